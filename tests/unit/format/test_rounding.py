"""Rounded values are within their bound by exact arithmetic, whatever the bits; what must not be rounded is not."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tieredckpt.errors import Invalid
from tieredckpt.format import rounding
from tieredckpt.format.rounding import Bound, can_round, round_values

FLOATS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)]
MANTISSA = dict(zip(FLOATS, (10, 7, 23, 52), strict=True))

RELATIVE = st.one_of(
    st.floats(1e-15, 0.5),
    st.integers(1, 40).map(lambda n: math.ldexp(1.0, -n)),
    st.integers(1, 40).map(lambda n: math.nextafter(math.ldexp(1.0, -n), 0.0)),
).map(Bound)
ABSOLUTE = st.one_of(st.floats(2.0**-99, 2.0**99), st.integers(-99, 99).map(lambda n: math.ldexp(1.0, n))).map(
    lambda most: Bound(most, absolute=True)
)


@st.composite
def bits(draw: st.DrawFn, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Values of any bits, and those that rounding is most likely to get wrong."""
    width, mantissa = 8 * dtype.itemsize, MANTISSA[dtype]
    exponents = (1 << (width - 1 - mantissa)) - 1
    nearly = st.integers(-3, 3)
    special = st.builds(
        lambda sign, exponent, low, near: (
            ((sign << (width - 1)) | ((exponent << mantissa) + ((low << (mantissa // 2)) % (1 << mantissa)) + near))
            % (1 << width)
        ),
        st.integers(0, 1),
        st.sampled_from([0, 1, 2, exponents // 2, exponents - 1, exponents]),
        st.integers(0, 1 << (mantissa // 2 + 1)),
        nearly,
    )
    found = draw(st.lists(st.integers(0, (1 << width) - 1) | special, min_size=1, max_size=20))
    return np.array(found, dtype=f"u{dtype.itemsize}").view(dtype)


def finite(value: Any) -> bool:
    """By its bits: NaN that signal warn of everything else."""
    width, mantissa = 8 * value.dtype.itemsize, MANTISSA[value.dtype]
    top = ((1 << (width - 1 - mantissa)) - 1) << mantissa
    return bool(int(value.view(f"u{value.dtype.itemsize}")) & top != top)


def exact(value: Any) -> Fraction:
    return Fraction(float(value))


def rounded(values: NDArray[Any], bound: Bound) -> tuple[NDArray[Any], float]:
    memory = values.copy().view(np.uint8)
    worst = round_values(memory, values.dtype, bound)
    assert worst is not None, "no input may be outside of its bound"
    return memory.view(values.dtype), worst


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.data(), bound=RELATIVE | ABSOLUTE)
def test_every_value_is_within_its_bound_by_exact_arithmetic(
    dtype: np.dtype[Any], data: st.DataObject, bound: Bound
) -> None:
    before = data.draw(bits(dtype))
    after, worst = rounded(before, bound)
    assert worst <= bound.most
    for old, new in zip(before, after, strict=True):
        if not finite(old) or old == 0:
            assert old.tobytes() == new.tobytes()
            continue
        assert finite(new)
        assert np.signbit(new) == np.signbit(old)
        error = abs(exact(new) - exact(old))
        if not bound.absolute:
            assert error <= Fraction(worst) * abs(exact(old))
            assert new != 0
        else:
            assert error <= Fraction(worst)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.data(), bound=RELATIVE | ABSOLUTE)
def test_rounding_twice_changes_nothing_more(dtype: np.dtype[Any], data: st.DataObject, bound: Bound) -> None:
    once, _ = rounded(data.draw(bits(dtype)), bound)
    twice, worst = rounded(once, bound)
    assert twice.tobytes() == once.tobytes()
    assert worst == 0.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.data(), bound=RELATIVE)
def test_normal_values_keep_no_more_bits_than_the_bound_needs(
    dtype: np.dtype[Any], data: st.DataObject, bound: Bound
) -> None:
    before = data.draw(bits(dtype))
    after, _ = rounded(before, bound)
    cut = max(0, MANTISSA[dtype] - bound.kept_bits)
    limits: Any = ml_dtypes.finfo(dtype)
    for old, new in zip(before, after, strict=True):
        largest = abs(exact(limits.max)) * (1 - Fraction(1, 1 << (bound.kept_bits + 1)))
        if finite(old) and exact(limits.tiny) <= abs(exact(old)) <= largest:
            assert int(new.view(f"u{dtype.itemsize}")) % (1 << cut) == 0


@given(st.floats(2.0**-60, 0.5))
def test_the_bits_kept_are_the_fewest_that_keep_the_bound(most: float) -> None:
    kept = Bound(most).kept_bits
    assert Fraction(1, 1 << (kept + 1)) <= Fraction(most)
    assert kept == 0 or Fraction(1, 1 << kept) > Fraction(most)


@given(st.floats(2.0**-99, 2.0**99))
def test_the_unit_is_the_largest_power_of_two_that_keeps_the_bound(most: float) -> None:
    unit = Fraction(Bound(most, absolute=True).unit)
    assert unit / 2 <= Fraction(most) < unit


def test_ties_go_to_the_even_neighbour() -> None:
    values = np.array([1.25, 1.75, 2.5, 3.5], np.float32)
    after, _ = rounded(values, Bound(0.25))  # one bit of the mantissa
    assert after.tolist() == [1.0, 2.0, 2.0, 4.0]
    after, _ = rounded(np.array([0.5, 1.5, 2.5, -2.5], np.float32), Bound(0.5, absolute=True))
    assert after.tolist() == [0.0, 2.0, 2.0, -2.0]


def test_the_worst_error_is_found_in_any_block() -> None:
    values = np.zeros(3 * rounding._BLOCK + 5, np.float32)
    values[-1] = 1 + 2.0**-9
    _, worst = rounded(values, Bound(2.0**-8))
    assert worst == 2.0**-9
    _, worst = rounded(values, Bound(2.0**-8, absolute=True))
    assert worst == 2.0**-9


def test_a_value_outside_of_its_bound_is_noticed_and_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.linspace(1, 2, 1000, dtype=np.float32)
    for name, bound in (("_to_bits", Bound(2.0**-8)), ("_to_multiples", Bound(2.0**-8, absolute=True))):
        real = getattr(rounding, name)

        def wrong(block: Any, *rest: Any, real: Any = real) -> Any:
            found = real(block, *rest)
            (rest[-2] if found is None else found)[-1] += 1 << 20
            return found

        monkeypatch.setattr(rounding, name, wrong)
        assert round_values(values.copy().view(np.uint8), values.dtype, bound) is None


def test_only_plain_floating_point_is_rounded() -> None:
    assert all(can_round(dtype) for dtype in FLOATS)
    for name in ("int32", "uint8", "bool", "complex64", ">f4", "datetime64[ns]"):
        assert not can_round(np.dtype(name))
    assert not can_round(np.dtype(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("most", [0.0, -0.1, 0.51, math.nan, math.inf])
def test_a_bound_that_says_nothing_is_refused(most: float) -> None:
    with pytest.raises(Invalid, match="relative bound"):
        Bound(most)
    if not 0 < most < 1:
        with pytest.raises(Invalid, match="absolute bound"):
            Bound(most, absolute=True)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_large_arrays_of_any_bits_are_within_the_bound(seed: int) -> None:
    before = np.random.default_rng(seed).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    after, worst = rounded(before, Bound(0.004))
    fine = np.isfinite(before) & (before != 0)
    with np.errstate(all="ignore"):
        error = np.abs(after[fine].astype(np.float64) - before[fine]) / np.abs(before[fine].astype(np.float64))
    assert error.max() <= worst <= 2.0**-8
