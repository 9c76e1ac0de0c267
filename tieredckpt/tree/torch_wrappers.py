"""Wrapper tensors of torch, such as quantized ones, as containers of their inner tensors.

``__tensor_flatten__`` of the class gives the inner tensors and a description; ``__tensor_unflatten__`` makes the tensor
again, as torch.compile needs it. The class is not stored: it is that of ``like``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tieredckpt.errors import Invalid
from tieredckpt.tree.objects import Plain, to_plain

__all__ = ["is_wrapper", "opened"]


def is_wrapper(value: torch.Tensor) -> bool:
    """Whether ``value``, of a class derived from torch's, is a tensor around others.

    Torch's own distributed and nested tensors do not count.
    """
    cls = type(value)
    if cls.__module__.startswith("torch.distributed"):
        return False
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__") and not value.is_nested


def opened(path: str, value: Any) -> tuple[list[str], list[Any], Plain, Callable[[Sequence[Any]], object]]:
    """Open a wrapper tensor: names and inner tensors, its description, and a function that makes it from others.

    Raises `Invalid`, naming ``path``, for a description that cannot be stored, and so not be compared with that of
    ``like``.
    """
    names, context = value.__tensor_flatten__()
    size, stride = value.size(), value.stride()

    def make(children: Sequence[Any]) -> object:
        inner = dict(zip(names, children, strict=True))
        made = type(value).__tensor_unflatten__(inner, context, size, stride)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=value.requires_grad)
        return made

    about = _description(path, (tuple(size), value.dtype, context))
    return list(names), [getattr(value, name) for name in names], about, make


def _description(path: str, value: Any, depth: int = 16) -> Plain:
    if isinstance(value, dict) and depth:
        return {str(name): _description(path, item, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_description(path, item, depth - 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth:
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _description(path, getattr(value, name), depth - 1) for name in names}
    try:
        return to_plain(path, value, depth)
    except Invalid as error:
        raise Invalid(f"{error}; a wrapper tensor must have a description that can be compared") from error
