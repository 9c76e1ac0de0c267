"""Convert NumPy arrays to PyTorch tensors and back, over the same memory, and to JAX arrays, in new memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tieredckpt.bench.peers.base import Setting
from tieredckpt.bench.workloads import State

__all__ = ["arrays_of", "jax_arrays", "join_process_group", "tensors_of"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tensors_of(state: State) -> dict[str, Any]:
    """Tensors that share the arrays' memory."""
    return {key: _tensor(array) for key, array in state.items()}


def arrays_of(tensors: dict[str, Any]) -> State:
    """Arrays that share the tensors' memory."""
    return {key: _array(tensor) for key, tensor in tensors.items()}


def jax_arrays(state: State) -> dict[str, Any]:
    """Complete copies: JAX copies asynchronously, and would see later changes of the training."""
    import jax
    import jax.numpy as jnp

    found: dict[str, Any] = jax.block_until_ready({key: jnp.array(array) for key, array in state.items()})
    return found


def join_process_group(setting: Setting) -> None:
    """Make one gloo process group of all ranks, unless this process is in one."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    port = setting.shared / "port"
    store = None
    if setting.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.write_text(str(store.port))
    setting.meet()
    store = store or dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=setting.rank, world_size=setting.ranks)


def _tensor(array: npt.NDArray[Any]) -> Any:
    import torch

    if array.dtype == _BFLOAT16:  # which PyTorch does not take from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Any) -> npt.NDArray[Any]:
    import torch

    if tensor.dtype == torch.bfloat16:
        found: npt.NDArray[Any] = tensor.view(torch.int16).numpy().view(_BFLOAT16)
        return found
    array: npt.NDArray[Any] = tensor.numpy()
    return array
