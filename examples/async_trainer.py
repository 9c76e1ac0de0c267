"""An asynchronous trainer: policies in a `StoreConfig`, metrics, `due()`, and events as they happen.

Every tenth step is saved. RAM keeps the last two; the folder `fast` gets all of them and keeps three; the
folder `archive` gets every fiftieth and keeps the best by loss beside the newest.
"""

from __future__ import annotations

import asyncio

import numpy as np

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.config import load
from tieredckpt.events import Event, StepPromoted, TierFailed
from tieredckpt.units import format_duration, format_size

STEPS = 100


def configuration() -> StoreConfig:
    """The configuration; a .toml file could hold the same."""
    return load(
        {
            "store": {"schedule": {"kind": "every_n_steps", "n": 10}},
            "tiers": {
                "ram": {"kind": "ram", "retain": {"kind": "last_n", "n": 2}},
                "fast": {"kind": "posix", "path": "fast", "retain": {"kind": "last_n", "n": 3}},
                "archive": {
                    "kind": "posix",
                    "path": "archive",
                    "promote": {"kind": "every_n_steps", "n": 50},
                    "retain": {
                        "kind": "union",
                        "policies": [
                            {"kind": "last_n", "n": 1},
                            {"kind": "best", "metric": "loss", "n": 1, "mode": "min"},
                        ],
                    },
                },
            },
        }
    )


def show(event: Event) -> None:
    """Print an event; called in the store's own thread, so it only prints."""
    if isinstance(event, StepPromoted):
        took = format_duration(event.seconds)
        print(f"step {event.step} is on {event.tier}: {format_size(event.written)} written in {took}")
    elif isinstance(event, TierFailed):
        print(f"{event.tier} failed, next try in {format_duration(event.retry_in)}: {event.error}")


def train(weights: np.ndarray, step: int) -> float:
    """One step of gradient descent on a noisy quadratic; returns the loss."""
    noise = np.random.default_rng(step).normal(size=weights.shape)
    weights -= 0.05 * (weights - 1 + 0.1 * noise)
    return float(((weights - 1) ** 2).mean())


async def main() -> None:
    """Train to the end, from the last run's newest step."""
    state = {"weights": np.zeros(100_000)}
    async with CheckpointStore.open(configuration()) as store:
        store.subscribe(show)
        restored = await store.restore(into=state)
        first = restored.step + 1 if restored else 1
        print(f"training from step {first}")
        ckpt = None
        for step in range(first, STEPS + 1):
            loss = await asyncio.to_thread(train, state["weights"], step)
            if store.due(step):
                ckpt = await store.save(step, state, metrics={"loss": loss})
        if ckpt is not None:
            await ckpt.reached("archive")
        for info in await store.steps():
            print(f"step {info.step}: loss {info.metrics['loss']:.5f}, on {', '.join(info.tiers)}")


if __name__ == "__main__":
    asyncio.run(main())
