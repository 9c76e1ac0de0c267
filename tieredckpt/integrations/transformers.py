"""Hugging Face's Trainer over a store: `TieredTrainer`, and `TieredTrainerMixin` for Trainers of your own.

::

    trainer = TieredTrainer(model, args, train_dataset=data, store=store)
    trainer.train(resume_from_checkpoint=True)

The folders ``checkpoint-N`` stay, with ``trainer_state.json`` and a small file that says which step of the store is
meant: by them the Trainer finds, counts and removes its checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import Trainer

from tieredckpt import Invalid, NoSpace, NotFound, SyncStore, TieredCkptError, TierUnavailable
from tieredckpt.integrations.torch import TrainingState, _rng_state, _set_rng_state

__all__ = ["TieredTrainer", "TieredTrainerMixin"]

_log = logging.getLogger("tieredckpt")
_FILE = "tieredckpt.json"
"""In a folder of a checkpoint: which step of the store it is."""


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TieredTrainerMixin(_Base):
    """Saves the checkpoints of a Trainer to a store: ``class MyTrainer(TieredTrainerMixin, Trainer)``.

    A checkpoint is saved when it is in RAM. What ``save_total_limit`` removes is deleted from the store as soon as a
    later step is as safe; what the store's own retention removes is not resumed from. What keeps the store from a
    save is a warning, and the training goes on.

    Args:
        store: open; the processes of the training are its ranks.
    """

    def __init__(self, *args: Any, store: SyncStore, **options: Any) -> None:
        super().__init__(*args, **options)
        self._store = store
        self._random = _Random()
        self._saving = False
        self._removed: set[int] = set()

    def train(self: Any, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """As of the Trainer; True resumes from the newest checkpoint that the store has, and begins without one."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_whole()
        result = super().train(resume_from_checkpoint=resume_from_checkpoint, **options)
        try:
            self._store.flush()
        except TieredCkptError as error:
            _log.warning("the store does not have everything where it should be: %s", error)
        self._delete_removed()
        return result

    # -- saving -------------------------------------------------------------------------------------------

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise Invalid(
                "TieredTrainer saves one process and DDP; with FSDP or DeepSpeed, write the loop with accelerate and "
                "tieredckpt.integrations.accelerate"
            )
        step, run = self.state.global_step, Path(self._get_output_dir(trial))
        try:
            saved = self._parts().save(self._store, step, overwrite=True).saved
        except (NoSpace, TierUnavailable) as error:
            _log.warning("step %d was not saved, training goes on: %s", step, error)
            return
        if saved.skipped:
            _log.warning("step %d was not saved: %s", step, saved.skipped)
            return
        before = set(_steps(run))
        if self.args.should_save:
            folder = run / f"checkpoint-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f"{_FILE}.tmp"
            unfinished.write_text(json.dumps({"step": step, "serial": saved.step.serial}) + "\n")
            unfinished.replace(folder / _FILE)
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        if self.args.should_save:
            self._removed |= before - set(_steps(run)) - {step}
            self._delete_removed()
            self._remove_folders_without_step(run)

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._saving:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not self._saving:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self: Any, output_dir: str) -> None:
        if not self._saving:
            super()._save_scaler(output_dir)

    def _save_rng_state(self: Any, output_dir: str) -> None:
        if not self._saving:
            super()._save_rng_state(output_dir)

    def _parts(self: Any) -> TrainingState:
        parts = {"model": self.model}
        if not self.args.save_only_model:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapping
            parts |= {"optimizer": optimizer, "scheduler": self.lr_scheduler, "random": self._random}
            scaler = getattr(self.accelerator, "scaler", None)
            parts |= {} if scaler is None else {"scaler": scaler}
        # Random numbers are set later than the rest: the Trainer says when.
        return TrainingState(rng=False, per_rank=["random"], **parts)

    def _delete_removed(self: Any) -> None:
        if self.args.process_index:
            return
        for step in sorted(self._removed):
            try:
                self._store.delete(step)
            except NotFound:
                pass
            except TieredCkptError as error:  # the newest, or no later one is as safe yet
                _log.debug("step %d stays in the store for now: %s", step, error)
                continue
            self._removed.discard(step)

    def _remove_folders_without_step(self: Any, run: Path) -> None:
        """Remove the folders of steps that the store's retention took, where every tier answers."""
        if all(tier.healthy for tier in self._store.tier_infos()):
            held = {(info.step, info.serial) for info in self._store.steps()}
            for step, folder in _steps(run).items():
                meant = _meant(folder)
                if meant is not None and meant not in held and step != self.state.global_step:
                    shutil.rmtree(folder, ignore_errors=True)

    # -- loading ------------------------------------------------------------------------------------------

    def _newest_whole(self: Any) -> str | None:
        """The folder of the newest save that the store has, and which was written to its end; None without any.

        Raises `NotFound` where there are folders of steps and the store has none of them: to begin anew would be to
        train on from nothing, and to delete what comes back later.
        """
        held = {(info.step, info.serial) for info in self._store.steps()}
        known = [(_meant(folder), step, folder) for step, folder in _steps(Path(self.args.output_dir)).items()]
        whole = [each for each in known if (each[2] / "trainer_state.json").exists()]
        for meant, _, folder in sorted(whole, key=lambda each: (each[0][1] if each[0] else 0, each[1]), reverse=True):
            if meant is None or meant in held:
                return str(folder)
        if any(meant is not None for meant, _, _ in whole):
            problems = [f"tier {tier.name!r}: {tier.error}" for tier in self._store.tier_infos() if not tier.healthy]
            raise NotFound(
                f"{self.args.output_dir} has checkpoints, and the store has none of their steps (it has "
                f"{', '.join(str(step) for step, _ in sorted(held)) or 'none'}; "
                f"{'; '.join(problems) or 'all tiers answer'}); move the folder away to begin anew"
            )
        return None

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if _meant(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        model = self.model if model is None else model
        like = {"model": get_model_state_dict(model)}
        found = self._store.restore(self._step_of(resume_from_checkpoint), keys=["model"], like=like, resume=False)
        set_model_state_dict(model, found.tree["model"])

    def _load_best_model(self: Any) -> None:
        if self.state.best_model_checkpoint and _meant(self.state.best_model_checkpoint) is not None:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """With all else of the step: now everything is there that takes it."""
        if checkpoint is None or _meant(checkpoint) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif not self.args.save_only_model:
            self._parts().restore(self._store, self._step_of(checkpoint), resume=True)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or _meant(checkpoint) is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or _meant(checkpoint) is None:
            super()._load_rng_state(checkpoint)
        elif self._random.loaded is not None:
            _set_rng_state(self._random.loaded)

    def _step_of(self: Any, folder: str) -> int:
        step, serial = _meant(folder) or (0, 0)
        if (step, serial) not in {(info.step, info.serial) for info in self._store.steps()}:
            raise NotFound(
                f"{folder} means step {step} (serial {serial}), which the store does not have: its retention took it, "
                f"or another training saved the step again; resume_from_checkpoint=True takes the newest one there is"
            )
        return step


class TieredTrainer(TieredTrainerMixin, Trainer):
    """A Trainer that saves its checkpoints to a store; see `TieredTrainerMixin`."""


class _Random:
    """Random numbers, as a part that keeps what was loaded until it is time."""

    loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return _rng_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def _steps(run: Path) -> dict[int, Path]:
    """The folders of checkpoints, by step."""
    return {int(found[1]): path for path in _folders(run) if (found := re.fullmatch(r"checkpoint-(\d+)", path.name))}


def _folders(run: Path) -> Iterator[Path]:
    return run.iterdir() if run.is_dir() else iter(())


def _meant(folder: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Step and serial that a folder means; None for one of another Trainer."""
    try:
        found = json.loads((Path(folder) / _FILE).read_text())
        return int(found["step"]), int(found["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
