"""Promise 6: which copy of which step may be deleted, whatever a policy proposes.

`Evictor.evict` asks this rule for every eviction. These deletions of manifests, packs and memory do not ask it:

- `Evictor.evict` with ``deleted``: a person deletes a step; `check_deletable` was asked before, unless with ``force``.
- `Evictor.drop_part`: a rank's part of a step that is not committed, or that rank 0 has evicted for all ranks.
- `Evictor.find_out`: repeats an eviction that this rule permitted and whose outcome is unknown; it asks again first.
- `Evictor.drop_unreadable`: a step in RAM whose index is damaged, and not in memory either, is no good copy.
- `Collector`: packs and index nodes that no step refers to, and commits that come late of steps that this process has
  evicted or failed to commit; one that it does not know stays, and is read.
- `commit_file`: a failed first commit, or one in the place of a stale step, and the nodes of a commit that a newer one
  of the same step replaces.
- `Replication`: replicas in RAM, which never count as durable; the last fully replicated step stays.
- `opening.scan`: steps in RAM that cannot be read, or whose extents overlap others.
- `ranks.ram_of_ranks`: RAM that ranks left, once the rule permits it for each of their steps, whole here or not.
- `opening.stale`: RAM that another run has overtaken, after the shared tiers were compared with it.
- `ranks.commit`: parts of a step on a shared tier, after its merged manifest was written.
- The lease, catalogs and mailboxes hold no copy of a step.
"""

from __future__ import annotations

from collections.abc import Collection

from tieredckpt.blobs.base import Survives
from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["check_deletable", "check_unpinned", "check_unread", "why_kept"]


def why_kept(state: State, step: StepId, tier: Tier) -> str:
    """Why the copy of ``step`` on ``tier`` must stay, and what to do; empty when it may go.

    A copy may go only if afterwards a tier that answers and survives at least as much still holds this step, or a
    newer one of the branch, which a restore would rather take; a pinned one may not go at all. So the newest step on a
    durable tier stays until a newer one is committed there, not merely until one lies in RAM; steps off the branch stay
    until a save that came after them is as safe; and a copy that is being deleted, or lacks chunks, counts no more. A
    copy that lacks chunks may itself go where any good step of the branch is as safe. For an agent RAM never counts,
    though it survives as much as some tiers do: the trainer lets a step leave it at any time, for the agent's tiers
    have it.
    """
    if tier.steps.readers.get(step):
        return f"{step} is being read from tier {tier.name!r}; try again when that has ended"
    if step in tier.steps.pinned:
        return f"{step} is pinned on tier {tier.name!r}; take the pin away first (`tieredckpt pin --off`)"
    if tier.outdated:
        return f"what tier {tier.name!r} holds is not known before it is read again; try again when it works"
    if _is_covered(state, step, tier):
        return ""
    return (
        f"{step} on tier {tier.name!r} is the last good copy that survives as much: "
        f"no other tier that answers holds it or a newer step; promote it, or a newer step, to another tier first"
    )


def _is_covered(state: State, step: StepId, tier: Tier, without: Collection[StepId] = ()) -> bool:
    """Whether the step, or a newer one of the branch, is as safe elsewhere; steps in ``without`` do not count."""
    of_ranks = tier.in_memory and state.membership.size == 1 and not tier.steps.has_own(step)
    survives = Survives.PROCESS if of_ranks else tier.survives  # RAM of this process may be a memfd
    for other in state.tiers:
        if state.membership.role is Role.AGENT and not state.manages(other):
            continue
        if other.survives < survives or other.outdated or not (other.answers or other is tier):
            continue
        not_good = other.steps.leaving | other.steps.impaired.keys() | state.deleting.keys()
        for held in reversed(other.steps.held):  # as a rule the newest is the last, and settles it
            newer = held.serial > step.serial or step in tier.steps.impaired  # which keeps no room from a good copy
            better = newer and state.on_line(held.serial)
            other_copy = held == step and other is not tier
            if (better or other_copy) and held not in not_good and held not in without:
                return True
    return False


def check_deletable(state: State, steps: Collection[StepId]) -> None:
    """Raise unless every copy of ``steps`` may be deleted, as a person asks without ``force``.

    Raises:
        Conflict: one is the newest step of the branch, they are all there is, or nothing newer is as safe.
        TierUnavailable: a tier that may hold one does not answer.
    """
    names = ", ".join(map(str, sorted(steps)))
    anyway = "to delete it all the same, pass force=True (--force)"
    if state.newest() in steps:
        raise Conflict(f"cannot delete {names}: it is the newest step of the branch, which a restore takes; {anyway}")
    if not state.records().keys() - steps:
        raise Conflict(f"cannot delete {names}: it is the last step there is; {anyway}")
    for tier in state.tiers:
        here = [step for step in steps if step in tier.steps.held or step in tier.steps.damaged]
        if not tier.answers and (here or tier.marker is None):
            raise TierUnavailable(
                f"cannot delete {names}: tier {tier.name!r} does not answer and may hold it ({tier.health.error}); try "
                f"again when it does, or pass force=True (--force) to delete it elsewhere"
            )
        if not all(_is_covered(state, step, tier, steps) for step in here if step in tier.steps.held):
            raise Conflict(
                f"cannot delete {names}: no newer step of the branch is on a tier that survives as much as "
                f"{tier.name!r}; wait until one is promoted, or pass force=True (--force)"
            )


def check_unpinned(steps: Collection[StepId], tier: Tier) -> None:
    """Raise `Conflict` where one of the steps is pinned on the tier."""
    for step in steps:
        if step in tier.steps.pinned:
            raise Conflict(
                f"cannot delete: {step} is pinned on tier {tier.name!r}; take the pin away first (`tieredckpt pin "
                f"--off`), or pass force=True (--force)"
            )


def check_unread(steps: Collection[StepId], tier: Tier) -> None:
    """Raise `Conflict` where a restore, a promotion or a verification reads one of the steps on the tier."""
    for step in steps:
        if tier.steps.readers.get(step):
            raise Conflict(
                f"cannot delete: {step} is being read from tier {tier.name!r}; try again when that has ended"
            )
