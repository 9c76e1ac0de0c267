"""Sizes, rates and durations: what is understood, what is refused, and what people read."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tieredckpt.errors import Invalid
from tieredckpt.units import (
    Duration,
    Rate,
    Size,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("512 B", 512),
        ("512 bytes", 512),
        ("64 MiB", 64 * 2**20),
        ("64MiB", 64 * 2**20),
        (" 1.5GB ", 1_500_000_000),
        ("2 kB", 2000),
        ("3 KB", 3000),
        ("1 KiB", 1024),
        ("0.5 TiB", 2**39),
        ("1 TB", 10**12),
        ("1 PiB", 2**50),
        ("0.3 GiB", 322122547),
        (7, 7),
    ],
)
def test_a_size_means_its_bytes(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("64 mib", "written MiB"),
        ("64 M", "MiB .* or MB"),
        ("64 g", "GiB .* or GB"),
        ("64 Mb", "written MB"),
        ("64 furlongs", "no unit"),
        ("-1", "write for example"),
        ("1e9", "write for example"),
        ("٣ MiB", "write for example"),
        ("", "write for example"),
        ("9" * 100, "write for example"),
        ("nan", "write for example"),
        ("8192 PiB", "4096 PiB"),
        (-1, "4096 PiB"),
        (2**62 + 1, "4096 PiB"),
        pytest.param(10**5000, "thousands of digits", id="huge"),
        (1.5, "whole bytes"),
        (True, "whole bytes"),
        (None, "whole bytes"),
    ],
)
def test_what_is_no_size_is_refused_with_what_to_write(value: object, told: str) -> None:
    with pytest.raises(Invalid, match=told):
        parse_size(value)


def test_a_rate_may_say_per_second() -> None:
    assert parse_rate("200 MB/s") == parse_rate("200 MB") == parse_rate(200_000_000)
    assert format_rate(1.5 * 2**30) == "1.5 GiB/s"
    with pytest.raises(Invalid):
        parse_rate("200 MB/h")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("15 min", 900),
        ("15m", 900),
        ("2h", 7200),
        ("500 ms", 0.5),
        ("250us", 0.00025),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        ("30 s", 30),
        ("0.1 s", 0.1),
        ("7 d", 604800),
        ("1d12h", 129600),
        (2.5, 2.5),
        (0, 0),
    ],
)
def test_a_duration_means_its_seconds(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        *("", "30", "s", "30 sec", "-1 s", "1e3 s", "30m1h", "1h1h", "1h,30m", "2000000 d", "1" * 100 + "s"),
        *(float("nan"), float("inf"), -1, 10**400, True, None, [1]),
    ],
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(Invalid, match="is not a duration"):
        parse_duration(value)


@given(st.integers(0, 2**62))
@example(1070)
def test_a_formatted_size_parses_to_three_digits(nbytes: int) -> None:
    text = format_size(nbytes)
    number, unit = text.split()
    meant = Fraction(number) * parse_size(f"1 {unit}")
    assert abs(meant - nbytes) <= nbytes / Fraction(200)
    assert parse_size(text) == int(meant)  # the fraction of a byte is dropped: of 1.04 KiB, 1064.96 bytes


@given(st.integers(1, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_formatting_whole_units_is_exact(count: int, unit: str) -> None:
    # Four digits are rounded to three only above 999.
    text = f"{min(count, 999)} {unit}"
    assert format_size(parse_size(text)) == text


@given(st.floats(1e-6, 1e9))
def test_a_formatted_duration_parses_to_about_the_same(seconds: float) -> None:
    # Two units of which the second is at most a 24th of the first.
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.0209)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00025, "250 us"),
        (0.5, "500 ms"),
        (12.5, "12.5 s"),
        (60, "1 min"),
        (119.7, "2 min"),
        (125, "2 min 5 s"),
        (5400, "1 h 30 min"),
        (86399, "1 d"),
        (90000, "1 d 1 h"),
    ],
)
def test_a_duration_reads_in_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(1023, "1023 B"), (2**20 - 1, "1 MiB"), (3 * 2**29, "1.5 GiB")])
def test_a_size_reads_in_binary_units(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 2**62), st.floats(0, 3e10))
def test_what_is_dumped_to_json_comes_back_exactly(number: int, seconds: float) -> None:
    for field, value in ((Size, number), (Rate, number), (Duration, seconds)):
        adapter: TypeAdapter[float] = TypeAdapter(field)
        assert adapter.validate_json(adapter.dump_json(value)) == value


def test_json_says_it_as_people_do_where_that_is_exact() -> None:
    assert TypeAdapter(Size).dump_python(16 * 2**20, mode="json") == "16 MiB"
    assert TypeAdapter(Size).dump_python(1_500_000_000, mode="json") == "1500 MB"
    assert TypeAdapter(Size).dump_python(1_234_567, mode="json") == 1_234_567
    assert TypeAdapter(Rate).dump_python(10_000_000, mode="json") == "10 MB/s"
    assert TypeAdapter(Duration).dump_python(900.0, mode="json") == "15 min"
    assert TypeAdapter(Duration).dump_python(900.25, mode="json") == 900.25
