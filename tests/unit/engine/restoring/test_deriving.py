"""What is rounded: by which rule, within which bound, and what stays exact."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lossy import close_to, derived_in, drop_from_ram, lossy_config
from support.scenes import CHUNK, Heard, assert_restored, assert_same, config, folder, pack_bytes, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.restoring import deriving
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.events import StepPromoted
from tieredckpt.format import layout
from tieredckpt.format.derivation import Derivation, Rounded, Rule
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepIndex


async def test_unchanged_chunks_are_neither_written_nor_rounded_again(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded: list[int] = []
    real = deriving._round

    def counting(memory: Any, *rest: Any) -> Any:
        rounded.append(memory.nbytes)
        return real(memory, *rest)

    monkeypatch.setattr(deriving, "_round", counting)
    saved = tree(1)
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await store.save(1, saved)
        await store.flush()
        first, written = len(rounded), pack_bytes(derived_in(tmp_path))
        assert first == 2 * 4 * 3  # to know which are lacking, and to write them
        saved["params"]["w0"][0] += 1
        await store.save(2, saved)
        await store.flush()
        assert len(rounded) == first + 2
        assert 0 < pack_bytes(derived_in(tmp_path)) - written <= CHUNK + 2 * layout.ALIGNMENT


async def test_what_no_rule_means_and_what_cannot_be_rounded_stays_exact(tmp_path: Path, shared_memory: Path) -> None:
    rng = np.random.default_rng(0)
    saved = {
        "opt": {
            "wide": rng.standard_normal((100, 64)).astype(np.float32),
            "ints": rng.integers(0, 1 << 30, (100, 64)).astype(np.int32),
            "flat": rng.standard_normal(6400).astype(np.float32),
            "named": rng.standard_normal(6400).astype(np.float32),
            "tiny": rng.standard_normal((4, 4)).astype(np.float32),
            "big": rng.standard_normal((100, 64)).astype(">f4"),
            "half": rng.standard_normal((100, 64)).astype(ml_dtypes.bfloat16),
            "scale": 3,
        },
        "other": rng.standard_normal((100, 64)).astype(np.float32),
    }
    rules = [{"keys": ["opt/named"], "max_abs_error": 0.01}, {"keys": ["opt/**"], "max_error": 0.25}]
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory, rules)) as store:
        await store.save(1, saved)
        await store.flush()
        await store.save(2, {"other": saved["other"]})
        await store.flush()
        await drop_from_ram(store)
        found = await store.restore(1, lossy=True, resume=False)
        assert found is not None
        derived = (await store.describe(1)).derived["archive"]
    assert set(derived.arrays) == {"opt/wide", "opt/named", "opt/half"}
    assert derived.arrays["opt/wide"].rule == 1
    assert derived.arrays["opt/named"].rule == 0
    opt: Any = found.tree["opt"]
    before: Any = saved["opt"]
    for name in ("ints", "flat", "tiny", "big"):
        assert np.array_equal(opt[name], before[name])
    assert_same(found.tree["other"], saved["other"])
    assert np.abs(opt["named"] - before["named"]).max() <= derived.arrays["opt/named"].worst <= 0.01
    assert close_to(opt["wide"], before["wide"], 0.25)
    assert not close_to(opt["wide"], before["wide"], 0.01)


async def test_equal_bytes_of_two_dtypes_are_rounded_each_by_its_own(tmp_path: Path, shared_memory: Path) -> None:
    bits = np.random.default_rng(7).integers(0x3C01, 0x4400, (64, 64), np.uint16)
    saved = {"params": {"a": bits.view(np.float16), "b": bits.view(ml_dtypes.bfloat16)}}
    rules = [{"keys": ["params/**"], "max_error": "3%"}]
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory, rules)) as store:
        for step, tree_ in ((1, {"params": {"a": saved["params"]["a"]}}), (2, saved)):
            await store.save(step, tree_)
            await store.flush()
        assert [info.lossy for info in await store.steps()] == [("archive",)] * 2
        for key in ("a", "b"):
            spec = await store.spec(2, f"params/{key}", "archive")
            found = ts.open(spec, read=True).result().read().result()
            assert close_to(found, saved["params"][key], 0.03)
            assert not np.array_equal(found, saved["params"][key])


async def test_a_chunk_outside_of_its_bound_is_kept_exact(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = deriving.round_values

    def doubting(memory: Any, *rest: Any) -> Any:
        found = real(memory, *rest)
        return None if memory[-1] % 2 else found

    monkeypatch.setattr(deriving, "round_values", doubting)
    rng = np.random.default_rng(0)
    saved = {"params": {"w": np.abs(rng.standard_normal((2 * CHUNK // 256, 64))).astype(np.float32)}}
    saved["params"]["w"].view(np.uint8)[CHUNK // 256 - 1, -1] = 0x3F  # the first chunk ends with an odd byte
    saved["params"]["w"].view(np.uint8)[-1, -1] = 0x40
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await store.save(1, saved)
        await store.flush()
        stock = ts.open(await store.spec(1, "params/w", "archive")).result().read().result()
        how = (await store.describe(1)).derived["archive"].arrays["params/w"]
    half = CHUNK // 256
    assert how.exact_chunks == 1
    assert np.array_equal(stock[:half], saved["params"]["w"][:half])
    assert not np.array_equal(stock[half:], saved["params"]["w"][half:])


async def test_chunks_in_the_index_are_not_counted_as_outside_of_the_bound(tmp_path: Path, shared_memory: Path) -> None:
    saved = {"params": {"w": np.random.default_rng(0).standard_normal((2 * CHUNK // 256, 64)).astype(np.float32)}}
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await store.save(1, saved)
        await store.flush()
        state = store._life.open_engine.state
        (derivation,) = state.derivations

        async def derive() -> Rounded:
            async with deriving.StepSource.open(state, state.find(1)) as exact:
                (key,) = (key for key in exact.index.arrays if layout.array_key(key) == "params/w")
                array = exact.index.arrays[key]
                first, second = array.chunks
                chunks = [Chunk(first.digest, bytes(array.grid.cell_nbytes)), second]
                arrays = {**exact.index.arrays, key: ArrayIndex(array.grid, array.dtype, chunks)}
                exact.index = StepIndex(exact.index.record, arrays)
                tier = derivation.tiers[-1]
                plan = deriving._Plan.of(exact.index, tier.config.lossy)
                index = await deriving._rounded_index(derivation, exact, tier, plan)
                assert isinstance(index.record.derived, Derivation)
                return index.record.derived.arrays[key]

        how = await store._life.call(lambda engine: derive())
    assert how.worst > 0
    assert how.exact_chunks == 0


async def test_what_was_rounded_wrongly_once_is_rounded_again(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = deriving._round
    flipped: list[Any] = []

    def fails_once(memory: Any, dtype: Any, bound: Any) -> Any:
        found = real(memory, dtype, bound)
        if flipped or found is None:
            return found
        flipped.append(found)
        return found._replace(digest=bytes(16))

    monkeypatch.setattr(deriving, "_round", fails_once)
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        heard = Heard(store)
        await store.save(1, tree(1))
        await heard.first(StepPromoted, lambda event: event.tier == "archive")
        (found,) = await store.verify(1, "archive")
        assert found.intact
    assert flipped


async def test_a_record_that_says_integers_were_rounded_makes_nothing_but_corrupt(
    tmp_path: Path, shared_memory: Path
) -> None:
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory)) as store:
        await store.save(1, {"params": {"w": np.ones((64, 64), np.float32)}, "many": np.arange(4096)})
        await store.flush()
        (derivation,) = store._life.open_engine.state.derivations

        async def read_crafted() -> None:
            async with deriving.open_source(derivation, derivation.find(1), derivation.tiers[-1]) as source:
                key = next(key for key in source.index.arrays if layout.array_key(key) == "many")
                array, how = source.index.arrays[key], source.index.record.derived
                assert isinstance(how, Derivation)
                chunks = [Chunk(bytes(16), chunk.where) for chunk in array.chunks]
                how = msgspec.structs.replace(how, arrays={**how.arrays, key: Rounded(rule=0, worst=0.0)})
                record = msgspec.structs.replace(source.index.record, derived=how)
                arrays = {**source.index.arrays, key: ArrayIndex(array.grid, array.dtype, chunks)}
                source.index = StepIndex(record, arrays)
                with pytest.raises(Corrupt, match="is lost"):
                    await source.read(key, 0, np.empty(layout.aligned(array.grid.cell_nbytes), np.uint8))

        await store._life.call(lambda engine: read_crafted())


@pytest.mark.parametrize(
    ("rule", "sound"),
    [
        (Rule(keys=("w",), max_error=0.5), True),
        (Rule(keys=("w",), max_abs_error=1.0), True),
        (Rule(keys=("w",), max_error=0.51), False),
        (Rule(keys=("w",), max_error=0.5, max_abs_error=1.0), False),
        (Rule(keys=("w",), max_abs_error=2.0**100), False),
        (Rule(keys=("w",)), False),
        (Rule(keys=("w",), drop=True), False),
    ],
)
def test_a_record_whose_rules_cannot_round_is_refused(rule: Rule, sound: bool) -> None:
    how = {"chunks": "0" * 32, "rules": (rule,), "arrays": {"w": Rounded(rule=0, worst=0.0)}}
    with nullcontext() if sound else pytest.raises(msgspec.ValidationError, match="none of its rules"):
        msgspec.json.decode(msgspec.json.encode(how), type=Derivation)


async def test_dropped_arrays_are_left_out_and_their_absence_is_told(tmp_path: Path, shared_memory: Path) -> None:
    saved = {"params": tree(1)["params"], "opt": {"mu": np.ones((90, 64)), "count": np.int64(3)}, "list": [1, 2]}
    rules = [{"keys": ["opt"], "drop": True}]
    async with CheckpointStore.open(lossy_config(tmp_path, shared_memory, rules)) as store:
        await store.save(1, saved)
        await store.flush()
        await store.save(2, {"other": 1})
        await store.flush()
        await drop_from_ram(store)
        assert_restored(await store.restore(1, lossy=True, resume=False), {"params": saved["params"], "list": [1, 2]})
        with pytest.raises(Invalid, match="opt/mu"):
            await store.restore(1, lossy=True, like=saved, resume=False)
        assert_restored(
            await store.restore(1, lossy=True, like={"params": saved["params"]}, keys=["params"], resume=False),
            {"params": saved["params"]},
        )
        details = await store.describe(1)
        assert details.derived["archive"].dropped == ("opt/count", "opt/mu")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from([np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype("f4"), np.dtype("f8")]),
    rows=st.integers(1, 900),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    rule=st.sampled_from(
        [{"max_error": 0.004}, {"max_error": "50%"}, {"max_error": 1e-9}, {"max_abs_error": 0.01}, {"max_abs_error": 3}]
    ),
    codec=st.sampled_from(["none", "fast", "small"]),
)
def test_any_bits_come_back_within_the_recorded_bound(
    tmp_path_factory: pytest.TempPathFactory, dtype: Any, rows: int, columns: int, seed: int, rule: Any, codec: str
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    bits = np.random.default_rng(seed).bytes(rows * columns * dtype.itemsize)
    saved = np.frombuffer(bits, dtype).reshape(rows, columns)
    tiers = {
        "disk": folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1}),
        "archive": folder(tmp_path / "archive", lossy=[{"keys": ["*"], **rule}], codec=codec),
    }

    async def work() -> tuple[Any, Any]:
        async with CheckpointStore.open(config(tiers)) as store:
            await store.save(1, {"a": saved})
            await store.flush()
            await store.save(2, {"b": 1})
            await store.flush()
            found = await store.restore(1, lossy=True, resume=False)
            assert found is not None
            assert found.lossy
            return found.tree["a"], (await store.describe(1)).derived["archive"]

    found, derived = asyncio.run(work())
    with np.errstate(all="ignore"):
        old, new = saved.astype(np.float64), found.astype(np.float64)
        fine = np.isfinite(old)
        assert np.array_equal(saved[~fine].view(f"u{dtype.itemsize}"), found[~fine].view(f"u{dtype.itemsize}"))
        if (rounded := derived.arrays.get("a")) is None:
            assert np.array_equal(saved.view(np.uint8), found.view(np.uint8))
            return
        error = np.abs(new - old)[fine]
        most = rounded.worst * np.abs(old[fine]) if "max_error" in rule else rounded.worst
        assert (error <= most).all()
