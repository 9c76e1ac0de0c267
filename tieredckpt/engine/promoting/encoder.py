"""Encodes chunks for one tier. It stops compressing while that delays a caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tieredckpt.blobs.codecs import BLOSC
from tieredckpt.engine.promoting.pack_writer import Payload, seal_all
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.views import write_bandwidth
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.encoding import Encoded, Encoding

__all__ = ["Encoder"]


class Encoder:
    """Encodes what one copy of a step brings to a tier. Lives on the engine's loop."""

    def __init__(self, state: State, tier: Tier, encoding: Encoding, is_awaited: Callable[[], bool]) -> None:
        """``is_awaited`` returns whether a caller waits for the copy to end."""
        self._state, self._tier, self._encoding, self._is_awaited = state, tier, encoding, is_awaited
        self._nbytes = 0
        self._seconds = 0.0

    @property
    def encoding(self) -> Encoding:
        """How the next chunks are stored: uncompressed if the device would take them faster than they are compressed,
        and somebody waits. Its sizes and its framing are those of the tier at any time.
        """
        if self._encoding.raw or not self._seconds:
            return self._encoding
        bandwidth = write_bandwidth(self._tier)
        slows = bandwidth is not None and self._nbytes / self._seconds < bandwidth
        return BLOSC if slows and self._is_awaited() else self._encoding

    async def seal(self, payloads: Sequence[Payload], threads: int) -> list[Encoded | None]:
        """`seal_all` the chunks, compressed on the tier's own number of threads, any other way on ``threads``."""
        encoding = self.encoding
        compresses = not encoding.raw and encoding is not BLOSC
        begin = time.monotonic()
        pool, at_most = self._state.pool, self._tier.config.codec_threads if compresses else threads
        sealed = await seal_all(payloads, encoding, pool, at_most)
        if compresses:
            self._nbytes += sum(payload.nbytes for payload in payloads)
            self._seconds += time.monotonic() - begin
        return sealed
