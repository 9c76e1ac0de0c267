"""Object stores for tests: a server of S3's protocol, the data in it past our store, and tiers that lie there."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import http.client
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.frameworks import need_modules

__all__ = [
    "AZURITE",
    "BUCKET",
    "CREDENTIALS",
    "REAL",
    "Bucket",
    "Container",
    "Place",
    "azurite_server",
    "moto_server",
    "null_server",
    "real_server",
]

BUCKET = "checkpoints"
REAL = os.environ.get("S3_SERVER")
"""The URL of a server that somebody runs; its credentials are ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``."""
_KEYS = {"access_key_id": "an-access-key", "secret_access_key": "test-secret"}
if REAL:
    _KEYS = {name: os.environ[f"AWS_{name.upper()}"] for name in _KEYS}
CREDENTIALS = _KEYS | {"region": "us-east-1"}

AZURITE = {
    "account": "devstoreaccount1",
    # Of every Azurite there is, as its manual says.
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}

_STARTS_WITHIN = 120.0


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """A server of S3's protocol, on loopback, that keeps everything in memory; yields its URL. It has `BUCKET`."""
    need_modules("obstore", "boto3", "moto", "flask", "flask_cors")
    port = _free_port()
    server = str(Path(__file__).with_name("atomic_moto.py"))
    with _running([sys.executable, server, "-H", "127.0.0.1", "-p", str(port)], port, folder / "log"):
        url = f"http://127.0.0.1:{port}"
        _client(url).create_bucket(Bucket=BUCKET)
        yield url


@contextmanager
def real_server() -> Iterator[str]:
    """The server that ``S3_SERVER`` names, with `BUCKET`, of which nothing below ``runs/`` stays."""
    assert REAL is not None
    need_modules("obstore", "boto3")
    client = _client(REAL)
    with suppress(client.exceptions.BucketAlreadyOwnedByYou):  # of an earlier run
        client.create_bucket(Bucket=BUCKET)
    yield REAL
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="runs/"):
        for found in page.get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=found["Key"])


@contextmanager
def azurite_server(folder: Path) -> Iterator[str]:
    """Azurite, Microsoft's emulator of Azure Blob Storage; yields its account's URL. Skips where it is missing."""
    need_modules("obstore")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs azurite-blob: npm install azurite, and its node_modules/.bin in PATH")
    port = _free_port()
    place = ["--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with _running([program, *place, "--location", str(folder / "data")], port, folder / "log"):
        yield f"http://127.0.0.1:{port}/{AZURITE['account']}"


@contextmanager
def null_server(folder: Path) -> Iterator[str]:
    """A server that throws away what is put, and serves one object; yields its URL."""
    need_modules("obstore", "boto3")
    port = _free_port()
    with _running([sys.executable, str(Path(__file__).with_name("null_store.py")), str(port)], port, folder / "log"):
        yield f"http://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_for(port, process, log)
        yield
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
    pytest.fail(f"the server does not answer: {log.read_text(errors='replace')[-2000:]}")


@functools.cache  # making one takes longer than most of what is asked of it
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

    def encryption(self, key: str) -> tuple[str | None, str | None]:
        """How the service encrypts an object, and by which key."""
        head = self._client.head_object(Bucket=BUCKET, Key=self._name(key))
        return head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")

    def sizes(self) -> dict[str, int]:
        """The size of every object."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self._prefix}/")
        return {
            found["Key"].removeprefix(f"{self._prefix}/"): found["Size"]
            for page in pages
            for found in page.get("Contents", ())
        }

    def uploads(self) -> set[str]:
        """The keys of multipart uploads that were begun and not ended: no listing of objects has them."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=BUCKET, Prefix=f"{self._prefix}/")
        return {found["Key"].removeprefix(f"{self._prefix}/") for page in pages for found in page.get("Uploads", ())}

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class Container:
    """A new container of Azurite, by requests that are signed here: the back door of a store."""

    def __init__(self, account: str) -> None:
        self._account = urlsplit(account)
        self.name = f"test-{secrets.token_hex(8)}"
        self._ask("PUT", "", "restype:container")

    async def put(self, key: str, data: bytes) -> None:
        await asyncio.to_thread(self._ask, "PUT", f"/{key}", "", data)

    async def get(self, key: str) -> bytes | None:
        status, data = await asyncio.to_thread(self._ask, "GET", f"/{key}")
        return data if status == 200 else None

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._ask, "DELETE", f"/{key}")

    async def list(self) -> set[str]:
        _, data = await asyncio.to_thread(self._ask, "GET", "", "comp:list\nrestype:container")
        return set(re.findall("<Name>(.*?)</Name>", data.decode()))

    def _ask(self, verb: str, path: str, query: str = "", data: bytes = b"") -> tuple[int, bytes]:
        """Shared Key of Azure Storage: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
        where = f"{self._account.path}/{self.name}{path}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        if verb == "PUT" and path:
            headers["x-ms-blob-type"] = "BlockBlob"
        signed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        resource = f"/{AZURITE['account']}{where}" + (f"\n{query}" if query else "")
        text = f"{verb}\n\n\n{len(data) or ''}\n\n\n\n\n\n\n\n\n{signed}{resource}"
        digest = hmac.digest(base64.b64decode(AZURITE["account_key"]), text.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {AZURITE['account']}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection(self._account.netloc)
        try:
            url = where + (f"?{query.replace(':', '=').replace(chr(10), '&')}" if query else "")
            connection.request(verb, url, data or None, headers | {"Content-Length": str(len(data))})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        assert answer.status in (200, 201, 202, 404), body
        return answer.status, body
