"""`bench chfs` measures what it says, over the look-alike too, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.command_line import run, told
from support.lookalike import library, missing

from tieredckpt.bench import chfs as bench
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.config import load, to_toml
from tieredckpt.errors import TierUnavailable


@pytest.fixture
def chfs(tmp_path: Path) -> Path:
    """The directory of a look-alike with three servers."""
    if why := missing():
        pytest.skip(why)
    directory = tmp_path / "chfs"
    directory.mkdir()
    (directory / "switches").write_text("servers = 3\n")
    return directory


@pytest.fixture
def over_chfs(config: Path, chfs: Path) -> Path:
    """A configuration whose one slower tier is that look-alike."""
    tiers = {
        "ram": {"kind": "ram"},
        "pmem": {"kind": "chfs", "path": "/a job/steps", "server": f"directory:{chfs}", "chunk_size": "64 KiB"},
    }
    config.write_text(to_toml(load({"tiers": tiers})))
    return config


async def left(chfs: Path) -> list[str]:
    """What CHFS lists where the store's folder would be, and every chunk that is left anywhere."""
    store = ChfsStore("/a job", server=f"directory:{chfs}", library=str(library()))
    await store.connect()
    assert store.link is not None
    listed = [name for name, *_ in await store.link.ask(frames.ListFolder("/a job"))]
    await store.close()
    return listed + [path.name for path in (chfs / "servers").rglob("*") if not path.is_dir()]


def test_every_figure_is_told_and_nothing_is_left(over_chfs: Path, chfs: Path, tmp_path: Path) -> None:
    media = [tmp_path / "medium", tmp_path / "shared"]
    for folder in media:
        folder.mkdir()
    figures = told(
        "bench", "chfs", over_chfs, "--size", "1 MiB", "--rounds", 2, "--directory", media[0], "--shared", media[1]
    )
    assert (figures["servers"], figures["chunk_size"], figures["nbytes"]) == (3, 64 << 10, 1 << 20)
    assert "look-alike" in figures["library"]
    timed = {f"{what} {where}" for what in ("write", "read") for where in ("bare", "worker", "directory", "shared")}
    timed |= {f"{what} {where}" for what in ("promote", "restore") for where in ("tier", "shared")}
    assert figures["seconds"].keys() == timed
    assert all(seconds > 0 for seconds in figures["seconds"].values())
    assert figures["ratios"].keys() == {name for name, _, _ in bench._COMPARED}
    seconds = figures["seconds"]
    assert figures["ratios"]["worker_write_over_bare"] == pytest.approx(seconds["write bare"] / seconds["write worker"])
    assert asyncio.run(left(chfs)) == []
    assert [list(folder.iterdir()) for folder in media] == [[], []]


def test_people_see_a_table(over_chfs: Path) -> None:
    result = run("bench", "chfs", over_chfs, "--size", "1 MiB", "--rounds", 1)
    assert result.exit_code == 0, result.output
    assert "write worker" in result.stdout
    assert "promote_over_bare" in result.stdout
    assert "write directory" not in result.stdout


async def test_what_fails_in_the_middle_leaves_nothing_either(
    over_chfs: Path, chfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise TierUnavailable("in the middle")

    def write_and_end(loop: bench.BareLoop, path: str, count: int, seconds: dict[str, list[float]]) -> None:
        loop.write(path)

    monkeypatch.setattr(bench, "_bare_round", write_and_end)
    monkeypatch.setattr(bench, "_checkpoints", fails)
    with pytest.raises(TierUnavailable, match="in the middle"):
        await bench.measure_chfs(load(over_chfs).tiers[1], 1 << 20, 1)
    assert await left(chfs) == []


def test_a_loop_that_libchfs_ends_is_an_error(over_chfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(bench.BareLoop):
        def __init__(self, library: str, server: str, **sizes: int) -> None:
            super().__init__(library, "nonsense", **sizes)

    monkeypatch.setattr(bench, "BareLoop", Broken)
    result = run("bench", "chfs", over_chfs, "--size", "1 MiB")
    assert result.exit_code == 1
    assert "bare loop" in result.output


@pytest.mark.parametrize(
    ("arguments", "told"), [([], "no chfs tier"), (["--tier", "disk"], "no chfs tier of the name 'disk'")]
)
def test_a_configuration_without_a_chfs_tier_is_refused(config: Path, arguments: list[str], told: str) -> None:
    result = run("bench", "chfs", config, *arguments)
    assert result.exit_code == 1
    assert told in result.output


def test_one_of_several_has_to_be_chosen(config: Path) -> None:
    config.write_text('[tiers.a]\nkind = "chfs"\npath = "/a"\n[tiers.b]\nkind = "chfs"\npath = "/b"\n')
    result = run("bench", "chfs", config)
    assert result.exit_code == 1
    assert "--tier" in result.output


def test_too_few_bytes_are_refused(config: Path) -> None:
    assert run("bench", "chfs", config, "--size", "1000 B").exit_code == 2
