"""A JAX training that donates its state is killed with SIGKILL, resumes, and ends with the same bits as without a kill.

Without arguments this starts itself as the trainer: once to be killed, once to resume, and once without a kill. ``train
STORE`` is the trainer, and ``train STORE 12`` one that waits to be killed after the twelfth step.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

from tieredckpt import CheckpointStore

STEPS, KILLED_AT = 20, 12


def train(path: str, long_after: int | None = None) -> None:
    """Train to the end, and save every second step; the one after ``long_after`` takes until the input ends."""
    import jax
    import jax.numpy as jnp

    def initial() -> dict[str, Any]:
        first, second, rest = jax.random.split(jax.random.key(0), 3)
        params = {"w1": jax.random.normal(first, (32, 4096)) / 6, "w2": jax.random.normal(second, (4096, 1)) / 64}
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0), "rng": rest}

    def loss_of(params: Any, inputs: Any) -> Any:
        outputs = jax.nn.relu(inputs @ params["w1"]) @ params["w2"]
        return jnp.mean((outputs - jnp.sum(inputs**2, axis=1, keepdims=True)) ** 2)

    def update(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        rng, batch = jax.random.split(state["rng"])
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], jax.random.normal(batch, (64, 32)))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 1e-4 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "step": state["step"] + 1, "rng": rng}, loss

    step_fn = jax.jit(update, donate_argnums=0)  # the new state takes the memory of the old one
    with CheckpointStore.open(path).sync() as store:
        restored = store.restore(like=jax.eval_shape(initial))  # shapes and dtypes suffice
        state = restored.tree if restored else initial()
        if restored:
            loss = restored.metrics["loss"]
            print(f"restored step {restored.step}", flush=True)
        for step in range(int(state["step"]) + 1, STEPS + 1):
            state, loss = step_fn(state)
            if step % 2 == 0:
                # The next step takes the memory of `state`, so JAX copies it first; the store reads that copy.
                ckpt = store.save(step, state, metrics={"loss": float(loss)}, capture="device")
                if step == long_after:
                    ckpt.reached("ram")
                    print(f"step {step} is in RAM", flush=True)
                    sys.stdin.read()
    bits = [jax.random.key_data(leaf) if leaf is state["rng"] else leaf for leaf in jax.tree.leaves(state)]
    digest = hashlib.sha256(b"".join(jax.device_get(leaf).tobytes() for leaf in bits))
    print(f"finished at step {STEPS}, loss {float(loss):.6f}, state {digest.hexdigest()[:16]}", flush=True)


def run(path: str, kill_at: int | None = None) -> None:
    """Run the trainer in a process of its own, and kill it as soon as the step ``kill_at`` is in RAM."""
    command = [sys.executable, __file__, "train", path, *([str(kill_at)] if kill_at else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        for line in trainer.stdout or ():
            print(f"  {line}", end="")
            if line == f"step {kill_at} is in RAM\n":
                trainer.kill()
                print("  killed")
                break


def main() -> None:
    """Train twice, with and without a kill."""
    try:
        import jax  # noqa: F401
    except ImportError:
        print("JAX is not installed: pip install jax")
        return
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], *map(int, sys.argv[3:]))
        return
    run("jax-killed", kill_at=KILLED_AT)
    run("jax-killed")
    print("  without a kill:")
    run("jax-never-killed")


if __name__ == "__main__":
    main()
