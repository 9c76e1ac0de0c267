"""Ranks serve each other: what one has or reads, others need not read; a lost node comes back from the rest."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scenes import CHUNK, SOON, Heard, assert_same, config, crash, folder, ram

from tieredckpt import CheckpointStore, Shard
from tieredckpt.blobs.ram import RamStore
from tieredckpt.blobs.wrap import Metered
from tieredckpt.engine import replicating
from tieredckpt.engine.passing import PEERS, Passing
from tieredckpt.engine.tier import unique_extents
from tieredckpt.errors import Invalid, TierUnavailable
from tieredckpt.events import ReplicationFailed, StepReplicated
from tieredckpt.testing.ranks import World

ROWS, COLUMNS = 512, 64
STATE_BYTES = ROWS * COLUMNS * 8


class Cluster:
    """Ranks on simulated nodes, each with shared memory of its own, and one folder that all share."""

    def __init__(
        self, nodes: Sequence[str], shared_memory: Path, shared: Path, *, bulk: bool = True, **settings: Any
    ) -> None:
        self.world = World(len(nodes), nodes=nodes, bulk=bulk)
        self._shared_memory = shared_memory
        self._shared = shared
        self._settings = settings

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.world.nodes

    def ram_of(self, node: str) -> Path:
        return self._shared_memory / node / "ram"

    def lose(self, node: str) -> None:
        """Everything in the RAM of a node is gone."""
        shutil.rmtree(self.ram_of(node))

    def new(self, rank: int) -> CheckpointStore:
        tiers = {
            "ram": ram(self._shared_memory, path=self.ram_of(self.nodes[rank]), **self._settings.get("ram", {})),
            "disk": folder(self._shared, **self._settings.get("disk", {})),
        }
        standing = self._settings.get("racks", {}).get(self.nodes[rank])
        settings = config(
            tiers, rack=standing, **({"name": "test", "rank_deadline": SOON} | self._settings.get("store", {}))
        )
        return CheckpointStore.open(settings, ranks=self.world.coordinator(rank))

    @asynccontextmanager
    async def open(self, *, crashing: bool = False) -> AsyncIterator[list[CheckpointStore]]:
        """All ranks, that end in order or as if their processes died."""
        stores = [self.new(rank) for rank in range(self.world.size)]
        await asyncio.gather(*stores)
        try:
            yield stores
        finally:
            if crashing:
                await asyncio.gather(*map(crash, stores))
                self.world.restart()
            else:
                await asyncio.gather(*(store.close() for store in stores))


def whole(seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS))


def part(seed: int, rank: int, size: int) -> dict[str, Any]:
    """The rows of one rank, and something that all have."""
    first, last = ROWS * rank // size, ROWS * (rank + 1) // size
    return {
        "w": Shard(whole(seed)[first:last].copy(), shape=(ROWS, COLUMNS), offset=(first, 0)),
        "bias": np.full(COLUMNS, float(seed)),
    }


def blank(rank: int, size: int) -> dict[str, Any]:
    tree = part(0, rank, size)
    tree["w"].array[:] = 0
    tree["bias"][:] = 0
    return tree


async def save(stores: Sequence[CheckpointStore], step: int, seed: int | None = None) -> None:
    size = len(stores)
    seed = step if seed is None else seed
    await asyncio.gather(*(store.save(step, part(seed, rank, size)) for rank, store in enumerate(stores)))


async def restore(stores: Sequence[CheckpointStore], seed: int) -> list[dict[str, int]]:
    """What came from where, by rank; everything is what was saved."""
    size = len(stores)
    trees = [blank(rank, size) for rank in range(size)]
    restored = await asyncio.gather(*(store.restore(into=tree) for store, tree in zip(stores, trees, strict=True)))
    for rank, tree in enumerate(trees):
        expected = part(seed, rank, size)
        assert_same(tree["w"].array, expected["w"].array)
        assert_same(tree["bias"], expected["bias"])
    return [dict(each.sources) for each in restored if each is not None]


async def replicated(stores: Sequence[CheckpointStore], heard: Sequence[Heard], step: int) -> list[StepReplicated]:
    return list(await asyncio.gather(*(one.first(StepReplicated, lambda event: event.step == step) for one in heard)))


def read(store: CheckpointStore) -> int:
    """Bytes that a rank has read of packs on the shared tier since it was opened."""
    blobs = store.engine.state.tier("disk").blobs
    assert isinstance(blobs, Metered)
    return blobs.usage().verbs["get_into"].nbytes


TWO_NODES = ("a", "a", "b", "b")


@pytest.fixture
def cluster(shared_memory: Path, tmp_path: Path) -> Cluster:
    return Cluster(
        TWO_NODES, shared_memory, tmp_path / "disk", ram={"replicas": 2}, disk={"promote": {"kind": "never"}}
    )


async def test_a_lost_node_comes_back_from_the_ram_of_the_others(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await save(stores, 2)
        for event in await replicated(stores, heard, 2):
            assert event.copies == 2
    for lost in ("b", "a"):
        cluster.lose(lost)
        async with cluster.open(crashing=True) as stores:
            heard = [Heard(store) for store in stores]
            for rank, came in enumerate(await restore(stores, 2)):
                assert came.keys() <= {"ram", PEERS}  # or its part was given back to its RAM before
                assert came.keys() == {"ram"} or cluster.nodes[rank] == lost
                assert read(stores[rank]) == 0
            # What the lost node had is made anew, or the other one could not be lost next.
            await replicated(stores, heard, 2)


async def test_training_goes_on_after_a_lost_node(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
    cluster.lose("a")
    async with cluster.open() as stores:
        heard = [Heard(store) for store in stores]
        await restore(stores, 1)
        await save(stores, 2)
        await replicated(stores, heard, 2)
        assert set(await stores[0].where(2)) == {"ram"}
        await asyncio.gather(*(store.promote(2, "disk") for store in stores[:1]))


async def test_what_is_damaged_in_a_rank_s_own_ram_comes_from_its_copy(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
        for store in stores[:2]:  # both of one node
            tier = store.engine.state.tiers[0]
            assert tier.ram is not None
            (step,) = tier.held
            for extent in [*unique_extents((await tier.load_index(step)).arrays).values()][::2]:
                tier.ram.slab.array[extent.offset] ^= 1
        for rank, came in enumerate(await restore(stores, 1)):
            assert (PEERS in came) == (rank < 2)


async def test_a_part_that_came_back_is_promoted_from_where_it_is_now(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
    cluster.lose("b")
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await restore(stores, 1)
        await replicated(stores, heard, 1)
        await save(stores, 2)
        await replicated(stores, heard, 2)  # the copies of step 1 have gone
        await stores[0].promote(1, "disk")
        assert await stores[0].where(1) == ("ram", "disk")


async def test_ranks_that_change_their_nodes_find_their_parts_and_copy_them_anew(
    shared_memory: Path, tmp_path: Path
) -> None:
    settings = {"ram": {"replicas": 2}, "disk": {"promote": {"kind": "never"}}}
    before = Cluster(("a", "b", "c"), shared_memory, tmp_path / "disk", **settings)
    async with before.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
    after = Cluster(("c", "a", "b"), shared_memory, tmp_path / "disk", **settings)
    async with after.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await restore(stores, 1)
        await replicated(stores, heard, 1)
    after.lose("a")
    async with after.open(crashing=True) as stores:
        for store, came in zip(stores, await restore(stores, 1), strict=True):
            assert came.keys() <= {"ram", PEERS}
            assert read(store) == 0


async def test_no_node_keeps_a_copy_of_its_own_parts(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
        kept = {
            node: {path.name for path in cluster.ram_of(node).glob("rank-*.replica")} for node in set(cluster.nodes)
        }
    assert kept == {"a": {"rank-2.replica", "rank-3.replica"}, "b": {"rank-0.replica", "rank-1.replica"}}


async def test_only_what_changed_is_sent(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        (first, *_) = await replicated(stores, heard, 1)
        assert STATE_BYTES <= first.sent <= 1.1 * STATE_BYTES
        await save(stores, 2, seed=1)
        (second, *_) = await replicated(stores, heard, 2)
        assert second.sent <= 0.1 * STATE_BYTES


async def test_policies_see_on_how_many_nodes_a_step_lies(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
        for store in stores:
            (step,) = store.engine.state.view().steps
            assert step.replicas == 2


async def test_older_copies_go_when_a_newer_step_is_whole(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        for step in range(1, 5):
            await save(stores, step)
            await replicated(stores, heard, step)
        for node in set(cluster.nodes):
            for kept in cluster.ram_of(node).glob("rank-*.replica"):
                assert [path.name for path in (kept / "steps").iterdir() if any(path.iterdir())] == [
                    "0000000004-000004"
                ]


async def test_a_copy_that_fails_stops_no_training(cluster: Cluster) -> None:
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
        kept = next(cluster.ram_of("b").glob("rank-0.replica"))
        shutil.rmtree(kept / "steps")
        (kept / "steps").touch()  # nothing can be committed there
        await save(stores, 2)
        for one in heard:
            failed = await one.first(ReplicationFailed)
            assert (failed.step, failed.ranks) == (2, (cluster.world.nodes.index("b"),))
        (kept / "steps").unlink()
        await save(stores, 3)
        await replicated(stores, heard, 3)


async def test_memory_that_is_not_there_for_replicas_is_refused_with_the_numbers(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicating, "memory_limit", lambda: (100 << 20, "the machine's memory"))
    settings = {"replicas": 2, "capacity": "32 MiB"}
    small = Cluster(TWO_NODES, shared_memory, tmp_path / "disk", ram=settings)
    stores = [small.new(rank) for rank in range(4)]
    for end in await asyncio.gather(*stores, return_exceptions=True):
        assert isinstance(end, Invalid)
        assert "128 MiB" in str(end)
        assert "100 MiB" in str(end)


async def test_racks_that_are_named_are_never_shared(shared_memory: Path, tmp_path: Path) -> None:
    racks = {"a": "east", "b": "east", "c": "west", "d": "west"}
    cluster = Cluster(tuple(racks), shared_memory, tmp_path / "disk", ram={"replicas": 2}, racks=racks)
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        await save(stores, 1)
        await replicated(stores, heard, 1)
        for rank, node in enumerate(racks):
            (keeper,) = list(shared_memory.rglob(f"rank-{rank}.replica"))
            assert racks[keeper.parents[1].name] != racks[node]


@pytest.mark.parametrize(
    ("verb", "topic"),
    [
        ("post", "replica/*/offer"),
        ("take", "replica/*/offer"),
        ("post", "replica/*/lacks"),
        ("take", "replica/*/lacks"),
        ("send", "*"),
        ("receive", "*"),
        ("post", "replica/*/kept"),
        ("take", "replica/*/kept"),
        ("post", "replicas/done/*"),
    ],
)
async def test_a_rank_that_dies_while_copying_stops_no_other(
    verb: str, topic: str, shared_memory: Path, tmp_path: Path
) -> None:
    cluster = Cluster(
        TWO_NODES, shared_memory, tmp_path / "disk", ram={"replicas": 2}, store={"rank_deadline": 0.3},
        disk={"min_bandwidth": "1 GB/s"},
    )  # fmt: skip
    async with cluster.open(crashing=True) as stores:
        heard = [Heard(store) for store in stores]
        cluster.world.kill(3, verb, topic=topic)
        await save(stores, 1)
        await cluster.world.died(3)
        for one in heard[:3]:
            failed = await one.first(ReplicationFailed)
            assert failed.step == 1
            assert 3 in failed.ranks
        for store in stores[:3]:
            assert "ram" in await store.where(1)
            assert store.engine.state.view().steps[0].replicas == 1


async def test_an_automatic_slab_leaves_as_much_room_for_replicas_as_for_parts(
    shared_memory: Path, tmp_path: Path
) -> None:
    cluster = Cluster(TWO_NODES, shared_memory, tmp_path / "disk", ram={"replicas": 2, "capacity": "auto"})
    async with cluster.open(crashing=True) as stores:
        for store in stores:
            ranked = store.engine.ranked
            assert ranked is not None
            assert ranked.replicas is not None
            (kept,) = ranked.replicas.kept.values()
            assert kept.capacity == store.engine.state.tiers[0].capacity


@pytest.mark.parametrize("name", ["rank-3", "rank-1.replica"])
async def test_ram_that_cannot_be_opened_costs_the_replicas_and_no_training(
    name: str, cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = RamStore.open

    def open_but_one(folder: Path, *arguments: Any, **settings: Any) -> RamStore:
        if folder == cluster.ram_of("b") / name:
            raise TierUnavailable("no such memory, by script")
        return really(folder, *arguments, **settings)

    monkeypatch.setattr(RamStore, "open", open_but_one)
    async with cluster.open(crashing=True) as stores:
        await save(stores, 1)
        await asyncio.gather(*(store.flush() for store in stores))
        assert [info.step for info in await stores[0].steps()] == [1]
    assert "parts are not replicated until the store is opened again" in caplog.text


async def test_one_node_alone_has_nowhere_to_copy_to_and_works(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    single = Cluster(("a", "a"), shared_memory, tmp_path / "disk", ram={"replicas": 2})
    async with single.open() as stores:
        await save(stores, 1)
        await asyncio.gather(*(store.flush() for store in stores))
    assert "kept on 1 nodes and not on 2" in caplog.text


async def test_a_process_that_is_alone_is_told_that_it_keeps_no_replicas(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = {"ram": ram(shared_memory, replicas=2), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers), ranks=None) as store:
        await store.save(1, {"x": np.arange(9)})
    assert "tier 'ram' keeps no replicas" in caplog.text


# -- the broadcast ----------------------------------------------------------------------------------------


@pytest.fixture
def state() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {f"w{i}": rng.standard_normal(20 * CHUNK // 8) for i in range(4)}


async def test_four_replicas_read_the_bytes_of_one(shared_memory: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    cluster = Cluster(("a", "b", "c", "d"), shared_memory, tmp_path / "disk")
    async with cluster.open() as stores:
        await asyncio.gather(*(store.save(1, state, replicated=("**",)) for store in stores))
        await asyncio.gather(*(store.flush() for store in stores))
    shutil.rmtree(shared_memory)
    shared_memory.mkdir()
    async with cluster.open() as stores:
        before = [read(store) for store in stores]
        restored = await asyncio.gather(*(store.restore() for store in stores))
        total = sum(read(store) for store in stores) - sum(before)
        assert nbytes <= total <= 1.05 * nbytes
        for each in restored:
            assert each is not None
            assert_same(each.tree, state)
            assert sum(each.sources.values()) == nbytes
            assert 0.6 * nbytes < each.sources[PEERS] < 0.9 * nbytes
            assert each.sources["disk"] + each.sources[PEERS] == nbytes


async def test_what_a_rank_does_not_send_in_time_is_read_by_the_others(
    shared_memory: Path, tmp_path: Path, state: dict[str, Any]
) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    cluster = Cluster(("a", "b", "c"), shared_memory, tmp_path / "disk", store={"rank_deadline": 2.0})
    async with cluster.open() as stores:
        await asyncio.gather(*(store.save(1, state, replicated=("**",)) for store in stores))
        await asyncio.gather(*(store.flush() for store in stores))
    shutil.rmtree(shared_memory)
    shared_memory.mkdir()
    async with cluster.open() as stores:
        held = cluster.world.hold(2, "send")
        restoring = asyncio.gather(*(store.restore() for store in stores))
        async with asyncio.timeout(SOON):
            while any(read(store) < 0.6 * nbytes for store in stores[:2]):  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
            held.release()
            for each in await restoring:
                assert each is not None
                assert_same(each.tree, state)


async def test_a_restore_that_fails_on_one_rank_keeps_none_waiting_and_can_be_made_again(
    shared_memory: Path, tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(("a", "b", "c"), shared_memory, tmp_path / "disk")
    async with cluster.open() as stores:
        await asyncio.gather(*(store.save(1, state, replicated=("**",)) for store in stores))
        await asyncio.gather(*(store.flush() for store in stores))
    shutil.rmtree(shared_memory)
    shared_memory.mkdir()
    async with cluster.open() as stores:
        for failing in (1, 0):
            really = Passing.run

            async def run(self: Passing, tasks: Any, failing: int = failing, really: Any = really) -> Any:
                if self.rank == failing:
                    raise TierUnavailable("this rank fails in the middle, by script")
                self.timeout = 0.2
                return await really(self, tasks)

            monkeypatch.setattr(Passing, "run", run)
            async with asyncio.timeout(SOON / 2):
                for end in await asyncio.gather(*(store.restore() for store in stores), return_exceptions=True):
                    assert isinstance(end, TierUnavailable)
            monkeypatch.undo()
        for each in await asyncio.gather(*(store.restore() for store in stores)):
            assert each is not None
            assert_same(each.tree, state)


async def test_a_step_that_is_in_ram_alone_comes_without_bulk_too(shared_memory: Path, tmp_path: Path) -> None:
    nodes = ("a", "b")
    never = {"promote": {"kind": "never"}}
    cluster = Cluster(nodes, shared_memory, tmp_path / "disk", disk=never, bulk=False)
    async with cluster.open(crashing=True) as stores:
        await save(stores, 1)
        await asyncio.gather(*(store.flush() for store in stores))
    async with cluster.open(crashing=True) as stores:
        restored = await asyncio.gather(*(store.restore() for store in stores))  # all of it, on both ranks
        for each in restored:
            assert each is not None
            assert_same(each.tree["w"], whole(1))
            assert each.sources.keys() == {"ram", PEERS}


async def test_groups_read_for_themselves(shared_memory: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    cluster = Cluster(("a", "b", "c", "d"), shared_memory, tmp_path / "disk", store={"restore_group": 2})
    async with cluster.open() as stores:
        await asyncio.gather(*(store.save(1, state, replicated=("**",)) for store in stores))
        await asyncio.gather(*(store.flush() for store in stores))
    shutil.rmtree(shared_memory)
    shared_memory.mkdir()
    async with cluster.open() as stores:
        before = [read(store) for store in stores]
        restored = await asyncio.gather(*(store.restore() for store in stores))
        assert 2 * nbytes <= sum(map(read, stores)) - sum(before) <= 2.1 * nbytes
        for each in restored:
            assert each is not None
            assert_same(each.tree, state)
