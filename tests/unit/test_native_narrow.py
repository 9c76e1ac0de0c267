"""Casts to 16 bits: native, portable and NumPy's are one function, also of what is infinite, subnormal or no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tieredckpt.errors import Invalid
from tieredckpt.interchange import casts

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


@given(bits=st.lists(st.integers(0, (1 << 32) - 1), max_size=40), name=st.sampled_from(NAMES))
def test_a_cast_gives_numpys_bits_or_says_that_a_finite_value_is_lost(bits: list[int], name: str) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    expected = by_numpy(values, name)
    found = np.zeros(values.size, np.uint16).view(casts.CASTS[name])
    assert casts.cast(values, found) == bool(np.isfinite(expected[np.isfinite(values)]).all())
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("accelerated", [True, False])
def test_blocks_follow_each_other_to_the_end_and_a_lost_value_is_named(
    monkeypatch: pytest.MonkeyPatch, accelerated: bool
) -> None:
    if not accelerated:
        monkeypatch.setattr(casts, "_native", {})
    values = np.random.default_rng(0).standard_normal((2 << 20) + 5).astype(np.float32)
    values[[3, -1]] = np.nan, -np.inf
    memory = casts.new_memory()
    for name, dtype in casts.CASTS.items():
        found = [block.copy() for block in casts.blocks("w", values, dtype, memory)]
        np.testing.assert_array_equal(np.concatenate(found).view(np.uint16), by_numpy(values, name).view(np.uint16))
        values[-2] = 3.4e38
        with pytest.raises(Invalid, match=r"array 'w' has values beyond the largest of"):
            list(casts.blocks("w", values, dtype, memory))
        values[-2] = 0


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="half of its size"):
        native.narrow_bf16(np.zeros(4, np.float32), np.zeros(5, np.uint16))
