"""Devices for tests: the fake one, and by the marker ``cuda`` a real one, in one form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from support.scenes import CHUNK
from tieredckpt.testing.devices import FakeDriver

__all__ = ["EVERY_KIND", "Rig", "rig", "values"]

EVERY_KIND = ["fake", pytest.param("cuda", marks=pytest.mark.cuda)]
"""For `pytest.mark.parametrize`: the fake device, and a real one with ``pytest -m cuda``."""


class Rig(Protocol):
    """What a test does with devices, as a program of their framework does it."""

    count: int
    driver: Any

    def array(self, values: Any, device: int = 0) -> Any:
        """A new array on a device."""

    def change(self, array: Any, values: Any) -> None:
        """Enqueue a change of all of an array, on the program's stream."""

    def read(self, array: Any) -> npt.NDArray[Any]:
        """The values, after what was enqueued."""

    def busy(self, seconds: float, device: int = 0) -> None:
        """Enqueue so much work on the program's stream."""


class FakeRig:
    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.count = len(driver.devices)

    def array(self, values: Any, device: int = 0) -> Any:
        return self.driver.devices[device].array(values)

    def change(self, array: Any, values: Any) -> None:
        array.change(values)

    def read(self, array: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = array.read()
        return found

    def busy(self, seconds: float, device: int = 0) -> None:
        for _ in range(20):  # other streams go on between them
            self.driver.devices[device].current.enqueue(lambda: time.sleep(seconds / 20))


class CudaRig:
    def __init__(self) -> None:
        import torch

        from tieredckpt.devices.cuda import DRIVER

        self.torch, self.driver = torch, DRIVER
        torch.cuda.init()
        self.count = torch.cuda.device_count()

    def array(self, values: Any, device: int = 0) -> Any:
        return self.torch.from_numpy(np.array(values)).to(f"cuda:{device}")

    def change(self, array: Any, values: Any) -> None:
        array.copy_(self.torch.from_numpy(np.array(values)).to(array.dtype))

    def read(self, array: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = array.cpu().numpy()
        return found

    def busy(self, seconds: float, device: int = 0) -> None:
        with self.torch.cuda.device(device):
            self.torch.cuda._sleep(int(seconds * 1.5e9))  # cycles


def values(seed: int) -> dict[str, Any]:
    """Random arrays of many kinds, in one or several chunks."""
    rng = np.random.default_rng(seed)
    return {
        "large": rng.standard_normal((100, 300)).astype(np.float32),
        "turned": rng.standard_normal((70, 128)).astype(np.float64).T,
        "half": rng.standard_normal((3 * CHUNK,)).astype(ml_dtypes.bfloat16),
        "flags": rng.integers(0, 2, 2 * CHUNK + 77).astype(bool),
        "small": rng.standard_normal(8),
        "scalar": np.array(seed, np.int64),
        "empty": np.empty((0, 4), np.float32),
    }


@contextmanager
def rig(kind: str, devices: int = 1, **how: Any) -> Iterator[Any]:
    """Devices of a kind; the test is skipped where there are none. ``how`` is for the fake one alone."""
    with ExitStack() as until_end:
        if kind == "fake":
            yield FakeRig(until_end.enter_context(FakeDriver(devices, **how)))
            return
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available() or torch.cuda.device_count() < devices:
            pytest.skip(f"needs {devices} CUDA devices")
        yield CudaRig()
