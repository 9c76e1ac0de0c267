"""The states of the random number generators of Python, NumPy and torch, as a tree."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  # it is what programs use
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
        if torch.cuda.device_count() > 1:
            state["cuda_devices"] = torch.stack(torch.cuda.get_rng_state_all())
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for index, each in enumerate(state.get("cuda_devices", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, index)
        # Last: where the process sees other devices than it did, its own one has another number.
        torch.cuda.set_rng_state(state["cuda"])
