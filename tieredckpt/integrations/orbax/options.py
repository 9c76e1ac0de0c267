"""Translate Orbax's options: Orbax's policies decide when a save is due; retention becomes a policy of the store."""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbax.checkpoint import CheckpointManagerOptions
from orbax.checkpoint import checkpoint_managers as policies

from tieredckpt import Invalid, NotFound
from tieredckpt.config import load
from tieredckpt.config.tiers import url_scheme
from tieredckpt.policy.base import Retention, parse

__all__ = ["BEST", "MORE", "Known", "best_fn", "config_for", "due_policy", "is_place"]

_log = logging.getLogger("tieredckpt")

BEST = "orbax_best"
"""The metric that holds the result of ``best_fn`` for a step: policies are values, and run no function."""

MORE = "orbax_more"
"""The metric of a step with metrics that are not numbers: those lie in its tree."""


@dataclass(frozen=True, slots=True)
class Known:
    """A saved step as Orbax's policies see it."""

    step: int
    time: dt.datetime
    metrics: Mapping[str, Any] | None
    """The metrics that are numbers."""
    best: float | None = None
    """Result of ``best_fn`` at the save, for a step with metrics that are not numbers."""


def is_place(directory: Any) -> bool:
    """Whether the manager's directory is a plain folder or URL, which the options configure."""
    return isinstance(directory, str | os.PathLike) and not os.fspath(directory).endswith(".toml")


def config_for(directory: Any, options: CheckpointManagerOptions) -> Any:
    """The argument of `CheckpointStore.open`: the options decide what a plain folder or URL keeps, and nothing else."""
    retain = _retention(options)
    if not is_place(directory):
        if retain != {"kind": "all"}:
            _log.warning(
                "max_to_keep, keep_period, best_fn and preservation_policy say what a plain folder or URL keeps; a "
                "configuration says that itself, with retain: what they say is not done"
            )
        return directory
    text = os.fspath(directory)
    if not options.create and url_scheme(text) is None and not Path(directory).is_dir():
        raise NotFound(f"{directory} is not there, and create=False says not to make it")
    config = load(text)
    *nearer, durable = config.tiers
    durable = durable.model_copy(update={"retain": parse(Retention, retain)})
    return config.model_copy(update={"tiers": (*nearer, durable)})


def _retention(options: CheckpointManagerOptions) -> dict[str, Any]:
    if options.keep_time_interval is not None:
        raise Invalid(
            "keep_time_interval has no equal here; give a configuration with retain = "
            '{ kind = "dense_then_sparse", … } as the directory'
        )
    if options.preservation_policy is not None:
        return _preserved(options.preservation_policy)
    newest: Any = policies.LatestN(options.max_to_keep)
    if options.best_fn is not None:
        newest = policies.BestN(
            get_metric_fn=options.best_fn, reverse=options.best_mode == "min", n=options.max_to_keep
        )
    periodic = [] if options.keep_period is None else [policies.EveryNSteps(options.keep_period)]
    return _preserved(policies.AnyPreservationPolicy([newest, *periodic]))


def _preserved(policy: Any) -> dict[str, Any]:
    """Translate a policy of Orbax to the settings of one of ours."""
    everything = {"kind": "all"}
    if isinstance(policy, policies.AnyPreservationPolicy):
        found = [_preserved(each) for each in policy.policies]
        if everything in found:
            return everything
        return found[0] if len(found) == 1 else {"kind": "union", "policies": found}
    if isinstance(policy, policies.LatestN):
        return everything if policy.n is None else {"kind": "last_n", "n": policy.n}
    if isinstance(policy, policies.BestN):
        if policy.n is None:
            return everything
        best = {"kind": "best", "metric": BEST, "n": policy.n, "mode": "min" if policy.reverse else "max"}
        return {"kind": "union", "policies": [best, {"kind": "last_n", "n": 1}]}
    if isinstance(policy, policies.EveryNSteps) and getattr(policy, "max_to_keep", None) is None:
        return {"kind": "every_k", "k": policy.interval_steps}
    raise Invalid(
        f"the preservation policy {type(policy).__name__} has no equal here; give a configuration with retain as the "
        f"directory, or one of LatestN, EveryNSteps, BestN and AnyPreservationPolicy"
    )


def best_fn(options: CheckpointManagerOptions) -> tuple[Callable[[Any], float] | None, bool]:
    """The function that rates a step's metrics, and whether lower is better."""
    found = [options.preservation_policy, *getattr(options.preservation_policy, "policies", [])]
    for policy in found:
        if isinstance(policy, policies.BestN):
            return policy.get_metric_fn, policy.reverse
    return options.best_fn, options.best_mode == "min"


class _Function:
    """``should_save_fn`` as a policy."""

    def __init__(self, function: Callable[[int, int | None], bool]) -> None:
        self._function = function

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return self._function(step.step, previous_steps[-1].step if previous_steps else None)


def due_policy(options: CheckpointManagerOptions) -> Any:
    """The policy of Orbax that decides when a save is due."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    found: list[Any] = [policies.PreemptionCheckpointingPolicy()]
    if options.should_save_fn is not None:
        return policies.AnySavePolicy([_Function(options.should_save_fn), *found])
    found += [policies.FixedIntervalPolicy(options.save_interval_steps), policies.InitialSavePolicy()]
    if options.save_on_steps is not None:
        found.append(policies.SpecificStepsPolicy(options.save_on_steps))
    return policies.AnySavePolicy(found)
