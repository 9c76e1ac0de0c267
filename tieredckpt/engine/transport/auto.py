"""Finds out which ranks this process belongs to."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap import Deadline, Retrying
from tieredckpt.config import StoreConfig, TierConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.engine.transport.shared import SharedStore
from tieredckpt.errors import Invalid

__all__ = ["communicator_of", "find_communicator", "ranks_of_environment"]

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
}
"""By launcher: the variables of a process's rank and of the number of processes, and one that tells it is there."""


def communicator_of(ranks: Communicator | str | None, config: StoreConfig) -> Communicator | None:
    """The communicator that ``ranks`` of `CheckpointStore.open` means; None for one process alone. Raises `Invalid`."""
    if ranks == "auto":
        return find_communicator(config)
    if ranks is None or isinstance(ranks, Communicator):
        return ranks
    raise Invalid(f"ranks is 'auto', None (this process alone) or a communicator, not {ranks!r}")


def find_communicator(config: StoreConfig, environment: Mapping[str, str] = os.environ) -> Communicator | None:
    """The communicator of the engine that this process is part of; None for a process alone.

    In this order: torch.distributed, jax.distributed and MPI, where they are loaded and initialised for more than
    one process; what a launcher says in the environment, with messages through the nearest slower tier.

    Raises:
        Invalid: a launcher started several processes, and there is no slower tier for their messages.
    """
    return _of_torch(config) or _of_jax(config) or _of_mpi(config) or _of_environment(config, environment)


def _of_torch(config: StoreConfig) -> Communicator | None:
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    from tieredckpt.engine.transport.torch import TorchCommunicator

    return TorchCommunicator(name=config.identity)


def _of_jax(config: StoreConfig) -> Communicator | None:
    distributed = sys.modules.get("jax._src.distributed")
    job = getattr(distributed, "global_state", None)
    if job is None or job.client is None or job.num_processes == 1:
        return None
    from tieredckpt.engine.transport.jax import JaxCommunicator

    return JaxCommunicator(name=config.identity)


def _of_mpi(config: StoreConfig) -> Communicator | None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        return None
    from tieredckpt.engine.transport.mpi import MpiCommunicator

    return MpiCommunicator(name=config.identity)


def _of_environment(config: StoreConfig, environment: Mapping[str, str]) -> Communicator | None:
    found = ranks_of_environment(environment)
    if found is None:
        return None
    launcher, rank, size = found
    if not config.slower:
        raise Invalid(
            f"{launcher} started {size} processes, and the store has no tier that they share for their messages; add "
            "one, initialise torch.distributed, jax.distributed or MPI before the store is opened, or open it with "
            "ranks=None if this process is alone"
        )
    return SharedStore(partial(_open, config.slower[0]), rank=rank, size=size, name=config.identity)


def ranks_of_environment(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Launcher, rank and size of a process that was started with others; None for one that is alone."""
    for launcher, (rank, size, sign) in _LAUNCHERS.items():
        if not environment.keys() >= {rank, size, sign}:
            continue
        try:
            mine, all_of_them = int(environment[rank]), int(environment[size])
        except ValueError:
            continue
        if all_of_them > 1 and 0 <= mine < all_of_them:
            return launcher, mine, all_of_them
    return None


async def _open(tier: TierConfig) -> BlobStore:
    kind = kind_of(tier)
    store = await kind.open(kind.transient(tier))
    store = Deadline(store, tier.name, base=tier.deadline, min_bandwidth=tier.min_bandwidth)
    return Retrying(store, attempts=tier.retries + 1)
