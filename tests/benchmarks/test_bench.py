"""`tieredckpt bench` measures what it says and leaves nothing behind; no time is asserted, for machines differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support import command_line
from support.scenes import SOON

from tieredckpt.bench import peers, run, turn, workloads
from tieredckpt.bench.files import Listing, forget, largest_first
from tieredckpt.bench.isolate import Failed, Meeting, places, run_isolated, run_together, seats
from tieredckpt.bench.peers import base, ours, tensor_file
from tieredckpt.bench.report import AIMS, compare, load_report, make_report, unlike
from tieredckpt.bench.turn import Part, Spec, Turn, of_all_ranks
from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.cli import bench as cli
from tieredckpt.cli.console import output
from tieredckpt.errors import Invalid, NotFound

KEYS = {
    "stall_over_memcpy",
    "durable_over_direct_write",
    "export_over_direct_write",
    "export_cast_over_direct_write",
    "export_stall_ratio",
    "incremental_bytes_ratio",
    "incremental_time_ratio",
    "restore_ram_over_memcpy",
    "restore_views_s",
    "restore_disk_over_direct_read",
    "restore_new_over_direct_read",
    "export_orbax_s",
    "peak_save",
    "peak_restore",
    "interference",
    "tiny_save_us",
    "tiny_restore_us",
    "leaves_first_save_us",
    "leaves_save_us",
    "leaves_restore_us",
    "first_stall_over_fresh_copy",
    "open_empty_s",
    "save_one_s",
    "close_s",
    "open_large_s",
    "save_large_extra_s",
}
"""What programs look for; `stall_reference_s` needs JAX."""

_GONE = base.absent("no_such_module")
_SLOW = {"tieredckpt-reference", "tieredckpt-torch", "tieredckpt-jax", "torch.save"}

ALL_PARTS: tuple[Part, ...] = ("limits", "tenth", "compute", "memory", "export", "cold", "warm")


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path) -> Iterator[None]:
    yield
    mine = f"tieredckpt-bench-{os.getpid()}-*"
    assert not list(shared_memory_root().glob(mine))
    assert not list(tmp_path.glob(mine))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A report of a run of a few MiB, and the HTML that was written with it."""
    folder = tmp_path_factory.mktemp("bench")
    page, result = folder / "report.html", folder / "report.json"
    arguments = ["bench", "--size", "4 MiB", "--folder", str(folder), "--peers", "torch.save", "--rounds", "1"]
    arguments += ["--repeats", "1", "--steps", "5", "--leaves", "20000", "--html", str(page), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        for module in (ours, tensor_file):  # a framework takes longer to load than all of this
            peers = [replace(each, missing=_GONE) if each.name in _SLOW else each for each in module.PEERS]
            patch.setattr(module, "PEERS", tuple(peers))
        done = command_line.run(*arguments)
    assert done.exit_code == 0, done.output
    result.write_text(done.stdout)
    assert {path.name for path in folder.iterdir()} == {page.name, result.name}
    return result, page.read_text()


@pytest.mark.benchmark
def test_one_command_tells_every_figure_of_the_aims(stored: tuple[Path, str]) -> None:
    report = load_report(stored[0])
    assert report.failed == {}
    assert report.ratios.keys() >= KEYS
    assert report.ratios["incremental_bytes_ratio"] < 0.2
    assert all(value >= 0 for value in report.ratios.values())
    assert [row.peer for row in report.rows["transformer"]] == ["tieredckpt"]
    assert set(report.missing) == _SLOW
    assert {"memcpy", "memcpy_by_one_thread", "direct_write", "direct_read", "fresh_memory"} <= report.limits.keys()
    assert set(report.rows) == {"transformer", "lora", "embedding", "tiny"}
    row = report.rows["lora"][0]
    assert row.peer == "tieredckpt"
    assert row.written_ratio is not None
    assert row.written_ratio < 0.9  # the frozen base was written before
    assert json.loads(stored[0].read_text())["machine"]["cores"] >= 1


@pytest.mark.benchmark
def test_the_page_needs_nothing_else_and_shows_the_figures(stored: tuple[Path, str]) -> None:
    page = stored[1]
    assert all(title in page for title, *_ in cli._BARS)
    assert page.count("█") > 100
    for foreign in ("http:", "https:", "<script", "src=", "@import", "url("):
        assert foreign not in page
    for aim in AIMS:
        assert aim.key in page
    assert "missing: torch.save: not installed: no_such_module" in page


@pytest.mark.benchmark
def test_people_see_the_figures_and_what_is_missing(
    stored: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = load_report(stored[0])
    following = msgspec.structs.replace(report.rows["lora"][0], snapshot=False)
    cli._show(msgspec.structs.replace(report, rows=report.rows | {"lora": [following]}), report, output())
    told = capsys.readouterr().out
    for aim in AIMS:
        assert aim.about in told
    assert "missing: torch.save: not installed: no_such_module" in told
    assert told.count("NO: it follows the training") == 1
    assert "alike" in told


@pytest.mark.benchmark
def test_a_report_compared_with_itself_has_no_change(stored: tuple[Path, str]) -> None:
    report = load_report(stored[0])
    assert {change.verdict for change in compare(report, report)} == {"alike"}


@pytest.mark.benchmark
def test_what_became_worse_is_seen_in_two_stored_reports(
    stored: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_report(stored[0])
    ratios = dict(before.ratios)
    ratios["stall_over_memcpy"] *= 1.5
    ratios["restore_ram_over_memcpy"] /= 1.5
    del ratios["tiny_save_us"]
    now = msgspec.structs.replace(before, ratios=ratios, size=2 * before.size)
    verdicts = {change.key: change.verdict for change in compare(before, now)}
    assert verdicts["stall_over_memcpy"] == "worse"
    assert verdicts["restore_ram_over_memcpy"] == "better"
    assert verdicts["tiny_save_us"] == "gone"
    cli._show_changes(before, now, output())
    assert "not comparable" in capsys.readouterr().out


def run_turn(peer: str, tmp_path: Path, parts: tuple[Part, ...] = ALL_PARTS) -> Turn:
    """A turn in this process, with a MiB or two."""
    with places(tmp_path) as where:
        return turn.measure(
            Spec(
                peer=peer,
                workload="transformer",
                nbytes=2 << 20,
                **where.told(),
                repeats=1,
                threads=2,
                parts=parts,
            )
        )


@pytest.mark.benchmark
@pytest.mark.parametrize("peer", [peer.name for peer in peers.all_peers() if peer.name.startswith("tieredckpt")])
def test_this_library_stores_a_snapshot(peer: str, tmp_path: Path) -> None:
    if why := peers.peer_named(peer).missing():
        pytest.skip(why)
    told = run_turn(peer, tmp_path)
    assert told.snapshot
    assert told.facts["tenth_written"] < 0.3 * told.facts["written"]
    assert {"stall", "durable", "restore_ram", "restore_views", "restore_cold_existing"} <= told.samples.keys()


def test_variants_of_this_library_are_measured_with_the_first_workload_in_their_parts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their figures are those of one key each, over what they have themselves measured."""
    asked: dict[tuple[str, str], Sequence[str]] = {}

    def told(outcome: run.Outcome, workload: str, peer: base.Peer) -> None:
        asked[workload, peer.name] = run._parts(outcome.request, workload, peer)
        samples = {"stall": [2.0], "tenth_stall": [1.0], "read": [1.0], "restore_cold_existing": [3.0]}
        outcome.turns[workload, peer.name] = [Turn(nbytes=1, arrays=1, samples=samples, facts={}, snapshot=True)]

    monkeypatch.setattr(run, "_take_turn", told)
    monkeypatch.setattr(run, "_measure_one_rank", lambda *_: None)
    monkeypatch.setattr(ours, "PEERS", tuple(replace(each, missing=lambda: None) for each in ours.PEERS))
    report = make_report(run.run(run.Request(tmp_path, 1 << 20, peers=(), rounds=1, repeats=1)))
    assert asked["transformer", "tieredckpt-torch"] == ("cold", "warm")
    assert asked["transformer", "tieredckpt-jax"] == ("tenth",)
    assert {peer for workload, peer in asked if workload == "lora"} == {"tieredckpt", "tieredckpt-reference"}
    assert (report.ratios["same_object_stall_ratio"], report.ratios["restore_torch_over_direct_read"]) == (0.5, 3.0)


def test_what_a_training_does_not_change_are_the_same_objects_in_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    state = {key: np.zeros(4, np.float32) for key in ("kept", "changed")}
    with places(tmp_path) as where:
        session = ours.Stored(base.Setting(where.folder, where.shared, 32), arrays="jax")
        try:
            session.take(state)
            before = dict(session._tree)
            state["changed"] += 1
            session.take(state)
            assert session._tree["kept"] is before["kept"]
            assert session._tree["changed"][0] == 1
        finally:
            session.close()


def spec(**changes: Any) -> Spec:
    """A turn with a MiB."""
    fields: dict[str, Any] = {
        "peer": "tieredckpt",
        "workload": "transformer",
        "nbytes": 1 << 20,
        "folder": "",
        "shared": "",
        "result": "",
        "repeats": 1,
        "threads": 1,
        "parts": (),
    }
    return Spec(**fields | changes)


class Following:
    """A peer that keeps the arrays themselves, so that what it writes follows the training."""

    def __init__(self, setting: base.Setting) -> None:
        self._path = setting.folder / "state.npz"
        self._state: workloads.State = {}

    def take(self, state: workloads.State) -> None:
        self._state = state

    def save(self, step: int) -> None:
        """Nothing is copied yet."""

    def wait(self) -> None:
        np.savez(self._path, **self._state)

    def restart(self) -> None:
        """Nothing is kept."""

    def restore(self, into: workloads.State | None) -> workloads.State:
        with np.load(self._path) as found:
            return dict(found)

    def forget(self, step: int) -> None:
        """There is one file."""

    def close(self) -> None:
        """Nothing runs."""


def test_a_peer_whose_bytes_follow_the_training_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    following = base.Peer("following", "np.savez", "none", "copy", ("new",), lambda: None, Following)
    monkeypatch.setattr(turn, "peer_named", lambda _: following)
    assert not run_turn("following", tmp_path, parts=()).snapshot


def test_a_peer_takes_its_turn_as_this_library_does(tmp_path: Path) -> None:
    told = run_turn("tensorstore-zarr3", tmp_path, parts=("cold", "warm"))
    assert told.snapshot
    assert told.facts["files"] == 2 * told.arrays
    assert {"first_stall", "stall", "durable", "restore_cold_new", "restore_warm_new"} <= told.samples.keys()


def test_a_turn_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="no workload"):
        run_isolated(Turn, "tieredckpt.bench.turn", tmp_path, partial(spec, workload="nonsense"), timeout=60)


def test_a_turn_that_is_killed_for_want_of_memory_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Failed, match="want of memory; a smaller `--size`"):
        run_isolated(Turn, "killed", tmp_path, spec, timeout=60)


def test_a_turn_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="took more than"):
        run_isolated(Turn, "tieredckpt.bench.turn", tmp_path, spec, timeout=0.01)


def test_the_ranks_of_a_turn_save_and_restore_their_shares_together(tmp_path: Path) -> None:
    with places(tmp_path) as where, seats(2) as taken:
        specs = [
            spec(
                peer="tensorstore-zarr3",
                **where.told() | {"result": f"{where.result}-{rank}"},
                parts=("tenth", "cold", "warm"),
                rank=rank,
                seat=seat,
            )
            for rank, seat in enumerate(taken)
        ]
        run_together("tieredckpt.bench.turn", [(each, each.seat) for each in specs], timeout=10 * SOON)
        turns = [msgspec.json.decode(Path(each.result).read_bytes(), type=Turn) for each in specs]
    told = of_all_ranks(turns)
    assert told.snapshot
    assert told.facts["files"] == 2 * told.arrays  # each rank sees what both have written
    assert [turn.facts["files"] for turn in turns] == [told.facts["files"]] * 2
    assert all(len(samples) == 1 for samples in told.samples.values())


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    with places(tmp_path) as where, seats(2) as (one, other):
        fine = spec(folder=str(where.folder), shared=str(where.shared), peer="tensorstore-zarr3", seat=one)
        wrong = spec(workload="nonsense", rank=1, seat=other)
        with pytest.raises(Failed, match="no workload"):
            run_together("tieredckpt.bench.turn", [(fine, one), (wrong, other)], timeout=10 * SOON)


def test_none_leaves_a_meeting_before_all_have_come() -> None:
    come, seen = [0, 0, 0], []

    def attend(rank: int, seat: Sequence[int]) -> None:
        meet = Meeting(seat)
        for number in range(1, 101):
            come[rank] = number
            meet()
            seen.append(min(come) >= number)
            meet()

    with seats(3) as taken, ThreadPoolExecutor(3) as pool:
        list(pool.map(attend, range(3), taken))
    assert seen == [True] * 300


def test_a_sample_of_all_ranks_is_that_of_the_slowest() -> None:
    def told(stalls: list[float], written: int, peak: int, *, snapshot: bool) -> Turn:
        facts = {"written": written, "peak_save": peak}
        return Turn(nbytes=10, arrays=2, samples={"stall": stalls}, facts=facts, snapshot=snapshot)

    found = of_all_ranks([told([1.0, 5.0], 20, 3, snapshot=True), told([2.0, 4.0], 20, 4, snapshot=False)])
    assert (found.nbytes, found.arrays, found.snapshot) == (20, 4, False)
    assert found.samples == {"stall": [2.0, 5.0]}
    assert found.facts == {"written": 20, "peak_save": 7}


@pytest.mark.slow
@pytest.mark.benchmark
def test_a_job_of_two_ranks_is_measured_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    arguments = ["bench", "--size", "1 MiB", "--ranks", "2", "--workloads", "transformer", "--folder", str(tmp_path)]
    arguments += ["--peers", "dcp-thread,torch.save,orbax", "--rounds", "1", "--repeats", "1", "--json"]
    done = command_line.run(*arguments)
    assert done.exit_code == 0, done.output
    (tmp_path / "report.json").write_text(done.stdout)
    report = load_report(tmp_path / "report.json")
    assert (report.ranks, report.failed) == (2, {})
    rows = {row.peer: row for row in report.rows["transformer"]}
    assert rows.keys() | report.missing.keys() >= {"tieredckpt", "dcp-thread", "torch.save", "orbax"}
    for row in rows.values():
        assert row.snapshot
        assert row.arrays == 300
        assert row.written_ratio is not None
        assert row.written_ratio > 0.99  # what both ranks have written
        assert None not in (row.stall_s, row.durable_s, row.tenth_durable_s, row.restore_cold_new_s)
    figures = {"stall_over_memcpy", "durable_over_direct_write", "incremental_time_ratio", "frozen_stall_ratio"}
    assert report.ratios.keys() >= figures | {"restore_ram_over_memcpy", "restore_disk_over_direct_read"}
    cli._show(report, None, output())
    assert "of 2 ranks" in capsys.readouterr().out
    assert unlike(msgspec.structs.replace(report, ranks=1), report) == ["1 and 2 ranks saved together"]


def test_a_turn_ends_with_its_caller(tmp_path: Path) -> None:
    with places(tmp_path) as where:
        asked = spec(**where.told(), repeats=10_000)
        process = subprocess.Popen([sys.executable, "-P", "-m", "tieredckpt.bench.turn"], stdin=subprocess.PIPE)
        with process:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(asked) + b"\n")
            process.stdin.close()  # as the kernel does when the process at the other end dies
            assert process.wait(60) == 1
        assert not where.result.exists()


@pytest.mark.parametrize("workload", [each.name for each in workloads.WORKLOADS])
def test_a_training_step_changes_what_its_workload_says(workload: str) -> None:
    found = workloads.workload_named(workload)
    state = found.build(1 << 20)
    before = workloads.fingerprints(state)
    found.train(state, 1)
    changed = {key for key, digest in workloads.fingerprints(state).items() if digest != before[key]}
    assert changed == {key for key in state if found.trained(key)}
    assert all(np.isfinite(array.astype(np.float32)).all() for array in state.values())


@pytest.mark.parametrize("nbytes", [1 << 20, 64 << 20])
@pytest.mark.parametrize("workload", ["transformer", "bfloat16", "lora", "embedding"])
def test_a_workload_has_about_the_bytes_that_are_asked_for(workload: str, nbytes: int) -> None:
    shapes = workloads.workload_named(workload).make(nbytes)
    found = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes.values())
    assert 0.5 * nbytes < found < 1.6 * nbytes


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    assert command_line.run("bench", "--size", "1000 B").exit_code == 2
    assert command_line.run("bench", "--peers", "nonsense", "--leaves", "99").exit_code == 2
    for wrong in (["--peers", "nonsense"], ["--workloads", "nonsense"], ["--compare", str(tmp_path / "none.json")]):
        refused = command_line.run("bench", "--folder", tmp_path, *wrong)
        assert refused.exit_code == 1
        assert "none.json" in refused.output or "nonsense" in refused.output
    for content in (b"{}", b'{"begun": "\xff"}'):
        (tmp_path / "old.json").write_bytes(content)
        with pytest.raises(Invalid, match="no report"):
            load_report(tmp_path / "old.json")
    with pytest.raises(NotFound):
        load_report(tmp_path / "none.json")


def test_a_file_that_goes_while_the_bench_looks_at_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"kept")
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((where, [], [*names, "gone"]) for where, _, names in walk(top)))
    assert Listing.of(tmp_path).since(Listing({})) == (1, 4)
    assert largest_first(tmp_path) == [tmp_path / "kept"]
    opened = os.open

    def vanishing(path: Path, flags: int) -> int:
        path.unlink()
        return opened(path, flags)

    monkeypatch.setattr(os, "open", vanishing)
    forget(tmp_path)


def test_a_bench_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ["--size", "1 MiB", "--peers", "none", "--steps", "0", "--leaves", "0", "--folder", str(tmp_path)]
    command = [sys.executable, "-P", "-m", "tieredckpt", "bench", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        made = [tmp_path, shared_memory_root()]
        deadline = time.monotonic() + SOON
        while not all(list(folder.glob(f"tieredckpt-bench-{process.pid}-*")) for folder in made):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
    assert process.returncode not in (0, None)
    assert [path for folder in made for path in folder.glob(f"tieredckpt-bench-{process.pid}-*")] == []


def test_a_sweep_has_a_point_for_every_size_and_draws_them(tmp_path: Path) -> None:
    drawn = tmp_path / "sweep.svg"
    ends = ("--leaves", "20", "--size", "2 MiB", "--steps", "2", "--repeats", "1")
    result = command_line.run("bench", "sweep", "--folder", tmp_path, "--json", "--picture", drawn, *ends)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    sizes = {axis: [point["size"] for point in points] for axis, points in found.items()}
    assert sizes == {"leaves": [10, 20], "nbytes": [1 << 20, 2 << 20], "steps": [1, 2]}
    assert all(second > 0 for points in found.values() for point in points for second in point["seconds"].values())
    text = drawn.read_text()
    assert all(name in text for points in found.values() for name in points[0]["seconds"])
    assert list(tmp_path.iterdir()) == [drawn]


def test_a_sweep_whose_picture_cannot_be_drawn_measures_nothing(tmp_path: Path) -> None:
    result = command_line.run("bench", "sweep", "--folder", tmp_path, "--picture", tmp_path / "x.txt")
    assert result.exit_code != 0
    assert "an .svg or a .png" in result.output
