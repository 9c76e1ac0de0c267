"""Helpers for torch's functions for optimizer states, which leave these cases to their caller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from tieredckpt import Invalid

__all__ = ["kept_on_error", "thawed", "with_groups_of", "without_steps"]


@contextmanager
def without_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Stop torch from initializing the state of an optimizer by a step that the training did not make."""
    own = vars(optimizer).get("step")
    optimizer.step = lambda closure=None: None
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:  # set by a scheduler
            optimizer.step = own


@contextmanager
def kept_on_error(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore the former state of the optimizers if the block fails."""
    before = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
    try:
        yield
    except BaseException:
        for optimizer, state in before:
            optimizer.state.clear()
            optimizer.state.update(state)
        raise


@contextmanager
def thawed(
    optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]], stored: Mapping[str, Any]
) -> Iterator[None]:
    """Set ``requires_grad``, during the block, of the parameters that have a state in a step.

    torch neither makes nor loads a state for frozen parameters. ``groups`` are the optimizer's, with the names of its
    parameters; ``stored`` is the state of each parameter, or a tree of specs like it.

    An optimizer that lacks a part of the state of one of them, because it makes that in its first step, loses the state
    of all, and torch makes all.
    """
    names = chain.from_iterable(group["params"] for group in groups)
    live = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    named = {name: param for name, param in zip(names, live, strict=True) if name in stored}
    params = named.values()
    if any(
        param not in optimizer.state or not _entries(stored[name]) <= _entries(optimizer.state[param])
        for name, param in named.items()
    ):
        optimizer.state.clear()
    frozen = [
        param for param in params if not param.requires_grad and (param.is_floating_point() or param.is_complex())
    ]
    try:
        for param in frozen:
            param.requires_grad_(True)
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _entries(state: Any) -> set[str]:
    """Names of what the state of a parameter consists of; none if it is no dict, such as one tensor."""
    return {*state} if isinstance(state, Mapping) else set()


def with_groups_of(name: str, live: Sequence[Mapping[str, Any]], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The ``stored`` state of the optimizer called ``name``, with its groups in the order of the optimizer's own.

    torch matches groups by position if no parameter has a state. Otherwise a group without stored settings gets none,
    and a group with several gets the last.

    Raises:
        Invalid: the parameters are in other groups than those that were saved; one is named.
    """
    order: list[Mapping[str, Any]] = []
    for group in live:
        mine = set(group["params"])
        found = [each for each in stored["param_groups"] if mine & {*each["params"]} or not (mine or each["params"])]
        if len(found) != 1 or any(each is found[0] for each in order):
            what = f"the group of {min(mine)!r}" if mine else "a group without parameters"
            raise _differ(name, what, stored, live)
        order.append(found[0])
    if len(order) < len(stored["param_groups"]):
        raise _differ(name, "a group of the step", stored, live)
    return {**stored, "param_groups": order}


def _differ(name: str, what: str, stored: Mapping[str, Any], live: Sequence[Mapping[str, Any]]) -> Invalid:
    return Invalid(
        f"part {name!r}: its parameters are in other groups than in the step, which has {len(stored['param_groups'])} "
        f"where the optimizer has {len(live)}: {what} is not one group there too. Make the optimizer with the groups "
        f"with which it was saved, and change them after the restore"
    )
