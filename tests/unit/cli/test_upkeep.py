"""`promote`, `evict`, `pin`, `delete` and `collect`: what they are told to do, and nothing besides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.command_line import run, told

from tieredckpt import CheckpointStore, SyncStore


def where(config: Path) -> dict[int, list[str]]:
    return {step["step"]: step["tiers"] for step in told("ls", config)["steps"]}


def test_promote_copies_whatever_the_policy_says(trained: Path) -> None:
    assert told("promote", trained, 2, "archive")["written"] > 25600
    assert where(trained) == {1: ["ram", "disk"], 2: ["ram", "disk", "archive"], 3: ["ram", "disk"]}
    assert told("promote", trained, 2, "archive")["written"] == 0
    with CheckpointStore.open(trained.parent / "archive", read_only=True).sync() as alone:
        assert alone.restore(2, resume=False) is not None


def test_a_promotion_that_retention_undoes_is_no_success(trained: Path) -> None:
    text = trained.read_text()
    head, _, archive = text.partition("[tiers.archive]")
    trained.write_text(head + "[tiers.archive]" + archive.replace('kind = "all"', 'kind = "last_n", n = 1'))
    assert run("promote", trained, 3, "archive").exit_code == 0
    result = run("promote", trained, 1, "archive")
    assert result.exit_code == 1
    assert "retain" in result.stderr
    assert "tieredckpt pin" in result.stderr
    assert told("pin", trained, 1) == {"step": 1, "tier": "archive", "pinned": True}
    assert where(trained)[1] == ["ram", "disk", "archive"]


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_what_was_evicted_by_hand_stays_away(trained: Path, tier: str) -> None:
    told("evict", trained, 2, tier)
    assert tier not in where(trained)[2]
    assert where(trained)[3] == ["ram", "disk"]


def test_the_last_good_copy_is_not_evicted(trained: Path) -> None:
    result = run("evict", trained, 3, "disk")
    assert result.exit_code == 1
    assert result.stderr.startswith("Conflict: cannot evict")
    assert where(trained)[3] == ["ram", "disk"]


def test_a_pin_is_listed_and_keeps_the_step_until_it_is_taken_away(trained: Path) -> None:
    assert told("pin", trained, 2, "disk") == {"step": 2, "tier": "disk", "pinned": True}
    assert told("show", trained, 2)["pinned"] == ["disk"]
    assert {step["step"]: step["pinned"] for step in told("ls", trained)["steps"]} == {1: [], 2: ["disk"], 3: []}
    assert "live, pinned on disk" in run("show", trained, 2).stdout
    assert run("evict", trained, 2, "disk").stderr.startswith("Conflict: cannot evict: step 2 (serial 2) is pinned")
    assert "step 2 is not pinned any more on tier disk" in run("pin", trained, 2, "disk", "--off").stdout
    told("evict", trained, 2, "disk")
    result = run("pin", trained, 2, "disk", "--off")
    assert (result.exit_code, result.stderr.strip()) == (1, "NotFound: step 2 is not pinned on tier 'disk'")


@pytest.mark.parametrize(
    ("verb", "kind"), [("promote", "NotFound"), ("evict", "NotFound"), ("delete", "TierUnavailable")]
)
def test_a_step_that_a_tier_out_of_reach_may_hold_is_missed_with_the_cause(trained: Path, verb: str, kind: str) -> None:
    disk = trained.parent / "disk"
    shutil.rmtree(disk)
    disk.write_text("no folder")
    result = run(verb, trained, 7, *([] if verb == "delete" else ["archive"]))
    assert result.exit_code == 1
    missed = f"{kind}: no tier holds step 7 (held: 1, 2, 3; not reachable at present: disk ({disk}"
    assert result.stderr.startswith(missed)
    assert result.stderr.count(str(disk)) == 1


def test_a_step_is_deleted_from_every_tier_and_the_newest_by_force(trained: Path) -> None:
    told("delete", trained, 2)
    assert 2 not in where(trained)
    result = run("delete", trained, 3)
    assert (result.exit_code, result.stderr[:23], "--force" in result.stderr) == (1, "Conflict: cannot delete", True)
    told("delete", trained, 3, "--force")
    assert 3 not in where(trained)


def test_what_is_not_there_can_be_neither_promoted_nor_evicted(trained: Path) -> None:
    for arguments in (("promote", trained, 9, "disk"), ("evict", trained, 1, "archive"), ("evict", trained, 1, "no")):
        result = run(*arguments)
        assert (result.exit_code, result.stderr[:9]) == (1, "NotFound:")


def test_a_running_trainer_is_not_written_beside(config: Path, training: SyncStore) -> None:
    for arguments in (("promote", config, 1, "archive"), ("evict", config, 1, "ram"), ("collect", config)):
        result = run(*arguments)
        assert (result.exit_code, result.stderr[:9]) == (1, "Conflict:")
    assert training.where(1) == ("ram", "disk")


def test_a_collection_of_all_tiers_but_one_is_no_success(trained: Path) -> None:
    shutil.rmtree(trained.parent / "archive")
    (trained.parent / "archive").write_text("no folder")
    result = run("collect", trained, "--json")
    assert [each["tier"] for each in json.loads(result.stdout)] == ["ram", "disk"]
    assert (result.exit_code, "TierUnavailable: tier 'archive' was not collected" in result.stderr) == (1, True)


def test_collect_tells_what_it_reclaimed(trained: Path) -> None:
    assert [(each["tier"], each["packs"]) for each in told("collect", trained)] == [
        ("ram", 0),
        ("disk", 0),
        ("archive", 0),
    ]
    packs = trained.parent / "disk" / "packs"
    before = sum(path.stat().st_size for path in packs.rglob("*.pack"))
    told("evict", trained, 1, "disk")
    assert sum(path.stat().st_size for path in packs.rglob("*.pack")) < before


def test_ram_is_left_as_it_was_found(trained: Path, shared_memory: Path) -> None:
    released = trained.read_text().replace('on_close = "keep"', 'on_close = "auto"')
    trained.write_text(released)
    ram = shared_memory / "of-test" / "ram"
    told("promote", trained, 1, "archive")
    told("collect", trained)
    assert where(trained)[3] == ["ram", "disk"]
    with CheckpointStore.open(trained).sync():
        pass
    assert not ram.exists()
    told("promote", trained, 2, "archive")
    told("collect", trained)
    assert not ram.exists()


def test_what_a_crash_left_in_ram_outlives_upkeep(config: Path) -> None:
    store = CheckpointStore.open(config).sync()
    store.__enter__()
    store.save(1, {"w": np.ones(100)})
    store._life.close_blocking(clean=False)
    told("promote", config, 1, "archive")
    assert set(where(config)[1]) >= {"ram", "archive"}
