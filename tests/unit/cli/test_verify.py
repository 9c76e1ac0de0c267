"""`verify`: exit code 0 means that every chunk was read and is as it was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reliability.tiers import FaultyTiers
from support.command_line import run, told

from tieredckpt import CheckpointStore, TierUnavailable


def damage(config: Path, tier: str = "disk") -> None:
    """Flip a bit of every pack of a tier."""
    packs = list((config.parent / tier / "packs").rglob("*.pack"))
    assert packs
    for path in packs:
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)


def test_an_intact_step_passes_on_every_tier(trained: Path) -> None:
    found = told("verify", trained)
    assert [(each["step"], each["tier"], each["intact"]) for each in found] == [(3, "ram", True), (3, "disk", True)]


def test_all_means_every_save_also_of_off_branch_steps(trained: Path) -> None:
    with CheckpointStore.open(trained).sync() as store:
        store.restore(1)
        store.save(2, {"x": 1})
        store.flush()
    found = told("verify", trained, "--all", "--tier", "disk")
    assert [(each["step"], each["serial"]) for each in found] == [(1, 1), (2, 2), (3, 3), (2, 4)]


def test_damage_is_named_and_exits_with_1(trained: Path) -> None:
    damage(trained)
    result = run("verify", trained, 2)
    assert result.exit_code == 1
    assert "damaged: params/w" in result.stdout
    assert run("verify", trained, 2, "--tier", "ram").exit_code == 0


def test_repair_repairs_and_what_is_repaired_stays_so(trained: Path) -> None:
    damage(trained)
    assert run("verify", trained, "--all").exit_code == 1
    assert [each["repaired"] for each in told("verify", trained, "--all", "--repair", "--tier", "disk")] == [True] * 3
    assert all(each["intact"] and not each["repaired"] for each in told("verify", trained, "--all"))


def test_what_no_tier_has_intact_stays_damage(trained: Path, shared_memory: Path) -> None:
    damage(trained)
    for path in shared_memory.rglob("manifest.ocdbt"):
        path.unlink()
    for option in ((), ("--repair",)):
        result = run("verify", trained, 3, *option, "--json")
        assert result.exit_code == 1
        assert [(each["damaged"], each["repaired"]) for each in json.loads(result.stdout)] == [(["params/w"], False)]


@pytest.mark.parametrize("name", ["manifest.ocdbt", "btree"])
def test_an_unreadable_commit_is_damage_until_it_is_repaired(trained: Path, name: str) -> None:
    next((trained.parent / "disk" / "steps").glob(f"*3-*/{name}")).write_bytes(b"torn")
    assert run("verify", trained, 3).exit_code == 1
    assert run("verify", trained, "--all").exit_code == 1
    assert run("verify", trained, 3, "--repair").exit_code == 0
    assert run("verify", trained, "--all").exit_code == 0


def test_a_commit_that_is_torn_under_a_reader_is_damage(trained: Path) -> None:
    with CheckpointStore.open(trained, read_only=True).sync() as store:
        next((trained.parent / "disk" / "steps").glob("*3-*/btree")).write_bytes(b"torn")
        (found,) = store.verify(3, "disk")
    assert (found.damaged, found.repaired, found.intact) == (("tieredckpt/step.json",), False, False)


def test_a_step_that_only_a_torn_commit_tells_of_fails_all(trained: Path, shared_memory: Path) -> None:
    for path in shared_memory.rglob("manifest.ocdbt"):
        path.unlink()
    next((trained.parent / "disk" / "steps").glob("*3-*/manifest.ocdbt")).write_bytes(b"torn")
    result = run("verify", trained, "--all", "--json")
    assert result.exit_code == 1
    assert [(each["step"], each["intact"]) for each in json.loads(result.stdout)] == [
        (1, True),
        (2, True),
        (3, False),
    ]


def test_a_tier_that_stops_answering_is_not_called_intact(trained: Path, faults: FaultyTiers) -> None:
    with CheckpointStore.open(trained, read_only=True).sync() as store:
        faults["disk"].fail("get_into", TierUnavailable("unplugged"), times=None)
        (found,) = store.verify(3, "disk")
    assert not found.intact
    assert not found.repaired
    assert "unplugged" in found.problem


def test_progress_tells_every_byte_that_is_read(trained: Path) -> None:
    parts: list[int] = []
    with CheckpointStore.open(trained, read_only=True).sync() as store:
        (found,) = store.verify(3, "disk", progress=parts.append)
        chunks = sum(array.chunks for array in store.describe(3).arrays)
    assert found.intact
    assert found.nbytes <= sum(parts) <= found.nbytes + chunks * 8192


def test_a_step_and_all_is_wrong_usage(trained: Path) -> None:
    assert run("verify", trained, 1, "--all").exit_code == 2


def test_an_unknown_tier_is_named_with_those_there_are(trained: Path) -> None:
    for option in ((), ("--all",)):
        result = run("verify", trained, "--tier", "dsk", *option)
        assert result.exit_code == 1
        assert "did you mean 'disk'" in result.stderr
