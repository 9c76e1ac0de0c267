"""Kinds of tier: how they are found by their names, and what is said when they are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest
from support.scenes import config, folder, ram, tree

from tieredckpt import CheckpointStore, _registry
from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.posix.kind import POSIX
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.ram.kind import RAM
from tieredckpt.config import TierConfig, TierKind, kinds, load, to_toml
from tieredckpt.config.kinds import GROUP, kind_named, kind_of, kind_of_url, register
from tieredckpt.config.tiers import AbsolutePath, Capacity
from tieredckpt.errors import Conflict, Invalid, TierUnavailable
from tieredckpt.testing.tiers import Opening, tiers_opened_by


class ShelfTier(TierConfig):
    """A folder that only this kind reads."""

    kind: Literal["shelf"] = "shelf"
    path: AbsolutePath
    capacity: Capacity | None = None
    survives: Literal["node", "site"] = "node"

    @property
    def location(self) -> str:
        return f"shelf:{self.path}"


class BoxTier(ShelfTier):
    kind: Literal["box"] = "box"  # type: ignore[assignment]  # not its base's


async def open_shelf(tier: ShelfTier, *, read_only: bool = False) -> BlobStore:
    return PosixStore(tier.path, survives=Survives.named(tier.survives), tries=not read_only)


SHELF = TierKind(config=ShelfTier, open=open_shelf, survives=lambda tier: Survives.named(tier.survives))

BOX = TierKind(config=BoxTier, open=open_shelf, survives=SHELF.survives, schemes=("s3", "gs", "box", "shelf"))

HERE = __name__


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """More entry points than are installed; what the test registers is forgotten."""
    added: list[EntryPoint] = []
    installed = _registry.entry_points
    monkeypatch.setattr(_registry, "entry_points", lambda group: [*installed(group=group), *added])
    _forget()
    with kinds.replaced():
        yield added
    _forget()


def _forget() -> None:
    _registry.offered.cache_clear()
    kinds._offered.cache_clear()


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


def table(**more: Any) -> dict[str, Any]:
    return {"tiers": {"shelf": {"kind": "shelf", "path": "/shelf", **more}}}


def test_a_kind_is_found_by_its_entry_point_and_its_configuration_survives_a_trip(entries: list[EntryPoint]) -> None:
    entries.append(entry("shelf", f"{HERE}:SHELF"))
    made = load(table(capacity="1 GiB"))
    assert made.tiers == (ShelfTier(name="shelf", path=Path("/shelf"), capacity=1 << 30),)
    assert kind_of(made.tiers[0]).name == "shelf"
    assert load(made.model_dump(mode="json")) == made
    assert 'kind = "shelf"' in to_toml(made)


def test_our_kinds_are_offered_as_those_of_others() -> None:
    assert kinds.kinds() == ["azure", "chfs", "gcs", "kvstore", "lustre", "nfs", "posix", "ram", "s3"]
    assert (kind_named("ram"), kind_named("posix")) == (RAM, POSIX)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("posx", "`posx` is not a kind of tier; did you mean `posix`?"),
        (
            "s4",
            "`s4` is not a kind of tier; there are: azure, chfs, gcs, kvstore, lustre, nfs, posix, ram, s3; for ",
        ),
        (3, "`3` is not a kind of tier; did you mean `s3`"),
        (["ram"], r"`\['ram'\]` is not a kind of tier; did you mean `ram`"),
    ],
)
def test_an_unknown_kind_is_answered_with_the_nearest_or_all(kind: object, told: str) -> None:
    with pytest.raises(Invalid, match=rf"^tiers\.shelf\.kind: {told}"):
        load(table(kind=kind))


def test_without_any_kind_it_is_said_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    others = _registry.entry_points
    monkeypatch.setattr(_registry, "entry_points", lambda group: [] if group == GROUP else others(group=group))
    _forget()
    with pytest.raises(Invalid, match=r"no kind is known.*pip install"):
        load(table())


def test_a_kind_that_cannot_be_imported_harms_only_itself_and_names_its_package(
    entries: list[EntryPoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tier.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    entries.append(entry("shelf", "broken_tier:SHELF"))
    load({"tiers": {"disk": {"kind": "posix", "path": "/d"}}})
    with pytest.raises(Invalid, match=r"known are az://, gs://, s3://"):
        load("s4://bucket/run")
    with pytest.raises(
        Invalid,
        match=r"tiers\.shelf\.kind: the kind of tier `shelf`, which a package offers as broken_tier:SHELF, cannot be "
        "imported: RuntimeError: no licence",
    ):
        load(table())


def test_two_packages_with_the_same_kind_are_refused(entries: list[EntryPoint]) -> None:
    entries += [entry("shelf", f"{HERE}:SHELF"), entry("shelf", "other:SHELF")]
    with pytest.raises(Invalid, match=f"is offered by {HERE}:SHELF, other:SHELF; uninstall all but one"):
        load(table())


class Bare(TierConfig):
    kind: Literal["shelf"] = "shelf"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("ShelfTier", "is no TierKind"),
        ("NO_MODEL", "<class 'int'> is not a class derived from TierConfig"),
        ("INCOMPLETE", "Bare has no location and no capacity and no survives, as a field or a property"),
        ("NEAR", "only the kind `ram` is in memory, or seen by its node alone"),
        ("POSIX", "it is the kind `posix`"),
    ],
)
def test_an_entry_point_that_leads_to_no_complete_kind_is_refused(
    entries: list[EntryPoint], value: str, told: str
) -> None:
    entries.append(entry("shelf", f"{HERE}:{value}"))
    with pytest.raises(Invalid, match=rf"cannot be used: .*{told}"):
        load(table())


NO_MODEL = replace(SHELF, config=int)  # which is to be refused
INCOMPLETE = replace(SHELF, config=Bare)
NEAR = replace(SHELF, scopes=("node",))


def test_registering_makes_a_kind_known_and_takes_none_from_another(entries: list[EntryPoint]) -> None:
    entries.append(entry("box", "nowhere:BOX"))
    register(SHELF)
    register(SHELF)
    assert load(table()).tiers[0].kind == "shelf"
    register(POSIX)  # as it is offered

    class OtherPosix(ShelfTier):
        kind: Literal["posix"] = "posix"  # type: ignore[assignment]  # not its base's

    with pytest.raises(Conflict, match=r"the kind 'posix' of tier is taken by tieredckpt\.blobs\.posix\.kind:POSIX"):
        register(replace(SHELF, config=OtherPosix))
    with pytest.raises(Conflict, match=r"the kind 'box' of tier is taken by nowhere:BOX"):
        register(replace(SHELF, config=BoxTier))

    class Other(ShelfTier):
        """Of the same kind."""

    with pytest.raises(Conflict, match="another kind"):
        register(replace(SHELF, config=Other))


def test_a_scheme_that_several_kinds_have_is_of_the_registered_then_the_namesake_then_ours(
    entries: list[EntryPoint],
) -> None:
    entries.append(entry("box", f"{HERE}:BOX"))  # which comes first by name
    assert [kind_of_url(f"{scheme}://b/run").name for scheme in ("s3", "gs")] == ["s3", "gcs"]
    assert kind_of_url("box://b/run").name == "box"
    assert kind_of_url("shelf://b/run").name == "box"
    register(replace(SHELF, schemes=("gs", "shelf")))
    assert [kind_of_url(f"{scheme}://b/run").name for scheme in ("s3", "gs", "shelf")] == ["s3", "shelf", "shelf"]


async def test_a_store_goes_through_a_kind_that_tensorstore_cannot_read(tmp_path: Path, shared_memory: Path) -> None:
    register(SHELF)
    shelf = {"kind": "shelf", "path": tmp_path / "shelf"}
    settings = config({"ram": ram(shared_memory), "shelf": shelf, "disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(settings) as store:
        saved = await store.save(1, tree(1))
        await saved.reached("shelf")
        await saved.reached("disk")
        with pytest.raises(Invalid, match="no driver that reads tier 'shelf', of the kind `shelf`; name another tier"):
            await store.spec(1, "params/w0", tier="shelf")
        await store.evict(1, "ram")
        spec = await store.spec(1, "params/w0")  # of the nearest tier that TensorStore reads
        assert str(tmp_path / "disk") in str(spec)
        restored = await store.restore()
    assert restored is not None
    assert restored.sources == {"shelf": restored.sources["shelf"]}


async def test_other_stores_are_put_below_every_slower_tier_in_a_block_alone(tmp_path: Path) -> None:
    settings = load({"tiers": {"disk": {"kind": "posix", "path": tmp_path / "disk"}}})
    seen: list[str] = []

    async def opened(tier: TierConfig, opening: Opening) -> BlobStore:
        seen.append(tier.name)
        return await opening()

    with tiers_opened_by(opened):
        async with CheckpointStore.open(settings) as store:
            await store.save(1, tree(1))
    async with CheckpointStore.open(settings, read_only=True) as store:
        assert [step.step for step in await store.steps()] == [1]
    assert seen == ["disk"]


async def test_ram_is_opened_by_the_engine_alone() -> None:
    (nearest,) = load({"store": {"name": "x"}, "tiers": {"ram": {"kind": "ram"}}}).tiers
    with pytest.raises(TierUnavailable, match="not known yet whose RAM it is"):
        await kind_of(nearest).open(nearest)
