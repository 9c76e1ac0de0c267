"""A simulation reproduces theory, spends every second once, and asks the engine's own questions."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.config import load
from tieredckpt.engine.tier.held import HeldSteps
from tieredckpt.errors import Invalid
from tieredckpt.plan import simulate as simulation
from tieredckpt.plan.actions import Action
from tieredckpt.plan.cluster import Failure, failures
from tieredckpt.plan.figures import Figures
from tieredckpt.plan.model import Risk, daly, ettr, young
from tieredckpt.plan.picture import Point, draw
from tieredckpt.plan.scenario import Kind, Scenario, derived_rungs, rungs
from tieredckpt.plan.simulate import simulate
from tieredckpt.plan.world import World
from tieredckpt.policy import Observed, Schedule, StoreView
from tieredckpt.policy.steps import ByAge, StepView, StepViews

GB = 10**9


def scenario(
    tiers: dict[str, Any],
    mtbf: dict[Kind, float],
    *,
    schedule: object = "always",
    step: float = 10.0,
    state: int = GB,
    restart: float = 20.0,
    rates: dict[str, float] | None = None,
    **others: Any,
) -> Scenario:
    config = load({"store": {"name": "simulated", "schedule": schedule}, "tiers": tiers})
    return Scenario(config, state, step, 1, rungs(config, state, 1, rates or {}, {}), mtbf, restart, **others)


def one_tier(interval: float, stall: float, mtbf: float) -> Scenario:
    """Every training step is one interval, and every save lies where nothing is lost."""
    far = {"far": {"kind": "posix", "path": "/far", "survives": "site", "retain": {"kind": "last_n", "n": 1}}}
    return scenario(far, {"node": mtbf}, step=interval, rates={"far": GB / stall})


LADDER: dict[str, Any] = {
    "ram": {"kind": "ram"},
    "nvme": {"kind": "posix", "path": "/nvme", "retain": {"kind": "last_n", "n": 2}},
    "far": {"kind": "posix", "path": "/far", "survives": "site", "promote": {"kind": "every", "interval": "5 min"}},
}
RATES = {"ram": 1.0 * GB, "nvme": 0.05 * GB, "far": 0.01 * GB}


def ladder(mtbf: dict[Kind, float], **settings: Any) -> Scenario:
    return scenario(LADDER, mtbf, schedule={"kind": "every", "interval": 60}, rates=RATES, **settings)


def test_with_one_tier_the_curve_and_its_optimum_are_dalys() -> None:
    stall, mtbf, count = 10.0, 1000.0, 500
    best = daly(stall, mtbf)
    simulated = {}
    for factor in (0.3, 0.6, 1.0, 1.7, 3.5):
        interval = best * factor
        risk = Risk(mtbf, interval + stall, 0.0, 20.0 + stall)  # the state is read as fast as it is written
        found = simulate(one_tier(interval, stall, mtbf), count * mtbf, seed=1)
        assert found.ettr == pytest.approx(ettr(interval, stall, [risk]), rel=0.015)
        simulated[factor] = found.ettr
    assert max(simulated.values()) <= simulated[1.0] * 1.02
    assert simulated[1.0] > simulated[0.3] * 1.02
    assert simulated[1.0] > simulated[3.5] * 1.02
    youngs = simulate(one_tier(young(stall, mtbf), stall, mtbf), count * mtbf, seed=1).ettr
    assert youngs == pytest.approx(simulated[1.0], rel=0.02)


def parts(figures: Figures) -> float:
    return figures.productive + figures.lost + figures.stalls + figures.restarts + figures.restoring


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    mtbf=st.floats(100, 5000),
    repair=st.floats(10, 3000),
    changed=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_second_is_spent_once(seed: int, mtbf: float, repair: float, changed: float) -> None:
    asked = ladder(
        {"process": mtbf, "node": 2 * mtbf, "rack": 20 * mtbf},
        changed=changed,
        tier_mtbf={"nvme": 4000.0, "far": 2000.0},
        tier_repair=repair,
    )
    found = simulate(asked, 10_000.0, seed=seed)
    assert parts(found) == pytest.approx(10_000.0)
    assert min(found.productive, found.lost, found.stalls, found.restarts, found.restoring) >= 0
    assert 0 <= found.ettr <= 1


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "every", "interval": 60},
        {"kind": "every_n_steps", "n": 70},
        {"kind": "young_daly", "mtbf": "1 h"},
        {"kind": "bounded_overhead", "percent": 2},
        "always",
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [0.7, 1])
def test_steps_taken_at_once_give_the_figures_of_steps_taken_one_by_one(
    schedule: Any, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scenario(
        LADDER, {"process": 4000, "node": 7000}, schedule=schedule, rates=RATES, step=step, tier_mtbf={"far": 5000}
    )
    questions = []
    due = World.due
    monkeypatch.setattr(World, "due", lambda *about: questions.append(about) or due(*about))
    coarse, coarsely = simulate(asked, 20_000, seed=1), len(questions)
    questions.clear()
    monkeypatch.setattr(simulation, "_AT_ONCE", 0.0)
    fine, finely = simulate(asked, 20_000, seed=1), len(questions)
    if schedule != "always":
        assert coarsely < 0.6 * finely
    if step == 1:  # whose multiples are exact
        assert coarse == fine
    assert coarse.failures == fine.failures
    assert coarse.saves == pytest.approx(fine.saves, rel=0.01)
    assert coarse.ettr == pytest.approx(fine.ettr, rel=1e-3)
    assert coarse.tiers["far"].promoted == pytest.approx(fine.tiers["far"].promoted, rel=0.03)


class Sevenths(Schedule):
    """Due at some steps, and no longer after them."""

    kind: Literal["sevenths"] = "sevenths"

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        return step % 7 == 0


def test_a_schedule_that_does_not_stay_due_is_asked_about_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scenario(LADDER, {"process": 4000}, rates=RATES, step=1)
    asked = dataclasses.replace(asked, config=asked.config.model_copy(update={"schedule": Sevenths()}))
    coarse = simulate(asked, 5_000, seed=1)
    monkeypatch.setattr(simulation, "_AT_ONCE", 0.0)
    assert coarse == simulate(asked, 5_000, seed=1)


def test_the_same_seed_gives_the_same_figures_and_another_gives_others() -> None:
    asked = ladder({"process": 900, "node": 1500}, tier_mtbf={"far": 5000})
    assert simulate(asked, 50_000, seed=3) == simulate(asked, 50_000, seed=3)
    assert simulate(asked, 50_000, seed=3) != simulate(asked, 50_000, seed=4)


def test_without_failures_only_saves_take_time() -> None:
    found = simulate(ladder({}), 10_000)
    assert found.lost == found.restarts == found.restoring == 0
    assert found.ettr == pytest.approx(1 - found.saves / 10_000, abs=0.002)  # a second each


def test_a_failure_takes_what_the_tiers_do_not_survive() -> None:
    for kind, source in (("process", "ram"), ("node", "nvme"), ("rack", "far"), ("site", "far")):
        heard: list[Action] = []
        simulate(ladder({}), 2000.0, trace=[Failure(1500.0, kind)], hear=heard.append)
        assert [action.tier for action in heard if action.what == "restored"] == [source]


def test_a_job_whose_tiers_all_die_with_it_begins_anew() -> None:
    asked = scenario({"ram": LADDER["ram"]}, {}, schedule={"kind": "every", "interval": 60}, rates={"ram": GB})
    found = simulate(asked, 1000.0, trace=[Failure(505.0, "node")])
    assert found.from_nothing == 1
    assert found.lost == pytest.approx(505.0, abs=10)
    assert found.lost + found.productive == pytest.approx(1000 - 20 - found.stalls)


def test_a_tier_that_is_away_gets_its_steps_later() -> None:
    far = scenario(
        {"ram": LADDER["ram"], "far": LADDER["far"] | {"promote": "always"}},
        {},
        schedule={"kind": "every", "interval": 100},
        rates={"ram": 10.0 * GB, "far": 1.0 * GB},
    )
    away = dataclasses.replace(far, tier_mtbf={"far": 500.0}, tier_repair=400.0)
    always, sometimes = simulate(far, 50_000), simulate(away, 50_000)
    assert 0 < sometimes.tiers["far"].promoted < always.tiers["far"].promoted


def test_a_busy_shared_tier_slows_a_restore() -> None:
    tiers = {
        "near": {"kind": "posix", "path": "/near", "survives": "site"},
        "far": {"kind": "posix", "path": "/far", "survives": "site"},
    }
    alone = scenario({"near": tiers["near"]}, {}, rates={"near": 0.1 * GB}, step=100.0)
    busy = scenario(tiers, {}, rates={"near": 0.1 * GB, "far": 0.1 * GB}, step=100.0)
    trace = [Failure(115.0, "process")]  # the one step there is lies on the near tier alone
    one, two = (simulate(asked, 1000.0, trace=trace).restores["near"].mean for asked in (alone, busy))
    assert one == pytest.approx(10)
    assert two == pytest.approx(20)  # it is promoted to the far tier meanwhile


def test_failures_of_many_nodes_come_at_the_sum_of_their_rates_and_in_their_shares() -> None:
    seen = list(takewhile(lambda each: each.at < 1e6, failures({"node": 100.0, "rack": 300.0}, random.Random(5))))
    assert len(seen) == pytest.approx(1e6 * (1 / 100 + 1 / 300), rel=0.03)
    assert sum(each.kind == "rack" for each in seen) / len(seen) == pytest.approx(0.25, rel=0.05)
    assert [each.at for each in seen] == sorted(each.at for each in seen)
    assert not list(islice(failures({}, random.Random(5)), 1))


def test_no_time_and_no_tier_are_refused() -> None:
    with pytest.raises(Invalid, match="longer"):
        simulate(ladder({}), 0)
    with pytest.raises(Invalid, match="smaller than the state"):
        simulate(scenario({"ram": {"kind": "ram", "capacity": "16 MiB"}}, {}), 100)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_equal_simulations_draw_equal_pictures(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    found = simulate(ladder({"node": 900}), 5000)
    points = [Point(10.0, 0.8, 0.81), Point(100.0, 0.7, 0.71)]
    for name in ("one", "two"):
        draw(tmp_path / f"{name}{suffix}", found, points)
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_copies_in_other_nodes_ram_answer_the_loss_of_a_node_once_they_are_whole() -> None:
    config = load(
        {
            "store": {"name": "copied", "schedule": {"kind": "every", "interval": 60}},
            "tiers": {"ram": {"kind": "ram", "replicas": 2, "rate_limit": "5 MB/s"}},
        }
    )

    def restored(at: float, kind: Kind, nodes: int) -> list[int]:
        made = rungs(config, GB, nodes, {"ram": 10.0 * GB}, {})
        asked = Scenario(config, GB, 10.0, nodes, made, {}, 20.0)
        heard: list[Action] = []
        simulate(asked, 1000.0, trace=[Failure(at, kind)], hear=heard.append)
        return [action.step for action in heard if action.what == "restored"]

    assert restored(105.0, "node", 10) == [6]  # saved after 60 s, copied at 10 x 5 MB/s in 20 s
    assert restored(65.0, "node", 10) == []
    assert restored(65.0, "process", 10) == [6]
    assert restored(105.0, "rack", 10) == []
    assert restored(105.0, "node", 1) == []  # there is no other node


def test_a_training_step_costs_a_simulation_no_more_with_many_steps_on_a_tier() -> None:
    def looks(retained: int) -> int:
        tiers = {"far": {"kind": "posix", "path": "/far", "retain": {"kind": "last_n", "n": retained}}}
        asked = scenario(tiers, {}, schedule={"kind": "every", "interval": 5}, step=0.1, rates={"far": 1e12})
        made = 0
        look = StepViews._seen

        def counted(views: StepViews, step: StepView) -> StepView:
            nonlocal made
            made += 1
            return look(views, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepViews, "_seen", counted)
            simulate(asked, 300.0)
        return made

    assert looks(50) <= 100 * 300 / 5 + looks(1)  # of 3,000 training steps; each save looks at what is retained


def test_a_save_costs_a_simulation_no_more_with_many_steps_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without failures, nobody goes through the steps of a tier that keeps all."""
    looked = 0

    def counting(goes: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def counted(steps: Any) -> Iterator[Any]:
            nonlocal looked
            for step in goes(steps):
                looked += 1
                yield step

        return counted

    for kind in (ByAge, HeldSteps):
        for name in ("__iter__", "__reversed__"):
            monkeypatch.setattr(kind, name, counting(getattr(kind, name)))

    def looks(seconds: float) -> int:
        nonlocal looked
        looked = 0
        keeping = {"promote": "always", "retain": "all"}
        disk, far = ({"kind": "posix", "path": path, **keeping} for path in ("/disk", "/far"))
        rates = {"ram": 1e12, "disk": 1e12, "far": 1e12}
        asked = scenario({"ram": {"kind": "ram"}, "disk": disk, "far": far}, {}, step=5.0, rates=rates)
        assert simulate(asked, seconds).tiers["far"].promoted == pytest.approx(seconds / 5, abs=2)
        return looked

    assert looks(4000.0) < 5 * looks(1000.0)


SEVEN_BITS = [{"keys": ["**"], "max_error": "0.4%"}]


def with_lossy(mtbf: dict[Kind, float], archive: dict[str, Any], rates: dict[str, float], **others: Any) -> Scenario:
    """The ladder, and an archive of lossy copies."""
    place = {"kind": "posix", "path": "/archive", "survives": "site", "codec": "small", "lossy": SEVEN_BITS}
    made = scenario({**LADDER, "archive": place | archive}, mtbf, rates=RATES | rates, schedule=EVERY_MINUTE, **others)
    return dataclasses.replace(made, derived=derived_rungs(made.config, GB, 1, RATES | rates, {}))


EVERY_MINUTE = {"kind": "every", "interval": "1 min"}


def test_lossy_tiers_fill_by_their_own_policies_and_speed() -> None:
    archive = {"promote": {"kind": "every", "interval": "10 min"}, "retain": {"kind": "last_n", "n": 3}}
    found = simulate(with_lossy({}, archive, {"archive": 0.05 * GB}), 86400.0)
    lossy = found.tiers["archive"]
    assert lossy.promoted == pytest.approx(144, abs=5)
    assert lossy.evicted == lossy.promoted - 3
    assert lossy.peak == pytest.approx(3.5 * 0.382 * GB, rel=0.2), "three, and one more while it comes"
    assert "archive" not in found.restores
    fill = [nbytes for _, nbytes in found.fill["archive"]]
    assert fill[0] == 0
    assert fill[-1] == pytest.approx(3 * 0.382 * GB, rel=0.01)


def test_nothing_is_restored_from_a_lossy_tier_and_what_it_has_stays() -> None:
    """The disks of the node go with it, and the archive has newer steps than the shared folder."""
    found = simulate(with_lossy({"site": 7200.0, "node": 3600.0}, {"retain": "all"}, {"archive": GB}), 86400.0)
    assert found.failures["site"] > 3
    assert found.restores.keys() <= {"ram", "nvme", "far"}
    fill = [nbytes for _, nbytes in found.fill["archive"]]
    assert fill == sorted(fill), "it survives"


def test_a_lossy_tier_of_a_capacity_and_with_outages_holds_no_more_than_fits() -> None:
    asked = with_lossy({"node": 7200.0}, {"retain": "all", "capacity": "2 GB"}, {}, tier_mtbf={"far": 50_000.0})
    asked = dataclasses.replace(asked, tier_mtbf={"archive": 7200.0})
    found = simulate(asked, 3 * 86400.0)
    assert found.tiers["archive"].evicted > 0
    assert 1.5 * GB < found.tiers["archive"].peak <= 2 * GB


def test_a_slow_lossy_tier_gets_fewer_steps() -> None:
    fast, slow = (
        simulate(with_lossy({}, {"promote": "always"}, {"archive": rate, "nvme": GB}), 3600.0)
        for rate in (GB, 0.001 * GB)
    )
    assert fast.tiers["archive"].promoted > 50
    assert 0 < slow.tiers["archive"].promoted < 15
