"""torch's CUDA kernels on the host, for the look-alike of the runtime; imported before the first of them is used.

Each kernel of the dispatcher is replaced by that of the CPU, over the same memory, at once: what is enqueued on the
current stream comes first. Copies between devices and the host stay torch's own. See "Extending PyTorch" there, and
`torch.library`.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__: list[str] = []

_WITHOUT_KERNEL = (
    *("as_strided", "empty.memory_format", "empty_strided", "is_set_to", "_local_scalar_dense", "record_stream"),
    *("_reshape_alias", "resize_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset"),
    *("set_.source_Tensor", "unfold", "view", "view_as_complex", "view_as_real"),
)
"""What runs nothing on the device; its code for CUDA stays."""


def _on_host(tensor: Any) -> Any:
    """The same memory as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        memory = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    else:
        memory = torch.UntypedStorage(0)
    found = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def _wait(*devices: Any) -> None:
    for device in devices:
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()


def _run(operator: Any, *arguments: Any, **options: Any) -> Any:
    hosts: dict[int, tuple[Any, Any]] = {}
    devices: list[Any] = []

    def enter(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            devices.append(value.device)
            return hosts.setdefault(id(value), (value, _on_host(value)))[1]
        if isinstance(value, torch.device) and value.type == "cuda":
            devices.append(value)
            return torch.device("cpu")
        return value

    arguments, options = pytree.tree_map(enter, (arguments, options))
    _wait(*devices)
    given = {id(host): tensor for tensor, host in hosts.values()}
    device = devices[0] if devices else torch.device("cuda", torch.cuda.current_device())

    def leave(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensor = given.get(id(value))
        if tensor is None:
            tensor = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        elif tensor.untyped_storage().nbytes() >= value.untyped_storage().nbytes():
            return tensor  # changed where it is
        else:
            tensor.resize_(value.size())  # given as `out`
        _on_host(tensor).copy_(value)
        return tensor

    return pytree.tree_map(leave, operator(*arguments, **options))


def _copy(original: Any, keys: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    """torch's own, but for copies on a device that need a kernel."""
    if target.is_cuda and source.is_cuda:
        _wait(target.device, source.device)
        _on_host(target).copy_(_on_host(source))
        return target
    alike = target.dtype == source.dtype and target.is_conj() == source.is_conj() and target.is_neg() == source.is_neg()
    if not alike:
        return target.copy_(source.resolve_conj().resolve_neg().to(target.dtype), non_blocking)
    return original.call_boxed(keys, target, source, non_blocking)


def _replace() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    original = torch.library.get_kernel("aten::copy_", "CUDA")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, short = name.partition("::")
        if namespace == "aten" and short not in _WITHOUT_KERNEL:
            operator, _, overload = short.partition(".")
            packet = getattr(torch.ops.aten, operator)
            library.impl(short, partial(_run, getattr(packet, overload or "default")), "CUDA", allow_override=True)
    library.impl("copy_", partial(_copy, original), "CUDA", with_keyset=True)
    return library


with warnings.catch_warnings(action="ignore"):  # each of them is replaced on purpose
    _LIBRARY = _replace()
"""To be kept: what it has replaced comes back when it ends."""
