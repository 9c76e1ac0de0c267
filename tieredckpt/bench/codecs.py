"""The effect of codecs and lossy rules on arrays: stored bytes, CPU time, and the largest error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.codecs import CODECS
from tieredckpt.config import TierConfig
from tieredckpt.engine.restoring.rules import as_recorded, first_rules, rounding_of
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.manifest import INLINE_MAX
from tieredckpt.format.rounding import Bound, can_round, round_values

__all__ = ["Chunks", "CodecRow", "LossyTier", "RuleRow", "larger", "measure_codecs", "rounded"]

_REPEATS = 3


@dataclass(slots=True)
class CodecRow:
    """One codec on the arrays of one dtype under one key."""

    arrays: str
    """The first component of their keys, and their dtype."""
    codec: str
    nbytes: int = 0
    stored: int = 0
    encode_seconds: float = 0.0
    """CPU time."""
    decode_seconds: float = 0.0
    """CPU time, with the check of the digest."""
    worst: float | None = None
    """The largest error of a value that was rounded, relative or absolute as the bound is; None if none was."""


class Chunks:
    """Chunks of arrays, one after the other; takes only one chunk in ``every``."""

    def __init__(self, chunk_size: int, every: int) -> None:
        self._size, self._every, self._number = chunk_size, every, 0

    def of(self, array: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.uint8]]:
        """Copies of the chunks of an array."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        part = self._size // array.itemsize * array.itemsize
        for start in range(0, flat.size, part):
            self._number += 1
            if self._number % self._every == 0:
                yield np.array(flat[start : start + part])


def measure_codecs(
    arrays: Iterable[tuple[str, npt.NDArray[Any]]], chunk_size: int, *, every: int = 1, bound: Bound | None = None
) -> list[CodecRow]:
    """Compress and decompress arrays, by key, chunk by chunk; only one chunk in ``every``.

    With a ``bound``, arrays are rounded as by a lossy rule for all keys. The last rows are those of all arrays.
    """
    rows: dict[tuple[str, str], CodecRow] = {}
    chunks = Chunks(chunk_size, every)
    room = np.empty(max(encoding.stored_size(chunk_size) for encoding in CODECS.values()), np.uint8)
    into = np.empty(chunk_size, np.uint8)
    # Not on the main thread, where Blosc would use several threads.
    with ThreadPoolExecutor(1) as thread:
        for key, array in arrays:
            for exact in chunks.of(array):
                chunk, worst = exact, None
                if bound is not None and array.ndim > 1 and can_round(array.dtype):
                    chunk, worst = rounded(chunk, array.dtype, bound)
                for codec, encoding in CODECS.items():
                    row = rows.setdefault(
                        (group := f"{key.partition('/')[0]} {array.dtype}", codec), CodecRow(group, codec)
                    )
                    row.worst = larger(row.worst, worst)
                    thread.submit(_measure, row, encoding, chunk, array.itemsize, room, into).result()
    return [*rows.values(), *(_sum(codec, rows.values()) for codec in CODECS)]


def rounded(
    chunk: npt.NDArray[np.uint8], dtype: np.dtype[Any], bound: Bound
) -> tuple[npt.NDArray[np.uint8], float | None]:
    """A chunk rounded as by a lossy rule, and its largest error; the chunk itself and None if it exceeds the bound."""
    found = chunk.copy()
    worst = round_values(found, dtype, bound)
    return (chunk, None) if worst is None else (found, worst)


def larger(one: float | None, other: float | None) -> float | None:
    """The larger of two errors, either of which may be None."""
    return max((each for each in (one, other) if each is not None), default=None)


def _measure(
    row: CodecRow,
    encoding: Encoding,
    chunk: npt.NDArray[np.uint8],
    itemsize: int,
    room: npt.NDArray[np.uint8],
    into: npt.NDArray[np.uint8],
) -> None:
    encoded = encoding.encode(chunk, chunk.size, itemsize, room)  # memory that is touched first takes longer
    row.encode_seconds += _fastest(partial(encoding.encode, chunk, chunk.size, itemsize, room))
    stored = encoded.parts[0] if len(encoded.parts) == 1 else np.concatenate(encoded.parts)
    frame = stored[: encoded.length - encoding.checksum_size]
    row.decode_seconds += _fastest(partial(encoding.decode, frame, chunk.size, into[: chunk.size]))
    row.nbytes += chunk.size
    row.stored += encoded.length


def _fastest(work: Callable[[], object]) -> float:
    """CPU seconds of a call, the least of several."""
    found = math.inf
    for _ in range(_REPEATS):
        begin = time.process_time()
        work()
        found = min(found, time.process_time() - begin)
    return found


def _sum(codec: str, rows: Iterable[CodecRow]) -> CodecRow:
    total = CodecRow("all", codec)
    for row in rows:
        if row.codec == codec:
            total.nbytes += row.nbytes
            total.stored += row.stored
            total.encode_seconds += row.encode_seconds
            total.decode_seconds += row.decode_seconds
            total.worst = larger(total.worst, row.worst)
    return total


@dataclass(slots=True)
class RuleRow:
    """Figures of the arrays that one lossy rule names; the last row of a tier has those that no rule names."""

    tier: str
    keys: tuple[str, ...]
    says: str
    """``max_error=0.004``, ``max_abs_error=1e-06``, ``drop`` or ``exact``."""
    arrays: int = 0
    nbytes: int = 0
    stored: int = 0
    """Stored bytes with the tier's codec."""
    worst: float | None = None
    """The largest error found of a value, relative or absolute as the rule is; None if none was rounded."""


class LossyTier:
    """Rounds arrays as a tier with lossy rules does, one after the other."""

    def __init__(self, config: TierConfig, keys: Sequence[str], chunk_size: int, *, every: int = 1) -> None:
        """``keys`` are those of all arrays; only one chunk in ``every`` is measured."""
        self._rules, self._encoding = as_recorded(config.lossy), CODECS[config.codec]
        self._first = first_rules(self._rules, keys)
        self._chunks = Chunks(chunk_size, every)
        self._room = np.empty(self._encoding.stored_size(chunk_size), np.uint8)
        self.rows = [RuleRow(config.name, rule.keys, rule.says) for rule in config.lossy]
        self.rows.append(RuleRow(config.name, (), "exact"))

    def add(self, key: str, array: npt.NDArray[Any]) -> None:
        """Add an array, by the first rule that matches it."""
        number = self._first.get(key, -1)
        row = self.rows[number]
        row.arrays += 1
        rule = self._rules[number] if number >= 0 else None
        bound = None
        if rule is not None and array.nbytes > INLINE_MAX:
            bound = rounding_of(rule, key, array.ndim, array.dtype)
        for exact in self._chunks.of(array):
            chunk = exact
            row.nbytes += chunk.size
            if rule is not None and rule.drop:
                continue
            if bound is not None:
                chunk, worst = rounded(chunk, array.dtype, bound)
                row.worst = larger(row.worst, worst)
            row.stored += self._encoding.encode(chunk, chunk.size, array.itemsize, self._room).length
