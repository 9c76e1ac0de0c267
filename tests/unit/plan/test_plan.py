"""What a plan says of a configuration follows from its policies, its sizes and its speeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tieredckpt.config import load
from tieredckpt.engine.inventory import ArrayInfo
from tieredckpt.errors import Invalid
from tieredckpt.plan.codecs import CodecGain, gains
from tieredckpt.plan.forecast import forecast
from tieredckpt.plan.measure import measure_copy, measure_tier
from tieredckpt.plan.scenario import Kind, Scenario, derived_rungs, rungs

GB = 10**9


def scenario(
    tiers: dict[str, Any],
    mtbf: dict[Kind, float] | None = None,
    *,
    interval: float = 60.0,
    nodes: int = 1,
    changed: float = 1.0,
    **rates: float,
) -> Scenario:
    schedule = {"kind": "every", "interval": interval}
    config = load({"store": {"name": "planned", "schedule": schedule}, "tiers": tiers})
    made = rungs(config, 100 * GB, nodes, rates, {})
    return Scenario(config, 100 * GB, 1.0, nodes, made, mtbf or {}, restart=30.0, changed=changed)


LADDER: dict[str, Any] = {
    "ram": {"kind": "ram"},
    "nvme": {"kind": "posix", "path": "/nvme", "retain": {"kind": "last_n", "n": 3}},
    "lustre": {
        "kind": "posix",
        "path": "/lustre",
        "survives": "site",
        "promote": {"kind": "every", "interval": "10 min"},
    },
}
SPEEDS = {"ram": 50.0 * GB, "nvme": 10.0 * GB, "lustre": 2.0 * GB}


def test_a_save_stalls_for_one_pass_over_the_state() -> None:
    found = forecast(scenario({"ram": LADDER["ram"], "nvme": LADDER["nvme"]}, ram=50.0 * GB, nvme=10.0 * GB))
    assert found.stall == pytest.approx(2.0)
    assert found.interval == pytest.approx(60.0, abs=3.0)


def test_each_failure_returns_from_the_nearest_tier_that_survives_it() -> None:
    found = forecast(scenario(LADDER, {"process": 1e5, "node": 1e5, "site": 1e6}, **SPEEDS))
    assert {loss.kind: loss.tier for loss in found.losses} == {
        "process": "ram",
        "node": "nvme",
        "rack": "lustre",
        "site": "lustre",
    }
    process, node, _, site = found.losses
    assert process.mean < node.mean < site.mean < site.worst
    assert process.restart == pytest.approx(30 + 2)
    assert site.restart == pytest.approx(30 + 50)


def test_a_tier_that_gets_a_step_every_ten_minutes_has_one_every_ten_minutes() -> None:
    lustre = forecast(scenario(LADDER, **SPEEDS)).tiers[2]
    assert lustre.period == pytest.approx(600, rel=0.15)
    assert lustre.lag >= 50


def test_nothing_survives_where_no_tier_does() -> None:
    found = forecast(scenario({"ram": LADDER["ram"]}, {"process": 1e4, "node": 1e4}, ram=50.0 * GB))
    assert [loss.tier for loss in found.losses] == ["ram", None, None, None]
    assert math.isinf(found.losses[1].mean)


def test_nodes_multiply_what_lies_in_them_and_not_what_they_share() -> None:
    tiers = {
        "ram": {"kind": "ram", "capacity": "1 TB"},
        "disk": {"kind": "posix", "path": "/n", "capacity": "1 TB"},
        "far": {"kind": "posix", "path": "/far", "capacity": "1 TB", "survives": "site"},
    }
    one, many = (scenario(tiers, nodes=nodes).rungs for nodes in (1, 10))
    assert many[0].capacity == 10 * (one[0].capacity or 0)
    assert many[0].write == 10 * one[0].write
    assert [rung.capacity for rung in many[1:]] == [rung.capacity for rung in one[1:]]  # all nodes see one folder


def test_what_does_not_change_takes_no_room_and_no_time_on_slower_tiers() -> None:
    dense, frozen = (forecast(scenario(LADDER, changed=changed, **SPEEDS)) for changed in (1.0, 0.1))
    assert frozen.tiers[1].nbytes == pytest.approx(100 * GB + 2 * 10 * GB, rel=0.01)
    assert dense.tiers[1].nbytes == 300 * GB
    assert frozen.tiers[1].busy < 0.3 * dense.tiers[1].busy
    assert frozen.stall == pytest.approx(dense.stall, rel=0.5)


def test_a_state_that_no_tier_can_take_is_refused() -> None:
    with pytest.raises(Invalid, match="smaller than the state"):
        forecast(scenario({"ram": {"kind": "ram", "capacity": "1 GB"}}))


def test_a_tier_that_does_not_exist_has_no_speed() -> None:
    with pytest.raises(Invalid, match=r"no tier 'lustr'.*nvme"):
        scenario(LADDER, lustr=1.0)


async def test_a_measurement_leaves_nothing_on_the_tier(tmp_path: Path) -> None:
    config = load({"tiers": {"disk": {"kind": "posix", "path": tmp_path / "disk"}}})
    write, read = await measure_tier(config.tiers[0], 1 << 20)
    assert write > 0
    assert read > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert await measure_copy(1 << 20) > 0


def with_codec(codec: str, speed: float, **settings: Any) -> Scenario:
    far = {**LADDER["lustre"], "codec": codec, **settings}
    return scenario({"ram": LADDER["ram"], "far": far}, ram=50.0 * GB, far=speed)


def test_a_codec_takes_less_room_and_is_faster_on_devices_that_are_slower_than_it() -> None:
    plain, small = (forecast(with_codec(codec, 0.4 * GB)) for codec in ("none", "small"))
    assert small.tiers[1].nbytes == pytest.approx(0.814 * plain.tiers[1].nbytes, abs=2)
    assert small.tiers[1].lag == pytest.approx(0.814 * plain.tiers[1].lag)
    assert small.tiers[1].restore == pytest.approx(0.814 * plain.tiers[1].restore)
    plain, small = (forecast(with_codec(codec, 5.0 * GB)) for codec in ("none", "small"))
    assert small.tiers[1].lag == pytest.approx(5 / 0.6 * plain.tiers[1].lag)  # as long as one thread compresses


def test_gains_say_from_which_speed_on_a_codec_takes_longer_than_it_saves() -> None:
    for codec in ("fast", "small"):
        limit = next(each.saves_time_below for each in gains(with_codec(codec, GB, codec_threads=2)) if each.chosen)
        for speed, saves in ((0.98 * limit, True), (1.02 * limit, False)):
            found = {each.codec: each for each in gains(with_codec(codec, speed, codec_threads=2))}
            assert (found[codec].seconds < found["none"].seconds) is saves
            assert found[codec].nbytes < found["none"].nbytes == 100 * GB
            assert found[codec].cpu_seconds > found["none"].cpu_seconds == 0


def test_a_simulated_tier_with_a_codec_holds_more_steps() -> None:
    held = [
        forecast(with_codec(codec, GB, capacity=5 * 82 * GB, retain="all", promote="always")).tiers[1].steps
        for codec in ("none", "small")
    ]
    assert held == [4, 5]


def test_lossy_copies_cost_their_bytes_and_their_cpu_time_and_count_for_no_failure() -> None:
    rules = [{"keys": ["**"], "max_error": "0.4%"}]
    far = LADDER["lustre"]
    tiers = {**LADDER, "archive": {**far, "path": "/archive", "codec": "small", "lossy": rules}}
    config = load({"store": {"name": "planned"}, "tiers": tiers})
    speeds = {**SPEEDS, "archive": GB / 2}
    made, derived = (find(config, 100 * GB, 1, speeds, {}) for find in (rungs, derived_rungs))
    asked = Scenario(config, 100 * GB, 1.0, 1, made, {"site": 1e6}, derived=derived)
    assert [tier.name for tier in forecast(asked).tiers] == ["ram", "nvme", "lustre"]
    assert {loss.kind: loss.tier for loss in forecast(asked).losses}["site"] == "lustre"
    found = {each.codec: each for each in gains(asked) if each.tier == "archive"}
    assert found["small"].chosen
    assert 0.35 * 100 * GB < found["small"].nbytes < 0.4 * 100 * GB < found["fast"].nbytes < 0.45 * 100 * GB
    assert found["none"].nbytes == 100 * GB
    assert found["small"].cpu_seconds == pytest.approx(100 * (1 / 0.6 + 1 / 0.7), rel=0.01)


def planned_lossy(
    rules: list[dict[str, Any]], codec: str, arrays: list[ArrayInfo] | None = None, speed: float = GB / 2
) -> Scenario:
    """100 GB, of which a tier keeps what the rules leave."""
    far = LADDER["lustre"]
    tiers = {**LADDER, "archive": {**far, "path": "/archive", "codec": codec, "lossy": rules}}
    config = load({"store": {"name": "planned"}, "tiers": tiers})
    speeds = {**SPEEDS, "archive": speed}
    derived = derived_rungs(config, 100 * GB, 1, speeds, {}, arrays)
    return Scenario(config, 100 * GB, 1.0, 1, rungs(config, 100 * GB, 1, speeds, {}), {}, derived=derived)


SEVEN_BITS = {"keys": ["params/**"], "max_error": "0.4%"}
DROPPED = {"keys": ["opt/**"], "drop": True}


def gains_of(scenario: Scenario) -> dict[str, CodecGain]:
    return {each.codec: each for each in gains(scenario) if each.tier == "archive"}


@pytest.mark.parametrize("rules", [[SEVEN_BITS], [DROPPED], [SEVEN_BITS, DROPPED]])
def test_no_codec_saves_no_time_on_a_tier_with_lossy_rules(rules: list[dict[str, Any]]) -> None:
    assert gains_of(planned_lossy(rules, "none"))["none"].saves_time_below == 0


@pytest.mark.parametrize("rules", [[SEVEN_BITS], [DROPPED], [SEVEN_BITS, DROPPED]])
def test_gains_on_lossy_tiers_say_as_well_from_which_speed_on_a_codec_takes_longer(rules: list[dict[str, Any]]) -> None:
    for codec in ("fast", "small"):
        limit = gains_of(planned_lossy(rules, codec))[codec].saves_time_below
        for speed, saves in ((0.98 * limit, True), (1.02 * limit, False)):
            found = gains_of(planned_lossy(rules, codec, speed=speed))
            assert (found[codec].seconds < found["none"].seconds) is saves


def test_what_is_dropped_is_neither_stored_nor_compressed() -> None:
    found = gains_of(planned_lossy([DROPPED], "small"))
    assert found["none"].nbytes == pytest.approx(100 * GB * 6 / 14, rel=0.01), "without Adam's two moments"
    assert found["small"].nbytes == pytest.approx(0.814 * found["none"].nbytes, rel=0.01)
    assert found["small"].cpu_seconds == pytest.approx(100 / 0.6 * 6 / 14, rel=0.01)


@pytest.mark.parametrize(("most", "share"), [(2e-6, 0.6), (2e-4, 0.35), (2e-3, 0.2)])
def test_an_absolute_bound_is_planned_as_for_values_of_the_size_of_weights(most: float, share: float) -> None:
    rule = {"keys": ["**"], "max_abs_error": most}
    assert gains_of(planned_lossy([rule], "small"))["small"].nbytes == pytest.approx(share * 100 * GB, rel=0.2)


def test_the_arrays_of_a_step_tell_what_rules_mean() -> None:
    def array(key: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> ArrayInfo:
        return ArrayInfo(key, dtype, shape, nbytes, 1, "numpy")

    arrays = [
        array("params/w", "float32", (1000, 1000), 4_000_000),
        array("params/b", "float32", (1_000_000,), 4_000_000),  # of one axis
        array("opt/m", "float32", (1000, 1000), 4_000_000),
        array("ids", "int64", (1000, 500), 4_000_000),
    ]
    found = gains_of(planned_lossy([SEVEN_BITS, DROPPED], "small", arrays))
    assert found["none"].nbytes == pytest.approx(75 * GB)
    assert found["small"].nbytes == pytest.approx((2 * 0.814 + 10.7 / 32) / 4 * 100 * GB, rel=0.01)
    assert found["small"].cpu_seconds == pytest.approx(75 / 0.6 + 25 / 0.7, rel=0.01)
    everything = [{"keys": ["**"], "drop": True}]
    assert gains_of(planned_lossy(everything, "small", arrays))["small"].nbytes == 0


def test_a_lossy_tier_is_as_fast_as_what_it_stores_and_holds_as_many_steps() -> None:
    (rung,) = planned_lossy([SEVEN_BITS, DROPPED], "small", speed=GB / 100).derived
    assert rung.share < 0.2
    assert rung.write == pytest.approx(GB / 100 / rung.share)
