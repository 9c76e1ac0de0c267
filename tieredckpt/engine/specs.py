"""How stock TensorStore opens what a tier holds, without this library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tieredckpt.blobs.chfs.choice import driver_spec
from tieredckpt.config import ChfsTier, KvstoreTier
from tieredckpt.engine.moved import unless_moved
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import NotFound
from tieredckpt.format import layout, zarr
from tieredckpt.format.boxes import Box
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.redact import without_secrets

__all__ = ["array_spec", "spec_of"]


async def array_spec(state: State, step: int, key: str, name: str | None) -> dict[str, Any]:
    """A TensorStore spec of one array of a step: zarr3 over OCDBT over the own kvstore of a tier that holds it.

    Raises `NotFound` for a step, tier or key that is not there.
    """
    found = state.find(step)
    tier = state.tier(name) if name is not None else _whole_on(state, found)
    async with unless_moved(state, found):
        index = await tier.load_index(found)
    kvstore = {
        "driver": "ocdbt",
        "base": _folder(tier, ""),
        "manifest": _folder(tier, layout.step_folder(found.step, found.serial)),
    }
    return spec_of(index, key, kvstore)


def _whole_on(state: State, step: StepId) -> Tier:
    """The nearest tier with all of a step in one place; the RAM of several ranks is not one."""
    for tier in state.holders(step):
        if state.ranks == 1 or tier.config.kind != "ram":
            return tier
    raise NotFound(
        f"{step} is in the RAM of {state.ranks} ranks alone; promote it, and stock TensorStore opens it there"
    )


def spec_of(index: StepIndex, key: str, kvstore: Mapping[str, Any]) -> dict[str, Any]:
    """A TensorStore spec of one array, given that of the key-value store of its step.

    An array that is stored whole is one zarr array. Of one that is stored in blocks, the driver ``stack`` makes
    the array of which each block is a layer (https://google.github.io/tensorstore/driver/stack/).

    Raises `NotFound` for an array that is not there.
    """
    blocks = index.blocks(key)
    if not blocks:
        raise NotFound(f"{index.record.id} has no array {key!r}; `tieredckpt show {index.record.step}` lists them")
    if blocks[0][1] == key:
        return _zarr(key, kvstore)
    layers = [{**_zarr(name, kvstore), "transform": _moved(box)} for box, name in blocks if box.size]
    dtype = zarr.zarr_type(index.arrays[blocks[0][1]].dtype)
    return {"driver": "stack", "dtype": dtype, "layers": layers}


def _zarr(path: str, kvstore: Mapping[str, Any]) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": dict(kvstore), "path": path}


def _moved(box: Box) -> dict[str, Any]:
    """The transform that puts a block, whose own indices begin at 0, to its place in the array."""
    return {
        "input_inclusive_min": list(box.offset),
        "input_shape": list(box.shape),
        "output": [{"input_dimension": axis, "offset": -start} for axis, start in enumerate(box.offset)],
    }


def _folder(tier: Tier, folder: str) -> dict[str, Any]:
    if isinstance(tier.config, ChfsTier):
        at = tier.blobs.location if tier.blobs is not None else ""
        root = at.removeprefix("chfs:") if at.startswith("chfs:") else tier.config.folder
        return {**driver_spec(tier.config), "path": f"{root}/{folder}"}
    if not isinstance(tier.config, KvstoreTier):
        return {"driver": "file", "path": f"{tier.store.location}/{folder}"}
    import tensorstore as ts  # only a kvstore tier needs it

    spec = tier.config.spec
    described: dict[str, Any] = without_secrets(
        ts.KvStore.Spec(spec if isinstance(spec, str) else dict(spec)).to_json()
    )
    root = described.get("path", "")
    return {**described, "path": (f"{root.rstrip('/')}/" if root else "") + folder}
