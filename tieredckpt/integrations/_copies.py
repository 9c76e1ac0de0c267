"""Copies of tensors that PyTorch's forward and backward passes change, for saves that run beside these passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tieredckpt import Shard

__all__ = ["with_copies"]


def with_copies(tree: Any, unchanged: Iterable[torch.Tensor]) -> Any:
    """Copy the tensors and arrays of ``tree`` on their devices, except those that share memory with ``unchanged``."""
    return _copied(tree, {_data(tensor) for tensor in unchanged})


def _copied(tree: Any, unchanged: set[tuple[str, int]]) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value, unchanged) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_copied(value, unchanged) for value in tree)
    if isinstance(tree, Shard):
        return dataclasses.replace(tree, array=_copied(tree.array, unchanged))
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, torch.Tensor) and _data(tree) not in unchanged:
        return tree.detach().clone()
    return tree


def _data(tensor: Any) -> tuple[str, int]:
    """Address of the data of a tensor, or of this rank's part of a distributed one."""
    with torch.no_grad():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    plain = local.layout == torch.strided and not hasattr(local, "__tensor_flatten__")
    return str(local.device), local.untyped_storage().data_ptr() if plain else id(local)
