"""The buffers of DDP are saved by the first of its ranks, and no buffer of another rank is left out silently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cohort import cohort

torch = pytest.importorskip("torch")

import torch.distributed as dist

from tieredckpt import CheckpointStore, Invalid, Shard
from tieredckpt.integrations.torch import TrainingState

Trees = Callable[[Callable[[int], Any]], list[dict[str, Any]]]


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trees]:
    """What each of two ranks saves of a model, as one process sees it: DDP is told that it has both."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])

    def saved(model_of: Callable[[int], Any]) -> list[dict[str, Any]]:
        found = []
        for rank in range(2):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            torch.manual_seed(0)
            found.append(TrainingState(model=model_of(rank), rng=False).tree())
        return found

    yield saved
    dist.destroy_process_group()


def ddp(module: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(module)


def norms(*names: str) -> Any:
    """A layer, and norms that have buffers alone."""
    found = {name: torch.nn.BatchNorm1d(3, affine=False) for name in names}
    return torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 2), **found})


def test_each_ddp_module_of_a_part_has_a_first_rank_of_its_own(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_of(rank: int) -> Any:
        groups = iter([[0, 1], [1, 2]])  # in the order in which they are asked for
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: next(groups))
        return torch.nn.ModuleDict({name: ddp(norms("norm")) for name in ("a", "b")})

    for rank, tree in enumerate(trees(model_of)):
        rows = {name: tree["model"][f"{name}.norm.running_mean"].array.shape[0] for name in ("a", "b")}
        assert rows == {"a": 3 * (rank == 0), "b": 3 * (rank == 1)}


async def test_a_buffer_that_the_first_rank_does_not_have_makes_no_step(
    trees: Trees, shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(2, shared_memory, tmp_path) as ranks:
        holes = trees(lambda rank: ddp(norms(f"of{rank}")))
        await ranks.all(lambda store, rank: store.save(1, holes[rank]))
        assert "of1.running_" in (await ranks.failed(step=1))[0].reason
        found = trees(lambda _: ddp(norms("norm")))
        await ranks.reached(await ranks.all(lambda store, rank: store.save(2, found[rank])), "disk")
    store = CheckpointStore.open_sync(tmp_path / "alone")
    with store, pytest.raises(Invalid, match=r"norm\.running_mean"):
        await asyncio.to_thread(store.save, 1, found[1])


def test_no_other_tensor_is_taken_for_a_buffer_of_ddp(trees: Trees) -> None:
    def model_of(rank: int) -> Any:
        inner = torch.nn.Linear(3, 3)
        inner.register_buffer("view", inner.weight.detach()[:1])
        inner.register_buffer("empty", torch.zeros(0))
        model = torch.nn.ModuleDict({"ddp": ddp(inner), "plain": norms("norm")})
        few = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), check_invariants=True)
        inner.register_buffer("few", few, persistent=False)
        return model

    for tree in trees(model_of):
        assert not any(isinstance(value, Shard) for value in tree["model"].values())
