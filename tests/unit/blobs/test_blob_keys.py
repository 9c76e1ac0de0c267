"""A key is a relative path of plain components, and can never lead out of its root."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.blobs.base import check_key, check_prefix
from tieredckpt.errors import Invalid

parts = st.text("abzABZ019._-", min_size=1, max_size=8).filter(lambda part: part not in (".", ".."))
keys = st.lists(parts, min_size=1, max_size=5).map("/".join)


@given(keys)
def test_every_key_of_the_alphabet_is_taken_as_it_is(key: str) -> None:
    assert check_key(key) == key
    assert check_prefix(key + "/") == key + "/"


@given(st.text())
def test_what_is_taken_stays_below_its_root(text: str) -> None:
    try:
        check_key(text)
    except Invalid:
        return
    path = PurePosixPath("/root") / text
    assert path.is_relative_to("/root")
    assert path != PurePosixPath("/root")
    assert not {".", "..", ""} & set(text.split("/"))
    assert text.isascii()
    assert "\n" not in text


@pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "./", "a/./", "a b/", "a\n/", "a/\n"])
def test_a_prefix_is_empty_or_a_folder(prefix: str) -> None:
    assert check_prefix("") == ""
    with pytest.raises(Invalid):
        check_prefix(prefix)
