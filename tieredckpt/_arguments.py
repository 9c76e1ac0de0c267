"""Checks of what callers give: step numbers, metrics, patterns of keys."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from tieredckpt.errors import Invalid

__all__ = ["as_number", "checked_listener", "checked_metrics", "checked_patterns", "checked_step"]


def checked_listener(listener: Any) -> Any:
    """``listener`` as it is. Raises `Invalid` where a call of it would handle no event."""
    if not callable(listener) or inspect.iscoroutinefunction(listener):
        raise Invalid(f"a listener is a function that takes an event, and no coroutine function; not {listener!r}")
    return listener


def checked_step(step: Any) -> int:
    """``step`` as an int; also of NumPy. Raises `Invalid` for what is no step of a training."""
    try:
        # NumPy before 2.4 makes an index of its own bool, with a warning, and a float of an array of one.
        number = -1 if isinstance(step, bool) or str(getattr(step, "dtype", "")) == "bool" else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise Invalid(f"a step is a whole number from 0 on, not {step!r}")
    return number


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """``metrics`` as a new dict: numbers as float, but those of torch and jax as they are.

    The device may still compute these, so `as_number` converts them later, where nobody waits.

    Raises `Invalid`, naming the metric, for what is not one number by name.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise Invalid(f"metrics are numbers by name, such as {{'loss': 0.5}}, not {metrics!r}")
    for name in metrics:
        if not isinstance(name, str):
            raise Invalid(f"the metric {name!r} has a name that is no text; write {str(name)!r}")
        if not _is_utf8(name):
            raise Invalid(f"the metric {name!r} has a lone surrogate in its name; rename it")
    return {str(name): _number_or_tensor(name, value) for name, value in metrics.items()}


def as_number(name: str, value: Any) -> float:
    """The value of the metric ``name`` as a float. Raises `Invalid`, naming it, for what is no number."""
    try:
        library = type(value).__module__.partition(".")[0]
        if isinstance(value, str | bytes | bytearray) or (library == "numpy" and value.ndim):
            raise TypeError("neither text nor an array of NumPy is a number")
        if library == "torch" and hasattr(value, "detach"):
            value = value.detach()  # else PyTorch warns of a loss that has a gradient
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise Invalid(f"the metric {name!r} is a {kind}, which is no number; give a number, or leave it out") from error
    except OverflowError as error:
        raise Invalid(f"the metric {name!r} is too large for a float; scale it, or leave it out") from error


def checked_patterns(what: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """``patterns`` as a tuple. Raises `Invalid` for what is no sequence of text."""
    if isinstance(patterns, str | bytes) or not isinstance(patterns, Iterable):
        raise Invalid(f"{what}={patterns!r} is no sequence of keys and patterns; write [{patterns!r}]")
    found = tuple(patterns)
    for pattern in found:
        if not isinstance(pattern, str):
            raise Invalid(f"{what}: {pattern!r} is no key or pattern; those are text, such as 'params/**'")
    return found


def _number_or_tensor(name: str, value: Any) -> Any:
    import numpy as np

    is_foreign = hasattr(value, "shape") and not isinstance(value, np.ndarray | np.generic)
    return value if is_foreign and tuple(value.shape) == () else as_number(name, value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
