"""The socket between a trainer and its agent carries whole frames, for one user, wherever its folder is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.scenes import SOON

from tieredckpt.engine.agent import wire
from tieredckpt.engine.agent.messages import FromAgent, Progress, Response
from tieredckpt.engine.agent.wire import SOCKET, Parted, Silent, Wire, accept, connect, listen
from tieredckpt.errors import Conflict


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[tuple[Wire, Wire]]:
    """Both ends of a connection."""
    sock = listen(folder)
    accepting = asyncio.create_task(accept(sock))
    one = await connect(folder)
    assert one is not None
    other = await accepting
    try:
        yield one, other
    finally:
        await one.close()
        await other.close()
        sock.close()


async def test_frames_arrive_whole_and_in_their_order_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    assert len(str(folder / SOCKET)) > 107
    large = Response(1, os.urandom(3 << 20), None)
    async with joined(folder) as (one, other), asyncio.timeout(SOON):
        assert one.peer == other.peer == os.getpid()
        assert one.peer_lives()
        for message in (large, Progress(1, 7)):
            one.send(message)
        assert await other.read(FromAgent) == large
        assert await other.read(FromAgent) == Progress(1, 7)
        await one.close()
        with pytest.raises(Parted):
            await other.read(FromAgent)


async def test_a_frame_that_comes_late_is_read_where_it_was_left(tmp_path: Path) -> None:
    async with joined(tmp_path) as (one, other), asyncio.timeout(SOON):
        one.send(Progress(1, 7))
        data = await other._reader.readexactly(1)  # put the frame together anew, in two parts
        data += await other._reader.read(1000)
        one._writer.write(data[:6])
        with pytest.raises(Silent, match=r"has said nothing for 0\.1 s"):
            await other.read(FromAgent, 0.1)
        one._writer.write(data[6:])
        assert await other.read(FromAgent, SOON) == Progress(1, 7)


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\x03\x00\x00\x00abc", b"\x00\x00\x00\x00"])
async def test_what_is_no_frame_ends_the_connection(tmp_path: Path, data: bytes) -> None:
    async with joined(tmp_path) as (one, other), asyncio.timeout(SOON):
        one._writer.write(data)
        with pytest.raises(Parted):
            await other.read(FromAgent)


async def test_another_user_is_refused_at_either_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_peer", lambda _: (4711, os.getuid() + 1))
    sock = listen(tmp_path)
    try:
        accepting = asyncio.create_task(accept(sock))
        with pytest.raises(Conflict, match="process 4711 of user"):
            await connect(tmp_path)
        with pytest.raises(Conflict, match="process 4711 of user"):
            await accepting
    finally:
        sock.close()


async def test_where_nobody_listens_nobody_answers(tmp_path: Path) -> None:
    assert await connect(tmp_path) is None
    assert await connect(tmp_path / "missing") is None
    listen(tmp_path).close()  # as one that died has left it
    assert await connect(tmp_path) is None
    sock = listen(tmp_path)  # the next one takes its place
    assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600
    sock.close()
