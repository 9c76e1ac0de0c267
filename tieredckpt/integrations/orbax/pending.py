"""Saves that are on their way to the tier that outlives the process."""

from __future__ import annotations

import logging
import threading

from tieredckpt import NotFound, SyncCheckpoint, SyncStore, TieredCkptError

__all__ = ["Pending"]

_log = logging.getLogger("tieredckpt")


class Pending:
    """A save, and whether it is still on its way.

    Args:
        store: of the save.
        saved: what its `SyncStore.save` returned.
        tier: that it has to reach.
    """

    def __init__(self, store: SyncStore, saved: SyncCheckpoint, tier: str) -> None:
        self._store, self._saved, self._tier = store, saved, tier
        self._unwanted = False
        self._watching: threading.Thread | None = None

    @property
    def step(self) -> int:
        return self._saved.step

    def wait(self) -> None:
        """Wait until the save is on its tier, or will never be; raises the error that prevents it."""
        try:
            self._saved.reached(self._tier)
        except NotFound as error:  # a policy does not want it there, or it has left again
            self._unwanted = True
            _log.debug("step %s is not waited for: %s", self.step, error)

    def is_over(self) -> bool:
        """Whether the save is on its tier, or will never be, as far as is known without waiting."""
        try:
            if self._unwanted or self._tier in self._store.where(self.step):
                return True
        except NotFound:
            return True
        if self._watching is None or not self._watching.is_alive():
            # Only a waiting caller learns that a policy does not want a step there.
            self._watching = threading.Thread(target=self._watch, name=f"step {self.step}", daemon=True)
            self._watching.start()
        return False

    def _watch(self) -> None:
        try:
            self.wait()
        except TieredCkptError as error:
            _log.debug("step %s is not on tier %r yet: %s", self.step, self._tier, error)
