"""Object stores for tests: a server of S3's protocol, the data in it past our store, and tiers that lie there."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["BUCKET", "CREDENTIALS", "Bucket", "Place", "moto_server", "need_modules"]

BUCKET = "checkpoints"
CREDENTIALS = {"access_key_id": "an-access-key", "secret_access_key": "test-secret", "region": "us-east-1"}

_STARTS_WITHIN = 120.0


def need_modules(*names: str) -> None:
    """Skip the test where one is not installed; fail it where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"needs {' and '.join(missing)}"
    if os.environ.get("TIEREDCKPT_REQUIRE_ENGINES"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """A server of S3's protocol, on loopback, that keeps everything in memory; yields its URL. It has `BUCKET`."""
    need_modules("obstore", "boto3", "moto", "flask", "flask_cors")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(port, process, folder / "moto.log")
        url = f"http://127.0.0.1:{port}"
        _client(url).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"moto does not answer: {log.read_text(errors='replace')[-2000:]}")


def _client(url: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=CREDENTIALS["region"],
        aws_access_key_id=CREDENTIALS["access_key_id"],
        aws_secret_access_key=CREDENTIALS["secret_access_key"],
    )


class Place:
    """A prefix of its own in the bucket of a server."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.prefix = f"runs/{secrets.token_hex(8)}"
        self.url = f"s3://{BUCKET}/{self.prefix}"
        self.bucket = Bucket(server, self.prefix)

    def tier(self, endpoint: str | None = None, **settings: Any) -> dict[str, Any]:
        """A tier here, by the server itself or by what stands in front of it; it fails at once when it fails."""
        here = {"kind": "s3", "url": self.url, "endpoint": endpoint or self.server, "retries": 0}
        return here | CREDENTIALS | settings


class Bucket:
    """The objects below a prefix, by boto3: the back door of a store."""

    def __init__(self, server: str, prefix: str) -> None:
        self._client = _client(server)
        self._prefix = prefix

    async def put(self, key: str, data: bytes) -> None:
        await asyncio.to_thread(self._client.put_object, Bucket=BUCKET, Key=self._name(key), Body=data)

    async def get(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self.read, key)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._client.delete_object, Bucket=BUCKET, Key=self._name(key))

    async def list(self) -> set[str]:
        return set(await asyncio.to_thread(self.sizes))

    def read(self, key: str) -> bytes | None:
        """An object; None where there is none."""
        try:
            body = self._client.get_object(Bucket=BUCKET, Key=self._name(key))["Body"]
        except self._client.exceptions.NoSuchKey:
            return None
        data: bytes = body.read()
        return data

    def sizes(self) -> dict[str, int]:
        """The size of every object."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self._prefix}/")
        return {
            found["Key"].removeprefix(f"{self._prefix}/"): found["Size"]
            for page in pages
            for found in page.get("Contents", ())
        }

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
