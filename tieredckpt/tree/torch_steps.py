"""Hooks that run before a step of any torch optimizer. Imports torch; imported only for a tree of tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["before_each_step"]

_calls: list[Callable[[], None]] = []


def before_each_step(call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` on the thread of every optimizer's step, before the step; returns a function that stops this.

    This covers every subclass of ``torch.optim.Optimizer`` in this process, since torch itself wraps their steps. A
    step that a CUDA graph replays calls nothing.
    """
    _calls.append(call)

    def end() -> None:
        with suppress(ValueError):  # it was ended before
            _calls.remove(call)

    return end


def _before_step(*_: object) -> None:
    if _calls:  # a compiled step is compiled again when this changes
        _call_each()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _call_each() -> None:
    for call in tuple(_calls):
        call()


# For good: torch walks over its hooks while it calls them, and the step raises if one comes or goes meanwhile.
register_optimizer_step_pre_hook(_before_step)
