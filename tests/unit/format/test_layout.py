"""Names on disk: each is parsed back to what it was made from, and nothing else parses."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tieredckpt.errors import Invalid
from tieredckpt.format import layout

steps = st.integers(0, layout.MAX_NUMBER)
serials = st.integers(1, layout.MAX_NUMBER)


def test_the_names_are_those_of_the_specification() -> None:
    assert layout.step_folder(1000, 7) == "steps/0000001000-000007/"
    assert layout.manifest_key(1000, 7) == "steps/0000001000-000007/manifest.ocdbt"
    assert layout.btree_key(1000, 7) == "steps/0000001000-000007/btree"
    assert layout.pack_key("ab" * 16) == f"packs/ab/{'ab' * 16}.pack"


@given(st.integers(0, layout.MAX_NUMBER))
def test_what_is_aligned_ends_with_the_page_in_which_it_ended(nbytes: int) -> None:
    assert layout.aligned(nbytes) % layout.ALIGNMENT == 0
    assert 0 <= layout.aligned(nbytes) - nbytes < layout.ALIGNMENT


@given(step=steps, serial=serials)
@example(step=layout.MAX_NUMBER, serial=layout.MAX_NUMBER)
def test_a_step_folder_parses_to_its_step_and_serial(step: int, serial: int) -> None:
    assert layout.parse_step_folder(layout.step_folder(step, serial)) == (step, serial)


def test_folders_sort_by_step_then_serial() -> None:
    pairs = [(0, 1), (1, 9), (9, 2), (10, 1), (10, 2), (999_999_999, 1)]
    names = [layout.step_folder(*pair) for pair in pairs]
    assert sorted(names) == names


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0000001000-000007/",
        "steps/0000001000-000007",
        "steps/0000001000-000007/ ",
        "steps/0000001000-000007/\n",
        "steps/1000-7/",
        "steps/00000001000-000007/",
        "steps/0000001000-0000007/",
        "steps/0000001000-000000/",
        "steps/-000001000-000007/",
        "steps/\N{ARABIC-INDIC DIGIT ONE}000001000-000007/",
        f"steps/{1 << 63}-000001/",
        f"steps/0000001000-{1 << 63}/",
        f"steps/{'9' * 5000}-000001/",
    ],
)
def test_no_other_name_is_taken_for_a_step(name: str) -> None:
    assert layout.parse_step_folder(name) is None


@given(st.from_regex(r"steps/\d{8,12}-\d{5,8}/", fullmatch=True))
def test_a_name_that_parses_is_the_one_that_would_be_made(name: str) -> None:
    parsed = layout.parse_step_folder(name)
    assert parsed is None or layout.step_folder(*parsed) == name


@pytest.mark.parametrize(("step", "serial"), [(-1, 1), (0, 0), (5, -3), (1 << 63, 1), (0, 1 << 63)])
def test_impossible_steps_have_no_folder(step: int, serial: int) -> None:
    with pytest.raises(Invalid, match=str(step)):
        layout.step_folder(step, serial)


def test_a_new_pack_has_a_name_of_its_own_which_parses_back() -> None:
    identities = {layout.new_pack_id() for _ in range(1000)}
    assert len(identities) == 1000
    for identity in identities:
        assert re.fullmatch("[0-9a-f]{32}", identity)
        assert layout.parse_pack_key(layout.pack_key(identity)) == identity


@pytest.mark.parametrize(
    "key",
    [
        "packs/ab/" + "ab" * 16,
        "packs/cd/" + "ab" * 16 + ".pack",
        "packs/AB/" + "AB" * 16 + ".pack",
        "packs/ab/" + "ab" * 15 + ".pack",
        "packs/ab/" + "ab" * 16 + ".pack\n",
        "other/ab/" + "ab" * 16 + ".pack",
    ],
)
def test_no_other_file_is_taken_for_a_pack(key: str) -> None:
    assert layout.parse_pack_key(key) is None


@pytest.mark.parametrize("identity", ["", "AB" * 16, "../" + "ab" * 16, "ab" * 17])
def test_only_a_pack_id_names_a_pack(identity: str) -> None:
    with pytest.raises(Invalid):
        layout.pack_key(identity)


@given(key=st.text(min_size=1, max_size=20), offset=st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=32))
@example(key="w", offset=[(1 << 63) - 1] * 32)
@example(key="w", offset=[0])
def test_a_block_key_parses_to_its_array_and_offset(key: str, offset: list[int]) -> None:
    name = layout.block_key(key, tuple(offset))
    assert layout.parse_block_key(name) == (key, tuple(offset))
    assert layout.array_key(name) == key


@pytest.mark.parametrize(
    "key",
    [
        "params/w",
        "layers/0",
        "tieredckpt/step.json",
        "tieredckpt/blocks/w",
        "tieredckpt/blocks//0",
        "tieredckpt/blocks/w/",
        "tieredckpt/blocks/w/00",
        "tieredckpt/blocks/w/0.",
        "tieredckpt/blocks/w/-1",
        "tieredckpt/blocks/w/0.01",
        "tieredckpt/blocks/w/\N{ARABIC-INDIC DIGIT ONE}",
        "tieredckpt/blocks/w/9223372036854775808",
        "tieredckpt/blocks/w/0.9223372036854775808",
        "tieredckpt/blocks/w/" + ".".join("0" * 33),
        "tieredckpt/blocks/w/0/zarr.json",
    ],
)
def test_no_other_key_is_taken_for_a_block(key: str) -> None:
    assert layout.parse_block_key(key) is None
    assert layout.array_key(key) == key


@pytest.mark.parametrize("offset", [(), (-1,), (0, -1), (1 << 63,), (0,) * 33])
def test_impossible_offsets_have_no_block(offset: tuple[int, ...]) -> None:
    with pytest.raises(Invalid, match="no block"):
        layout.block_key("w", offset)


def test_the_part_of_a_rank_lies_in_the_folder_of_its_step() -> None:
    assert layout.part_key(1000, 7, 12) == "steps/0000001000-000007/parts/12"
    assert layout.part_key(1000, 7, 0) == "steps/0000001000-000007/parts/0"
    with pytest.raises(Invalid, match="rank -1"):
        layout.part_key(1000, 7, -1)
