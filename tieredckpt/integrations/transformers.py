"""Hugging Face's Trainer over a store: `TieredTrainer`, and `TieredTrainerMixin` for Trainers of your own.

::

    trainer = TieredTrainer(model, args, train_dataset=data, store=store)
    trainer.train(resume_from_checkpoint=True)

The folders ``checkpoint-N`` stay, with ``trainer_state.json`` and a small file that names a step of the store: by them
the Trainer finds, counts and removes its checkpoints.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, sort_checkpoints

from tieredckpt import SyncStore
from tieredckpt.errors import Corrupt, Invalid, NoSpace, NotFound, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.integrations._durable import outlive_node
from tieredckpt.integrations._errors import blocking
from tieredckpt.integrations._module_state import load_module_state, module_targets
from tieredckpt.integrations._ranks import of_all_ranks, on_rank_0
from tieredckpt.integrations._rng import rng_state, set_rng_state
from tieredckpt.integrations._trainer_folders import folders_of, mean_save, save_meant, store_meant
from tieredckpt.integrations.torch import TrainingState

__all__ = ["TieredTrainer", "TieredTrainerMixin"]

_log = logging.getLogger("tieredckpt")

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TieredTrainerMixin(_Base):
    """Saves the checkpoints of a Trainer to a store: ``class MyTrainer(TieredTrainerMixin, Trainer)``.

    A checkpoint is saved when it is in RAM. A checkpoint that ``save_total_limit`` removes is deleted from the store as
    soon as a later step is as safe, then its folder. A step has the metrics that the Trainer logged at it. A training
    does not resume from a checkpoint that the store's retention removed. If the store cannot save, that is a warning,
    and the training goes on.

    Args:
        store: open; the processes of the training are its ranks.

    Raises `Invalid` with FSDP and DeepSpeed, and for a store that is not blocking.
    """

    def __init__(self, *args: Any, store: SyncStore, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise Invalid(
                "TieredTrainer saves one process and DDP; with FSDP2, write the loop with accelerate and "
                "tieredckpt.integrations.accelerate, or with tieredckpt.integrations.torch; with DeepSpeed, keep the "
                "Trainer of transformers"
            )
        self._store = blocking(store)
        self._random = _Random()
        self._saving = False
        self._stores: dict[tuple[int, int], str] = {}
        if self.args.load_best_model_at_end and not any(
            tier.retain.kind == "all" for tier in store.config.exact if tier.kind != "ram"
        ):
            _log.warning(
                "load_best_model_at_end: no tier below RAM retains all steps, so the best may be gone by then; set "
                'retain = "all", save_total_limit removes the others'
            )

    def train(self: Any, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train as the Trainer does; True resumes from the newest checkpoint in the store, or begins without one."""
        self._store.tier_infos()  # raises if it is not open, which the first save would do otherwise
        if resume_from_checkpoint is True:
            resume_from_checkpoint = on_rank_0(self._newest_whole)
        held = on_rank_0(self._held)
        if held and not resume_from_checkpoint and self.is_world_process_zero():
            _log.warning(
                "the store has steps of an earlier training (%d), and this one begins anew: the earlier one cannot "
                "resume from a step whose number is saved again; give each training a store of its own",
                len(held),
            )
        result = super().train(resume_from_checkpoint=resume_from_checkpoint, **options)
        try:
            self._store.flush()
        except TieredCkptError as error:
            _log.warning("the store does not have everything where it should be: %s", error)
        self._rotate(Path(self.args.output_dir))
        return result

    def _prepare_for_training(self: Any, *args: Any, **options: Any) -> Any:
        """Raise before the first step, when all parts exist, what the first save would raise."""
        prepared = super()._prepare_for_training(*args, **options)
        if self.args.save_strategy != "no":
            self._store.prepare(self._parts(whole=not self.args.save_only_model).tree())
        return prepared

    # -- saving -------------------------------------------------------------------------------------------

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        step, run = self.state.global_step, Path(self._get_output_dir(trial))
        saved = self._saved(step)
        if saved is None:
            return
        serial = saved.saved.step.serial
        if self.args.should_save:
            folder, store = run / f"checkpoint-{step}", None
            try:
                store = self._store_that_saved(step, serial)
            except TieredCkptError as error:
                _log.debug("%s does not say which store it means: %s", folder, error)
            mean_save(folder, step, serial, store)
        self._saving = True
        try:
            with self._keeping_folders():
                super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        if self.args.enable_jit_checkpoint and self.control.should_training_stop and self.is_world_process_zero():
            outlive_node(self._store, saved)  # SIGTERM came, or the training ends
        self._rotate(run)

    def _saved(self: Any, step: int) -> Any:
        """Save a step; its `SyncCheckpoint`, or None on all ranks if one of them did not save."""
        saved, outcome = None, None
        try:
            parts = self._parts(whole=not self.args.save_only_model)
            saved = parts.save(self._store, step, metrics=_metrics(self.state), overwrite=True)
            outcome = saved.skipped or None
        except (NoSpace, RanksUnavailable, TierUnavailable) as error:
            outcome = str(error)
        except TieredCkptError as error:
            outcome = error
        outcomes = of_all_ranks(outcome)
        for each in outcomes:
            if isinstance(each, TieredCkptError):
                raise each
        why = next((each for each in outcomes if isinstance(each, str)), None)
        if why is None:
            return saved
        _log.warning("step %d was not saved, training goes on: %s", step, why)
        return None

    def _finalize_training(self: Any, *args: Any, **options: Any) -> Any:
        with self._keeping_folders():
            return super()._finalize_training(*args, **options)

    @contextmanager
    def _keeping_folders(self: Any) -> Iterator[None]:
        """Keep the Trainer from removing a folder whose step the store still has; `_rotate` does it."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def _rotate(self: Any, run: Path) -> None:
        """Remove surplus checkpoints, each step before its folder.

        A process that ends between the two leaves a folder without its step, which is not resumed from and removed
        later.
        """
        gone = on_rank_0(lambda: self._deleted(run))
        if self.args.should_save:
            for name in gone:
                shutil.rmtree(run / name, ignore_errors=True)

    def _deleted(self: Any, run: Path) -> list[str]:
        """Delete surplus steps; returns the folders whose steps the store does not have, also by its retention.

        Surplus is defined as in `transformers.trainer_utils.rotate_checkpoints`.
        """
        folders = [Path(each) for each in sort_checkpoints(str(run), use_mtime=True)]
        try:
            folders = [each for each in folders if not self._is_of_another_store(each)]
        except TieredCkptError as error:
            _log.debug("the folders in %s stay for now: %s", run, error)
            return []
        held, sure = self._held(), all(tier.healthy for tier in self._store.tier_infos())
        # A folder newer than all steps of the store may still be committed, or come back with a tier.
        newest = max((serial for _, serial in held), default=0)
        gone = [
            each for each in folders if sure and (meant := save_meant(each)) and meant not in held and meant[1] < newest
        ]
        kept = [each for each in folders if each not in gone]
        best = self.state.best_model_checkpoint
        protected = {*kept[-1:], *(each for each in kept if best and each.resolve() == Path(best).resolve())}
        limit = self.args.save_total_limit or 0
        too_many = len(kept) - max(limit, len(protected)) if limit > 0 else 0
        for folder in [each for each in kept if each not in protected][: max(too_many, 0)]:
            meant = save_meant(folder)
            if meant is not None:
                if meant not in held:
                    continue
                try:
                    self._store.delete(meant[0])
                except TieredCkptError as error:  # no later one is as safe yet
                    _log.debug("%s stays for now: %s", folder, error)
                    continue
            gone.append(folder)
        return [folder.name for folder in gone]

    def _store_that_saved(self: Any, step: int, serial: int) -> str:
        """The identity of the store that saved a step: this one, or one that it was forked from."""
        if (step, serial) not in self._stores:
            self._stores[step, serial] = self._store.describe(step, serial=serial).store
        found: str = self._stores[step, serial]
        return found

    def _is_of_another_store(self: Any, folder: Path) -> bool:
        """Whether a folder names another store; serials of different stores may be equal."""
        meant, store, held = save_meant(folder), store_meant(folder), self._held()
        if store is None or not held:
            return False
        step, serial = meant if meant and meant in held else max(held, key=lambda each: each[1])
        return bool(store != self._store_that_saved(step, serial))

    def _held(self: Any) -> set[tuple[int, int]]:
        """Step and serial of the saves that the store returns for their numbers.

        These exclude saves from before a rollback, or of another run, if a later save has the number, and saves with
        lossy copies only.
        """
        exact = (info for info in self._store.steps() if info.tiers)
        in_order = sorted(exact, key=lambda info: (not info.off_branch, info.serial))
        return set({info.step: info.serial for info in in_order}.items())

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._saving:
            super().save_model(output_dir, _internal_call)

    def _push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        """Push ``output_dir`` with the files of the model, which the folder of a checkpoint does not have."""
        wanted = self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END
        if wanted and (self.args.hub_always_push or not self.push_in_progress or self.push_in_progress.is_done()):
            self._save(self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not self._saving:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self: Any, output_dir: str) -> None:
        if not self._saving:
            super()._save_scaler(output_dir)

    def _save_rng_state(self: Any, output_dir: str) -> None:
        if not self._saving:
            super()._save_rng_state(output_dir)

    def _parts(self: Any, *, whole: bool) -> TrainingState:
        # DDP says whose buffers are saved; `TrainingState` takes its name out of those of the parameters.
        parts = {"model": self.model_wrapped if _is_ddp(self.model_wrapped) else self.model}
        if whole:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapper
            parts |= {"optimizer": optimizer, "scheduler": self.lr_scheduler, "random": self._random}
            scaler = getattr(self.accelerator, "scaler", None)
            parts |= {} if scaler is None else {"scaler": scaler}
        # Random numbers are set later than the rest: the Trainer says when.
        return TrainingState(rng=False, per_rank=[name for name in parts if name == "random"], **parts)

    # -- loading ------------------------------------------------------------------------------------------

    def _newest_whole(self: Any) -> str | None:
        """The folder of the newest complete save that the store has; None without any.

        Raises `NotFound` if there are folders of steps and the store has none of them: beginning again would train from
        nothing, and delete steps that come back later.
        """
        held = self._held()
        known = [(save_meant(folder), step, folder) for step, folder in folders_of(Path(self.args.output_dir)).items()]
        whole = [each for each in known if (each[2] / "trainer_state.json").exists()]
        for meant, _, folder in sorted(whole, key=lambda each: (each[0][1] if each[0] else 0, each[1]), reverse=True):
            if meant is None or (meant in held and not self._is_of_another_store(folder)):
                return str(folder)
        if any(meant is not None for meant, _, _ in whole):
            problems = [f"tier {tier.name!r}: {tier.problem}" for tier in self._store.tier_infos() if not tier.healthy]
            raise NotFound(
                f"{self.args.output_dir} has checkpoints, and the store has none of their steps (it has "
                f"{', '.join(str(step) for step, _ in sorted(held)) or 'none'}; "
                f"{'; '.join(problems) or 'all tiers answer'}); move the folder away to begin anew"
            )
        return None

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        step = self._step_of(resume_from_checkpoint)
        if step is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        model = self.model if model is None else model
        like = {"model": module_targets(model)}
        found = self._store.restore(step, keys=["model"], like=like, resume=False)
        load_module_state("model", model, found.tree["model"])

    def _load_best_model(self: Any) -> None:
        """Load the best model; if the store lost it, the last one stays, as with the Trainer's own files."""
        try:
            if self._step_of(self.state.best_model_checkpoint) is None:
                super()._load_best_model()
            else:
                self._load_from_checkpoint(self.state.best_model_checkpoint)
        except (Corrupt, NotFound, TierUnavailable) as error:
            _log.warning("the best model is not loaded, the last one stays: %s", error)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Load all remaining parts of the step: now all objects that take them exist."""
        step = self._step_of(checkpoint)
        if step is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._random.loaded = None  # left from an earlier resume
        found = self._store.restore(step, as_="specs", resume=True)
        if "optimizer" in found.tree:
            self._parts(whole=True).restore(self._store, step, resume=True)
        elif self.is_world_process_zero():
            _log.warning("%s has the model only: optimizer, scheduler and random numbers begin anew", checkpoint)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        if self._step_of(checkpoint) is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if self._step_of(checkpoint) is None:
            super()._load_rng_state(checkpoint)
        elif self._random.loaded is not None:
            set_rng_state(self._random.loaded)

    def _step_of(self: Any, folder: str | None) -> int | None:
        """The step that a folder names, as rank 0 sees it; None for a folder of another Trainer.

        Raises `NotFound` if its number belongs to another save by now.
        """

        def look_up() -> int | None:
            meant = None if folder is None else save_meant(folder)
            if folder is not None and self._is_of_another_store(Path(folder)):
                raise Invalid(
                    f"{folder} means a step of another store ({store_meant(folder)}); open that one, or resume from a "
                    f"folder of this one"
                )
            if meant is not None and meant not in self._held():
                raise NotFound(
                    f"{folder} means step {meant[0]} (serial {meant[1]}), which the store does not have: its retention "
                    f"took it, or another training saved the step again; resume_from_checkpoint=True takes the newest "
                    f"one there is"
                )
            return None if meant is None else meant[0]

        return on_rank_0(look_up)


class TieredTrainer(TieredTrainerMixin, Trainer):
    """A Trainer that saves its checkpoints to a store; see `TieredTrainerMixin`."""


class _Random:
    """Random number states, as a part that keeps loaded states until the Trainer sets them."""

    loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return rng_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def _metrics(state: Any) -> dict[str, float]:
    """What the Trainer logged at this step, evaluation included; without the times that it took."""
    logged: dict[str, Any] = {}
    for entry in state.log_history:
        logged |= entry if entry.get("step") == state.global_step else {}
    logged.pop("step", None)
    times = ("_runtime", "_per_second", "_time")
    return {name: each for name, each in logged.items() if isinstance(each, int | float) and not name.endswith(times)}


def _is_ddp(model: torch.nn.Module) -> bool:
    """Whether DDP wraps a model, or a part of one; torch.compile may be around it."""
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())
