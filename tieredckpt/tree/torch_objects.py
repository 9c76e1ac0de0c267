"""torch's small objects as leaves. Imports torch; `tieredckpt.tree.objects` imports this only for one of them."""

from __future__ import annotations

import torch

from tieredckpt.tree.codec import Codec

__all__ = ["CODECS"]

_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"torch {torch.__version__} has no dtype {name[:40]!r}")
    return _DTYPES[name]


def _generator(parts: tuple[str, bytes]) -> object:
    """A generator of that device and state; the parts themselves where this machine has no such device."""
    device, state = parts
    try:
        generator = torch.Generator(torch.device(device))
    except RuntimeError:
        return parts
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _size(parts: tuple[int, ...]) -> torch.Size:
    if any(type(length) is not int for length in parts):
        raise ValueError("a length is no integer")
    return torch.Size(parts)


CODECS: dict[type, Codec] = {
    torch.dtype: Codec("torch-dtype", str, _dtype),
    torch.device: Codec("torch-device", str, torch.device),
    torch.Size: Codec("torch-size", tuple, _size),
    torch.Generator: Codec(
        "torch-generator",
        lambda generator: (str(generator.device), generator.get_state().cpu().numpy().tobytes()),
        _generator,
    ),
}
"""By type."""
