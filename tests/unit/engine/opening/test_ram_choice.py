"""The rules by which a store finds its RAM, one by one; see decision 30."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.blobs.ram.owner import Owner, Place
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening.ram_choice import Choice, SeenTier, choose, is_copy
from tieredckpt.errors import Conflict
from tieredckpt.format.marker import StoreMarker

ONE, TWO = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"
DISK = Place(location="/disk", inode=(1, 7), file_system="a", seen=True)
MOVED = Place(location="/moved", inode=(1, 7), file_system="a", seen=True)
EMPTY = Place(location="/disk", file_system="a")
OTHER = Place(location="/other", inode=(1, 9), file_system="a", seen=True)
NEVER = Place(location="/disk", file_system="a")
OLDER = Place(location="s3://bucket/run", seen=True)
GATEWAY = Place(location="s3://bucket/run at http://gateway:9000", seen=True)
ELSEWHERE = Place(location="s3://bucket/run2", seen=True)


def ram(store: str, *places: Place, **fields: Any) -> FoundRam:
    """RAM with one step, and a note of these places."""
    owner = Owner(places=places, used_at=float(fields.pop("used_at", 0.0)), ranks=int(fields.pop("ranks", 1)))
    given: dict[str, Any] = {
        "folder": f"/dev/shm/{store}",
        "marker": StoreMarker(store=store),
        "rank": None,
        "owner": owner,
        "steps": ((1, 1),),
        "nbytes": 4096,
        "lost": False,
        "user": "",
        "modified": 0.0,
    }
    return FoundRam(**(given | fields))


def tier(place: Place, store: str | None, *, answers: bool = True, name: str = "disk") -> SeenTier:
    return SeenTier(name, place, answers, None if store is None else StoreMarker(store=store))


def chosen(tiers: list[SeenTier], *found: FoundRam, name: str | None = None) -> Choice:
    disks = {each.name: {"kind": "posix", "path": Path(each.place.location)} for each in tiers}
    return choose(tiers, found, StoreConfig(tiers={"ram": {"kind": "ram"}, **disks}, name=name))


def store_of(choice: Choice) -> str | None:
    return None if choice.marker is None else choice.marker.store


def test_the_tiers_tell_whose_store_it_is_whatever_ram_says() -> None:
    choice = chosen([tier(DISK, ONE)], ram(TWO, DISK))
    assert (store_of(choice), choice.provisional) == (ONE, False)
    assert list(choice.left) == [TWO]


def test_tiers_of_two_stores_are_refused_with_both() -> None:
    with pytest.raises(Conflict) as refused:
        chosen([tier(DISK, ONE), tier(OTHER, TWO, name="archive")])
    for word in (ONE, TWO, "/disk", "/other", "'archive'"):
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("noted", "ours", "holding", "copy"),
    [
        (DISK, DISK, ("/disk",), ""),  # where it was
        (DISK, MOVED, (), ""),  # moved on one file system: the inode is the same
        (DISK, OTHER, (), ""),  # moved to another one: it is nowhere else
        (DISK, OTHER, ("/disk",), "/disk"),  # copied
        (OLDER, GATEWAY, ("s3://bucket/run",), ""),  # noted by a version that did not name the service
        (GATEWAY, OLDER, (GATEWAY.location,), ""),  # the service is named otherwise
        (ELSEWHERE, GATEWAY, (ELSEWHERE.location,), ELSEWHERE.location),
    ],
)
def test_a_copied_folder_is_told_from_one_that_was_moved(
    noted: Place, ours: Place, holding: tuple[str, ...], copy: str
) -> None:
    assert is_copy(ram(ONE, noted, holding=holding), [ours]) == copy


def test_ram_of_the_version_before_is_no_copy() -> None:
    assert is_copy(ram(ONE, owner=None), [DISK]) == ""


def test_an_empty_tier_that_never_had_the_store_gets_what_ram_holds() -> None:
    choice = chosen([tier(EMPTY, None)], ram(ONE, NEVER))
    assert (store_of(choice), choice.provisional) == (ONE, True)


def test_what_a_person_removed_is_not_restored_from_ram() -> None:
    choice = chosen([tier(EMPTY, None)], ram(ONE, DISK))
    assert store_of(choice) is None
    assert list(choice.left) == [ONE]


def test_what_is_not_mounted_is_continued_from_ram_and_left_alone() -> None:
    choice = chosen([tier(EMPTY, None)], ram(ONE, DISK, elsewhere=("/disk",)))
    assert (store_of(choice), choice.provisional) == (ONE, False)


def test_ram_that_notes_no_place_of_ours_is_nobodys_business() -> None:
    choice = chosen([tier(EMPTY, None)], ram(ONE, OTHER))
    assert store_of(choice) is None
    assert not choice.left


def test_while_a_tier_is_silent_the_ram_used_last_is_continued() -> None:
    silent = tier(EMPTY, None, answers=False)
    choice = chosen([silent], ram(ONE, DISK, used_at=1.0), ram(TWO, DISK, used_at=2.0))
    assert store_of(choice) == TWO
    assert list(choice.left) == [ONE]


def test_ram_with_a_whole_step_wins_over_what_was_used_later() -> None:
    silent = tier(EMPTY, None, answers=False)
    part = ram(TWO, DISK, used_at=2.0, ranks=2, rank=0)
    assert store_of(chosen([silent], ram(ONE, DISK, used_at=1.0), part)) == ONE
    other = ram(TWO, DISK, used_at=2.0, ranks=2, rank=1)
    assert store_of(chosen([silent], ram(ONE, DISK, used_at=1.0), part, other)) == TWO


def test_a_store_of_ram_alone_is_known_by_its_name() -> None:
    named = ram(ONE, owner=Owner(label="run"))
    assert store_of(chosen([], named, name="run")) == ONE
    assert store_of(chosen([], named, name="other")) is None
    assert store_of(chosen([], ram(ONE, DISK), name="run")) is None
