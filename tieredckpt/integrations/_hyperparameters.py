"""Hyperparameters in Lightning's checkpoints: Lightning pickles them, so they may be objects that a store refuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tieredckpt import Invalid, SyncStore

__all__ = ["Hyperparameters"]

_log = logging.getLogger("tieredckpt")
_PARTS = frozenset({"hyper_parameters", "datamodule_hyper_parameters", "hparams_type"})
"""Parts of a checkpoint that are no state."""


class Hyperparameters:
    """Removes hyperparameters that a store refuses from checkpoints; a training can resume without them."""

    def __init__(self) -> None:
        self._left_out: set[str] = set()
        """Names that a warning has reported."""

    def storable(self, store: SyncStore, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint without the hyperparameters that ``store`` refuses; a warning names each once."""
        kept = dict(checkpoint)
        for part in _PARTS & kept.keys():
            value = kept[part]
            if isinstance(value, Mapping):
                kept[part] = {
                    key: each for key, each in value.items() if self._is_storable(store, f"{part}/{key}", each)
                }
            elif not self._is_storable(store, part, value):
                del kept[part]
        return kept

    def _is_storable(self, store: SyncStore, name: str, value: Any) -> bool:
        try:
            store.prepare({"value": value})
        except Invalid:
            if name not in self._left_out:
                self._left_out.add(name)
                _log.warning(
                    "%s, a %s, is left out of the checkpoints, for no store takes it: pass what it is made of to "
                    "save_hyperparameters, or let it ignore that argument",
                    *(name, type(value).__name__),
                )
            return False
        return True
