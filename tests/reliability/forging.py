"""Hostile input, as strategies of Hypothesis: bytes and JSON that were tampered with, and steps whose checksums fit.

Random bytes are refused by the first check that they meet. What is made here is sound but for a few places, and its
checksums are right, so that it gets to the checks behind them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from tieredckpt.errors import Invalid
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.derivation import Derivation, Rounded, Rule
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C, Encoding
from tieredckpt.format.grid import plan
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepRecord, encode_step
from tieredckpt.format.ocdbt import Extent, Value
from tieredckpt.format.structure import (
    ArrayNode,
    DictNode,
    FloatNode,
    IntNode,
    ListNode,
    Node,
    ObjectNode,
    StrNode,
    TypedNode,
)
from tieredckpt.format.zarr import dtype_name

__all__ = [
    "BTREE",
    "ESCAPES",
    "HOSTILE",
    "PACK",
    "STORE",
    "as_json",
    "derived_step",
    "entries_of",
    "forged_record",
    "marker_json",
    "record_json",
    "resealed",
    "sample_arrays",
    "sample_step",
    "tampered_bytes",
    "tampered_derivations",
    "tampered_json",
    "tampered_records",
    "tampered_steps",
    "tree_of",
]

STORE = str(uuid.UUID(int=7))
STEP, SERIAL = 20, 3
BTREE = layout.btree_key(STEP, SERIAL)
PACK = layout.pack_key("ab" * 16)

ESCAPES = "\x1b[31mred\x1b]0;title\x07\x00\n\r\u202e"
"""What a terminal must never be sent."""

_DEEP = "@@nested@@"
"""Stands in a JSON value for lists too deep for Python's own encoder."""

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40, -(10**40)),
    *(0.5, 1e308, -1e308, 1e-320, float("inf"), float("nan")),
    *("", ".", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a//b", "%", "zarr.json", "tieredckpt", ESCAPES),
    *("nan", "inf", "1e400", "1e308", "9" * 4300, "9" * 5000, "-0x" + "f" * 5000, "x" * 70_000, "\ud800", "\U0010ffff"),
    *("datetime64[s/0]", "datetime64[99999999999s]", "datetime64[generic]", "object", "float32:big", "uint8:big"),
    *([], {}, [[]], [{}], {"type": "none"}, {"type": "list", "children": []}, {"kind": "always"}),
    _DEEP,
)


def as_json(value: object) -> bytes:
    """``value`` as JSON, also what is none (NaN, lone surrogates), with 5000 nested lists where `HOSTILE` says so."""
    return json.dumps(value).encode().replace(json.dumps(_DEEP).encode(), b"[" * 5000 + b"]" * 5000)


@st.composite
def tampered_json(draw: st.DrawFn, value: Any) -> Any:
    """``value`` with one to three of its parts replaced, removed, repeated or moved."""
    value = deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = [value]
        place: Any = 0
        while isinstance(holder[place], (dict, list)) and holder[place] and draw(st.integers(0, 5)):
            holder = holder[place]
            place = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        hostile = draw(st.sampled_from(HOSTILE))
        match draw(st.sampled_from(("replace", "replace", "remove", "add", "wrap"))):
            case "replace":
                holder[place] = deepcopy(hostile)
            case "remove":
                del holder[place]
            case "add" if isinstance(holder, dict):
                holder[hostile if isinstance(hostile, str) else "extra"] = deepcopy(hostile)
            case "add":
                holder.insert(place, deepcopy(holder[place]))
            case _:
                holder[place] = [holder[place]]
        if isinstance(holder, list) and not holder:
            return None
        if holder is not value and not isinstance(value, (dict, list)):
            return value
    return value


@st.composite
def tampered_bytes(draw: st.DrawFn, data: bytes, others: Iterable[bytes] = ()) -> bytes:
    """``data`` after one to four changes: bits, numbers, cuts, insertions, and pieces of it or of ``others``."""
    now = bytearray(data)
    spare = [data, *others]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(now)))
        match draw(st.sampled_from(("bit", "byte", "number", "cut", "drop", "insert", "splice", "grow"))):
            case "bit" if at < len(now):
                now[at] ^= 1 << draw(st.integers(0, 7))
            case "byte" if at < len(now):
                now[at] = draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))
            case "number":
                size = draw(st.sampled_from((2, 4, 8)))
                number = draw(st.sampled_from((0, 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)))
                now[at : at + size] = (number % (1 << 8 * size)).to_bytes(
                    size, draw(st.sampled_from(("little", "big")))
                )
            case "cut":
                del now[at:]
            case "drop":
                del now[at : at + draw(st.integers(1, 64))]
            case "insert":
                now[at:at] = draw(st.binary(max_size=16))
            case "splice":
                piece = draw(st.sampled_from(spare))
                start = draw(st.integers(0, len(piece)))
                now[at:at] = piece[start : start + draw(st.integers(0, 64))]
            case _:
                now += bytes(draw(st.integers(1, 4096)))
    return bytes(now)


# -- steps ------------------------------------------------------------------------------------------------


def forged_record(structure: Node, **changes: Any) -> StepRecord:
    """The record of a step with that tree."""
    settings: dict[str, Any] = {
        "store": STORE,
        "step": STEP,
        "serial": SERIAL,
        "line": ((1, 1), (SERIAL, SERIAL)),
        "restored_from": 1,
        "saved_at": 1.7e9,
        "nbytes": 0,
        "metrics": {"loss": 0.25, "worst": "nan"},
        "provenance": {"host": "node", "process": "12", "failures": "3", "trained_seconds": "10.5"},
        "policy": {"name": None, "tiers": [{"kind": "ram", "promote": {"kind": "every_n_steps", "n": 2}}]},
        "structure": structure,
    }
    return StepRecord(**settings | changes)


def sample_arrays() -> dict[str, ArrayIndex]:
    """An array of three chunks in a pack, one in the index, a scalar and an empty one."""
    stored = plan((3, 8192), 1, 8192)
    where = [Extent(PACK, 12288 * i, 8192 + 4) for i in range(3)]
    return {
        "params/w": ArrayIndex(stored, np.dtype(np.uint8), [Chunk(bytes([i]) * 16, where[i]) for i in range(3)]),
        "small": _inline(np.arange(4, dtype="<f4")),
        "scalar": _inline(np.array(7, dtype="<i8")),
        "when": _inline(np.zeros(2, dtype="<M8[ns]")),
        "empty": ArrayIndex(plan((0, 2), 2, 8192), np.dtype("<i2"), []),
    }


def _inline(array: np.ndarray[Any, Any]) -> ArrayIndex:
    grid = plan(array.shape, array.itemsize, 8192)
    stored = array.view(np.int64) if array.dtype.kind == "M" else array
    data = stored.tobytes()
    return ArrayIndex(grid, array.dtype, [Chunk(digest(data), data)])


def tree_of(arrays: dict[str, ArrayIndex]) -> Node:
    """A tree that has exactly these arrays, and scalars beside them."""

    def node(key: str) -> ArrayNode:
        return ArrayNode(key, dtype_name(arrays[key].dtype), arrays[key].grid.shape, "numpy")

    top = [key for key in arrays if "/" not in key]
    inner = [key.removeprefix("params/") for key in arrays if "/" in key]
    names: list[str | int] = [*top, "epoch", "name", "rate", "rest", "seen", "odd", "queue"]
    children: list[Node] = [*map(node, top), IntNode(3), StrNode("run"), FloatNode("3ff0000000000000"), ListNode([])]
    children.append(ObjectNode("set", ["a", 1.5, {"type": "object", "of": "enum", "value": ["RED", [1, None]]}]))
    children.append(TypedNode(["=1", '=[0,"x"]'], [IntNode(1), ObjectNode("path", "/data")], "map"))
    children.append(TypedNode([0], [StrNode("last")], "deque", 4))
    if inner:
        names.append("params")
        children.append(DictNode(list(inner), [node(f"params/{key}") for key in inner]))
    return DictNode(names, children)


def sample_step(encoding: Encoding = CRC32C) -> tuple[ocdbt.Index, StepRecord, dict[str, ArrayIndex]]:
    """A whole step: its two files, and what is in them."""
    arrays = sample_arrays()
    record = forged_record(tree_of(arrays), nbytes=sum(array.grid.nbytes for array in arrays.values()))
    return encode_step(record, arrays, btree_path=BTREE, encoding=encoding), record, arrays


def entries_of(files: ocdbt.Index, btree: str = BTREE) -> dict[bytes, Value]:
    """The key space of a step."""
    return dict(ocdbt.decode(files.manifest, files.btree, btree))


def resealed(entries: dict[bytes, Value], btree: str = BTREE, *, node_bytes: int = 1 << 17) -> ocdbt.Index | None:
    """The files of a step with these entries and every checksum right; None for what no index can say."""
    try:
        return ocdbt.encode(
            sorted(entries.items()),
            btree,
            uuid=uuid.UUID(STORE).bytes,
            commit_time_ns=time.time_ns(),
            max_node_bytes=node_bytes,
        )
    except Invalid:
        return None


_EXTENTS = st.builds(
    Extent,
    st.sampled_from((PACK, layout.pack_key("cd" * 16), BTREE, layout.MARKER, "packs/x", "leases/a")),
    st.sampled_from((0, 1, 4095, 4096, 12288, 1 << 31, 1 << 40, (1 << 62), (1 << 63) - 4096)),
    st.sampled_from((0, 1, 8192, 8196, 8200, 1 << 31, 1 << 40, (1 << 62))),
)


@st.composite
def tampered_steps(draw: st.DrawFn, encoding: Encoding = CRC32C) -> ocdbt.Index | None:
    """A step in which a key, a place, the record, an array's metadata or a digest is another; checksums fit."""
    entries = entries_of(sample_step(encoding)[0])
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(entries)))
        value = entries[name]
        match draw(st.sampled_from(("tamper", "tamper", "remove", "rename", "point", "inline"))):
            case "tamper" if isinstance(value, bytes):
                entries[name] = draw(_tampered_value(value))
            case "remove":
                del entries[name]
            case "rename":
                entries[draw(_tampered_name(name))] = entries.pop(name)
            case "point":
                entries[name] = draw(_EXTENTS)
            case _:
                entries[name] = draw(st.binary(max_size=64))
        if not entries:
            return None
    return resealed(entries, node_bytes=draw(st.sampled_from((200, 1 << 17))))


def tampered_records() -> st.SearchStrategy[ocdbt.Index | None]:
    """A step of which only the record was tampered with; checksums fit."""
    entries, name = entries_of(sample_step()[0]), layout.STEP_RECORD.encode()
    inline = entries[name]
    assert isinstance(inline, bytes)
    return tampered_json(json.loads(inline)).map(lambda record: resealed({**entries, name: as_json(record)}))


def derived_step() -> ocdbt.Index:
    """The sample step as a tier with lossy rules has it."""
    _, record, arrays = sample_step()
    rules = (
        Rule(keys=("params/**",), max_error=0.004),
        Rule(keys=("small",), max_abs_error=0.5),
        Rule(keys=("opt",), drop=True),
    )
    rounded = {"params/w": Rounded(rule=0, worst=0.003), "small": Rounded(rule=1, worst=0.25, exact_chunks=1)}
    how = Derivation(chunks="ab" * 16, rules=rules, arrays=rounded, dropped=("opt/mu",))
    record = msgspec.structs.replace(record, derived=how)
    return encode_step(record, arrays, btree_path=BTREE, encoding=CRC32C)


def tampered_derivations() -> st.SearchStrategy[ocdbt.Index | None]:
    """A derived step, of whose record only what says how it was made was tampered with; checksums fit."""
    entries, name = entries_of(derived_step()), layout.STEP_RECORD.encode()
    inline = entries[name]
    assert isinstance(inline, bytes)
    record = json.loads(inline)
    how = record["derived"]
    within = tampered_json(how["arrays"]).map(lambda arrays: {**how, "arrays": arrays})
    other_rules = st.integers(-1, 4).map(
        lambda rule: {**how, "arrays": {**how["arrays"], "small": {**how["arrays"]["small"], "rule": rule}}}
    )
    return (tampered_json(how) | within | other_rules).map(
        lambda told: resealed({**entries, name: as_json({**record, "derived": told})})
    )


def _tampered_value(value: bytes) -> st.SearchStrategy[bytes]:
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):  # what was nested too deeply before
        return tampered_bytes(value)
    return tampered_json(decoded).map(as_json) | tampered_bytes(value)


def _tampered_name(name: bytes) -> st.SearchStrategy[bytes]:
    return tampered_bytes(name).filter(bool) | st.sampled_from(
        [name + b"/zarr.json", b"a/zarr.json", b"/zarr.json", b"\xff/zarr.json", b"tieredckpt/step.json.1", b"\0"]
    )


def marker_json() -> dict[str, Any]:
    """A marker, as JSON has it."""
    return {"store": STORE, "format_version": layout.FORMAT_VERSION, "digest": "xxh3-128"}


def record_json() -> Any:
    """The record of the sample step, as JSON has it."""
    return msgspec.json.decode(msgspec.json.encode(sample_step()[1]))
