"""The verbs `plan` and `simulate`: what they print, and what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.command_line import run, told
from tieredckpt_policies.retention import LastN

from tieredckpt import CheckpointStore
from tieredckpt.cli import simulate

JOB = ("--nodes", 100, "--state", "1TB", "--step-time", "10s", "--mtbf", "20min", "--bandwidth", "disk=20GB/s/node")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        """
        [store]
        schedule = { kind = "every", interval = "1 min" }
        [tiers.ram]
        kind = "ram"
        [tiers.disk]
        kind = "posix"
        path = "disk"
        """
    )
    return path


def test_plan_and_simulation_expect_the_same(settings: Path) -> None:
    planned, simulated = told("plan", settings, *JOB), told("simulate", settings, *JOB, "--days", 3)
    assert simulated["ettr"] == pytest.approx(planned["ettr"], abs=0.02)
    assert simulated["restores"].keys() == {"disk"}  # all failures are nodes', whose RAM is gone
    assert planned["losses"][1]["tier"] == "disk"


def test_both_say_what_codecs_do_for_each_slower_tier(settings: Path) -> None:
    settings.write_text(settings.read_text() + 'codec = "small"\n')
    planned, simulated = told("plan", settings, *JOB), told("simulate", settings, *JOB, "--days", 0.1)
    assert planned["codecs"] == simulated["codecs"]
    assert [(each["tier"], each["codec"], each["chosen"]) for each in planned["codecs"]] == [
        ("disk", "none", False),
        ("disk", "fast", False),
        ("disk", "small", True),
    ]
    assert "codecs" in {each["what"] for each in planned["assumed"]}


def test_people_get_tables(settings: Path) -> None:
    planned, simulated = run("plan", settings, *JOB), run("simulate", settings, *JOB, "--days", 1)
    assert planned.exit_code == simulated.exit_code == 0
    assert "expected ETTR" in planned.stdout
    assert "dedupe: brings nothing" in planned.stdout
    assert "where the time went" in simulated.stdout


def test_an_interval_of_the_command_line_replaces_the_schedule(settings: Path) -> None:
    found = told("simulate", settings, *JOB, "--days", 1, "--interval", "5min")
    assert found["interval"] == pytest.approx(300, rel=0.2)


def test_a_simulation_draws_its_picture(settings: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = told("simulate", settings, *JOB, "--days", 0.1, "--picture", tmp_path / "ettr.svg")
    assert len(found["sweep"]) > 3
    text = (tmp_path / "ettr.svg").read_text()
    assert "ETTR" in text
    assert "by formula" in text


def test_a_plan_measures_what_is_not_told(settings: Path, tmp_path: Path) -> None:
    found = told("plan", settings, "--measure", "--size", "1MiB")
    assert [tier["assumed"] for tier in found["tiers"]] == [False, False]
    assert list(tmp_path.iterdir()) == [settings]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--bandwidth", "disc=1GB/s"), "no tier 'disc'"),
        (("--bandwidth", "disk"), "TIER=RATE"),
        (("--bandwidth", "disk=0"), "more than 0"),
        (("--mtbf", "1h", "--node-mtbf", "1y"), "one of them"),
        (("--mtbf", "0s"), "--mtbf: must be more than 0"),
        (("--mtbf", "1h", "--failures", "meteor=1"), "process, node, rack, site"),
        (("--mtbf", "1h", "--failures", "node=0"), "all 0"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(settings: Path, options: tuple[str, ...], what: str) -> None:
    for verb in ("plan", "simulate"):
        result = run(verb, settings, *options)
        assert result.exit_code == 1
        assert what in result.stderr


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(settings: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "x.svg", tmp_path / "x.txt"):
        result = run("simulate", settings, "--picture", path, "--days", 100_000)
        assert result.exit_code == 1


def test_a_simulation_without_end_is_refused(settings: Path) -> None:
    result = run("simulate", settings, "--days", "inf")
    assert (result.exit_code, "--days" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("missing", "options"), [("simpy", ()), ("matplotlib", ("--picture", "x.svg"))], ids=["simpy", "matplotlib"]
)
def test_a_missing_extra_is_named(settings: Path, tmp_path: Path, missing: str, options: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[0] = 'tieredckpt';"
        "from tieredckpt.cli import main; import tieredckpt.plan.model; main()"
    )
    command = [sys.executable, "-c", code, "simulate", str(settings), "--days", "0.01", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert f"needs {missing}: pip install 'tieredckpt[simulate]'" in done.stderr


def test_the_command_line_starts_without_what_only_a_simulation_needs() -> None:
    code = "import sys, tieredckpt.cli.app; print(sorted({'simpy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_speed_or_size_without_a_unit_is_refused(settings: Path, trained: Path) -> None:
    for verb, problem in (
        (("plan", settings, "--bandwidth", "disk=2"), "--bandwidth disk=2: a speed needs a unit; write '2 GB/s'"),
        (
            ("simulate", settings, "--read-bandwidth", "disk=2/s/node"),
            "--read-bandwidth disk=2/s: a speed needs a unit",
        ),
        (("plan", settings, "--state", "-5 GB"), "--state: '-5 GB' is not a size"),
        (("plan", settings, "--bandwidth", "disk=fast"), "--bandwidth disk: 'fast' is not"),
        (("plan", settings, "--mtbf", "0"), "--mtbf: '0' is not a duration"),
        *((("plan", settings, name, "0 s"), f"{name}: must be more than 0") for name in ("--step-time", "--mtbf")),
        (("simulate", settings, "--tier-mtbf", "disk=0 s"), "--tier-mtbf disk: must be more than 0"),
        (("simulate", settings, "--state", "0 B"), "--state: must be more than 0"),
        (("simulate", settings, "--interval", "5 parsec"), "--interval: '5 parsec' is not a duration"),
        (("simulate", settings, "--tier-mtbf", "disk=1"), "--tier-mtbf disk: '1' is not a duration"),
        (("simulate", settings, "--state", "100"), "--state=100: a size needs a unit"),
        (("plan", settings, "--size", "1 GiB"), "--size is used only with --measure"),
        (("plan", settings, "--measure", "--size", "64"), "--size=64: a size needs a unit"),
        (("plan", settings, "--measure", "--size", "64 B"), "--size: 64 B measure nothing; give at least 4 KiB"),
        (("doctor", "--size", "64"), "--size=64: a size needs a unit"),
        (("bench", "--size", "1.5"), "--size=1.5: a size needs a unit"),
        (("verify", trained, "--all", "--rate", "10"), "--rate=10: a speed needs a unit"),
    ):
        result = run(*verb)
        assert result.exit_code != 0
        assert problem in " ".join(result.stderr.replace("\u2502", " ").split())


def test_a_plan_counts_all_steps_that_a_policy_retains(settings: Path) -> None:
    settings.write_text(settings.read_text() + 'retain = { kind = "last_n", n = 50 }\n')
    tier = told("plan", settings, "--state", "10GiB")["tiers"][1]
    assert (tier["steps"], tier["nbytes"], tier["growing"]) == (50, 500 << 30, False)


def test_a_plan_says_what_has_no_end(settings: Path) -> None:
    settings.write_text(settings.read_text() + 'retain = "all"\n')
    text = run("plan", settings, "--state", "10GiB").stdout
    found = re.search(r"(\d+), growing", text)
    assert found
    assert int(found[1]) > 1000
    assert "of training the policies still retain more and more" in text


def test_a_plan_says_that_there_is_no_step_to_take_the_size_of(settings: Path) -> None:
    (state,) = [each for each in told("plan", settings)["assumed"] if each["what"] == "state"]
    assert "no step was found" in state["why"]


def test_a_plan_takes_the_size_of_the_newest_step_of_a_store(trained: Path) -> None:
    found = told("plan", trained, "--bandwidth", "ram=1GB/s", "--mtbf", "1d")
    (state,) = [each for each in found["assumed"] if each["what"] == "state"]
    assert state["why"] == "step 3 of this store has so many"
    assert found["tiers"][1]["nbytes"] % (100 * 64 * 4 + 40) == 0
    assert found["tiers"][0]["restore"] == pytest.approx((100 * 64 * 4 + 40) / 1e9)


def test_assumptions_are_printed_and_always_include_failures(settings: Path) -> None:
    for verb, more in (("plan", ()), ("simulate", ("--days", 0.05))):
        text = run(verb, settings, "--nodes", 131072, *more).stdout
        for part in ("assumed", "3.73 PiB", "2 min 54 s", "arXiv:2407.21783", "all of one node", "speed of disk"):
            assert part in text


def test_what_was_said_is_not_assumed(settings: Path) -> None:
    said = (*JOB, "--bandwidth", "ram=5GB/s/node", "--failures", "node=1", "--restart", "1min", "--changed", 1)
    for verb, more in (("plan", ()), ("simulate", ("--days", 0.05))):
        assert told(verb, settings, *said, *more)["assumed"] == []


def test_what_many_nodes_share_is_not_measured_by_one(settings: Path) -> None:
    measured = ("plan", settings, "--measure", "--size", "1MiB", "--nodes", 10)
    assert [tier["assumed"] for tier in told(*measured)["tiers"]] == [False, True]
    assert "give --bandwidth disk=RATE" in run(*measured).stderr


def test_a_disk_of_each_nodes_own_is_told_to_be_none(settings: Path) -> None:
    for verb, more in (("plan", ()), ("simulate", ("--days", 0.05))):
        (doubt,) = told(verb, settings, *JOB, *more)["doubts"]
        assert "tier disk is taken for one place that all 100 nodes see" in doubt
        assert "replicas = 2" in run(verb, settings, *JOB, *more).stderr
        assert told(verb, settings, *JOB, *more, "--nodes", 1)["doubts"] == []


def test_a_state_that_ram_cannot_hold_is_told(settings: Path) -> None:
    settings.write_text(settings.read_text().replace('kind = "ram"', 'kind = "ram"\n capacity = "9 GB"'))
    for verb, more in (("plan", ()), ("simulate", ("--days", 0.05))):
        (doubt,) = told(verb, settings, *JOB, "--nodes", 1, *more)["doubts"]
        assert doubt.startswith("tier ram has 8.38 GiB, less than the state of 931 GiB")
        assert told(verb, settings, *JOB, "--nodes", 1, "--state", "9GB", *more)["doubts"] == []


def test_a_policy_that_fails_is_told_with_its_error(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def retains(*_: object) -> frozenset[int]:
        raise ValueError("no age")

    monkeypatch.setattr(LastN, "retains", retains)
    said = run("simulate", settings, *JOB, "--days", 0.05).stderr
    assert "error: a policy of tier 'disk' failed; nothing is evicted from it: ValueError: no age" in said


def test_a_simulation_tells_how_far_it_is(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []

    @contextmanager
    def bar(what: str, whole: float) -> Iterator[Callable[[float], None]]:
        told.append(whole)
        yield told.append

    monkeypatch.setattr(simulate, "bar", bar)
    assert run("simulate", settings, *JOB, "--days", 0.1).exit_code == 0
    whole, *parts = told
    assert whole == pytest.approx(8640)
    assert len(parts) > 100
    assert sum(parts) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("verb", [("plan",), ("simulate", "--days", "0.05")])
def test_what_is_assumed_of_lossy_rules_is_told(tmp_path: Path, verb: tuple[str, ...]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        """
        [tiers.disk]
        kind = "posix"
        path = "disk"
        [tiers.archive]
        kind = "posix"
        path = "archive"
        codec = "small"
        lossy = [{ keys = ["params/**"], max_abs_error = 1e-4 }, { keys = ["opt/**"], drop = true }]
        """
    )
    assert {"lossy rules", "drop", "max_abs_error"} <= {each["what"] for each in told(*verb, path, *JOB)["assumed"]}
    with CheckpointStore.open(path).sync() as store:
        store.save(1, {"params": {"w": np.ones((100, 64))}, "opt": {"m": np.ones((300, 64))}})
    found = told(*verb, path, "--mtbf", "1d")
    assert {"lossy rules", "drop"}.isdisjoint(each["what"] for each in found["assumed"])
    plain = next(each for each in found["codecs"] if (each["tier"], each["codec"]) == ("archive", "none"))
    assert plain["nbytes"] == 100 * 64 * 8
