"""Errors of the integrations: a store that is not blocking, and what only a `TrainingState` knows of an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tieredckpt import SyncStore
from tieredckpt.errors import Invalid, TieredCkptError

__all__ = ["blocking", "naming", "telling_of_parts"]


def blocking(store: Any) -> SyncStore:
    """``store``; raises `Invalid` for anything but a `SyncStore`: calls of others would do nothing, and say nothing."""
    if isinstance(store, SyncStore):
        return store
    raise Invalid(
        f"a framework with blocking calls takes a SyncStore, not a {type(store).__name__}: pass what "
        f"CheckpointStore.open_sync(...) returns, or store.sync() of an open CheckpointStore"
    )


@contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """Raise `Invalid`, naming the part ``name``, for any error while it should do ``what``."""
    try:
        yield
    except TieredCkptError:
        raise
    except Exception as error:
        raise Invalid(f"part {name!r} could not {what}: {error}") from error


@contextmanager
def telling_of_parts(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Explain in an error about ``like`` or ``into`` what it is, since the caller did not give it."""
    try:
        yield
    except Invalid as error:
        for said in ("like", "into"):
            if said in arguments and f"`{said}`" in str(error):
                raise Invalid(
                    f"{error}. Here `{said}` is the parts of the TrainingState: give it those with which the step was "
                    f"saved, under the same names"
                ) from error
        raise
