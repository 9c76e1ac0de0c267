"""Steps by age and by tier: a changed copy is what would be made anew, and costs little; views are made when asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.policy.steps import ByAge, Listing, StepView, StepViews
from tieredckpt.policy.views import StoreView, TierView

ages = st.tuples(st.integers(1, 30), st.integers(0, 1))


@settings(max_examples=200)
@given(st.lists(st.dictionaries(ages, st.none() | st.integers(0, 9), max_size=5), max_size=30))
def test_a_sequence_that_was_changed_is_one_made_anew_and_what_it_was_made_from_stays(
    history: list[dict[tuple[int, int], int | None]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tieredckpt.policy.steps._BLOCK", 4)
        patch.setattr("tieredckpt.policy.steps._FEW", 4)
        found, model = ByAge(), dict[tuple[int, int], StepView]()
        versions: list[tuple[ByAge, list[StepView]]] = []
        for changes in history:
            made = {
                age: None if nbytes is None else StepView(age[1], age[0], 0.0, 0.0, nbytes, {}, ())
                for age, nbytes in changes.items()
            }
            found = found.changed(made)
            model = {age: step for age, step in {**model, **made}.items() if step is not None}
            versions.append((found, [model[age] for age in sorted(model)]))
        for version, steps in versions:
            assert list(version) == steps == list(reversed(tuple(reversed(version))))
            assert [version[place] for place in range(len(version))] == steps
            assert (version[-3:], version[1:4:2]) == (tuple(steps[-3:]), tuple(steps[1:4:2]))
            with pytest.raises(IndexError):
                version[len(steps)]
        for serial in range(1, 31):
            assert found.find((serial, 0)) == model.get((serial, 0))


def test_deletions_leave_no_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change copies the tuple of all blocks."""
    monkeypatch.setattr("tieredckpt.policy.steps._BLOCK", 8)
    found = ByAge()
    for serial in range(256):
        found = found.changed({(serial, 0): StepView(0, serial, 0.0, 0.0, 0, {}, ())})
    for serial in range(256):
        found = found if serial % 16 == 0 else found.changed({(serial, 0): None})
    assert [step.serial for step in found] == [*range(0, 256, 16)]
    assert len(found._blocks) <= 8


def listed(steps: Sequence[StepView]) -> Listing:
    return Listing(("a", "b")).changed({(step.serial, step.step): step for step in steps})


def views(*serials: int) -> tuple[StepView, ...]:
    return tuple(
        StepView(serial, serial, 1000.0 * serial, 0.0, 1, {}, ("a",) * (serial % 2), serial % 3 > 0)
        for serial in serials
    )


def test_steps_seen_one_by_one_are_the_steps_seen_together() -> None:
    plain = views(*range(1, 9))
    now = 5500.0
    lazy = StepViews(listed(plain), now, {3: 2})
    made = tuple(lazy)
    assert [step.age for step in made] == [max(0.0, now - step.saved_at) for step in plain]
    assert [step.replicas for step in made] == [2 if step.serial == 3 else 1 for step in plain]
    assert tuple(reversed(StepViews(listed(plain), now, {3: 2}))) == made[::-1]
    assert (lazy[2:5], lazy[-1], lazy[0], len(lazy)) == (made[2:5], made[-1], made[0], len(made))
    assert lazy == made
    assert made == lazy
    assert lazy != made[1:]
    first, second = StoreView(now, lazy, ()), StoreView(now, made, ())
    assert first == second
    for tier in ("a", "b"):
        assert first.on(tier) == second.on(tier)
        assert first.line_on(tier) == second.line_on(tier)
        assert first.on(tier)[-2:] == second.on(tier)[-2:]
        assert first.serials_on(tier) == second.serials_on(tier) == {step.serial for step in second.on(tier)}
    assert first.newest == second.newest
    for serial in range(10):
        assert first.find((serial, serial)) == second.find((serial, serial))
    assert first.find((3, 4)) is second.find((3, 4)) is None


def test_a_store_with_one_more_copy_is_seen_as_it_would_be() -> None:
    tiers = tuple(TierView(name, index, "node", None, 0, None, True) for index, name in enumerate("ab"))
    listing, now = listed(views(*range(1, 9))), 5500.0
    before = StoreView(now, StepViews(listing, now, {7: 2}), tiers)
    plain = StoreView(now, tuple(before.steps), tiers)
    for step in plain.steps:
        with_one, as_plain = before.with_copy(step, "b"), plain.with_copy(step, "b")
        assert with_one == as_plain
        assert with_one.find((step.serial, step.step)) == replace(step, tiers=(*step.tiers, "b"))
        for tier in ("a", "b"):
            assert with_one.line_on(tier) == as_plain.line_on(tier)
        assert with_one.serials_on("b") == {step.serial}
    assert before == plain


def test_a_change_shares_all_but_a_block_with_what_it_was_made_from() -> None:
    """Else a save would cost more, the more steps are held."""
    before = listed(views(*range(1, 20_001))).steps
    after = before.changed({(20_001, 20_001): views(20_001)[0]}).changed({(7, 7): None})
    kept = {id(block) for block in before._blocks}
    assert sum(id(block) not in kept for block in after._blocks) <= 4
