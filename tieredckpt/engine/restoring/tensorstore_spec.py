"""TensorStore specs, with which stock TensorStore opens arrays on a tier without this library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tieredckpt.config.kinds import kind_of
from tieredckpt.engine.restoring.moved import unless_moved
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Invalid, NotFound
from tieredckpt.format import layout, zarr
from tieredckpt.format.boxes import Box
from tieredckpt.format.manifest import StepId, StepIndex

__all__ = ["array_spec", "spec_of"]


async def array_spec(state: State, step: int, key: str, name: str | None) -> dict[str, Any]:
    """A TensorStore spec of one array of a step: zarr3 over OCDBT over the own kvstore of a tier that holds it.

    Raises `NotFound` for a step, tier or key that is not there.
    """
    state = next((each for each in state.derivations if each.target.name == name), state)
    found = state.find(step)
    tier = state.tier(name) if name is not None else _whole_on(state, found)
    async with unless_moved(state, found):
        index = await step_index.load(tier, found)
    kvstore = {
        "driver": "ocdbt",
        "base": _folder(tier, ""),
        "manifest": _folder(tier, found.folder),
    }
    return spec_of(index, key, kvstore)


def _whole_on(state: State, step: StepId) -> Tier:
    """The nearest tier with all of a step in one place, readable by TensorStore; the RAM of ranks is not one place."""
    alone = state.membership.size == 1
    whole = [tier for tier in state.holders(step) if tier.shared or (alone and tier.steps.has_own(step))]
    if not whole:
        raise NotFound(f"{step} is in the RAM of ranks alone; promote it, and stock TensorStore opens it there")
    return next((tier for tier in whole if kind_of(tier.config).tensorstore_spec is not None), whole[0])


def spec_of(index: StepIndex, key: str, kvstore: Mapping[str, Any]) -> dict[str, Any]:
    """A TensorStore spec of one array, given that of the key-value store of its step.

    An array that is stored whole is one zarr array. For an array in blocks, the driver ``stack`` has each block as a
    layer (https://google.github.io/tensorstore/driver/stack/).

    Raises `NotFound` for an array that is not there.
    """
    blocks = index.blocks(key)
    if not blocks:
        shown = f"`tieredckpt show STORE {index.record.step}`"
        raise NotFound(f"{index.record.id} has no array {key!r}; {shown} lists them")
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
    kind = kind_of(tier.config)
    describe = kind.tensorstore_spec
    if describe is None:
        raise Invalid(
            f"stock TensorStore has no driver that reads tier {tier.name!r}, of the kind `{kind.name}`; name "
            "another tier that holds the step"
        )
    root = describe(tier.config, tier.store.location)
    path = root.get("path", "")
    below = layout.DERIVED if tier.derived else ""
    return {**root, "path": (f"{path.rstrip('/')}/" if path else "") + below + folder}
