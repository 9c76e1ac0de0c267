"""What lossy copies cost and spare, on states that were trained; `docs/explanation/encodings.md` has the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenes import config, folder

from tieredckpt import CheckpointStore
from tieredckpt.bench.codecs import measure_codecs
from tieredckpt.format.rounding import Bound

SEVEN_BITS = [{"keys": ["**"], "max_error": "0.4%"}]


async def through_a_lossy_copy(place: Path, state: Mapping[str, Any]) -> Any:
    """The state as a tier keeps it that keeps 7 bits of every value."""
    tiers = {
        "disk": folder(place / "disk", retain={"kind": "last_n", "n": 1}),
        "archive": folder(place / "archive", codec="small", lossy=SEVEN_BITS),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, state)
        await store.flush()
        await store.save(2, {"nothing": 0})
        await store.flush()
        restored = await store.restore(1, lossy=True, resume=False, as_="numpy")
        assert restored is not None
        assert restored.lossy
        return restored.tree


class _Regression:
    """A linear model with Adam, which stands in for a network."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.inputs = rng.standard_normal((400, 96)).astype(np.float32)
        self.wanted = self.inputs @ rng.standard_normal((96, 64)).astype(np.float32) + rng.standard_normal((400, 64))
        self.state = {name: np.zeros((96, 64), np.float32) for name in ("weights", "mu", "nu")}
        self.step = 0

    def train(self, steps: int) -> float:
        for _ in range(steps):
            self.step += 1
            weights, mu, nu = (self.state[name] for name in ("weights", "mu", "nu"))
            gradient = self.inputs.T @ (self.inputs @ weights - self.wanted) / len(self.inputs)
            mu += 0.1 * (gradient - mu)
            nu += 0.001 * (np.square(gradient) - nu)
            weights -= 0.01 * (mu / (1 - 0.9**self.step)) / (np.sqrt(nu / (1 - 0.999**self.step)) + 1e-8)
        return float(np.square(self.inputs @ self.state["weights"] - self.wanted).mean())


@pytest.mark.parametrize("seed", range(3))
async def test_a_training_that_goes_on_from_seven_bits_ends_where_an_exact_one_does(seed: int, tmp_path: Path) -> None:
    exact, lossy = _Regression(seed), _Regression(seed)
    exact.train(200)
    tree = await through_a_lossy_copy(tmp_path, exact.state)
    lossy.state, lossy.step = {name: np.array(tree[name]) for name in exact.state}, exact.step
    assert any(not np.array_equal(tree[name], exact.state[name]) for name in tree)
    assert lossy.train(300) == pytest.approx(exact.train(300), abs=0.01)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_seven_bits_of_every_value_take_two_fifths_of_a_trained_state() -> None:
    pytest.importorskip("torch")
    import torch
    from support.trained_states import gpt_state

    def arrays() -> Any:
        for group, leaves in gpt_state().items():
            for name, leaf in leaves.items():
                # Weights in bfloat16 have 7 bits as they are.
                yield f"{group}/{name}", (leaf.view(torch.uint16) if leaf.element_size() == 2 else leaf).numpy()

    rows = measure_codecs(arrays(), 16 << 20, bound=Bound(0.004))
    found = {(row.arrays.partition(" ")[0], row.codec): row.stored / row.nbytes for row in rows}
    assert found["all", "small"] <= 0.40, found
    assert found["master", "small"] < 0.4, found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
async def test_a_gpt_that_goes_on_from_seven_bits_ends_where_an_exact_one_does(
    seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("torch")
    from support.trained_states import GptTraining

    exact = GptTraining(seed)
    exact.train(0, 60)
    lossy = GptTraining(seed)
    lossy.take(await through_a_lossy_copy(tmp_path, exact.state()), exact)
    at_once = lossy.validation() - exact.validation()
    for training in (exact, lossy):
        training.train(60, 40)
    later = lossy.validation() - exact.validation()
    record_property("validation loss", f"{exact.validation():.4f}, at once {at_once:+.4f}, later {later:+.4f}")
    assert abs(at_once) < 0.01
    assert abs(later) < 0.01
