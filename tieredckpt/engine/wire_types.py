"""Values that cross a process border, to another rank or to the agent: an error, a step on a tier; their encoding."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tieredckpt._decoders import UNREADABLE, msgpack_decoder
from tieredckpt.errors import (
    Closed,
    Conflict,
    Corrupt,
    DeviceUnavailable,
    Invalid,
    NoSpace,
    NotFound,
    RanksUnavailable,
    TieredCkptError,
    TierUnavailable,
)
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.structure import NoneNode

__all__ = ["Failure", "StepOnTier", "brief", "decode", "encode"]

M = TypeVar("M")

_KINDS: dict[str, type[TieredCkptError]] = {
    kind.__name__: kind
    for kind in (Closed, Conflict, Corrupt, DeviceUnavailable, Invalid, NoSpace, NotFound, TierUnavailable)
}


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to another process."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
        if isinstance(error, RanksUnavailable):
            return cls("RanksUnavailable", str(error), tuple(error.ranks))
        return cls(kind, str(error) if kind or str(error) else type(error).__name__)

    def error(self) -> TieredCkptError:
        """The error, to be raised in this process."""
        if self.kind == "RanksUnavailable":
            return RanksUnavailable(self.text, self.ranks)
        return _KINDS.get(self.kind, TierUnavailable)(self.text)


class StepOnTier(msgspec.Struct, frozen=True):
    """What one process tells another of a step on a tier."""

    record: StepRecord
    """Without the structure."""
    btree_key: str

    @classmethod
    def of(cls, record: StepRecord, btree_key: str) -> StepOnTier:
        return cls(brief(record), btree_key)

    @property
    def id(self) -> StepId:
        return self.record.id


def brief(record: StepRecord) -> StepRecord:
    """The record of a step without its structure, which can be large and is rarely asked for."""
    return msgspec.structs.replace(record, structure=NoneNode())


def encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[M] | object) -> M:
    """Decode a message. Raises `Corrupt` for one that no process of this version sends."""
    try:
        found: M = msgpack_decoder(kind).decode(data)
    except UNREADABLE as error:
        text = f"a message of another process cannot be read: {error}; all ranks, and the agent, run one version"
        raise Corrupt(text) from error
    return found
