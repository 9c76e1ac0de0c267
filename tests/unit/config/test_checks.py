"""A store warns of probable mistakes in its configuration, and refuses tiers that can hold no step."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from support.scenes import config, folder, ram, tree
from tieredckpt_policies import retention

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig, load
from tieredckpt.config.checks import probable_mistakes
from tieredckpt.errors import Invalid
from tieredckpt.policy.base import Retention, StoreView, TierView


def disk(**more: Any) -> dict[str, Any]:
    return {"tiers": {"disk": {"kind": "posix", "path": "/d", **more}}}


class KeepsNothing(Retention):
    kind: Literal["test_keeps_nothing"] = "test_keeps_nothing"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset()


class Fails(Retention):
    kind: Literal["test_fails"] = "test_fails"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        raise ZeroDivisionError("a policy with a bug")


class Above(Retention):
    kind: Literal["test_above"] = "test_above"
    least: float

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.line_on(tier.name) if step.metrics["accuracy"] > self.least)


class After(Retention):
    kind: Literal["test_after"] = "test_after"
    step: int

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.line_on(tier.name) if step.step > self.step)


class Chosen(Retention):
    kind: Literal["test_chosen"] = "test_chosen"
    steps: tuple[int, ...]

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.line_on(tier.name) if step.step in self.steps)


class Numbers(Retention):
    kind: Literal["test_numbers"] = "test_numbers"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.step for step in store.line_on(tier.name))


class Pairs(Retention):
    kind: Literal["test_pairs"] = "test_pairs"

    def retains(self, tier: TierView, store: StoreView) -> Any:
        return [[step.serial, step.step] for step in store.line_on(tier.name)]


class Endless(Retention):
    kind: Literal["test_endless"] = "test_endless"

    def retains(self, tier: TierView, store: StoreView) -> Any:
        return itertools.count()


@pytest.mark.parametrize(
    ("retain", "told"),
    [
        (Numbers(), r"`test_numbers` keeps no step: what retains\(\) gives, such as \d+, is the serial of none"),
        (Pairs(), r"`test_pairs` keeps no step: what retains\(\) gives, such as \[.*\], is the serial of none"),
        (Endless(), r"`test_endless` keeps no step: retains\(\) gives a count; give a frozenset of serials"),
        (KeepsNothing(), "`test_keeps_nothing` keeps no step, not even one that was just saved; let it keep one"),
        (Chosen(steps=()), "`test_chosen` keeps no step"),
    ],
)
def test_a_retention_that_keeps_nothing_is_refused_before_the_first_save(retain: Retention, told: str) -> None:
    with pytest.raises(Invalid, match=f"^tiers.disk.retain: {told}"):
        load(disk(retain=retain))


@pytest.mark.parametrize(
    ("keep", "told"),
    [(KeepsNothing(), "`test_keeps_nothing` keeps no step"), (Fails(), "`test_fails` fails on a sample of steps")],
)
def test_a_retention_of_an_export_that_keeps_nothing_is_probably_a_mistake(keep: Retention, told: str) -> None:
    export = {"format": "npz", "to": "/e", "keep": keep}
    ((place, text),) = probable_mistakes(load({**disk(), "exports": {"out": export}}))
    assert place == ("exports", "out", "keep")
    assert told in text


@pytest.mark.parametrize(
    "retain",
    [
        retention.EveryK(k=123_457),
        retention.Best(metric="anything"),
        retention.WithinAge(age=1e-6),
        retention.DenseThenSparse(),
        retention.Union(policies=(retention.EveryK(k=10**9),)),
        Chosen(steps=(777_777,)),
        Above(least=0.9),
        After(step=1000),
    ],
)
def test_a_retention_that_keeps_some_step_is_not_refused(retain: Retention) -> None:
    assert load(disk(retain=retain)).tiers[0].retain is retain


def test_a_retention_that_fails_on_a_sample_is_told_of_and_not_refused() -> None:
    ((place, text),) = probable_mistakes(load(disk(retain=Fails())))
    assert place == ("tiers", "disk", "retain")
    assert text.startswith("`test_fails` fails on a sample of steps (ZeroDivisionError: a policy with a bug)")


def tiers(**tiers: Any) -> StoreConfig:
    return load({"tiers": {"ram": {"kind": "ram"}, **tiers}})


def test_a_slower_tier_that_survives_less_is_told_of() -> None:
    nfs = {"kind": "posix", "path": "/nfs", "survives": "site"}
    nvme = {"kind": "posix", "path": "/nvme"}
    assert probable_mistakes(tiers(nvme=nvme, nfs=nfs)) == []
    ((place, text),) = probable_mistakes(tiers(nfs=nfs, nvme=nvme))
    assert place == ("tiers", "nvme")
    assert text.startswith("survives less (node) than the nearer tier nfs (site)")
    assert text.endswith("put it before nfs, or correct its `survives`")


def test_a_store_whose_steps_never_leave_ram_by_themselves_is_told_of() -> None:
    one = {"kind": "posix", "path": "/a", "promote": "never"}
    assert [place for place, _ in probable_mistakes(tiers(one=one))] == [("tiers", "one", "promote")]
    assert probable_mistakes(tiers(one=one, two={"kind": "posix", "path": "/b", "promote": "on_signal"})) == []


async def test_what_may_not_be_meant_is_logged_when_the_store_is_opened(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = config({"ram": ram(shared_memory), "disk": folder(tmp_path, promote="never")})
    async with CheckpointStore.open(store):
        assert "configuration: tiers.disk.promote: is `never` like that of every slower tier" in caplog.text


async def test_a_store_none_of_whose_tiers_can_hold_the_newest_step_is_refused_at_open(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def store(**far: Any) -> StoreConfig:
        disk = folder(tmp_path / "disk", capacity="64 KiB", promote="never")
        return config(
            {"ram": ram(shared_memory, on_close="keep"), "disk": disk, "far": folder(tmp_path / "far", **far)}
        )

    async with CheckpointStore.open(store(promote="never")) as opened:
        await opened.save(1, tree())
    with pytest.raises(Invalid) as refused:
        await CheckpointStore.open(store(capacity="128 KiB"))
    first, second = str(refused.value).splitlines()
    assert re.fullmatch(
        r"tier 'disk' with its 64 KiB cannot hold a step as large as step 1 \(serial 1\), 19\d\.?\d* KiB; "
        r"raise its capacity, or take the tier out",
        first,
    )
    assert second.startswith("tier 'far' with its 128 KiB")
    caplog.clear()
    async with CheckpointStore.open(store()) as opened:  # one tier is enough; the log names the other
        assert "tier 'disk' with its 64 KiB cannot hold" in caplog.text
        await opened.flush()
        assert await opened.where(1) == ("ram", "far")
