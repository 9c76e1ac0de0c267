"""What a trainer learns of the tiers that its agent manages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.records import first_record
from support.scenes import config, folder, ram

from tieredckpt.engine.agent.deltas import adopt_tier, tier_deltas
from tieredckpt.engine.agent.messages import OnTier
from tieredckpt.engine.opening.connect import make_tiers
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.steps import IndeterminateDelete, Stale, Unreadable
from tieredckpt.engine.wire_types import decode, encode
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import Events
from tieredckpt.format.structure import NoneNode

STEP = first_record(NoneNode())


@pytest.fixture
def states(shared_memory: Path, tmp_path: Path) -> Iterator[tuple[State, State]]:
    """Of an agent, and of its trainer."""
    settings, events = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}), Events()
    with ExitStack() as until_end:
        pool = until_end.enter_context(ThreadPoolExecutor(1))
        scratch = until_end.enter_context(closing(Scratch(1 << 20)))

        def state() -> State:
            tiers, _ = make_tiers(settings, read_only=False, events=events)
            return State(settings, tiers, events, pool, scratch, read_only=False)

        yield state(), state()


@pytest.mark.parametrize(
    ("problem", "raised"),
    [
        (IndeterminateDelete("deleted, perhaps", Held(STEP, "btree")), TierUnavailable),
        (Unreadable("an unreadable file"), Corrupt),
        (Corrupt("torn"), Corrupt),
        (Stale("the training went on elsewhere", "btree", None), NotFound),
    ],
)
def test_a_trainer_knows_of_a_step_why_it_cannot_be_read(
    states: tuple[State, State], problem: TieredCkptError, raised: type[TieredCkptError]
) -> None:
    agent, trainer = states
    managed = agent.tiers[1]
    managed.steps.damaged.quarantine(STEP.id, problem, (), exactly=True)
    delta = tier_deltas(agent, managed).take()
    assert delta is not None
    tier = adopt_tier(trainer, decode(encode(delta), OnTier))
    assert str(tier.steps.damaged[STEP.id]) == str(problem)
    for state in states:
        with pytest.raises(raised) as error:
            state.find(1)
        assert type(error.value) is raised
    assert tier.steps.damaged.stale() == managed.steps.damaged.stale()
