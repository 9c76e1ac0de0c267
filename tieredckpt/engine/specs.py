"""How stock TensorStore opens what a tier holds, without this library."""

from __future__ import annotations

from typing import Any

from tieredckpt.config import KvstoreTier
from tieredckpt.engine.tier import Tier
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

__all__ = ["array_spec"]


def array_spec(tier: Tier, step: StepId, key: str) -> dict[str, Any]:
    """A TensorStore spec of one array of a step on one tier: zarr3 over OCDBT over the tier's own kvstore."""
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": _folder(tier, ""),
            "manifest": _folder(tier, layout.step_folder(step.step, step.serial)),
        },
        "path": key,
    }


def _folder(tier: Tier, folder: str) -> dict[str, Any]:
    if not isinstance(tier.config, KvstoreTier):
        return {"driver": "file", "path": f"{tier.store.location}/{folder}"}
    import tensorstore as ts  # only a kvstore tier needs it

    spec = tier.config.spec
    described: dict[str, Any] = ts.KvStore.Spec(spec if isinstance(spec, str) else dict(spec)).to_json()
    root = described.get("path", "")
    return {**described, "path": (f"{root.rstrip('/')}/" if root else "") + folder}
