"""States of Flax, Optax, Equinox and MaxText come back bit for bit into `jax.eval_shape`'s, on any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.launch import SOON
from support.frameworks import lazily, need_modules, require
from support.runs import Run, runs_of

from tieredckpt import Invalid

need_modules("flax", "optax", "equinox")
jax = require("jax")
program = lazily("integrations.jax_users_program")

pytestmark = pytest.mark.timeout(5 * SOON)

PROGRAM = Path(__file__).with_name("jax_users_program.py")
USERS = ("linen", "nnx", "optax", "equinox", "maxtext")


def on_devices(what: str, folder: Path, devices: int) -> Run:
    return Run((what, str(folder)), {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("users")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, dict[str, Any]]:
    """What each process printed; warnings, such as of buffers that could not be donated, fail."""
    runs = {
        "trained": on_devices("save", folder, 4),
        "the same mesh": on_devices("go on", folder, 4),
        "another mesh": on_devices("restore", folder, 8),
        "one device": on_devices("restore", folder, 1),
    }
    environment = {"JAX_PLATFORMS": "cpu"}
    ended = runs_of(PROGRAM, *runs.values(), folder=folder, seconds=SOON, environment=environment, quiet=True)
    return {name: json.loads(one.lines[-1]) for name, one in zip(runs, ended, strict=True)}


@pytest.fixture(scope="module")
def trained(told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What trainings on four devices were when they were saved, and at their end."""
    assert tuple(told["trained"]) == USERS
    return told["trained"]


@pytest.fixture(scope="module")
def resumed(told: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What they are in new processes, on as many devices and on others."""
    return told


@pytest.mark.parametrize("where", ["the same mesh", "another mesh", "one device"])
@pytest.mark.parametrize("user", USERS)
def test_a_donated_state_comes_back_into_an_abstract_one_bit_for_bit(
    trained: dict[str, Any], resumed: dict[str, dict[str, Any]], user: str, where: str
) -> None:
    found = resumed[where][user]
    assert found["step"] == program.SAVED_AT
    assert found["saved"] == trained[user]["saved"]
    assert found["placed"]


@pytest.mark.parametrize("user", USERS)
def test_a_training_that_goes_on_ends_with_the_same_bits(
    trained: dict[str, Any], resumed: dict[str, dict[str, Any]], user: str
) -> None:
    assert program.SAVED_AT < program.LAST
    assert trained[user]["last"] != trained[user]["saved"]
    assert resumed["the same mesh"][user]["last"] == trained[user]["last"]


def test_the_parameters_alone_come_in_the_dtype_of_another_training(folder: Path, trained: dict[str, Any]) -> None:
    assert trained
    abstract = jax.eval_shape(program.linen_initial)
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.float16), abstract.params)
    like = abstract.replace(params=half)
    with program.store_in(str(folder), "linen", read_only=True) as store:
        whole = store.restore(resume=False)
        with pytest.raises(Invalid, match=r"'params/Dense_0/kernel' \(.*cast=True converts it"):
            store.restore(keys=["params/**"], like=like)
        part = store.restore(keys=["params/**"], like=like, cast=True)
    assert whole is not None
    assert part is not None
    assert type(part.tree) is type(abstract)
    assert part.tree.opt_state == abstract.opt_state  # as it was given
    kernel = part.tree.params["Dense_0"]["kernel"]
    expected = whole.tree["params"]["Dense_0"]["kernel"].astype(np.float16)
    assert isinstance(kernel, jax.Array)
    assert np.asarray(kernel).tobytes() == expected.tobytes()
