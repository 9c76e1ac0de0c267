"""A tier goes to CHFS by the worker where it can, by TensorStore where it must, and says which and why."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tieredckpt.blobs.base import Survives
from tieredckpt.blobs.chfs import choice
from tieredckpt.blobs.chfs.choice import choose_path, driver_spec
from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.config import load, to_toml
from tieredckpt.config.kinds import kind_of
from tieredckpt.config.tiers import ChfsTier
from tieredckpt.errors import Invalid


@pytest.fixture(params=[True, False])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if request.param else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return bool(request.param)


@pytest.fixture(params=[True, False])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(choice, "_has_driver", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("via", ["auto", "worker", "tensorstore"])
def test_the_way_is_one_that_is_there(client: bool, driver: bool, via: Any) -> None:
    there = {"worker": client, "tensorstore": driver}
    tier = ChfsTier(name="pmem", via=via)
    wanted = via if via != "auto" else "worker" if client else "tensorstore"
    if there[wanted]:
        way, why = choose_path(tier)
        assert way == wanted
        assert why
    else:
        with pytest.raises(Invalid, match="pmem"):
            choose_path(tier)


def test_a_table_becomes_a_tier_and_a_table_again(tmp_path: Path) -> None:
    text = """
        [tiers.pmem]
        kind = "chfs"
        path = "/job/7"
        server = "directory:look$$alike"
        chunk_size = "1 MiB"
        servers = 4
        survives = "node"
    """
    (tmp_path / "ckpt.toml").write_text(text)
    config = load(tmp_path / "ckpt.toml")
    tier = config.tiers[-1]
    assert isinstance(tier, ChfsTier)
    assert tier.server == f"directory:{tmp_path}/look$alike"
    assert (tier.path, tier.chunk_size, tier.servers, tier.survives) == ("/job/7", 1 << 20, 4, "node")
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load(tmp_path / "again.toml").tiers[-1] == tier


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "relative"},
        {"path": "/"},
        {"path": "/a/../b"},
        {"path": "/a:b"},
        {"path": "/a//b"},
        {"server": ""},
        {"chunk_size": 5000},
        {"chunk_size": "128 MiB"},
        {"servers": 0},
        {"survives": "site"},
        {"via": "fuse"},
    ],
)
def test_what_chfs_cannot_take_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=next(iter(wrong))):
        ChfsTier(name="pmem", **wrong)


def test_the_driver_is_told_what_the_tier_says() -> None:
    spec = driver_spec(ChfsTier(name="pmem", path="/a", server="ofi+tcp://x:1", threads=3, library=Path("/lib.so")))
    assert spec == {
        "driver": "chfs",
        "path": "/a/",
        "server": "ofi+tcp://x:1",
        "library": "/lib.so",
        "chunk_size": 4 << 20,
        "chfs_concurrency": {"limit": 3},
    }


async def test_a_tier_that_asks_for_the_driver_is_opened_by_it_and_starts_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[object, Survives | None]] = []

    async def note(spec: object, *, survives: Survives | None = None) -> None:
        opened.append((spec, survives))

    monkeypatch.setattr(choice, "_has_driver", lambda: True)
    monkeypatch.setattr(KvStoreBlobs, "open", note)
    tier = ChfsTier(name="pmem", via="tensorstore", survives="node")
    await kind_of(tier).open(tier)
    assert opened == [(driver_spec(tier), Survives.NODE)]
