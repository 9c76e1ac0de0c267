"""`tieredckpt bench gpu`: its measurement on a fake device, whose times are known, and its answer without a device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import run

from tieredckpt.bench import gpu as bench_gpu
from tieredckpt.bench import gpu_bounds
from tieredckpt.bench.gpu import AIMS, GpuReport, GpuRow, measure
from tieredckpt.bench.gpu_bounds import Bounds, write_rate
from tieredckpt.bench.peers import gpu as peers
from tieredckpt.cli import bench_gpu as cli
from tieredckpt.testing.devices import FakeDriver

SPEED = 40e6
NBYTES = 2 << 20


class FakeTraining:
    device = "fake"
    nbytes = NBYTES

    def __init__(self, driver: FakeDriver, speed: float = SPEED) -> None:
        self.passes, self._speed = 1, speed
        (self._device,) = driver.devices
        self._arrays = {f"w{i}": self._device.array(np.zeros(NBYTES // 4, np.uint8)) for i in range(4)}

    def state(self) -> dict[str, Any]:
        return dict(self._arrays)

    def forward(self) -> None:
        for _ in range(10 * self.passes):
            self._device.current.enqueue(lambda: time.sleep(0.001))

    def change(self) -> None:
        for array in self._arrays.values():
            array.change(np.full(array.shape, array.version + 1, np.uint8))

    def synchronize(self) -> None:
        self._device.current.record().wait()

    def copies(self) -> tuple[float, float]:
        return NBYTES / self._speed, NBYTES / self._speed


class Blocking:
    name = "blocking"

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        path.write_bytes(b"".join(array.read().tobytes() for array in state.values()))

    def captured(self) -> None:
        pass

    def durable(self) -> None:
        pass

    def close(self) -> None:
        pass


class Waiting(Blocking):
    name = "waiting"

    def captured(self) -> None:
        time.sleep(0.1)


class Failing(Blocking):
    name = "failing"

    def durable(self) -> None:
        raise RuntimeError("no luck")


class Unopened(Blocking):
    name = "unopened"

    def __init__(self) -> None:
        raise ImportError("built for another CUDA")


@pytest.mark.usefixtures("shared_memory")
def test_every_way_is_measured_and_a_peer_that_fails_is_named(tmp_path: Path) -> None:
    told: list[str] = []
    with FakeDriver(speed=SPEED) as driver:
        bounds = Bounds(1, 1, 1e9, SPEED, 3)
        found = measure(FakeTraining(driver), tmp_path, [Blocking, Failing, Unopened], bounds, told.append)
    assert [row.name for row in found.rows] == ["tieredckpt, copy", "tieredckpt, lazy", "blocking"]
    assert found.failed == {"failing": "RuntimeError: no luck", "unopened": "ImportError: built for another CUDA"}
    assert list(tmp_path.iterdir()) == [], "what each has written goes before the next begins"
    names = ("tieredckpt, copy", "tieredckpt, lazy", "blocking", "failing", "unopened")
    assert [line.rpartition(", about ")[0] for line in told[1::2]] == list(names)
    assert [line.startswith(name) for name, line in zip(names, told[2::2], strict=True)] == [True] * 5
    copy, lazy, _ = found.rows
    assert copy.stall_s >= found.copy_out_s, "nothing is faster than the link"
    assert copy.restore_s is not None
    assert copy.restore_s >= found.copy_in_s
    assert found.forward_s >= 1.5 * found.copy_out_s
    assert lazy.step_s >= lazy.waited_s
    assert set(found.ratios) == {aim.key for aim in AIMS}


@pytest.mark.usefixtures("shared_memory")
def test_a_way_of_this_library_that_fails_costs_the_others_nothing_and_each_is_told_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time on a device is dear, and a run may be cut off before its report."""
    ours, told = bench_gpu._ours, list[str]()

    def without_lazy(training: Any, folder: Path, way: str, rounds: Any) -> GpuRow:
        if way == "lazy":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return ours(training, folder, way, rounds)

    monkeypatch.setattr(bench_gpu, "_ours", without_lazy)
    with FakeDriver(speed=SPEED) as driver:
        bounds = Bounds(1, 1, 1e9, SPEED, 1)
        found = measure(FakeTraining(driver), tmp_path, [Blocking], bounds, told.append)
    assert [row.name for row in found.rows] == ["tieredckpt, copy", "blocking"]
    assert found.failed == {"tieredckpt, lazy": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    assert set(found.ratios) == {"gpu_stall_over_copy", "gpu_restore_over_copy"}
    for name, word in (("tieredckpt, copy", ": stall "), ("tieredckpt, lazy", " failed: "), ("blocking", ": stall ")):
        assert any(line.startswith(name + word) for line in told), name
    cli._show(found, {})
    assert capsys.readouterr().out.count("FAILED") == 2


class Counting(Blocking):
    """A peer whose saves take a while."""

    name = "counting"
    saves = 0

    def save(self, path: Path, state: Mapping[str, Any]) -> None:
        type(self).saves += 1
        if self.saves > 1:
            assert len(list(path.parent.iterdir())) <= 1, "older steps are deleted"
        path.touch()
        time.sleep(0.05)


@pytest.mark.parametrize(("seconds", "saves"), [(0.001, 2 * 2), (3600, 2 * (1 + 2))])
def test_a_way_ends_when_its_time_is_over_but_is_measured_once(
    seconds: float, saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bounds, "_WARM_UP", 0.0)
    monkeypatch.setattr(bench_gpu, "_ours", lambda *_: GpuRow("ours", 1, 1, 1, 1, 1, 1))
    monkeypatch.setattr(Counting, "saves", 0)
    with FakeDriver() as driver:
        measure(FakeTraining(driver), tmp_path, [Counting], Bounds(seconds, 2, 1e3, SPEED, 1), lambda _: None)
    assert Counting.saves == saves


@pytest.mark.usefixtures("shared_memory")
def test_a_step_lasts_long_enough_to_hide_the_copy_and_what_is_waited_is_beyond_it(tmp_path: Path) -> None:
    """A step of the training lasts at least 1.5 times the copy; `waited_s` counts what a save adds to it."""
    speed = SPEED / 2
    with FakeDriver(speed=speed) as driver:
        training = FakeTraining(driver, speed)
        found = measure(training, tmp_path, [Waiting], Bounds(1, 1, 1e9, speed, 1), lambda _: None)
    assert found.passes == training.passes > 1
    assert found.forward_s >= 1.5 * found.copy_out_s
    _, lazy, waiting = found.rows
    assert lazy.waited_s < found.copy_out_s, "the copy is hidden"
    assert waiting.waited_s >= 0.1


def test_steps_without_a_save_are_measured_in_turns_with_those_beside_one() -> None:
    order: list[str] = []
    with FakeDriver() as driver:
        training = FakeTraining(driver)
        for turn in range(2):
            bench_gpu._in_turns(
                training, turn, lambda: order.append("save"), lambda: None, lambda: order.append("durable")
            )
            order.append(str(next(iter(training.state().values())).version))
    assert order == ["save", "durable", "4", "save", "durable", "8"]


def test_the_state_is_as_large_as_memory_and_time_allow() -> None:
    gib = 1 << 30
    bounds = Bounds(480, 5, 2e9, 50e9, 4)
    assert bounds.largest(80 * gib, 400 * gib, 1000 * gib) == 20_000_000_000
    assert bounds.largest(10 * gib, 400 * gib, 1000 * gib) == 5 * gib
    assert bounds.largest(80 * gib, 10 * gib, 1000 * gib) == 2 * gib
    assert bounds.largest(80 * gib, 400 * gib, 4 * gib) == gib
    slow = Bounds(480, 5, 50e6, 50e9, 6)
    in_time = slow.largest(80 * gib, 400 * gib, 1000 * gib)
    assert 0.99 < in_time / (480 / 8 / 4 * 50e6) < 1
    assert 2 * slow.round(in_time) == pytest.approx(slow.share)
    assert bounds.estimate(gib) == pytest.approx(80 / 3 + 5 * (2 * gib / 2e9 + 10.5 * gib / 50e9))
    assert slow.estimate(gib) == 60


def test_the_speed_of_a_folder_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bounds, "_SAMPLE", 16 << 20)
    assert write_rate(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("stall", "word"), [(1.05, "met"), (1.2, "MISSED")])
def test_each_aim_is_shown_with_whether_it_is_met(stall: float, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [GpuRow(f"tieredckpt, {way}", stall, 3, 1.005, 0.04, 1.0, 1.0) for way in ("copy", "lazy")]
    cli._show(GpuReport("H100", 1 << 30, 7, 1.6, 1.0, 1.0, rows, {}), {"DeepSpeed FastFileWriter": "not installed"})
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "gpu_stall_over_copy" in line)
    assert word in line
    assert shown.count(" met") == (4 if word == "met" else 3)
    assert "missing: DeepSpeed FastFileWriter: not installed" in shown
    assert "A copy from it takes 1 s, and forward and backward pass of a step, 7 of each, 1.6 s" in " ".join(
        shown.split()
    )


@pytest.mark.parametrize(
    "kind",
    [
        peers._TorchSave,
        pytest.param(peers._TorchCheckpointing, marks=pytest.mark.slow),  # starts a process
        pytest.param(peers._DeepSpeed, marks=pytest.mark.slow),  # compiles its I/O for minutes
    ],
)
def test_a_peer_writes_the_state_it_is_given(kind: type[Any], tmp_path: Path) -> None:
    """As far as a peer works without a device."""
    torch = pytest.importorskip("torch")
    if any(kind.name == name for name in peers.cuda_peers()[1]):
        pytest.skip("not installed")
    peer = kind()
    try:
        peer.save(tmp_path / "1", {"w": torch.arange(1 << 20, dtype=torch.float32)})
        peer.captured()
        peer.durable()
    finally:
        peer.close()
    files = [path for path in (tmp_path / "1", *(tmp_path / "1").rglob("*")) if path.is_file()]
    assert sum(path.stat().st_size for path in files) >= 4 << 20


def test_peers_that_are_not_installed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredckpt.bench.peers.base.find_spec", lambda _: None)
    here, missing = peers.cuda_peers()
    assert [kind.name for kind in here] == ["torch.save", "torch.distributed.checkpoint, pinned"]
    assert missing == {
        "torch_checkpointing": "not installed: torch_checkpointing",
        "DeepSpeed FastFileWriter": "not installed: deepspeed",
    }


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = run("bench", "gpu", "--folder", tmp_path)
    assert done.exit_code == 1
    assert "there is no CUDA device to measure" in done.output
    assert list(tmp_path.iterdir()) == []
