"""What is printed: no text of a checkpoint steers a terminal, and JSON is always JSON."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.cli.console import jsonable, metrics_text, printable, when

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.text(st.characters()))
def test_nothing_that_steers_a_terminal_is_printed(text: str) -> None:
    assert printable(text).isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="\\")))
def test_readable_text_is_printed_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_what_is_escaped_stays_recognizable() -> None:
    assert printable("a\x1b[2J\n\u202eb\udc80") == r"a\x1b[2J\n\u202eb\udc80"


@given(VALUES)
def test_json_takes_every_value(value: object) -> None:
    json.dumps(jsonable(value), allow_nan=False)


@given(st.floats())
def test_no_time_that_a_record_may_hold_is_an_error(seconds: float) -> None:
    assert when(seconds)


def test_a_time_is_iso_8601_in_utc() -> None:
    assert when(0) == "1970-01-01T00:00:00Z"


def test_metrics_are_one_line() -> None:
    assert metrics_text({"loss": 0.5, "norm": math.inf}) == "loss=0.5, norm=inf"
