"""What a catalog says comes back as it was said, and what no writer would have said is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import Corrupt
from tieredckpt.format import layout
from tieredckpt.format.catalog import Catalog, CatalogStep, decode_catalog, encode_catalog
from tieredckpt.format.crc import crc32c
from tieredckpt.format.pack import RECORD

STORE = "00000000-0000-4000-8000-000000000000"


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    ids = draw(st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=4))
    counts = [draw(st.integers(0, 3)) for _ in ids]
    table = np.empty(sum(counts), RECORD)
    for row in range(len(table)):
        offset = 4096 * draw(st.integers(0, 3))
        table[row] = (draw(st.binary(min_size=16, max_size=16)), offset, draw(st.integers(1, 4096)))
    steps = []
    for serial in draw(st.lists(st.integers(1, layout.MAX_NUMBER), unique=True, max_size=4)):
        times = st.floats(0, 2e9)
        steps.append(
            CatalogStep(
                draw(st.integers(0, layout.MAX_NUMBER)),
                serial,
                300,
                draw(times),
                "btree-0123abcd",
                4000,
                draw(times),
                line=((1, serial),),
                restored_from=draw(st.none() | st.integers(1, 9)),
                saved_at=draw(times),
                nbytes=7,
                metrics=draw(st.dictionaries(st.text(), st.floats(allow_nan=False) | st.just("nan"), max_size=2)),
                ranks=draw(st.integers(1, 9)),
                store=draw(st.uuids().map(str)),
                run=draw(st.text(max_size=2)),
                began_after=draw(st.none() | st.integers(0, layout.MAX_NUMBER)),
            )
        )
    keys = [layout.pack_key(identity.hex()) for identity in ids]
    sizes = np.array([4096 * 4 + 4096] * len(ids), np.uint64)
    return Catalog(STORE, keys, sizes, np.array(counts, np.uint32), table, steps)


@given(catalogs())
def test_what_is_written_is_read(catalog: Catalog) -> None:
    found = decode_catalog(encode_catalog(catalog), "here")
    assert (found.store, list(found.packs), list(found.steps)) == (catalog.store, catalog.packs, catalog.steps)
    assert found.sizes.tolist() == catalog.sizes.tolist()
    assert found.counts.tolist() == catalog.counts.tolist()
    assert found.chunks.tobytes() == catalog.chunks.tobytes()
    for step in found.steps:
        record = step.record
        assert (record.id, record.store, record.run) == (step.id, step.store, step.run)
        assert record.began_after == (math.inf if step.began_after is None else step.began_after)


@given(catalogs(), st.data())
def test_one_that_was_cut_or_changed_is_refused(catalog: Catalog, data: st.DataObject) -> None:
    whole = encode_catalog(catalog)
    with pytest.raises(Corrupt):
        decode_catalog(whole[: data.draw(st.integers(0, len(whole) - 1))], "here")
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[place] ^= 1 << bit
    with pytest.raises(Corrupt):
        decode_catalog(bytes(changed), "here")


def made_up(**changes: Any) -> bytes:
    """A catalog of one pack with one chunk and one step, with a right checksum whatever it says."""
    step = [5, 3, 300, 1.0, "btree", 4000, 1.0, [[1, 3]], None, 1.0, 7, {}, 1, STORE, "", None]
    table = np.array([(bytes(16), 0, 100)], RECORD)
    body: dict[str, Any] = {
        "store": STORE,
        "packs": bytes(16),
        "sizes": (8192).to_bytes(8, "little"),
        "counts": (1).to_bytes(4, "little"),
        "chunks": table.tobytes(),
        "steps": [step],
    }
    data = (
        b"tckcat\n\0" + (3).to_bytes(4, "little") + bytes(4) + msgspec.msgpack.encode(list((body | changes).values()))
    )
    return data + crc32c(data).to_bytes(4, "little")


def chunk(offset: int, length: int) -> bytes:
    return np.array([(bytes(16), offset, length)], RECORD).tobytes()


def step(**changes: Any) -> list[Any]:
    fields = {"step": 5, "serial": 3, "size": 300, "at": 1.0, "btree": "btree", "nodes": 4000, "nodes_at": 1.0}
    rest: dict[str, Any] = {"line": [[1, 3]], "from": None, "saved_at": 1.0, "nbytes": 7, "metrics": {}, "ranks": 1}
    rest |= {"store": STORE, "run": "", "began_after": None}
    return list((fields | rest | changes).values())


WRONG: dict[str, dict[str, Any]] = {
    "a chunk beyond its pack": {"chunks": chunk(8192, 1)},
    "a chunk that ends beyond its pack": {"chunks": chunk(4096, 4097)},
    "a chunk whose end wraps around": {"chunks": chunk(4096, (1 << 64) - 4096)},
    "a chunk that lies between pages": {"chunks": chunk(7, 1)},
    "a chunk of no bytes": {"chunks": chunk(0, 0)},
    "more chunks than are listed": {"counts": (2).to_bytes(4, "little")},
    "four thousand million chunks": {"counts": b"\xff" * 4},
    "a pack without a size": {"sizes": b""},
    "half an identity": {"packs": bytes(8)},
    "a pack larger than any": {"sizes": b"\xff" * 8},
    "a line that does not end with its serial": {"steps": [step(line=[[1, 2]])]},
    "a step without a line": {"steps": [step(line=[])]},
    "a serial that is none": {"steps": [step(serial=0)]},
    "a run that began before all": {"steps": [step(began_after=-1)]},
    "a time that is no number": {"steps": [step(saved_at=float("nan"))]},
    "no ranks": {"steps": [step(ranks=0)]},
    "a store that is none": {"steps": [step(store="..")]},
    "a step that is none": {"steps": [[5]]},
    "steps that are no list": {"steps": 7},
}


def test_what_is_made_up_here_is_right_but_for_what_is_changed() -> None:
    found = decode_catalog(made_up(), "here")
    assert [each.id.serial for each in found.steps] == [3]
    assert decode_catalog(made_up(steps=[step()]), "here").steps == found.steps


@pytest.mark.parametrize("position", [0, 8, 12])
def test_one_of_another_kind_or_version_is_refused_though_its_checksum_fits(position: int) -> None:
    changed = bytearray(made_up()[:-4])
    changed[position] ^= 1
    changed += crc32c(changed).to_bytes(4, "little")
    with pytest.raises(Corrupt, match="version 3"):
        decode_catalog(bytes(changed), "here")


@pytest.mark.parametrize("what", WRONG)
def test_what_no_writer_would_have_said_is_refused_though_the_checksum_fits(what: str) -> None:
    with pytest.raises(Corrupt):
        decode_catalog(made_up(**WRONG[what]), "here")
