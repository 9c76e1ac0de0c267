"""torch's tensors through the seam of devices: their bytes, with CUDA where there is a device and without it elsewhere.

Without a device, CPU tensors pose as those of one whose streams run everything at once. That holds the bytes, dtypes
and layouts; order and page-locking are for the fake device, and for ``pytest -m cuda``.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.devices import EVERY_KIND, need_cuda
from support.scenes import CHUNK

torch = pytest.importorskip("torch")

from tieredckpt import CheckpointStore, DeviceUnavailable, Invalid
from tieredckpt.config import StoreConfig
from tieredckpt.devices import cuda, drivers
from tieredckpt.devices.base import address
from tieredckpt.engine.saving.lazy import _fingerprint, _is_unchanged
from tieredckpt.tree import torch_leaves

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]


class Immediate:
    """A stream and an event that are always done."""

    device_index = 0

    def __init__(self, **_: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(params=EVERY_KIND)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where tensors are made."""
    if request.param == "cuda":
        need_cuda()
        yield "cuda"
        return
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Immediate)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for name in ("current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(cuda._CudaDriver, "register", lambda *_: None)
    monkeypatch.setattr(cuda._CudaDriver, "unregister", lambda *_: None)
    monkeypatch.setattr(cuda._CudaDriver, "pinned", lambda _, nbytes: np.empty(nbytes, np.uint8))
    streams = {cuda._device(0): cuda._CudaStream("cuda:0", Immediate())}
    monkeypatch.setattr(cuda._CudaDriver, "current_streams", lambda _: streams)
    monkeypatch.setattr(drivers, "drivers", lambda: [cuda.DRIVER])

    def view(leaf: Any) -> Any:
        tensor = leaf.source.detach()
        return cuda._device(0), tensor if leaf.part is None else tensor[leaf.part]

    monkeypatch.setattr(torch_leaves, "device_view", view)
    yield "cpu"


def tensor_of(dtype: Any, shape: tuple[int, ...], device: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return (torch.randn(shape) * 3).to(dtype).to(device)


def raw(tensor: Any) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    found: bytes = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def tree_on(device: str, seed: int) -> dict[str, Any]:
    found = {f"large {dtype}": tensor_of(dtype, (50, 3, CHUNK // 200), device, seed) for dtype in DTYPES}
    found |= {f"small {dtype}": tensor_of(dtype, (3, 5), device, seed) for dtype in DTYPES}
    found |= {f"turned {dtype}": tensor_of(dtype, (70, 130), device, seed).T for dtype in DTYPES}
    found |= {
        "scalar": torch.tensor(float(seed), device=device),
        "empty": torch.empty(0, 3, device=device),
        "strided": tensor_of(torch.float32, (90, 400), device, seed)[::2, 1::3],
        "one of many": tensor_of(torch.float32, (9,), device, seed)[::4][2:],
        "expanded": tensor_of(torch.float32, (1, 7000), device, seed).expand(5, 7000),
        "conjugate": tensor_of(torch.complex64, (5000,), device, seed).conj(),
        "parameter": torch.nn.Parameter(tensor_of(torch.float32, (9000,), device, seed)),
    }
    return found


def test_tensors_of_every_layout_are_saved_from_a_device_without_free_memory(
    tiers: StoreConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to gather small ones, nor to make one contiguous."""

    def full(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def flat(source: Any) -> Any:
        return full() if not source.is_contiguous() or source.is_conj() or source.is_neg() else plain(source)

    plain = cuda._flat
    monkeypatch.setattr(cuda, "_flat", flat)
    monkeypatch.setattr(cuda._CudaStream, "gather_out", full_gather(full))
    saved = tree_on(device, 1) | {
        "column": tensor_of(torch.float32, (3000, 70), device)[:, 3],
        "imaginary": tensor_of(torch.complex64, (5000,), device).conj().imag,
        "deep": tensor_of(torch.float16, (7, 40, 300), device).permute(2, 0, 1)[1::7],
    }
    with CheckpointStore.open(tiers).sync() as store:
        store.save(1, saved)
        restored = store.restore(as_="torch")
        assert restored is not None
        for key, each in saved.items():
            assert raw(restored.tree[key]) == raw(each), key


def full_gather(full: Any) -> Any:
    def gather_out(self: Any, *_: Any) -> None:
        with self._working():
            full()

    return gather_out


def test_new_memory_is_taken_on_the_stream_that_is_given(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.ones(3, 4, device=device)
    order = noted(monkeypatch)
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: (order.append("empty"), plain(*shape, **how))[1])
    made = cuda._device(0).empty(like, cuda._CudaStream("cuda:0", Immediate()))
    assert made.shape == (3, 4)
    assert order == ["begin device 0", "ours", "empty", "theirs", "end device 0"]


def test_page_locked_memory_is_of_the_host_wherever_new_tensors_of_the_program_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a program whose new tensors lie on its GPU (`set_default_tensor_type`) would have none."""
    plain, wanted = torch.empty, list[Any]()

    def empty(*shape: int, pin_memory: bool, device: Any = None, **how: Any) -> Any:
        wanted.append((pin_memory, device))
        return plain(*shape, **how)

    monkeypatch.setattr(torch, "empty", empty)
    assert cuda.DRIVER.pinned(4096).nbytes == 4096
    assert wanted == [(True, "cpu")]


def test_page_locked_memory_does_not_start_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or torch records an event when it is freed, which ends the process if the device has failed meanwhile."""
    plain, made = torch.empty, list[Any]()

    def empty(*shape: int, pin_memory: bool, **how: Any) -> Any:
        made.append(plain(*shape, **how))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    memory = cuda.DRIVER.pinned(4096)
    (whole,) = made
    assert whole.data_ptr() < address(memory)
    assert address(memory) % mmap.PAGESIZE == whole.data_ptr() % mmap.PAGESIZE
    assert address(memory) + memory.nbytes <= whole.data_ptr() + whole.nbytes


@pytest.mark.parametrize("capture", ["copy", "lazy"])
@pytest.mark.parametrize("way", ["like", "into"])
def test_tensors_of_every_dtype_and_layout_come_back(tiers: StoreConfig, device: str, capture: Any, way: str) -> None:
    with CheckpointStore.open(tiers).sync() as store:
        for step in (1, 2):
            saved = tree_on(device, step)
            store.save(step, saved, capture=capture).reached("ram")
        example = tree_on(device, 9)
        if way == "into":  # memory in which each item lies once, and as it is read
            example["expanded"] = torch.zeros(5, 7000, device=device)
            example["conjugate"] = torch.zeros(5000, dtype=torch.complex64, device=device)
        restored = store.restore(**{way: example})
        assert restored is not None
        for key, each in saved.items():
            found = restored.tree[key]
            assert (found.dtype, found.shape, found.device) == (each.dtype, each.shape, each.device), key
            assert raw(found) == raw(each), key
            if way == "into":
                assert raw(example[key]) == raw(each), key
        assert isinstance(restored.tree["parameter"], torch.nn.Parameter)


@pytest.mark.parametrize(
    ("about", "bus_id"),
    [
        ({"pci_domain_id": 1, "pci_bus_id": 0x3B, "pci_device_id": 2}, "0001:3b:02.0"),
        ({"name": "of an old PyTorch"}, None),
    ],
)
def test_a_device_has_the_id_that_the_bus_has_for_it(
    about: dict[str, Any], bus_id: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**about))
    assert cuda._device(0).bus_id == bus_id


class Runtime:
    """CUDA's, of three devices of which the last two are in use: what it is asked, by which thread, on which device.

    Its functions have the names that CUDA gives them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.mode = 0
        self._current = threading.local()
        self._code = code
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", [False, True, True].__getitem__, raising=False)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self._on)
        monkeypatch.setattr(cuda, "_exchange", lambda: self._exchange)

    @contextmanager
    def _on(self, device: Any) -> Iterator[None]:
        self._current.device = device
        yield
        self._current.device = None

    def _exchange(self, mode: Any) -> None:
        mode._obj.value, self.mode = self.mode, mode._obj.value

    def _called(self, what: str, *arguments: Any) -> int:
        self.asked.append((what, threading.get_ident(), getattr(self._current, "device", None), self.mode))
        return self._code

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802
        return self._called("register", *arguments)

    def cudaHostUnregister(self, *arguments: int) -> int:  # noqa: N802
        return self._called("unregister", *arguments)

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


def test_the_devices_in_use_are_those_that_the_process_has_begun_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    Runtime(monkeypatch)
    assert cuda.DRIVER.in_use() == [cuda._device(1), cuda._device(2)]


def test_memory_is_registered_on_a_device_in_use_by_a_thread_that_launches_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal stays the last error of its thread, and the first device would be made to hold memory."""
    runtime = Runtime(monkeypatch)
    cuda.DRIVER.register(np.zeros(4096, np.uint8))
    cuda.DRIVER.unregister(np.zeros(4096, np.uint8))
    assert [(what, device) for what, _, device, _ in runtime.asked] == [("register", 1), ("unregister", 1)]
    assert all(thread != threading.get_ident() for _, thread, _, _ in runtime.asked)
    refused = Runtime(monkeypatch, code=2)
    with pytest.raises(OSError, match="cudaHostRegister answered 2: error 2"):
        cuda.DRIVER.register(np.zeros(4096, np.uint8))
    assert len(refused.asked) == 1


def test_what_a_device_is_asked_ends_no_capture_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode of the thread is relaxed for each call, and is what it was again, whatever the call raises."""
    runtime = Runtime(monkeypatch)
    cuda.DRIVER.register(np.zeros(4096, np.uint8))
    modes = [mode for *_, mode in runtime.asked]

    class Failing(Immediate):
        def synchronize(self) -> None:
            modes.append(runtime.mode)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceUnavailable, match="illegal memory access"):
        cuda._CudaEvent("cuda:0", Failing()).wait()
    assert modes == [cuda._RELAXED] * 2
    cuda._CudaStream("cuda:0", Failing()).finish()
    assert modes == [cuda._RELAXED] * 3
    assert runtime.mode == 0


def test_the_capture_mode_of_a_thread_is_set_without_giving_the_gil_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set twice for each call of CUDA, and beside a training that runs Python each would wait for the GIL."""
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(
            ctypes, kind, lambda name, kind=kind: SimpleNamespace(cuThreadExchangeStreamCaptureMode=kind)
        )
    assert cuda._exchange.__wrapped__() == "PyDLL"


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which device and which stream become the current ones, from now on; the stream of the thread is `theirs`."""
    order: list[str] = []

    @contextmanager
    def on(device: int) -> Iterator[None]:
        order.append(f"begin device {device}")
        try:
            yield
        finally:
            order.append(f"end device {device}")

    for name, function in (
        ("device", on),
        ("current_stream", ["theirs"].__getitem__),  # of device 0
        ("set_stream", lambda stream: order.append("theirs" if stream == "theirs" else "ours")),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    return order


def test_a_thread_works_on_the_device_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the end of the block would set its own one, the first, which begins to hold memory of the process then."""
    order = noted(monkeypatch)
    with pytest.raises(ZeroDivisionError), cuda._CudaStream("cuda:0", Immediate()).working():
        order.append(str(1 // 0))
    assert order == ["begin device 0", "ours", "theirs", "end device 0"]


def test_a_tensor_of_which_items_share_memory_is_not_restored_into(tiers: StoreConfig, device: str) -> None:
    with CheckpointStore.open(tiers).sync() as store:
        store.save(1, {"w": torch.arange(15.0, device=device).reshape(5, 3)})
        expanded = torch.zeros(1, 3, device=device).expand(5, 3)
        with pytest.raises(Invalid, match=r"'w'.*share memory"):
            store.restore(into={"w": expanded})
        assert not expanded.any()


def test_memory_that_is_given_back_before_the_copy_has_ended_is_found(device: str) -> None:
    """It counts no version: FSDP and those who swap states out do that."""
    tensor = tensor_of(torch.float32, (50, 70), device)
    leaf = torch_leaves.as_array_leaf("w", tensor)
    before = _fingerprint(leaf)
    assert _is_unchanged(leaf, before)
    tensor.untyped_storage().resize_(0)
    assert not _is_unchanged(leaf, before)


def test_the_addresses_of_a_tensor_are_those_of_its_items(device: str) -> None:
    whole = torch.zeros(10, 20, device=device)
    where = cuda._device(0)
    start = whole.data_ptr()
    assert where.span(whole) == (start, start + 800)
    assert where.span(whole[2:4, 1:3]) == (start + 4 * 41, start + 4 * 63)
    assert where.span(whole.T) == (start, start + 800)
    low, high = where.span(torch.zeros(0, 3, device=device))
    assert low == high
