"""The state of a PyTorch module, under the names that it has without DistributedDataParallel and torch.compile.

torch's ``get_model_state_dict`` looks up every key of a state as an attribute, and so refuses layers that have other
keys in it, such as the quantized ones of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tieredckpt import AS_SAVED, Invalid

__all__ = ["load_module_state", "module_state", "module_targets"]

_WRAPPERS = {DistributedDataParallel: "module", OptimizedModule: "_orig_mod"}
"""Modules that wrap another one, and the name of the attribute that holds it."""

_UNNAMED = "_checkpoint_wrapped_module."
"""Part of module names that activation checkpointing adds; keys of a state do not have it."""


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """The state of a module: the tensors themselves, and extra states, by name."""
    prefixes = _prefixes(module)
    return {_bare(key, prefixes): value for key, value in _state(module).items()}


def module_targets(module: torch.nn.Module) -> dict[str, Any]:
    """The state of a module as ``like`` or ``into``; an extra state is restored in the form in which it was saved."""
    state = module_state(module)
    return {key: AS_SAVED if key.rpartition(".")[2] == "_extra_state" else value for key, value in state.items()}


def load_module_state(name: str, module: torch.nn.Module, stored: Mapping[str, Any]) -> None:
    """Load a state with the names of `module_state` into ``module``, the part called ``name``.

    Layers of bitsandbytes save the quantization of their weights but do not load it: they must be quantized in that
    way.

    Raises:
        Invalid: the module does not load a key, which is named, and has another value under it; or it needs a key that
            is not in its state.
    """
    prefixes = _prefixes(module)
    wrapped = {key: stored[_bare(key, prefixes)] for key in _state(module)}
    outcome = module.load_state_dict(wrapped, strict=False)  # a custom module may return nothing
    if missing := getattr(outcome, "missing_keys", ()):
        raise Invalid(
            f"part {name!r}: the module wants {', '.join(map(repr, missing))}, which its own state does not have, and "
            f"so no step"
        )
    refused = getattr(outcome, "unexpected_keys", ())
    now = _state(module) if refused else {}
    wrong = [_bare(key, prefixes) for key in refused if not _alike(now[key], wrapped[key])]
    if wrong:
        raise Invalid(
            f"part {name!r}: the module has other values than the step for {', '.join(map(repr, wrong))}, and takes "
            f"none for them; load the model from the same files, quantized in the same way, as the one that was saved"
        )


def _state(module: torch.nn.Module) -> dict[str, Any]:
    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        raise Invalid(
            "FullyShardedDataParallel (FSDP1) gathers its whole state on every rank; take `fully_shard` (FSDP2), of "
            "which each rank saves its own shards"
        )
    with torch.no_grad():
        return dict(module.state_dict())


def _prefixes(module: torch.nn.Module) -> list[tuple[str, int]]:
    """Beginnings of keys, innermost first, and how many of their characters are a wrapper's."""
    found = []
    for name, child in module.named_modules(remove_duplicate=False):
        for kind, inner in _WRAPPERS.items():
            if isinstance(child, kind):
                path = f"{name}.{inner}." if name else f"{inner}."
                found.append((path.replace(_UNNAMED, ""), len(inner) + 1))
    return sorted(found, key=lambda each: -len(each[0]))


def _bare(key: str, prefixes: list[tuple[str, int]]) -> str:
    for prefix, length in prefixes:
        if key.startswith(prefix):
            key = prefix[:-length] + key[len(prefix) :]
    return key


def _alike(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(value, other.to(value.device)))
    return bool(value == other)
