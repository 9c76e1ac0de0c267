"""Exports in tests: a store's tree, what an export has made of it, and writers that are replaced.

A test that takes ``open_store`` and ``paused`` finds both in ``tests/unit/engine/exporting/conftest.py``.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.frameworks import require
from tieredckpt import SyncStore, _registry
from tieredckpt.config.formats import GROUP
from tieredckpt.events import Event
from tieredckpt.interchange.safetensors import SAFETENSORS

__all__ = ["Open", "Paused", "exported", "heard", "names", "replace_writer", "stop_after_first_part", "tree"]

Open = Callable[..., SyncStore]


def tree(seed: int = 0) -> dict[str, Any]:
    """A state with what formats differ in: several dtypes, no items, no dimensions, a number."""
    rng = np.random.default_rng(seed)
    params = {
        "w": rng.standard_normal((300, 71)).astype(np.float32),
        "deep": rng.standard_normal((2, 3, 5, 7)).astype(np.float16),
        "b": np.arange(10, dtype=np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5),
    }
    return {"params": params, "opt": {"m": np.ones((50, 40), np.float32), "count": seed}}


def exported(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a folder of safetensors."""
    assert SAFETENSORS.read is not None
    return {name: np.array(value) for name, value in SAFETENSORS.read(path).items()}


def heard(store: SyncStore, kind: type[Event]) -> list[Any]:
    """The events of a kind, as they come."""
    found: list[Any] = []
    store.subscribe(lambda event: found.append(event) if isinstance(event, kind) else None)
    return found


def names(folder: Path) -> list[str]:
    """What lies in a folder; nothing where there is none."""
    return sorted(os.listdir(folder)) if folder.exists() else []


def replace_writer(monkeypatch: pytest.MonkeyPatch, stream: Callable[..., Any]) -> None:
    """Replace the function that writes exports whose format is safetensors."""
    (entry,) = _registry.offered(GROUP)["safetensors"]
    monkeypatch.setattr(require(entry.module), entry.attr, dataclasses.replace(SAFETENSORS, stream=stream))


def stop_after_first_part(step: Any, stop: Callable[[], None]) -> None:
    """Call ``stop`` on the thread that exports, behind the first part of everything that it asks to be read."""
    parts = step._parts

    def stopping(*arguments: Any, **named: Any) -> Any:
        for at, piece in enumerate(parts(*arguments, **named)):
            yield piece
            if not at:
                stop()

    step._parts = stopping


class Paused:
    """Replaces the writing of safetensors by one that waits after its first file was begun, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.when_given_up = False
        assert SAFETENSORS.stream is not None
        write = SAFETENSORS.stream

        def stream(step: Any, files: Any, **options: Any) -> Any:
            def wait() -> None:
                self.begun.set()
                while not (self.go_on.wait(0.01) or (self.when_given_up and step.given_up)):
                    pass

            stop_after_first_part(step, wait)
            return write(step, files, **options)

        replace_writer(monkeypatch, stream)
