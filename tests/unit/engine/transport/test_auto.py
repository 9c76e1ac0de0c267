"""A process finds out which ranks it belongs to, from what is loaded and what its launcher says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reliability.ranks import World

from tieredckpt import Invalid, StoreConfig
from tieredckpt.engine.ranks.communicator import node_of_this_process
from tieredckpt.engine.transport.auto import communicator_of, find_communicator, ranks_of_environment
from tieredckpt.engine.transport.shared import SharedStore

LAUNCHED = {
    "torchrun": {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job"},
    "srun": {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    "PMI": {"PMI_RANK": "2", "PMI_SIZE": "4"},  # MPICH and Intel MPI
}


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(tiers=({"kind": "ram", "name": "ram"}, {"kind": "posix", "name": "disk", "path": tmp_path}))


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "jax._src.distributed", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_ranks_of_a_launcher_speak_through_the_shared_tier(launcher: str, config: StoreConfig) -> None:
    assert ranks_of_environment(LAUNCHED[launcher]) == (launcher, 2, 4)
    found = find_communicator(config, LAUNCHED[launcher])
    assert isinstance(found, SharedStore)
    assert (found.rank, found.size, found.bulk) == (2, 4, False)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "4"},  # of nobody known
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # of a batch script, which runs once
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMI_RANK": "4", "PMI_SIZE": "4"},
        {"PMI_RANK": "first", "PMI_SIZE": "4"},
    ],
)
def test_a_process_without_others_is_alone(environment: Mapping[str, str], config: StoreConfig) -> None:
    assert find_communicator(config, environment) is None


def test_ranks_without_a_shared_tier_are_told_what_to_do() -> None:
    config = StoreConfig(name="alone", tiers=({"kind": "ram", "name": "ram"},))
    with pytest.raises(Invalid, match="PMI started 4 processes, and the store has no tier that they share"):
        find_communicator(config, LAUNCHED["PMI"])


def test_engines_that_are_loaded_and_not_initialised_do_not_count(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle: dict[str, Any] = {
        "torch": SimpleNamespace(distributed=SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)),
        "jax._src.distributed": SimpleNamespace(global_state=SimpleNamespace(client=None)),
        "mpi4py.MPI": SimpleNamespace(Is_initialized=lambda: False),
    }
    for name, module in idle.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert find_communicator(config, {}) is None


def test_what_is_given_is_taken(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED["PMI"].items():
        monkeypatch.setenv(name, value)
    assert communicator_of(None, config) is None
    mine = World(2).communicator(1)
    assert communicator_of(mine, config) is mine
    with pytest.raises(Invalid, match="'auto', None"):
        communicator_of("torchrun", config)


def test_a_node_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIEREDCKPT_NODE", raising=False)
    assert node_of_this_process() == node_of_this_process() != ""
    monkeypatch.setenv("TIEREDCKPT_NODE", "rack-1-node-7")
    assert node_of_this_process() == "rack-1-node-7"
