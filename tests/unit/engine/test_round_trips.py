"""Promise 4: what is restored is what was saved, bit for bit, from every kind of tier and in every way to ask."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.insight import slab_of
from support.scenes import CHUNK, assert_restored, assert_same, config, crash, files_under, folder, ram, tree
from support.trees import SCALARS, arrays, fingerprint, large_arrays, trees

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Conflict, Invalid, NotFound
from tieredckpt.format.structure import CONTAINERS, walk
from tieredckpt.sync import SyncStore
from tieredckpt.tree import flatten, host_view, select, unflatten

KINDS = ["ram", "posix", "memory", "small", "fast"]
TREES = trees(large_arrays(6 * 4096) | arrays() | SCALARS, max_leaves=8)
"""With chunks of 4 KiB, leaves of one to a dozen chunks beside those that lie in the index."""


@pytest.fixture
def settings_of(shared_memory: Path, tmp_path: Path) -> dict[str, StoreConfig]:
    """A store of one tier, by the kind of the tier."""
    tiers: dict[str, dict[str, Any]] = {
        "ram": ram(shared_memory, on_close="keep"),
        "posix": folder(tmp_path / "posix"),
        "memory": {"kind": "kvstore", "spec": {"driver": "memory"}, "retries": 0},
        **{
            codec: {
                "kind": "kvstore",
                "spec": {"driver": "file", "path": f"{tmp_path}/{codec}/"},
                "retries": 0,
                "codec": codec,
            }
            for codec in ("small", "fast")
        },
    }
    return {kind: config({"only": tier}, chunk_size=4096, name="of-test") for kind, tier in tiers.items()}


def other_values(tree: Any) -> Any:
    """A tree of the same form, whose arrays can be filled, with nothing of its values."""
    if isinstance(tree, dict):
        return {key: other_values(child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(other_values(child) for child in tree)
    if isinstance(tree, np.ndarray):
        return np.zeros(tree.shape, tree.dtype)
    if isinstance(tree, np.generic):
        return np.zeros((), tree.dtype)[()]  # of a time, with its unit
    return None if tree is None else type(tree)()


def fillable(tree: Any) -> Any:
    """The same tree with arrays without axes for NumPy's scalars, which cannot be filled."""
    if isinstance(tree, dict):
        return {key: fillable(child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(fillable(child) for child in tree)
    return np.asarray(tree) if isinstance(tree, np.generic) else tree


def arrays_in(tree: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The arrays of a tree, in its order."""
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from arrays_in(child)


def part_of(tree: Any, keys: list[str]) -> Any:
    """What is left of a tree when only ``keys`` are read."""
    flat = flatten(tree)
    return unflatten(select(flat.structure, keys), {leaf.key: host_view(leaf) for leaf in flat.arrays})


def leaf_keys(tree: Any) -> list[str]:
    ends = walk(flatten(tree).structure)
    return [key for key, node in ends if not (isinstance(node, CONTAINERS) and node.children)]


def restored(store: SyncStore, step: int, **how: Any) -> Any:
    found = store.restore(step, resume=False, **how)
    assert found is not None
    assert found.step == step
    return found.tree


@pytest.mark.parametrize("kind", KINDS)
def test_any_tree_comes_back_in_every_way_to_ask_for_it(settings_of: dict[str, StoreConfig], kind: str) -> None:
    with CheckpointStore.open(settings_of[kind]).sync() as store:
        step = 0

        @settings(max_examples=25, deadline=None)
        @given(tree=TREES, data=st.data())
        def hold(tree: Any, data: st.DataObject) -> None:
            nonlocal step
            step += 1
            store.save(step, tree)
            assert fingerprint(restored(store, step)) == fingerprint(tree)
            assert fingerprint(restored(store, step, copy=False)) == fingerprint(tree)
            like = other_values(tree)
            assert fingerprint(restored(store, step, like=like)) == fingerprint(tree)
            into = other_values(fillable(tree))
            filled = restored(store, step, into=into)
            assert fingerprint(filled) == fingerprint(fillable(tree))
            expected = list(arrays_in(fillable(tree)))
            assert [fingerprint(array) for array in arrays_in(into)] == [fingerprint(array) for array in expected]
            if keys := data.draw(st.lists(st.sampled_from(leaf_keys(tree)), unique=True, max_size=4)):
                assert fingerprint(restored(store, step, keys=keys)) == fingerprint(part_of(tree, keys))

        hold()


@pytest.mark.parametrize("dies", [False, True], ids=["closed", "crashed"])
@pytest.mark.parametrize("kind", ["ram", "posix", "small", "fast"])
def test_any_tree_comes_back_in_another_process(settings_of: dict[str, StoreConfig], kind: str, dies: bool) -> None:
    step = 0

    @settings(max_examples=12, deadline=None)
    @given(tree=TREES)
    def hold(tree: Any) -> None:
        nonlocal step
        step += 1

        async def save_and_end() -> None:
            store = await CheckpointStore.open(settings_of[kind])
            await store.restore()
            await store.save(step, tree)
            await (crash(store) if dies else store.close())

        asyncio.run(save_and_end())
        with CheckpointStore.open(settings_of[kind]).sync() as store:
            assert fingerprint(restored(store, step)) == fingerprint(tree)
            assert fingerprint(restored(store, step, like=other_values(tree))) == fingerprint(tree)
        with CheckpointStore.open(settings_of[kind], read_only=True).sync() as reader:
            assert fingerprint(restored(reader, step)) == fingerprint(tree)

    hold()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_promoted_tree_is_the_saved_one(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Down a ladder of all kinds of slower tiers, restored from each of them."""
    place = tmp_path_factory.mktemp("ladder")
    tree = data.draw(TREES)
    tiers = {
        "posix": folder(place / "posix"),
        "memory": {"kind": "kvstore", "spec": {"driver": "memory"}},
        "file": {"kind": "kvstore", "spec": {"driver": "file", "path": f"{place}/file/"}},
    }
    with CheckpointStore.open(config(tiers, chunk_size=4096)).sync() as store:
        store.save(1, tree)
        store.flush()
        for name in (*tiers, None):
            assert fingerprint(restored(store, 1)) == fingerprint(tree)
            if name in ("posix", "memory"):
                store.evict(1, name)
        assert store.where(1) == ("file",)


# -- trees of frameworks ----------------------------------------------------------------------------------


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class TrainState:
    params: Any
    moments: Moments
    step: int


@pytest.fixture(params=["ram and disk", "disk"])
def trained(request: pytest.FixtureRequest, shared_memory: Path, tmp_path: Path) -> StoreConfig:
    tiers = {"ram": ram(shared_memory)} if request.param != "disk" else {}
    return config({**tiers, "disk": folder(tmp_path / "disk")}, chunk_size=4096)


async def test_containers_take_the_types_of_like_and_are_plain_without_it(trained: StoreConfig) -> None:
    rng = np.random.default_rng(1)
    params = {"w": rng.standard_normal((40, 50)), "b": rng.standard_normal(7).astype(ml_dtypes.bfloat16)}
    state = TrainState(params, Moments(params["w"] * 2, [params["b"]]), 17)
    empty = TrainState(other_values(params), Moments(np.zeros((40, 50)), [other_values(params["b"])]), 0)
    async with CheckpointStore.open(trained) as store:
        await store.save(1, state)
        typed = await store.restore(like=empty)
        assert typed is not None
        assert (type(typed.tree), type(typed.tree.moments), typed.tree.step) == (TrainState, Moments, 17)
        assert_same(dataclasses.asdict(typed.tree), dataclasses.asdict(state))
        assert_restored(await store.restore(), dataclasses.asdict(state) | {"moments": state.moments._asdict()})


async def test_a_torch_model_and_its_optimizer_go_on_as_if_never_interrupted(trained: StoreConfig) -> None:
    torch = pytest.importorskip("torch")

    def fresh(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1).to(torch.bfloat16)
        model = torch.nn.ModuleList(layers)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)

    def train(model: Any, optimizer: Any, steps: int) -> None:
        first, norm, last = model
        for i in range(steps):
            inputs = torch.linspace(-1, 1, 8 * 32).reshape(8, 32) * (i + 1)
            optimizer.zero_grad()
            last(norm(first(inputs)).to(torch.bfloat16)).float().square().mean().backward()
            optimizer.step()

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def bits(tree: Any) -> Any:
        return {leaf.key: (leaf.dtype, leaf.shape, host_view(leaf).tobytes()) for leaf in flatten(tree).arrays}

    model, optimizer = fresh(1)
    train(model, optimizer, 3)
    saved = bits(state(model, optimizer))
    store = await CheckpointStore.open(trained)
    await (await store.save(3, state(model, optimizer))).reached("disk")
    train(model, optimizer, 2)  # in place, over the memory that was saved
    await crash(store)

    other, other_optimizer = fresh(2)
    train(other, other_optimizer, 1)
    async with CheckpointStore.open(trained) as store:
        for how in ("like", "into"):
            found = await store.restore(3, **{how: state(other, other_optimizer)})
            assert found is not None
            assert bits(found.tree) == saved
            assert all(type(value) is torch.Tensor for value in found.tree["model"].values())
            other.load_state_dict(found.tree["model"])
            other_optimizer.load_state_dict(found.tree["optimizer"])
            train(other, other_optimizer, 2)
            # What was restored trains on to the same bits, its optimizer included.
            train_on = bits(state(other, other_optimizer))
            assert train_on == bits(state(model, optimizer))


def jax_bits(value: Any) -> bytes:
    """The bytes of a jax array or typed PRNG key, or of a number."""
    import jax

    is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value).tobytes()


async def test_a_jax_state_comes_back_as_jax_arrays(trained: StoreConfig) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    params = {"w": jax.random.normal(jax.random.key(1), (64, 40)), "b": jnp.arange(40, dtype=jnp.bfloat16)}
    state = {
        "params": params,
        "moments": Moments(jax.tree.map(lambda x: x * 2, params), jax.tree.map(jnp.square, params)),
        "count": jnp.asarray(3),
        "rng": jax.random.key(7),
        "step": 3,
    }
    like = jax.eval_shape(lambda: {key: value for key, value in state.items() if key != "step"}) | {"step": 0}
    async with CheckpointStore.open(trained) as store:
        for step, capture in enumerate(("copy", "reference")):
            await (await store.save(step, state, capture=capture)).reached("disk")
            for template in (like, state):
                found = await store.restore(step, like=template)
                assert found is not None
                assert jax.tree.structure(found.tree) == jax.tree.structure(state)
                for got, saved in zip(jax.tree.leaves(found.tree), jax.tree.leaves(state), strict=True):
                    assert type(got) is type(saved)
                    assert not isinstance(saved, jax.Array) or got.dtype == saved.dtype
                    assert jax_bits(got) == jax_bits(saved)


# -- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (object(), "object"),
        ({object()}, "object"),
        (np.array(["x"], dtype=object), "object"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (print, "builtin_function_or_method"),
    ],
    ids=["object", "set of objects", "dtype object", "masked", "function"],
)
async def test_a_tree_with_a_leaf_that_cannot_be_stored_leaves_nothing_behind(
    shared_memory: Path, tmp_path: Path, leaf: object, named: str
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
        used, disk = slab_of(store).used, files_under(tmp_path / "disk")
        in_ram = set(files_under(shared_memory))
        for capture in ("copy", "reference"):
            with pytest.raises(Invalid, match=rf"'b/0'.*\b{named}\b"):
                await store.save(2, {"a": np.ones(3 * CHUNK), "b": [leaf]}, capture=capture)
        assert slab_of(store).used == used
        assert (files_under(tmp_path / "disk"), set(files_under(shared_memory))) == (disk, in_ram)
        assert [info.step for info in await store.steps()] == [1]
        # The number was not used up.
        await store.save(2, tree(2))


async def test_what_like_lacks_has_too_much_or_has_otherwise_is_listed_and_nothing_is_touched(
    trained: StoreConfig,
) -> None:
    saved = {"same": np.ones(3), "only": {"here": np.ones(2), "too": 5}, "shape": np.ones(4), "dtype": np.ones(2)}
    like = {
        "same": np.zeros(3),
        "more": [np.zeros(1)],
        "shape": np.zeros((2, 2)),
        "dtype": np.zeros(2, np.float32),
    }
    async with CheckpointStore.open(trained) as store:
        await store.save(1, saved)
        for how in ("like", "into"):
            with pytest.raises(Invalid) as refused:
                await store.restore(**{how: like})
            message = str(refused.value)
            assert "1 missing from the step: 'more/0'" in message
            assert "2 only in the step: 'only/here', 'only/too'" in message
            assert "2 different: " in message
            assert f"'shape' ({how}: float64[2, 2], step: float64[4])" in message
            remedy = "; cast=True converts it" if how == "like" else ""
            assert f"'dtype' ({how}: float32[2], step: float64[2]{remedy})" in message
        assert not any(array.any() for array in arrays_in(like))
        # A restore that was refused is none: the line goes on where it was.
        with pytest.raises(Conflict):
            await store.save(1, saved)
        await store.save(2, saved)
        assert not any(info.off_branch for info in await store.steps())


async def test_a_key_that_is_not_there_is_named_with_what_is_near(trained: StoreConfig) -> None:
    async with CheckpointStore.open(trained) as store:
        await store.save(1, {"params": {"kernel": np.ones(2)}})
        with pytest.raises(NotFound, match=r"'params/kernal'.*near: 'params/kernel'"):
            await store.restore(keys=["params/kernal"])
