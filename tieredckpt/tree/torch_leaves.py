"""torch tensors as leaves. Imports torch; `tieredckpt.tree.arrays` imports this only for a tensor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch.multiprocessing.reductions import StorageWeakRef

from tieredckpt.devices.base import Device
from tieredckpt.errors import Invalid
from tieredckpt.tree.device_target import DeviceTarget, Filled
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, checked_dtype

__all__ = [
    "as_array_leaf",
    "as_template",
    "device_view",
    "held",
    "host_view",
    "made",
    "restored",
    "restored_pieces",
    "small_bytes",
    "stamp",
    "version",
    "writable_view",
]

_NATIVE: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}

# torch's NumPy bridge does not know these: they cross as integers of their size.
_CARRIED: dict[torch.dtype, tuple[np.dtype[Any], torch.dtype]] = {
    torch.bfloat16: (np.dtype(ml_dtypes.bfloat16), torch.int16),
    torch.float8_e4m3fn: (np.dtype(ml_dtypes.float8_e4m3fn), torch.uint8),
    torch.float8_e4m3fnuz: (np.dtype(ml_dtypes.float8_e4m3fnuz), torch.uint8),
    torch.float8_e5m2: (np.dtype(ml_dtypes.float8_e5m2), torch.uint8),
    torch.float8_e5m2fnuz: (np.dtype(ml_dtypes.float8_e5m2fnuz), torch.uint8),
    torch.float8_e8m0fnu: (np.dtype(ml_dtypes.float8_e8m0fnu), torch.uint8),
}

_TOGETHER = 16 << 20
"""Bytes of small tensors at most that are gathered on their device at a time."""

_DTYPES = _NATIVE | {dtype: numpy_dtype for dtype, (numpy_dtype, _) in _CARRIED.items()}


def as_array_leaf(key: str, value: object) -> ArrayLeaf | Pieces | None:
    """The tensor ``value`` as a leaf; None for one that wraps others, `Invalid` for other than dense arrays."""
    if _is_distributed(value):
        from tieredckpt.tree import torch_shards

        return torch_shards.pieces(key, value, _array_leaf)
    return None if _is_wrapper(value) else _array_leaf(key, value)


def as_template(key: str, value: object) -> ArrayLeaf | Pieces | None:
    """The tensor ``value`` as an example; its data is not looked at."""
    if _is_distributed(value):
        from tieredckpt.tree import torch_shards

        return torch_shards.pieces(key, value, _template)
    return None if _is_wrapper(value) else _template(key, value)


def _array_leaf(key: str, value: object) -> ArrayLeaf:
    leaf = _template(key, value)
    tensor = _tensor(leaf)
    if tensor.is_meta:
        raise Invalid(f"leaf {key!r}: a meta tensor has no data to save; materialize it first")
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise Invalid(f"leaf {key!r}: the storage of the tensor was freed; gather the parameter first")
    return leaf


def _template(key: str, value: object) -> ArrayLeaf:
    assert isinstance(value, torch.Tensor)
    cls = type(value)
    if cls is not torch.Tensor and cls is not torch.nn.Parameter:
        hint = "save its local part (to_local())" if hasattr(value, "to_local") else "make it a plain one"
        raise Invalid(f"leaf {key!r}: a {cls.__name__} is no plain dense tensor; {hint}")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        what = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
        raise Invalid(f"leaf {key!r}: a {what} tensor cannot be stored; store its parts as dense tensors")
    dtype = _DTYPES.get(value.dtype)
    if dtype is None:
        raise Invalid(f"leaf {key!r}: a tensor of {value.dtype} cannot be stored; view it as integers")
    checked_dtype(key, dtype, value.ndim)
    return ArrayLeaf(key, value, "torch", tuple(value.shape), dtype, False, None)


def look(tensor: Any) -> object:
    """See `tieredckpt.tree.arrays.looks`; for a tensor."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    stored = plain and (tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0)
    return (tensor.dtype, tensor.shape) if stored else None  # a nested one has no shape


def stamp(leaf: ArrayLeaf) -> object:
    """See `tieredckpt.tree.changes.stamp`."""
    tensor, now = _tensor(leaf), version(leaf)
    form = tensor.dtype, tensor.device, tensor.shape, tensor.stride()
    # The reference keeps the address of the storage from being taken by another one.
    return None if now is None else (StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), now, *form)


def device_view(leaf: ArrayLeaf) -> tuple[Device, torch.Tensor] | None:
    """See `tieredckpt.tree.arrays.device_view`; for a CUDA tensor."""
    tensor = _tensor(leaf)
    if not tensor.is_cuda:
        return None
    from tieredckpt.devices import cuda

    tensor = tensor.detach()
    return cuda.device_of(tensor), tensor if leaf.part is None else tensor[leaf.part]


def held(leaf: ArrayLeaf) -> ArrayLeaf:
    """See `tieredckpt.tree.changes.held`: a tensor over the same memory, with the same version counter."""
    return replace(leaf, source=_tensor(leaf).detach())


def version(leaf: ArrayLeaf) -> int | None:
    """The tensor's version counter, which views of it share; None for a tensor of inference mode, which has none."""
    tensor = _tensor(leaf)
    if tensor.is_inference():
        return None
    found: int = tensor._version
    return found


def host_view(leaf: ArrayLeaf) -> npt.NDArray[Any]:
    """The tensor's array: a view of CPU memory, else a copy by torch, of no more than the leaf."""
    tensor = _tensor(leaf)
    if leaf.part is not None:
        tensor = tensor.detach()[leaf.part]
    carried = _CARRIED.get(tensor.dtype)
    if carried is None:
        native: npt.NDArray[Any] = tensor.numpy(force=True)
        return native
    integers: npt.NDArray[Any] = tensor.detach().cpu().view(carried[1]).numpy()
    return integers.view(carried[0])


def small_bytes(leaves: Sequence[ArrayLeaf]) -> list[bytes]:
    """The row-major bytes of each of many small tensors: those of one form are gathered where they lie."""
    found = [b""] * len(leaves)
    forms: dict[tuple[Any, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        tensor = _tensor(leaf)
        forms.setdefault((tensor.dtype, tensor.device, tensor.shape), []).append(i)
    for (dtype, _, _), places in forms.items():
        if dtype not in _NATIVE:  # which are not known to be gathered on every device
            for i in places:
                found[i] = host_view(leaves[i]).tobytes()
            continue
        at_once = max(1, _TOGETHER // max(1, _tensor(leaves[places[0]]).nbytes))
        for first in range(0, len(places), at_once):
            batch = places[first : first + at_once]
            for i, value in zip(batch, _gathered([leaves[i] for i in batch]), strict=True):
                found[i] = value
    return found


def _gathered(leaves: Sequence[ArrayLeaf]) -> list[bytes]:
    """As `small_bytes`, of tensors of one form."""
    try:
        with torch.no_grad():
            together = torch.stack(list(map(_tensor, leaves))).cpu().numpy()
    except RuntimeError:  # such as too little free memory on the device
        return [host_view(leaf).tobytes() for leaf in leaves]
    data, size = together.tobytes(), together[0].nbytes
    return [data[start : start + size] for start in range(0, len(data), size)]


def writable_view(key: str, value: object) -> npt.NDArray[Any]:
    """See `tieredckpt.tree.arrays.writable_view`; for a tensor."""
    leaf = _array_leaf(key, value)
    tensor = _tensor(leaf)
    if tensor.device.type != "cpu":
        raise Invalid(f"leaf {key!r}: a tensor on {tensor.device} cannot be restored into; use `like`")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise Invalid(
            f"leaf {key!r}: the tensor is not contiguous, or a lazy view, and cannot be restored into; "
            f"give a contiguous one, or use `like`"
        )
    return host_view(leaf)


def restored(template: ArrayLeaf, array: Filled) -> torch.Tensor:
    """``array`` as a tensor, or Parameter, on the template's device (the CPU for a meta tensor)."""
    like = _tensor(template)
    if isinstance(array, DeviceTarget):
        return _of_kind(like, array.array)
    data = array if array.flags.writeable else array.copy()
    carried = _CARRIED.get(like.dtype)
    if carried is None:
        tensor = torch.from_numpy(data)
    else:
        carrier = _NATIVE[carried[1]]
        tensor = torch.from_numpy(data.view(carrier)).view(like.dtype)
    if like.device.type not in ("cpu", "meta"):
        tensor = tensor.to(like.device)
    return _of_kind(like, tensor)


def _of_kind(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if type(like) is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    return tensor.requires_grad_(like.requires_grad)


def made(key: str, array: npt.NDArray[Any]) -> torch.Tensor:
    """``array`` as a tensor on the CPU; `Invalid`, naming ``key``, for a dtype that torch does not have."""
    native = array.dtype.newbyteorder("=")
    dtype = next((dtype for dtype, known in _DTYPES.items() if known == native), None)
    if dtype is None:
        raise Invalid(f"leaf {key!r}: torch has no dtype for {array.dtype}; restore it with as_='numpy'")
    data = array.astype(native, copy=False)
    return restored(_template(key, torch.empty(data.shape, dtype=dtype, device="meta")), data)


def restored_pieces(pieces: Pieces, arrays: Mapping[str, Filled]) -> torch.Tensor:
    """The distributed tensor that ``pieces`` are an example of, with the values of ``arrays`` by storage key."""
    from tieredckpt.tree import torch_shards

    return torch_shards.restored(pieces, arrays, _template, restored)


def _is_distributed(value: object) -> bool:
    # Whoever has made one has imported the module.
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    cls = getattr(module, "DTensor", None)
    return cls is not None and isinstance(value, cls)


def _is_wrapper(value: object) -> bool:
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        return False
    from tieredckpt.tree import torch_wrappers

    return torch_wrappers.is_wrapper(value)


def _tensor(leaf: ArrayLeaf) -> torch.Tensor:
    assert isinstance(leaf.source, torch.Tensor)
    return leaf.source
