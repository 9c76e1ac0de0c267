"""Lazy saves of several ranks: a step of all once each has confirmed its part, and of none if one has changed early."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cohort import cohort, part
from support.insight import hold_saves
from support.scenes import SOON

from tieredckpt import CheckpointStore, Invalid

SIZE = 3


def tree(seed: int, rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return part(seed, rank, SIZE) | {"same": {f"w{i}": rng.standard_normal((128, 512)) for i in range(3)}}


async def test_a_step_of_all_ranks_is_what_was_there_at_the_call_or_is_nowhere(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with cohort(SIZE, shared_memory, tmp_path / "disk", replicated=("same/**",)) as ranks:
        trees = [tree(1, rank) for rank in range(SIZE)]

        async def save(step: int) -> Any:
            return await ranks.all(lambda store, rank: store.save(step, trees[rank], capture="lazy"))

        checkpoints = await save(1)
        for rank in (2, 0, 1):  # in any order, and none waits for another
            await checkpoints[rank].captured()
        await ranks.reached(checkpoints, "disk")

        checkpoints = await save(2)
        for each in trees:  # a replicated array, of which every rank stores a share
            each["same"]["w1"][:] += 1
        for checkpoint in checkpoints:
            with pytest.raises(Invalid, match="'same/w1'"):
                await checkpoint.captured()
        await ranks.failed(step=2)

        checkpoints = await save(3)
        trees[1]["same"]["w2"][:] += 1
        results = await asyncio.gather(*(each.captured() for each in checkpoints), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), Invalid, type(None)]
        trees[1] = tree(1, 1)
        trees[1]["same"]["w1"][:] += 1
        await ranks.failed(step=3)

        checkpoints = await save(4)
        await ranks.flush()
        await ranks.reached(checkpoints, "disk")

        def numbers(store: CheckpointStore, rank: int) -> Any:
            return store.all_steps()

        assert set(await ranks.all(numbers)) == {(1, 4)}
        for step, added in ((1, 0), (4, 1)):
            for found in await ranks.restored(step, resume=False):
                assert found is not None
                same = tree(1, 0)["same"]
                np.testing.assert_array_equal(found.tree["same"]["w1"], same["w1"] + added)
                np.testing.assert_array_equal(found.tree["same"]["w2"], same["w2"])


async def test_digests_find_a_change_of_an_array_that_the_ranks_divide_among_them(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin = hold_saves(monkeypatch)
    settings: dict[str, Any] = {"lazy_guard": "digests", "replicated": ("same/**",)}
    async with cohort(SIZE, shared_memory, tmp_path / "disk", **settings) as ranks:
        trees = [tree(1, rank) for rank in range(SIZE)]
        for step in (1, 2):
            saves = (store.save(step, own, capture="lazy") for store, own in zip(ranks.stores, trees, strict=True))
            checkpoints = await asyncio.gather(*saves)
            if step == 2:
                for each in trees:
                    each["same"]["w1"][:, 256] += 1  # neither at its beginning nor at its end
            may_begin.set()
            for checkpoint in checkpoints:
                if step == 1:
                    await checkpoint.captured()
                else:
                    with pytest.raises(Invalid, match=r"'same/w1' \(1 in all\)"):
                        await checkpoint.captured()
            may_begin.clear()


async def test_a_restore_of_ranks_waits_for_no_save_behind_the_training(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 5: the others wait for its call a limited time."""
    jnp = pytest.importorskip("jax.numpy")
    may_begin = hold_saves(monkeypatch)  # an open store would not notice
    may_begin.set()
    async with cohort(2, shared_memory, tmp_path / "disk") as ranks, asyncio.timeout(SOON):
        await ranks.reached(await ranks.all(lambda store, rank: store.save(1, {"w": jnp.ones(3)})), "disk")
        may_begin.clear()
        behind = await ranks.all(lambda store, rank: store.save(2, {"w": jnp.ones(3)}, capture="reference"))
        assert [restored.step for restored in await ranks.restored(resume=False) if restored is not None] == [1, 1]
        may_begin.set()
        await ranks.reached(behind, "ram")
