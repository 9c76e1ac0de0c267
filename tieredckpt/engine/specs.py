"""How stock TensorStore opens what a tier holds, without this library."""

from __future__ import annotations

from typing import Any

from tieredckpt.blobs.chfs.choice import driver_spec
from tieredckpt.config import ChfsTier, KvstoreTier
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import NotFound
from tieredckpt.format import layout

__all__ = ["array_spec"]


async def array_spec(state: State, step: int, key: str, name: str | None) -> dict[str, Any]:
    """A TensorStore spec of one array of a step: zarr3 over OCDBT over the own kvstore of a tier that holds it.

    Raises `NotFound` for a step, tier or key that is not there.
    """
    found = state.find(step)
    tier = state.tier(name) if name is not None else state.holders(found)[0]
    index = await tier.load_index(found)
    if key not in index.arrays:
        raise NotFound(f"{found} has no array {key!r}; `tieredckpt show {step}` lists them")
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": _folder(tier, ""),
            "manifest": _folder(tier, layout.step_folder(found.step, found.serial)),
        },
        "path": key,
    }


def _folder(tier: Tier, folder: str) -> dict[str, Any]:
    if isinstance(tier.config, ChfsTier):
        return {**driver_spec(tier.config), "path": f"{tier.config.path}/{folder}"}
    if not isinstance(tier.config, KvstoreTier):
        return {"driver": "file", "path": f"{tier.store.location}/{folder}"}
    import tensorstore as ts  # only a kvstore tier needs it

    spec = tier.config.spec
    described: dict[str, Any] = ts.KvStore.Spec(spec if isinstance(spec, str) else dict(spec)).to_json()
    root = described.get("path", "")
    return {**described, "path": (f"{root.rstrip('/')}/" if root else "") + folder}
