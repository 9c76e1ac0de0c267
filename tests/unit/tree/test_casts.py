"""What ``like`` may have instead of what was saved: another dtype if asked for, an array for a number, and back."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.frameworks import require

from tieredckpt.errors import Invalid
from tieredckpt.tree import Shard, flatten, host_view, match, select
from tieredckpt.tree.casts import cast
from tieredckpt.tree.match import AS_SAVED

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int64", "uint32", "int16", "uint8", "int4"]
SMALL_FLOATS = [
    *("float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
]


def restore(saved: object, like: object, **settings: Any) -> Any:
    flat = flatten(saved)
    fitted = match(like, flat.structure, **settings)
    read = {leaf.key for leaf in fitted.leaves} | {node.key for node in (*fitted.as_saved, *fitted.scalars)}
    return fitted.build({leaf.key: host_view(leaf).copy() for leaf in flat.arrays if leaf.key in read})


def dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


# -- other dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [FLOATS, INTEGERS, ["complex64", "complex128"]])
def test_another_dtype_of_the_kind_is_cast_if_asked_for_and_named_if_not(names: list[str]) -> None:
    for one in names:
        for other in names:
            saved = np.array([0, 1, 2, 3, 7], dtype(one))
            like = {"a": [np.zeros(5, dtype(other))], "b": np.zeros(5, dtype(one))}
            got = restore({"a": [saved], "b": saved}, like, casts=True)
            assert got["a"][0].dtype == dtype(other)
            assert got["a"][0].tolist() == saved.tolist()
            assert got["b"].dtype == saved.dtype
            if one != other:
                with pytest.raises(Invalid, match=rf"'a/0' \(like: {other}\[5\], step: {one}\[5\]; cast=True") as error:
                    restore({"a": [saved], "b": saved}, like)
                assert "'b'" not in str(error.value)


def test_floats_are_rounded_to_the_nearest_and_their_signs_infinities_and_nans_stay() -> None:
    saved = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    got = restore(saved, np.zeros(7, dtype("bfloat16")), casts=True).astype(np.float32)
    expected = np.array([1, 1 + 2**-6, -0.0, np.inf, -np.inf, np.nan, 0], np.float32)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", FLOATS[1:])
@given(st.data())
def test_a_float_becomes_the_nearest_one_and_a_tie_the_even_one(name: str, data: st.DataObject) -> None:
    there = dtype(name)
    largest = ml_dtypes.finfo(there).max
    limit = float(largest) / 4
    saved = np.array(data.draw(st.lists(st.floats(-limit, limit), min_size=1, max_size=20)))
    # Near the middle between two neighbours, which a second rounding would get wrong.
    nearby = np.abs(saved).astype(there)
    above = np.nextafter(nearby, largest)
    middle = (nearby.astype(np.float64) + above.astype(np.float64)) / 2
    middle = middle[np.isfinite(middle) & (middle <= limit)]
    saved = np.concatenate([saved, middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    got = restore({"w": saved}, {"w": np.zeros(saved.shape, there)}, casts=True)["w"]
    below, beyond = (np.nextafter(got, end).astype(np.float64) for end in (-largest, largest))
    far = np.abs(got.astype(np.float64) - saved)
    for other in (below, beyond):
        differs = other != got.astype(np.float64)
        assert np.all(np.isfinite(other))
        assert np.all(far[differs] <= np.abs(other - saved)[differs])
        ties = differs & (far == np.abs(other - saved))
        assert not np.any(got[ties].view(f"u{there.itemsize}") & 1)


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (np.array([1, 1e6], np.float32), np.zeros(2, np.float16)),
        (np.array([1, 500], np.float32), np.zeros(2, dtype("float8_e4m3fn"))),
        (np.array([1, np.inf], np.float32), np.zeros(2, dtype("float8_e4m3fn"))),
        (np.array([1, 300], dtype("float8_e4m3fn")), np.zeros(2, dtype("float8_e4m3fnuz"))),
        (np.array([1, 7], np.float32), np.zeros(2, dtype("float4_e2m1fn"))),
        (np.array([1, np.nan]), np.zeros(2, dtype("float4_e2m1fn"))),
        (np.array([1, 1e300 + 1j]), np.zeros(2, np.complex64)),
        (np.array([1, complex(np.inf, 1e300)]), np.zeros(2, np.complex64)),
        (np.array([1, complex(1e300, np.nan)]), np.zeros(2, np.complex64)),
        (np.array([1, 200], np.uint8), np.zeros(2, np.int8)),
        (np.array([1, -1], np.int8), np.zeros(2, np.uint8)),
        (np.array([1, 2**33], np.int64), np.zeros(2, np.int32)),
        (np.array([1, 8], np.int64), np.zeros(2, dtype("int4"))),
        (np.array([1, 7], dtype("int4")), np.zeros(2, dtype("int2"))),
    ],
)
def test_a_value_out_of_range_is_refused_and_never_becomes_another(saved: Any, like: Any) -> None:
    with pytest.raises(Invalid, match=rf"'params/w'.*of {saved.dtype} is out of the range of {like.dtype}"):
        restore({"params": {"w": saved}}, {"params": {"w": like}}, casts=True)


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_small_floats_are_cast_as_their_values_are_and_no_value_becomes_infinite_or_nan(name: str) -> None:
    patterns = np.arange(16 if name == "float4_e2m1fn" else 256).astype(np.uint8)
    saved = patterns.view(dtype(name))
    for other in SMALL_FLOATS:
        for item in np.split(saved, len(saved)):
            assert cast_or_none(item, other) == cast_or_none(item.astype(np.float32), other) or name == other, item


def cast_or_none(item: np.ndarray[Any, Any], name: str) -> bytes | None:
    try:
        return np.asarray(cast("w", item, dtype(name))).tobytes()
    except Invalid:
        return None


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (np.zeros(2, np.int32), np.zeros(2, np.float32)),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (np.zeros(2, bool), np.zeros(2, np.int8)),
        (np.zeros(2, np.float32), np.zeros(2, np.complex64)),
        (np.zeros(2, "M8[s]"), np.zeros(2, "M8[ms]")),
        (np.zeros(2, np.float32), np.zeros(3, np.float16)),
    ],
)
def test_what_is_no_other_precision_of_the_same_is_never_cast(saved: Any, like: Any) -> None:
    with pytest.raises(Invalid, match="'w' ") as error:
        restore({"w": saved}, {"w": like}, casts=True)
    assert "cast=True" not in str(error.value)


def test_arrays_of_jax_and_torch_are_cast_as_those_of_numpy() -> None:
    jax, torch = require("jax"), require("torch")
    saved = np.array([[1 + 2**-8, 2.5], [3, -4]], np.float32)
    expected = saved.astype(dtype("bfloat16"))
    likes = {
        "jax": jax.ShapeDtypeStruct((2, 2), jax.numpy.bfloat16),
        "torch": torch.zeros((2, 2), dtype=torch.bfloat16),
        "numpy": np.zeros((2, 2), dtype("bfloat16")),
    }
    got = restore(dict.fromkeys(likes, saved), likes, casts=True)
    assert isinstance(got["jax"], jax.Array)
    assert got["jax"].dtype == jax.numpy.bfloat16
    assert got["torch"].dtype == torch.bfloat16
    for array in (np.asarray(got["jax"]), got["torch"].view(torch.int16).numpy(), got["numpy"]):
        assert array.tobytes() == expected.tobytes()
    wide = restore({"w": got["torch"]}, {"w": torch.zeros((2, 2), dtype=torch.float64)}, casts=True)
    assert wide["w"].tolist() == expected.tolist()


def test_shards_are_cast_too() -> None:
    saved = np.arange(32, dtype=np.float64).reshape(8, 4)
    box = Shard(np.zeros((3, 4), dtype("bfloat16")), saved.shape, (2, 0))
    fitted = match({"w": box}, flatten({"w": saved}).structure, casts=True)
    (leaf,) = fitted.leaves
    assert leaf.dtype == saved.dtype  # that is how it is read
    got: Any = fitted.build({leaf.key: saved[2:5].copy()})
    assert isinstance(got["w"], Shard)
    assert got["w"].array.dtype == dtype("bfloat16")
    assert got["w"].array.tolist() == saved[2:5].tolist()


def test_prng_keys_are_not_cast() -> None:
    jax = require("jax")
    keys = jax.random.split(jax.random.key(0), 3)
    for dtype in (np.uint32, np.int64):
        data = np.zeros((3, 2), dtype)
        for saved, like in ((keys, data), (data, keys)):
            with pytest.raises(Invalid, match="'rng'"):
                restore({"rng": saved}, {"rng": like}, casts=True)


# -- numbers and arrays ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (7, np.zeros((), np.int32)),
        (-8, np.zeros((), dtype("int4"))),
        (2**64 - 1, np.zeros((), np.uint64)),
        (0.5, np.zeros((), np.float32)),
        (float("inf"), np.zeros((), dtype("bfloat16"))),
        (0.1, np.zeros((), np.float64)),
        (1 + 2j, np.zeros((), np.complex64)),
        (True, np.zeros((), bool)),
    ],
)
def test_a_number_becomes_an_array_that_holds_it_and_comes_back(saved: Any, like: Any) -> None:
    got = restore({"step": saved}, {"step": like})["step"]
    assert (got.dtype, got.shape) == (like.dtype, ())
    assert got[()] == saved
    back = restore({"step": got}, {"step": type(saved)(0)})["step"]
    assert type(back) is type(saved)
    assert back == saved


def test_only_arrays_that_become_numbers_are_read_besides_those_of_like() -> None:
    fitted = match({"step": 0, "w": np.zeros(2)}, flatten({"step": np.array(3), "w": np.ones(2)}).structure)
    assert [leaf.key for leaf in fitted.leaves] == ["w"]
    assert [node.key for node in fitted.scalars] == ["step"]


def test_a_float_is_rounded_only_if_asked_for_and_a_nan_stays_one() -> None:
    single = np.zeros((), np.float32)
    with pytest.raises(Invalid, match=r"'rate' \(like: float32\[\], and the step has 0\.1, which float32 .* cast=True"):
        restore({"rate": 0.1}, {"rate": single})
    assert restore({"rate": 0.1}, {"rate": single}, casts=True)["rate"] == np.float32(0.1)
    for bits in (0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000):
        assert np.isnan(restore(struct.unpack("d", struct.pack("Q", bits))[0], single))
    with pytest.raises(Invalid, match="holds only rounded"):
        restore(complex(np.nan, 0.1), np.zeros((), np.complex64))
    assert restore(np.array(6.9), np.zeros((), dtype("float4_e2m1fn")), casts=True) == 6


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (300, np.zeros((), np.int8)),
        (-1, np.zeros((), np.uint32)),
        (10**40, np.zeros((), np.int64)),
        (1e300, np.zeros((), np.float32)),
        (-7.0, np.zeros((), dtype("float4_e2m1fn"))),
        (float("nan"), np.zeros((), dtype("float4_e2m1fn"))),
        (complex(np.nan, 1e300), np.zeros((), np.complex64)),
        (1, np.zeros((), np.float32)),
        (1, np.zeros((), bool)),
        (1.0, np.zeros((), np.int32)),
        (True, np.zeros((), np.int32)),
        ("1", np.zeros((), np.int32)),
        (None, np.zeros((), np.int32)),
        (1, np.zeros((1,), np.int32)),
        (np.zeros((1,), np.int32), 0),
        (np.zeros((), np.int32), 0.0),
        (np.zeros((), np.float32), 0),
        (np.zeros((), np.int32), False),
        (np.zeros((), np.int32), "0"),
    ],
)
def test_a_number_becomes_no_array_that_does_not_hold_it_and_no_other_number(saved: Any, like: Any) -> None:
    for casts in (False, True):
        with pytest.raises(Invalid, match="'a/step' "):
            restore({"a": {"step": saved}}, {"a": {"step": like}}, casts=casts)


def test_an_array_that_is_filled_has_what_was_saved() -> None:
    for saved, target in ((7, np.zeros((), np.int32)), (np.zeros(2, np.float32), np.zeros(2))):
        with pytest.raises(Invalid, match="'a' "):
            restore({"a": saved}, {"a": target}, casts=True, fills=True)
    assert restore({"a": np.int32(5)}, {"a": 0}, fills=True) == {"a": 5}


def test_weak_types_are_those_of_like() -> None:
    jax = require("jax")
    jnp = jax.numpy
    abstract = jax.eval_shape(lambda: {"step": 0, "rate": 0.5, "strong": jnp.int32(0), "row": jnp.full(3, 1.0)})
    saved = {"step": 12, "rate": 0.25, "strong": 3, "row": np.array([1, np.nan, -0.0], np.float32)}
    got = restore(saved, abstract)
    assert jax.tree.map(lambda array: array.weak_type, got) == {
        "step": True,
        "rate": True,
        "strong": False,
        "row": True,
    }
    assert got["step"].dtype == abstract["step"].dtype
    assert (int(got["step"]), float(got["rate"])) == (12, 0.25)
    assert np.asarray(got["row"]).tobytes() == saved["row"].tobytes()
    again = restore(got, jax.tree.map(jnp.zeros_like, got))
    assert not again["strong"].weak_type
    assert int(again["step"]) == 12


# -- parts -------------------------------------------------------------------------------------------------


def test_leaves_that_keys_do_not_choose_come_back_as_like_has_them() -> None:
    saved = {"params": [np.ones(2), {"w": np.ones(3), "old": 1}, 5], "opt": {"mu": np.ones(2)}, "name": "run"}
    mine = np.zeros(4)
    like = {"params": [mine, {"w": np.zeros(3), "new": "x"}, 6], "opt": {"mu": mine, "empty": {}}, "name": AS_SAVED}
    structure = flatten(saved).structure
    keys = ["params/1/w", "params/2"]
    got = restore_part(saved, like, keys)
    assert got["params"][0] is mine
    assert got["params"][1]["w"].tolist() == [1, 1, 1]
    assert got["params"][1]["new"] == "x"
    assert got["params"][2] == 5
    assert got["opt"] == {"mu": mine, "empty": {}}
    assert got["name"] is AS_SAVED
    part = select(structure, keys)
    fitted = match(like, part, keys=keys, whole=structure)
    assert [leaf.key for leaf in fitted.leaves] == ["params/1/w"]
    with pytest.raises(Invalid, match="1 missing from the step: 'params/1/new'"):
        restore_part(saved, like, ["params/1/*", "params/2"])
    with pytest.raises(Invalid, match="1 only in the step: 'opt/mu'"):
        restore_part(saved, {"params": like["params"]}, ["params/1/w", "opt"])
    with pytest.raises(Invalid, match="1 different: 'params'"):
        restore_part(saved, like | {"params": tuple(like["params"])}, ["params/1/w"])
    # The form that a restore without `like` has fits as well.
    assert restore_part(saved, {"params": {2: 0}}, ["params/2"]) == {"params": {2: 5}}


def restore_part(saved: object, like: object, keys: list[str]) -> Any:
    structure = flatten(saved).structure
    fitted = match(like, select(structure, keys), keys=keys, whole=structure)
    read = {leaf.key for leaf in fitted.leaves}
    return fitted.build({leaf.key: host_view(leaf).copy() for leaf in flatten(saved).arrays if leaf.key in read})
