"""`TrainingState`: saves and restores, in the right order, all that a PyTorch training needs to resume bit for bit.

::

    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)
    first = (state.restore(store) or 0) + 1
    for step in range(first, last):
        ...
        if store.due(step):
            state.save(store, step)
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader

from tieredckpt import AS_SAVED, Checkpoint, CheckpointStore, SyncCheckpoint, SyncStore
from tieredckpt.errors import Invalid, NotFound
from tieredckpt.integrations._buffers import is_wrapper, with_buffers_of_first
from tieredckpt.integrations._copies import with_copies
from tieredckpt.integrations._errors import naming, telling_of_parts
from tieredckpt.integrations._module_state import load_module_state, module_state, module_targets
from tieredckpt.integrations._optimizers import kept_on_error, thawed, with_groups_of, without_steps
from tieredckpt.integrations._rng import rng_state, set_rng_state

__all__ = ["TrainingState"]

_log = logging.getLogger("tieredckpt")

_ABOUT, _RANKS, _RNG = "about", "ranks", "rng"


class TrainingState:
    """The parts of a training, by the names under which a step has them.

    Parts are modules, optimizers, objects with ``state_dict`` and ``load_state_dict`` (schedulers, scalers, torchdata's
    ``StatefulDataLoader``), and plain values, which ``state["name"]`` reads and sets. Names of parameters are those of
    the model itself, without the wrapping of ``torch.compile`` and of DistributedDataParallel; FSDP2, tensor parallel
    and DDP are saved and restored by all ranks, on any number of them. Of the buffers of DDP, such as the running
    statistics of BatchNorm, the first of its ranks saves its own, and all get these. Other buffers, unless they are
    DTensors, and those of a single number must be equal on all ranks.

    Args:
        rng: save the states of the random number generators of Python, NumPy, torch and its CUDA devices.
        per_rank: names of further parts that every rank has of its own. Data loaders and generators always are; they
            are restored only on as many ranks as saved them.
        parts: by name, such as ``model=`` and ``optimizer=``.

    Raises:
        Invalid: a ``DataLoader`` that has no state, an optimizer of parameters that are not in one module, or one that
            gathers its state (ZeroRedundancyOptimizer), a name that is taken, or one of ``per_rank`` that cannot be; it
            is named.
    """

    _replicated = False
    """Whether the modules are replicas on all ranks, though no wrapper of DDP shows it."""

    def __init__(self, *, rng: bool = True, per_rank: Sequence[str] = (), **parts: Any) -> None:
        for name, part in parts.items():
            if name in (_ABOUT, _RANKS, _RNG):
                raise Invalid(f"a part cannot be called {name!r}: a step has something else under it; rename it")
            if isinstance(part, DataLoader) and not _has_state(part):
                raise Invalid(
                    f"part {name!r}: a DataLoader does not tell where it is; use torchdata's StatefulDataLoader, or "
                    f"leave it out and save between epochs"
                )
        for name in per_rank:
            if name not in parts or isinstance(parts[name], torch.nn.Module | torch.optim.Optimizer):
                raise Invalid(f"per_rank: {name!r} is no part, or is a module or optimizer, which ranks have together")
        self._rng = rng
        self._parts = parts
        self._of_rank = [name for name, part in parts.items() if isinstance(part, DataLoader) or name in per_rank]
        for name in self._names(torch.optim.Optimizer):
            self._owner(name)
            if hasattr(parts[name], "consolidate_state_dict"):
                raise Invalid(
                    f"part {name!r}: a {type(parts[name]).__name__} gathers the whole state on one rank; take "
                    f"`fully_shard` (FSDP2), of which each rank saves its own shards, or a plain optimizer with DDP"
                )

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._parts[name] = value

    def tree(self) -> dict[str, Any]:
        """The tree that this rank saves: the tensors themselves, not copies, by the names of the parts."""
        optimizers = {name: self._stored(name) for name in self._names(torch.optim.Optimizer)}
        rest = [name for name in self._parts if name not in optimizers and name not in self._of_rank]
        mine = {name: self._stored(name) for name in self._of_rank}
        if self._rng:  # last: asking a data loader for its state may draw from them
            mine[_RNG] = rng_state()
        rank, ranks = _rank()
        state_of = {name: dict.fromkeys(part["state"]) for name, part in optimizers.items()}
        about = {"ranks": ranks, "state_of": state_of}
        return {**{name: self._saved(name) for name in rest}, **optimizers, _RANKS: {rank: mine}, _ABOUT: about}

    @overload
    def save(
        self,
        store: SyncStore,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        capture: Literal["copy", "lazy"] = "copy",
        overwrite: bool = False,
        replicated: Sequence[str] = (),
    ) -> SyncCheckpoint: ...
    @overload
    def save(
        self,
        store: CheckpointStore,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        capture: Literal["copy", "lazy"] = "copy",
        overwrite: bool = False,
        replicated: Sequence[str] = (),
    ) -> Coroutine[Any, Any, Checkpoint]: ...
    def save(self, store: SyncStore | CheckpointStore, step: int, **options: Any) -> Any:
        """Save a step; of a `CheckpointStore`, await it. Arguments and errors are those of `CheckpointStore.save`.

        With ``capture="lazy"`` the next step of any optimizer waits until weights and optimizer states are copied;
        tensors that forward and backward passes change, such as the statistics of BatchNorm, are copied before this
        returns.

        Raises `Invalid`, naming the part, if a part does not give its state.
        """
        tree = self.tree()
        if options.get("capture") == "lazy":
            optimizers = [self._parts[name].state for name in self._names(torch.optim.Optimizer)]
            modules = [self._parts[name].parameters() for name in self._names(torch.nn.Module)]
            states = (tensor for state in optimizers for tensor in _tensors([*state.values()]))
            tree = with_copies(tree, chain(*modules, states))
        return store.save(step, tree, **options)

    @overload
    def restore(self, store: SyncStore, step: int | None = None, *, resume: bool | None = None) -> int | None: ...
    @overload
    def restore(
        self, store: CheckpointStore, step: int | None = None, *, resume: bool | None = None
    ) -> Coroutine[Any, Any, int | None]: ...
    def restore(
        self, store: SyncStore | CheckpointStore, step: int | None = None, *, resume: bool | None = None
    ) -> Any:
        """Restore a step, by default the newest, into the parts; of a `CheckpointStore`, await it.

        Tensors on the CPU and on CUDA devices are filled in place. The iterator of a data loader is made before the
        random number generators are set, and is the one that the next ``for`` over the loader takes.

        Returns:
            The number of the step, or None when the store is empty and nothing was changed.

        Raises:
            Invalid: the parts do not fit the step, or a part refuses its state; keys and part are named.
            NotFound: there is no such step, or it was not saved by a `TrainingState`.
        """
        work = self._restoring(step, resume)
        if isinstance(store, CheckpointStore):
            return _restored(store, work)
        found = None
        try:
            with closing(work):
                while True:
                    arguments = work.send(found)
                    with telling_of_parts(arguments):
                        found = store.restore(**arguments)
        except StopIteration as done:
            return done.value

    def _restoring(self, step: int | None, resume: bool | None) -> Generator[dict[str, Any], Any, int | None]:
        """Yield the arguments of two restores; receives each result, and returns the number of the step."""
        head = yield {"step": step, "as_": "specs", "resume": False}
        if head is None:
            return None
        if not isinstance(head.tree, dict) or _ABOUT not in head.tree or _RANKS not in head.tree:
            raise NotFound(
                f"step {head.step} was not saved by a TrainingState; restore it with as_='saved', and give each part "
                f"its state (load_state_dict)"
            )
        about = head.tree[_ABOUT]
        rank, ranks = _rank()
        if ranks == about["ranks"]:
            self._check_parts_of_rank(head.step, rank, head.tree[_RANKS].get(rank, {}))
        with kept_on_error(self._parts[name] for name in self._names(torch.optim.Optimizer)):
            state_of = about["state_of"].items()
            live = self._live(
                {name: {key: head.tree[name]["state"].get(key, {}) for key in of} for name, of in state_of}
            )
            others = [name for name in self._parts if name not in live and name not in self._of_rank]
            like = {**live, **dict.fromkeys([*others, _RANKS, _ABOUT], AS_SAVED)}
            how = "into" if all(map(_can_be_filled, _tensors(live))) else "like"
            found = yield {"step": head.step, how: like, "resume": resume}
        mine = None
        if ranks == about["ranks"]:
            mine = found.tree[_RANKS].get(rank, {})
        elif rank == 0:
            _log.warning(
                "step %d was saved by %d ranks, and these are %d: data loaders and random number generators stay as "
                "they are",
                *(found.step, about["ranks"], ranks),
            )
        for name in (*self._names(torch.nn.Module), *self._names(torch.optim.Optimizer), *others):
            self._load(name, found.tree[name])
        if mine is not None:
            for name in self._of_rank:
                self._load(name, mine[name])
                if _has_state(self._parts[name]):
                    self._stored(name)  # a StatefulDataLoader makes its iterator now, and not after the generators
            if self._rng and _RNG in mine:
                set_rng_state(mine[_RNG])
        return int(found.step)

    def _check_parts_of_rank(self, step: int, rank: int, stored: Mapping[str, Any]) -> None:
        """Raise `Invalid`, with the keys, unless the step has exactly the parts that belong to this rank."""
        wrong = [f"missing from the step: '{_RANKS}/{rank}/{name}'" for name in self._of_rank if name not in stored]
        extra = set(stored) - {*self._of_rank, _RNG}
        wrong += [f"only in the step: '{_RANKS}/{rank}/{name}'" for name in sorted(extra)]
        if wrong:
            raise Invalid(
                f"step {step} does not have the parts of rank {rank}: {'; '.join(wrong)}. Give data loaders and the "
                f"parts of `per_rank` the names under which they were saved"
            )
        if self._rng and _RNG not in stored and rank == 0:
            _log.warning("step %d was saved with rng=False: random number generators stay as they are", step)

    def _live(self, specs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Targets in modules and optimizers; for optimizers the state that the step has: ``specs``, by parameter."""
        live = {}
        for name in self._names(torch.nn.Module):
            with naming(name, "tell its state"):
                live[name] = module_targets(self._parts[name])
        for name in self._names(torch.optim.Optimizer):
            # The settings of a group may change from one version, or one setting, to the next.
            live[name] = {"state": self._states(name, specs.get(name, {})), "param_groups": AS_SAVED}
        return live

    def _states(self, name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Targets in the state of an optimizer, by parameter; `AS_SAVED` if a state cannot be made beforehand."""
        part = self._parts[name]
        # torch initializes the state of an optimizer only if there are no gradients.
        part.zero_grad(set_to_none=True)
        owner, settings = self._owner(name), [dict(group) for group in part.param_groups]
        try:
            with without_steps(part):
                groups = get_optimizer_state_dict(owner, part)["param_groups"]
            with thawed(part, groups, stored):
                made = get_optimizer_state_dict(owner, part)["state"]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # raised by its step, which needs the training's closure, or gradients besides zeros
            _log.debug("part %r: its state comes as it was saved: %s", name, error)
            for group, before in zip(part.param_groups, settings, strict=True):
                group.update(before)
            part.zero_grad(set_to_none=True)
            if stored and any(hasattr(param, "to_local") for group in part.param_groups for param in group["params"]):
                raise Invalid(
                    f"part {name!r} could not be given its state: {error}. With FSDP2 and tensor parallel it must have "
                    f"one whose shards are filled: make a step of the training, without freezing what has a state, and "
                    f"restore then"
                ) from error
            return dict.fromkeys(stored, AS_SAVED)
        return {key: AS_SAVED if _grows(state) else state for key, state in made.items() if key in stored}

    def _names(self, kind: type) -> list[str]:
        return [name for name, part in self._parts.items() if isinstance(part, kind)]

    def _owner(self, name: str) -> torch.nn.Module:
        """The module whose parameters an optimizer has."""
        held = {param for group in self._parts[name].param_groups for param in group["params"]}
        for module in self._names(torch.nn.Module):
            if held <= set(self._parts[module].parameters()):
                found: torch.nn.Module = self._parts[module]
                return found
        raise Invalid(
            f"part {name!r}: no module of this state has all of its parameters; give the module that has them, and of "
            f"several modules one that holds them (torch.nn.ModuleDict)"
        )

    def _saved(self, name: str) -> Any:
        """The tree to save, as `_stored`, without the buffers of DDP that another rank saves."""
        part, stored = self._parts[name], self._stored(name)
        if not isinstance(part, torch.nn.Module):
            return stored
        with naming(name, "tell its state"):
            return with_buffers_of_first(part, stored, replicated=self._replicated)

    def _stored(self, name: str) -> Any:
        part = self._parts[name]
        with naming(name, "tell its state"):
            if isinstance(part, torch.nn.Module):
                return module_state(part)
            if isinstance(part, torch.optim.Optimizer):
                with without_steps(part):
                    return get_optimizer_state_dict(self._owner(name), part)
            return part.state_dict() if _has_state(part) else part

    def _load(self, name: str, stored: Any) -> None:
        part = self._parts[name]
        with naming(name, "load its state"):
            if isinstance(part, torch.nn.Module):
                load_module_state(name, part, stored)
            elif isinstance(part, torch.optim.Optimizer):
                groups = self._stored(name)["param_groups"]
                stored = with_groups_of(name, groups, stored)
                # The step says which parameters have a state; that was matched in the restore.
                options = StateDictOptions(strict=False)
                with thawed(part, groups, stored["state"]), without_steps(part):
                    set_optimizer_state_dict(self._owner(name), part, optim_state_dict=stored, options=options)
            elif _has_state(part):
                part.load_state_dict(stored)
            else:
                self._parts[name] = stored


async def _restored(store: CheckpointStore, work: Generator[dict[str, Any], Any, int | None]) -> int | None:
    found = None
    try:
        with closing(work):
            while True:
                arguments = work.send(found)
                with telling_of_parts(arguments):
                    found = await store.restore(**arguments)
    except StopIteration as done:
        number: int | None = done.value
        return number


def _rank() -> tuple[int, int]:
    """Rank of this process, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _grows(state: Any) -> bool:
    """Whether the state of a parameter may change its form with each step, such as the history of LBFGS."""
    return isinstance(state, Mapping) and any(isinstance(value, list | tuple) for value in state.values())


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for child in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(child)


def _can_be_filled(tensor: Any) -> bool:
    if hasattr(tensor, "to_local"):
        tensor = tensor.detach().to_local()
    elif is_wrapper(tensor):
        return all(_can_be_filled(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    if tensor.is_conj() or tensor.is_neg():
        return False
    return bool(tensor.is_cuda or (tensor.device.type == "cpu" and tensor.is_contiguous()))
