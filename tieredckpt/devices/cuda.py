"""torch's CUDA devices. Imports torch; imported only where a program has initialized CUDA, or asks about it.

See the CUDA Runtime API, cudaHostRegister and cudaMemcpyAsync, and "CUDA semantics" of PyTorch's notes.

Most of this code runs on threads of the library, whose current device is the first one, used or not. Work on another
device first makes that device current: a call that makes the first device current would make it allocate memory for
this process.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

import torch

from tieredckpt.concurrency import begun_on_own_thread
from tieredckpt.devices.base import Bytes, Device, DeviceFull, Driver, Event, Stream, address
from tieredckpt.errors import DeviceUnavailable
from tieredckpt.units import format_size

__all__ = ["DRIVER", "device_of", "devices"]

_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for all devices, whichever is the calling thread's."""
_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: calls of the thread do not end a CUDA graph capture of another thread."""


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Relax this thread's capture mode.

    Otherwise a wait for an event, or an allocation, ends the capture of a CUDA graph by another thread. See the CUDA
    Driver API, cuThreadExchangeStreamCaptureMode, which torch does not offer.
    """
    if (exchange := _exchange()) is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange() -> Any:
    """A function that sets the calling thread's mode and returns the former; None without NVIDIA's driver (ROCm)."""
    with suppress(OSError, AttributeError):
        # Keeps the GIL, which each of these short calls would wait for beside a training that runs Python.
        return ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None


@contextmanager
def _mapped(name: str, what: str) -> Iterator[None]:
    try:
        with _beside_captures():
            yield
    except torch.cuda.OutOfMemoryError as error:
        raise DeviceFull(f"device {name}: {what} failed: {error}") from error
    except RuntimeError as error:  # of CUDA and of its allocator
        raise DeviceUnavailable(f"device {name}: {what} failed: {error}") from error


class _CudaEvent:
    def __init__(self, name: str, event: Any) -> None:
        self._name, self.event = name, event

    def wait(self) -> None:
        with _mapped(self._name, "a copy"):
            self.event.synchronize()


class _CudaStream:
    def __init__(self, name: str, stream: Any) -> None:
        self._name, self._stream = name, stream

    @contextmanager
    def working(self) -> Iterator[None]:
        """Make this the current stream of the calling thread, and its device the current device."""
        index = self._stream.device_index
        with torch.cuda.device(index):
            before = torch.cuda.current_stream(index)
            torch.cuda.set_stream(self._stream)  # takes half the time of the context `torch.cuda.stream`
            try:
                yield
            finally:
                torch.cuda.set_stream(before)

    @contextmanager
    def _working(self) -> Iterator[None]:
        with _mapped(self._name, "a copy"), torch.no_grad(), self.working():
            yield

    def after(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with _mapped(self._name, "an event"):
            self._stream.wait_event(event.event)

    def copy_out(self, source: Any, targets: Sequence[Bytes]) -> None:
        with self._working():
            try:
                flat = _flat(source)
            except torch.cuda.OutOfMemoryError:
                flat = _raw_bytes(source)  # on the host
            start = 0
            for target in targets:
                end = start + target.size
                torch.from_numpy(target).copy_(flat[start:end], non_blocking=True)
                start = end

    def gather_out(self, sources: Sequence[Any], target: Bytes) -> None:
        with self._working():
            together = torch.cat([_flat(source) for source in sources])
            torch.from_numpy(target).copy_(together, non_blocking=True)

    def copy_in(self, sources: Sequence[Bytes], target: Any) -> None:
        with self._working():
            direct = target.is_contiguous() and not target.is_conj() and not target.is_neg()
            landing = target if direct else torch.empty_like(target, memory_format=torch.contiguous_format)
            flat = _bytes_of(landing)
            start = 0
            for source in sources:
                end = start + source.size
                flat[start:end].copy_(torch.from_numpy(source), non_blocking=True)
                start = end
            if not direct:
                target.copy_(landing)

    def record(self) -> Event:
        with _mapped(self._name, "an event"):
            # Blocking: a waiting thread sleeps, and leaves the processor to the training.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return _CudaEvent(self._name, event)

    def finish(self) -> None:
        # Raised for a device that has failed, which runs nothing any more.
        with suppress(RuntimeError), _beside_captures():
            self._stream.synchronize()


def _flat(source: Any) -> Any:
    """The row-major bytes, on the device; a copy if ``source`` is not contiguous, in memory of the current stream."""
    return _bytes_of(source.detach().resolve_conj().resolve_neg().contiguous())


def _bytes_of(contiguous: Any) -> Any:
    # A tensor of one item is contiguous whatever its strides are, and `view` and `reshape` keep them.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _CudaDevice:
    index: int

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    @property
    def bus_id(self) -> str | None:
        with _mapped(self.name, "a question"):
            about = torch.cuda.get_device_properties(self.index)
        if not hasattr(about, "pci_bus_id"):  # an older PyTorch
            return None
        return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"

    @property
    def driver(self) -> Driver:
        return DRIVER

    def stream(self) -> Stream:
        with _mapped(self.name, "a stream"):
            return _CudaStream(self.name, torch.cuda.Stream(device=self.index))

    def empty(self, like: Any, stream: Stream | None) -> Any:
        working = stream.working() if isinstance(stream, _CudaStream) else nullcontext()
        with _mapped(self.name, "memory for what is restored"), working:
            return torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)

    def span(self, array: Any) -> tuple[int, int]:
        reach = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
        start = array.data_ptr()
        return start, start + (reach + 1) * array.element_size() if array.numel() else start


class _CudaDriver:
    def register(self, memory: Bytes) -> None:
        _on_a_thread_that_ends("cudaHostRegister", address(memory), memory.nbytes, _PORTABLE)

    def unregister(self, memory: Bytes) -> None:
        _on_a_thread_that_ends("cudaHostUnregister", address(memory))

    def pinned(self, nbytes: int) -> Bytes:
        # Of copies to and from the start of its memory, and no other place, torch keeps the stream, and records an
        # event there when the memory is freed. A device that has failed refuses that, which ends the process. So torch
        # does not know of copies here: the memory is let go when they have ended.
        try:
            with _beside_captures():
                whole = torch.empty(mmap.PAGESIZE + nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        memory: Bytes = whole.numpy()[mmap.PAGESIZE :]
        return memory

    def in_use(self) -> Sequence[Device]:
        return list(map(_device, _begun()))

    def current_streams(self) -> Mapping[Device, Stream]:
        return {
            _device(index): _CudaStream(f"cuda:{index}", torch.cuda.current_stream(index))
            for index in range(torch.cuda.device_count())
        }


DRIVER: Final = _CudaDriver()


def _begun() -> list[int]:
    """The devices that this process has begun to use, by torch or by anything else."""
    return [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]


def _on_a_thread_that_ends(what: str, *arguments: int) -> None:
    """Call a function of the runtime. Raises `OSError`.

    A refusal stays the last error of its thread, and a later kernel launch there would report it; torch cannot clear
    it.
    """

    def call() -> None:
        runtime = torch.cuda.cudart()
        with torch.cuda.device(next(iter(_begun()), -1)), _beside_captures():
            code = getattr(runtime, what)(*arguments)
        if int(code) != 0:
            raise OSError(f"{what} answered {int(code)}: {runtime.cudaGetErrorString(code)}")

    try:
        begun_on_own_thread(what, call).result()
    except RuntimeError as error:  # of a device that has failed
        raise OSError(str(error)) from error


@lru_cache(maxsize=64)
def _device(index: int) -> _CudaDevice:
    return _CudaDevice(index)


def devices() -> dict[Device, str]:
    """The devices that torch sees, and their names for people; initializes CUDA."""
    if not torch.cuda.is_available():
        return {}
    about = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {_device(i): f"{each.name}, {format_size(each.total_memory)}" for i, each in enumerate(about)}


def device_of(tensor: Any) -> Device:
    """The device of a CUDA tensor."""
    return _device(tensor.device.index)


_WASTE = 4
"""Most bytes that are copied to the host for each byte that is wanted, where a tensor can be divided."""


def _raw_bytes(source: Any) -> Any:
    """The bytes of ``source`` as a tensor of bytes on the host, by copies of memory as it lies. Blocking, and slow."""
    plain = source.detach()
    if conjugate := plain.is_conj():
        plain = plain.conj()
    if negative := plain.is_neg():
        plain = torch._neg_view(plain)
    found = _brought(plain)
    if conjugate:
        found = found.conj().resolve_conj()
    if negative:
        found = found.neg()
    return _bytes_of(found.contiguous())


def _brought(plain: Any) -> Any:
    """Copy the tensor to the host: the memory between its first and last item, or parts along its longest stride."""
    if not plain.numel():
        return torch.empty(plain.shape, dtype=plain.dtype)
    reach = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True)) + 1
    if reach <= _WASTE * plain.numel():
        lies = plain.as_strided((reach,), (1,)).cpu()
        return lies.as_strided(plain.shape, plain.stride())
    along = max(range(plain.dim()), key=lambda axis: plain.stride(axis) * (plain.shape[axis] > 1))
    return torch.stack([_brought(part) for part in plain.unbind(along)], along)
