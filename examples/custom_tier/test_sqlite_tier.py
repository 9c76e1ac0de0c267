"""Tests that the store keeps the contract of all blob stores, and that a configuration finds it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_tier import SqliteBlobs, SqliteTier

from tieredckpt.config import load
from tieredckpt.errors import NotFound
from tieredckpt.testing.blobs import BlobStoreTests


class Rows:
    """The same database, accessed past the store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def put(self, key: str, data: bytes) -> None:
        await self._run("INSERT OR REPLACE INTO objects (key, modified, data) VALUES (?, 0, ?)", key, data)

    async def get(self, key: str) -> bytes | None:
        rows = await self._run("SELECT data FROM objects WHERE key = ?", key)
        return rows[0][0] if rows else None

    async def delete(self, key: str) -> None:
        await self._run("DELETE FROM objects WHERE key = ?", key)

    async def list(self) -> set[str]:
        return {key for (key,) in await self._run("SELECT key FROM objects")}

    async def _run(self, sql: str, *values: object) -> list[tuple[bytes]]:
        def run() -> list[tuple[bytes]]:
            with closing(sqlite3.connect(self._path, timeout=60)) as database, database:
                return database.execute(sql, values).fetchall()

        return await asyncio.to_thread(run)


class TestSqliteBlobs(BlobStoreTests):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SqliteBlobs]:
        store = await SqliteBlobs.open(SqliteTier(name="database", path=tmp_path / "objects.db"))
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, tmp_path: Path) -> Rows:
        return Rows(tmp_path / "objects.db")


async def test_looking_at_a_database_that_is_not_there_makes_none(tmp_path: Path) -> None:
    tier = SqliteTier(name="database", path=tmp_path / "objects.db")
    with pytest.raises(NotFound):
        await SqliteBlobs.open(tier, read_only=True)
    assert os.listdir(tmp_path) == []


def test_a_configuration_names_the_kind(tmp_path: Path) -> None:
    config = load({"tiers": {"database": {"kind": "sqlite", "path": tmp_path / "objects.db"}}})
    assert config.tiers == (SqliteTier(name="database", path=tmp_path / "objects.db"),)
