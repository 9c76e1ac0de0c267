"""The saved states, and the arrays that a training step changes.

Shapes follow a decoder-only transformer: 8 layers, parameters and two Adam moments of each, 150 arrays in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Invalid
from tieredckpt.format.digest import digest

__all__ = ["WORKLOADS", "State", "Workload", "change", "fingerprints", "of_rank", "workload_named"]

State = dict[str, npt.NDArray[Any]]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_LAYERS = 8
_VOCABULARY = 16
"""Rows of the embedding, in multiples of the model's width."""
_TINY = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """A state of about any size, and its changes between two saves."""

    name: str
    about: str
    make: Callable[[int], dict[str, tuple[tuple[int, ...], np.dtype[Any]]]]
    """Shapes and dtypes by key, for so many bytes in all."""
    trained: Callable[[str], bool]
    """Whether a step changes the array of that key."""
    rows: float = 1.0
    """Share of an array's rows that a step changes; fewer than all are drawn by Zipf's law."""

    def build(self, nbytes: int, rank: int = 0) -> State:
        """Arrays of random bits that are finite numbers, about ``nbytes`` in all; each rank has others."""
        rng = np.random.default_rng(1 + rank)
        return {key + of_rank(rank): _random(rng, shape, dtype) for key, (shape, dtype) in self.make(nbytes).items()}

    def train(self, state: State, step: int) -> None:
        """Change in place the arrays that a training step changes."""
        keys = [key for key in state if self.trained(key)]
        if self.rows == 1:
            change(state, keys)
            return
        rng = np.random.default_rng(step)
        for key in keys:
            count = len(state[key])
            drawn = np.minimum(rng.zipf(1.3, size=max(1, int(count * self.rows))), count) - 1
            bits = _bits(state[key])
            bits[np.unique(drawn)] += 1


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if dtype == _FLOAT32:
        return rng.random(shape, dtype=np.float32)
    # The upper halves of float32 numbers are bfloat16 numbers; the conversion itself takes a second a GiB.
    return np.ascontiguousarray(rng.random(shape, dtype=np.float32).view(np.uint16)[..., 1::2]).view(dtype)


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def of_rank(rank: int) -> str:
    """Suffix of the keys of a rank's arrays."""
    return f".rank{rank}" if rank else ""


def change(state: State, keys: Sequence[str]) -> None:
    """Give arrays values that they never had, in place and at memory speed: increment each number."""
    for key in keys:
        bits = _bits(state[key])
        np.add(bits, 1, out=bits)


def fingerprints(state: State) -> dict[str, bytes]:
    """A digest of every array's bytes."""
    return {key: digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for key, array in state.items()}


def _parameters(elements: int) -> dict[str, tuple[int, ...]]:
    width = max(8, isqrt(elements // (12 * _LAYERS + _VOCABULARY)) // 8 * 8)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (_VOCABULARY * width, width)}
    for layer in range(_LAYERS):
        shapes |= {
            f"layer{layer}.attention.qkv": (width, 3 * width),
            f"layer{layer}.attention.out": (width, width),
            f"layer{layer}.mlp.up": (width, 4 * width),
            f"layer{layer}.mlp.down": (4 * width, width),
            f"layer{layer}.norm1": (width,),
            f"layer{layer}.norm2": (width,),
        }
    return shapes | {"norm": (width,)}


def _with_moments(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return {f"{part}.{key}": (shape, dtype) for part in ("params", "mu", "nu") for key, shape in shapes.items()}


def _transformer(nbytes: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return _with_moments(_parameters(nbytes // 12), _FLOAT32)


def _bfloat16(nbytes: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return _with_moments(_parameters(nbytes // 6), _BFLOAT16)


def _lora(nbytes: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    base = _parameters(nbytes // 2)
    rank = min(16, max(1, base["norm"][0] // 32))
    adapters = {
        f"{key}.{side}": (max(shape), rank) for key, shape in base.items() if len(shape) == 2 for side in ("a", "b")
    }
    return {f"base.{key}": (shape, _BFLOAT16) for key, shape in base.items()} | _with_moments(adapters, _FLOAT32)


def _embedding(nbytes: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    width = 128
    tables = 4
    rows = max(64, nbytes // 12 // tables // width // 4)
    return _with_moments({f"table{number}": (rows, 4 * width) for number in range(tables)}, _FLOAT32)


def _tiny(nbytes: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return {f"leaf{number}": ((64,), _FLOAT32) for number in range(min(_TINY, max(10, nbytes // 256)))}


WORKLOADS = (
    Workload("transformer", "a transformer with its Adam moments, float32; everything changes", _transformer, bool),
    Workload("bfloat16", "the same in bfloat16", _bfloat16, bool),
    Workload(
        "lora",
        "LoRA adapters (rank 16 from 64 MiB on) and their moments in float32, on a frozen bfloat16 base",
        _lora,
        lambda key: not key.startswith("base."),
    ),
    Workload(
        "embedding",
        "four embedding tables with their moments, float32, sorted by frequency; a step touches rows by Zipf's law",
        _embedding,
        bool,
        rows=0.01,
    ),
    Workload("tiny", "10,000 arrays of 256 bytes", _tiny, bool),
)


def workload_named(name: str) -> Workload:
    """One of `WORKLOADS`. Raises `Invalid` for an unknown name."""
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    raise Invalid(f"{name!r} is no workload; choose of {', '.join(each.name for each in WORKLOADS)}")
