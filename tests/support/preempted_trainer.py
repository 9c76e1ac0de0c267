"""A trainer in a process of its own that is warned by SIGTERM, as on a spot machine.

``python preempted_trainer.py CONFIG SECONDS`` saves steps and prints ``saved N`` after each, until it is warned; then
it saves one step more, and leaves it to `preemption` to make that durable within the seconds.
"""

from __future__ import annotations

import json
import sys
import time

from support.scenes import tree
from tieredckpt import CheckpointStore
from tieredckpt.preempt import preemption


def main(config: str, seconds: str) -> None:
    store = CheckpointStore.open(json.loads(config)).sync()
    with store, preemption(store, seconds=float(seconds)) as notice:
        step = 0
        while True:
            step, last = step + 1, notice.raised
            store.save(step, tree(step))
            sys.stdout.write(f"saved {step}\n")
            sys.stdout.flush()
            if last:
                return
            while step == 3 and not notice.raised:
                time.sleep(0.01)  # a long step of training


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
