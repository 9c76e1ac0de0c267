"""Casts to 16 bits: native, portable and NumPy's are one function, also of what is infinite, subnormal or no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tieredckpt.errors import Invalid
from tieredckpt.format import casts

native = pytest.importorskip(
    "tieredckpt._native", reason="tieredckpt was installed without a C++ compiler", exc_type=ImportError
)

NAMES = ("bf16", "fp16")
FORMS = {name: (getattr(native, f"narrow_{name}"), getattr(native, f"narrow_{name}_portable")) for name in NAMES}


def by_numpy(values: NDArray[np.float32], name: str) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(casts.CASTS[name])


def every_kind() -> NDArray[np.float32]:
    """All signs and exponents, with mantissas at, just below and just above what is halfway between two results."""
    high = np.arange(1 << 13, dtype=np.uint32)[:, None] << np.uint32(19)
    halves = [at + around for at in (0, 1 << 12, 1 << 13, 3 << 12, 1 << 15, 1 << 16, 3 << 15) for around in (-1, 0, 1)]
    low = np.array([half & 0x7FFFF for half in halves] + [1 << bit for bit in range(19)], np.uint32)
    return (high | low).reshape(-1).view(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_native_and_portable_casts_are_numpys_for_all_finite_results(name: str) -> None:
    values = every_kind()
    expected = by_numpy(values, name)
    values, expected = values[np.isfinite(expected)], expected[np.isfinite(expected)]
    for form in FORMS[name]:
        for start in (0, 1, 7):  # at addresses of any alignment, and with a rest
            found = np.zeros(values.size - start, np.uint16)
            assert form(values[start:], found)
            np.testing.assert_array_equal(found, expected[start:].view(np.uint16))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 15, 16, 20])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 65520.0])
def test_one_value_that_is_not_finite_is_told_wherever_it_lies(name: str, place: int, value: float) -> None:
    values = np.ones(21, np.float32)
    values[place] = value
    finite = bool(np.isfinite(by_numpy(values, name)).all())
    for form in FORMS[name]:
        assert form(values, np.zeros(21, np.uint16)) == finite


def cast(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.uint16]:
    found = np.zeros(values.size, np.uint16)
    casts.cast("w", values, found.view(dtype))
    return found


@given(bits=st.lists(st.integers(0, (1 << 32) - 1), max_size=40), name=st.sampled_from(NAMES))
def test_a_cast_gives_numpys_bits_or_says_that_a_finite_value_is_lost(bits: list[int], name: str) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    expected = by_numpy(values, name)
    if np.isfinite(expected[np.isfinite(values)]).all():
        np.testing.assert_array_equal(cast(values, casts.CASTS[name]), expected.view(np.uint16))
    else:
        with pytest.raises(Invalid, match=r"array 'w' has values beyond the largest of"):
            cast(values, casts.CASTS[name])


@given(mantissa=st.integers(0, (1 << 52) - 1), exponent=st.integers(900, 1100), tie=st.integers(-2, 2))
def test_a_double_is_rounded_once(mantissa: int, exponent: int, tie: int) -> None:
    """Values just beside the middle of two results are rounded to the nearer one, and not to the middle first."""
    for bits in (mantissa, ((mantissa >> 45 << 45) + (1 << 44) + tie) % (1 << 52)):
        values = np.array([exponent << 52 | bits], np.uint64).view(np.float64)
        found = cast(values, casts.CASTS["bf16"])
        around = np.array([found[0] - 1, found[0], found[0] + 1], np.uint16).view(casts.CASTS["bf16"])
        distances = np.abs(around.astype(np.float64) - values)
        assert distances[1] == distances.min()
        assert np.count_nonzero(distances == distances[1]) == 1 or found[0] % 2 == 0


def test_without_native_code_casts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    values[[3, -1]] = np.nan, -np.inf
    native_ones = [cast(values, dtype) for dtype in casts.CASTS.values()]
    monkeypatch.setattr(casts, "_native", {})
    for dtype, expected in zip(casts.CASTS.values(), native_ones, strict=True):
        np.testing.assert_array_equal(cast(values, dtype), expected)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="half of its size"):
        native.narrow_bf16(np.zeros(4, np.float32), np.zeros(5, np.uint16))
