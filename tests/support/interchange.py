"""State dicts of torch on their way through the commands `import` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.frameworks import require
from tieredckpt import CheckpointStore

torch = require("torch")
dcp = require("torch.distributed.checkpoint")


def save(store: Path, tree: Any, step: int = 1) -> None:
    with CheckpointStore.open(store).sync() as opened:
        opened.save(step, tree)
        opened.flush()


def restored(store: Path, step: int | None = None) -> Any:
    with CheckpointStore.open(store, read_only=True).sync() as opened:
        found = opened.restore(step, as_="saved")
    assert found is not None
    return found.tree


def equal(one: Any, other: Any) -> None:
    """That two state dicts are the same to the last bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.contiguous().reshape(-1).view(torch.uint8).tolist() == (
            other.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    else:
        assert one == other


STATE: dict[str, Any] = {
    "model": {
        "w": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
        "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "eighth": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
    },
    "optim": {"state": [{"m": torch.ones(3)}, {"m": torch.zeros(3)}], "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
    "pair": (torch.ones(2), 3),
    "step": 7,
    "note": None,
}


def written(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path
