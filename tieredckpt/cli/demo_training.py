"""The training that `tieredckpt demo` kills: a two-layer network on synthetic data, the same bits on every run.

It speaks JSON, a line an event: ``restored``, ``saved``, ``promoted``, ``failed`` (a tier), ``done`` (with a
digest of the weights). With ``--attended`` it waits for a line on stdin after every save, and ends when there
is none: so whoever started it decides at which step it dies, without a race.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.events import Event, StepPromoted, StepSaved, TierFailed
from tieredckpt.store import CheckpointStore
from tieredckpt.sync import SyncStore

__all__ = ["digest", "initial_state", "main", "train_step"]

Floats = npt.NDArray[np.float32]
State = dict[str, dict[str, Floats]]

_INPUTS, _HIDDEN, _OUTPUTS, _BATCH = 64, 4096, 32, 64
_RATE, _DECAY, _DECAY_SQUARED, _EPSILON = 1e-3, 0.9, 0.999, 1e-8
_SEED = 20


def initial_state() -> State:
    """Parameters and Adam's two moments, as float32 arrays: about 4.6 MiB."""
    random = np.random.default_rng(_SEED)
    params = {
        "w1": _normal(random, _INPUTS, _HIDDEN),
        "b1": np.zeros(_HIDDEN, np.float32),
        "w2": _normal(random, _HIDDEN, _OUTPUTS),
        "b2": np.zeros(_OUTPUTS, np.float32),
    }
    moments = {part: {key: np.zeros_like(value) for key, value in params.items()} for part in ("mean", "square")}
    return {"params": params, **moments}


def train_step(state: State, step: int) -> float:
    """Train on the batch of ``step``, in place; returns the loss."""
    random = np.random.default_rng([_SEED, step])
    inputs = random.standard_normal((_BATCH, _INPUTS), np.float32)
    wanted = np.sin(inputs[:, :_OUTPUTS] * 2) * inputs[:, -_OUTPUTS:]
    params = state["params"]
    hidden = np.maximum(inputs @ params["w1"] + params["b1"], 0)
    error = hidden @ params["w2"] + params["b2"] - wanted
    from_above = error * np.float32(2 / error.size)
    to_hidden = (from_above @ params["w2"].T) * (hidden > 0)
    gradients = {
        "w1": inputs.T @ to_hidden,
        "b1": to_hidden.sum(axis=0),
        "w2": hidden.T @ from_above,
        "b2": from_above.sum(axis=0),
    }
    for key, gradient in gradients.items():
        mean, square = state["mean"][key], state["square"][key]
        mean += np.float32(1 - _DECAY) * (gradient - mean)
        square += np.float32(1 - _DECAY_SQUARED) * (gradient * gradient - square)
        corrected = np.sqrt(square / np.float32(1 - _DECAY_SQUARED**step)) + np.float32(_EPSILON)
        params[key] -= np.float32(_RATE / (1 - _DECAY**step)) * mean / corrected
    return float((error * error).mean())


def _normal(random: np.random.Generator, inputs: int, outputs: int) -> Floats:
    return random.standard_normal((inputs, outputs), np.float32) * np.float32(inputs**-0.5)


def digest(state: Mapping[str, Mapping[str, Floats]]) -> str:
    """SHA-256 over every bit of the state."""
    found = hashlib.sha256()
    for part in sorted(state):
        for key in sorted(state[part]):
            found.update(f"{part}/{key}".encode())
            found.update(np.ascontiguousarray(state[part][key]).data)
    return found.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Train for ``--steps`` steps, without a store or with one."""
    parser = argparse.ArgumentParser(prog="python -m tieredckpt.cli.demo_training", description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--store", help="the configuration of a store; without one nothing is saved")
    parser.add_argument("--attended", action="store_true", help="wait for a line on stdin after every save")
    options = parser.parse_args(arguments)
    state = initial_state()
    tell = _teller()
    if options.store is None:
        loss = _train(state, range(1, options.steps + 1))
    else:
        opened = CheckpointStore.open(options.store).sync()
        opened.subscribe(lambda event: _tell_of(event, tell))
        with opened as store:
            loss = _train_with(store, state, options.steps, tell, attended=options.attended)
    tell({"event": "done", "loss": loss, "sha256": digest(state)})


def _train(state: State, steps: range) -> float:
    loss = float("nan")
    for step in steps:
        loss = train_step(state, step)
    return loss


def _train_with(
    store: SyncStore, state: State, steps: int, tell: Callable[[dict[str, Any]], None], *, attended: bool
) -> float:
    restored = store.restore(into=state)
    if restored is not None:
        tell({"event": "restored", "step": restored.step, "sources": dict(restored.sources)})
    loss = float("nan")
    for step in range(restored.step + 1 if restored else 1, steps + 1):
        loss = train_step(state, step)
        if store.due(step):
            store.save(step, state, metrics={"loss": loss})
            if attended and not sys.stdin.readline():
                raise SystemExit("whoever attended the training is gone")
    return loss


def _tell_of(event: Event, tell: Callable[[dict[str, Any]], None]) -> None:
    match event:
        case StepSaved(step=step, tier=tier, nbytes=nbytes, new_bytes=written, seconds=seconds):
            what = "saved"
        case StepPromoted(step=step, tier=tier, nbytes=nbytes, written=written, seconds=seconds):
            what = "promoted"
        case TierFailed(tier=tier, error=error):
            tell({"event": "failed", "tier": tier, "error": str(error)})
            return
        case _:
            return
    tell({"event": what, "step": step, "tier": tier, "nbytes": nbytes, "written": written, "seconds": seconds})


def _teller() -> Callable[[dict[str, Any]], None]:
    guards_stdout = threading.Lock()  # saves are told in the trainer's thread, promotions in the engine's

    def tell(event: dict[str, Any]) -> None:
        with guards_stdout:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()

    return tell


if __name__ == "__main__":
    main()
