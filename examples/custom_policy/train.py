"""Trains with the policies of this package, which ckpt.toml names only by their kind."""

from __future__ import annotations

import numpy as np

from tieredckpt import CheckpointStore


def main() -> None:
    with CheckpointStore.open("ckpt.toml").sync() as store:
        restored = store.restore()
        weights = restored.tree["weights"] if restored else np.zeros(1000)
        first = restored.step + 1 if restored else 1
        for step in range(first, first + 10):
            weights = weights + step
            store.save(step, {"weights": weights})
        store.flush()
        kept = [info.step for info in store.steps() if "disk" in info.tiers]
    print(f"steps {first} to {first + 9}; on disk: {kept}")


if __name__ == "__main__":
    main()
