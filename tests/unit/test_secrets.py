"""Promise 11: no secret is stored, shown or logged."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretBytes, SecretStr
from support.agents import agent_of, end_agent
from support.command_line import run
from support.scenes import Heard, files_below, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt._redact import REDACTED, redacted, redacted_text, without_secrets
from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.blobs.posix.kind import POSIX
from tieredckpt.config import KvstoreTier, PosixTier, StoreConfig, dump_with_secrets, kinds, load, to_toml
from tieredckpt.errors import Invalid, TieredCkptError, TierUnavailable
from tieredckpt.events import TierFailed

CANARY = "c4n4ry"
"""In every secret of these tests, and nowhere else."""

SECRET = [
    "aws_credentials",
    "headers",
    "api_key",
    "apiKey",
    "encryption-key",
    "client_secret",
    "SecretKey",
    "session_token",
    "authToken",
    "password",
    "passwd",
    "Authorization",
    "signature",
    "sig",
    "sas",
    "X-Amz-Date",
    "x_amz_security_token",
    "cookie",
    "pwd",
    "access_key_id",
]
HARMLESS = ["keys", "tokens", "tokenizer", "bucket", "path", "endpoint", "monkey", "author", "design", "user"]


class Gossip(BaseHTTPRequestHandler):
    """Refuses every request, and repeats in its answer all that it was told."""

    heard: list[str]

    def do_GET(self) -> None:
        told = f"{self.path} {self.headers.get('Authorization')}"
        type(self).heard.append(told)
        body = f"not for you: {told}".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    handler = type("OneTest", (Gossip,), {"heard": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def heard(server: ThreadingHTTPServer) -> list[str]:
    found: list[str] = server.RequestHandlerClass.heard
    return found


def spec(server: ThreadingHTTPServer) -> dict[str, Any]:
    """A kvstore with a secret in each place that has one."""
    return {
        "driver": "http",
        "base_url": f"http://user:{CANARY}-password@127.0.0.1:{server.server_port}/folder?sig={CANARY}-signature",
        "headers": [f"Authorization: Bearer {CANARY}-token"],
    }


@pytest.fixture
def settings(server: ThreadingHTTPServer, shared_memory: Path, tmp_path: Path) -> StoreConfig:
    far = {"kind": "kvstore", "spec": spec(server), "retries": 0}
    return StoreConfig(
        tiers={"ram": ram(shared_memory, on_close="keep"), "disk": folder(tmp_path / "disk"), "far": far}
    )


def bytes_below(*folders: Path) -> bytes:
    found = []
    for path in (path for each in folders for path in files_below(each) if path.is_file()):
        with suppress(FileNotFoundError):  # of a lease that is being renewed
            found.append(path.read_bytes())
    assert found
    return b"".join(found)


def told_of(error: BaseException) -> str:
    """What a logged traceback has."""
    return "".join(traceback.format_exception(error))


async def test_no_secret_is_in_a_step_an_event_an_error_or_the_log(
    settings: StoreConfig,
    server: ThreadingHTTPServer,
    shared_memory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="tieredckpt")
    async with CheckpointStore.open(settings) as store:
        events = Heard(store)
        saved = await store.save(1, {"w": np.ones(5000)}, metrics={"loss": 1.0})
        await saved.reached("disk")
        with pytest.raises(TierUnavailable) as failed:
            await saved.reached("far")
        told = [str(await events.first(TierFailed)), repr(await store.describe(1)), repr(await store.tier_infos())]
        record = (await store.describe(1)).policy
    assert CANARY in "".join(heard(server))  # the tier was given them
    assert CANARY not in "".join([*told, told_of(failed.value), caplog.text])
    assert CANARY.encode() not in bytes_below(shared_memory, tmp_path / "disk")
    assert record == {
        "schedule": {"kind": "always"},
        "tiers": [
            {
                "name": name,
                "kind": kind,
                "promote": {"kind": "always"},
                "retain": {"kind": "last_n", "n": n},
                "evict": {"kind": "oldest"},
            }
            for name, kind, n in (("ram", "ram", 1), ("disk", "posix", 5), ("far", "kvstore", 5))
        ],
    }


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_show_has_no_secret_of_a_step_that_an_earlier_version_saved(
    settings: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: tuple[str, ...]
) -> None:
    monkeypatch.setattr(StoreConfig, "recorded_policies", property(dump_with_secrets))
    with CheckpointStore.open(settings).sync() as store:
        store.save(1, {"w": np.ones(5000)}).reached("disk")
    assert CANARY.encode() in bytes_below(tmp_path / "disk")
    shown = run("show", tmp_path / "disk", *as_json)
    assert shown.exit_code == 0
    assert "http" in shown.output
    assert CANARY not in shown.output


@pytest.mark.parametrize(
    "show", [repr, str, to_toml, lambda config: str(config.model_dump()), StoreConfig.model_dump_json]
)
def test_what_a_configuration_is_shown_as_has_no_secret(
    settings: StoreConfig, show: Callable[[StoreConfig], str]
) -> None:
    shown = show(settings)
    assert "http" in shown
    assert CANARY not in shown


def test_a_secret_is_dumped_only_where_that_is_asked_for(settings: StoreConfig) -> None:
    assert load(dump_with_secrets(settings)) == settings
    with pytest.raises(Invalid, match=r"tiers\.far\.spec: has REDACTED in the place of a secret"):
        load(settings.model_dump(mode="json"))


def test_the_secrets_of_a_registered_kind_are_dumped_where_that_is_asked_for(tmp_path: Path) -> None:
    class VaultTier(PosixTier):
        kind: Literal["vault"] = "vault"  # type: ignore[assignment]  # not its base's
        password: SecretStr
        keys: dict[str, list[SecretStr]]
        certificate: SecretBytes | None = None

    with kinds.replaced(replace(POSIX, config=VaultTier)):
        secrets = {"password": CANARY, "keys": {"a": [CANARY, "b"]}, "certificate": CANARY}
        settings = load({"tiers": {"vault": {"kind": "vault", "path": str(tmp_path), **secrets}}})
        assert load(json.loads(json.dumps(dump_with_secrets(settings)))) == settings
        assert dump_with_secrets(settings)["tiers"][0]["keys"] == {"a": [CANARY, "b"]}
        for shown in (repr(settings), to_toml(settings), settings.model_dump_json(), str(settings.model_dump())):
            assert CANARY not in shown


def test_a_store_without_name_keeps_its_identity(server: ThreadingHTTPServer) -> None:
    far = KvstoreTier(name="far", spec=spec(server))
    where = [json.dumps(spec(server), sort_keys=True)]
    assert StoreConfig(tiers=[far]).identity == hashlib.sha256(json.dumps(where).encode()).hexdigest()[:16]
    assert CANARY not in far.location


@pytest.mark.parametrize(
    "wrong",
    [
        {"promote": "nonsense"},
        {"unknown": 1},
        {"spec": f"HTTPS://user:{CANARY}@host/"},
        {"spec": [{"token": CANARY}]},
        {"name": {"token": CANARY}},
    ],
    ids=str,
)
def test_what_is_wrong_with_a_configuration_is_told_without_its_secrets(
    server: ThreadingHTTPServer, wrong: dict[str, Any]
) -> None:
    far = {"kind": "kvstore", "spec": spec(server), **wrong}
    for tiers in ({"far": far}, [{"name": "far", **far}]):
        with pytest.raises(Invalid) as refused:
            load({"tiers": tiers})
        assert CANARY not in told_of(refused.value)
    with pytest.raises(Invalid) as refused:
        KvstoreTier(**{"name": "far", **far})
    assert CANARY not in told_of(refused.value)


async def test_what_a_kvstore_says_is_told_without_its_secrets(server: ThreadingHTTPServer) -> None:
    blobs = await KvStoreBlobs.open(spec(server))
    assert CANARY not in blobs.location
    for work in (blobs.get("key", limit=1), blobs.put("key", [b"x"]), blobs.stat("key")):
        with pytest.raises(TieredCkptError) as failed:
            await work
        assert CANARY not in told_of(failed.value)
    await blobs.close()
    assert CANARY in "".join(heard(server))


@pytest.mark.parametrize(
    "wrong",
    [
        {"driver": "http", "base_url": "http://host", "headers": f"x: {CANARY}"},
        {"driver": "gcs", "bucket": "bucket", "api_key": CANARY},
        f"nothing://user:{CANARY}@host/?token={CANARY}",
        {"driver": "file", "path": "", "context": {"password": CANARY}},
    ],
    ids=str,
)
async def test_a_spec_that_tensorstore_refuses_is_told_without_its_secrets(wrong: str | dict[str, Any]) -> None:
    with pytest.raises(TieredCkptError) as refused:
        await KvStoreBlobs.open(wrong)
    assert CANARY not in told_of(refused.value)


async def test_the_spec_of_an_array_has_no_secret_and_opens_it(tmp_path: Path) -> None:
    import tensorstore as ts

    far = {
        "driver": "file",
        "path": f"{tmp_path}/far",
        "context": {"aws_credentials": {"type": "profile", "profile": CANARY}},
    }
    async with CheckpointStore.open({"tiers": {"far": {"kind": "kvstore", "spec": far}}}) as store:
        await store.save(1, {"w": np.arange(5000)})
        found = await store.spec(1, "w")
        assert CANARY not in str(found)
        array = await ts.open(found)
        assert np.array_equal(await array.read(), np.arange(5000))


async def test_an_agent_is_given_secrets_over_its_standard_input_alone(
    settings: StoreConfig, server: ThreadingHTTPServer, shared_memory: Path, tmp_path: Path
) -> None:
    folder = settings.tiers[0].path
    assert isinstance(folder, Path)
    try:
        async with CheckpointStore.open(settings.model_copy(update={"promote_in": "agent"})) as store:
            await (await store.save(1, {"w": np.ones(5000)})).reached("disk")
            agent = await asyncio.to_thread(agent_of, folder)
            for name in ("cmdline", "environ"):
                assert CANARY.encode() not in Path(f"/proc/{agent}/{name}").read_bytes()
            assert CANARY.encode() not in bytes_below(shared_memory, tmp_path / "disk")
    finally:
        end_agent(folder)
    assert CANARY in "".join(heard(server))
    assert CANARY not in "".join(os.environ.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pass@host/a", "https://REDACTED@host/a"),
        ("https://host/a?X-Amz-Signature=abc&x=1 was not read", "https://host/a?REDACTED was not read"),
        ("Authorization: Bearer abc.def", "Authorization: REDACTED"),
        ("{'secret_key': 'a\\'b', 'bucket': 'b'}", "{'secret_key': 'REDACTED', 'bucket': 'b'}"),
        ('{"headers":["a: b", "c: d"],"x":1}', '{"headers":"REDACTED","x":1}'),
        ("aws_secret_access_key=abc, region=eu", "aws_secret_access_key=REDACTED, region=eu"),
        ("AWSAccessKeyId=abc&Signature=def", "AWSAccessKeyId=REDACTED&Signature=REDACTED"),
        ("value of size 7 [os_error_code='28']", "value of size 7 [os_error_code='28']"),
        ("gs://bucket/keys/token/x", "gs://bucket/keys/token/x"),
        ("connect(password='hunter2')", "connect(password=REDACTED)"),
        ('token="two words" step=1', "token=REDACTED step=1"),
        ("Authorization: ApiKey abcdefgh", "Authorization: REDACTED"),
    ],
)
def test_a_message_is_told_without_its_secrets(text: str, expected: str) -> None:
    assert redacted_text(text) == expected
    assert redacted_text(expected) == expected


@pytest.mark.parametrize("name", SECRET)
def test_a_member_of_such_a_name_is_a_secret(name: str) -> None:
    held = {"a": [{name: {"any": ["thing"]}, "b": 1}]}
    assert redacted(held) == {"a": [{name: REDACTED, "b": 1}]}
    assert without_secrets(held) == {"a": [{"b": 1}]}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_member_of_another_name_is_none(name: str) -> None:
    assert redacted({name: "value"}) == without_secrets({name: "value"}) == {name: "value"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_is_redacted_stays_as_it_is(value: Any) -> None:
    once = redacted(value)
    assert redacted(once) == once
