"""What errors of a `TrainingState` say that those of a store and of its parts do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tieredckpt.errors import Invalid, TieredCkptError

__all__ = ["naming", "telling_of_parts"]


@contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """Raise `Invalid`, naming the part, for whatever keeps it from that."""
    try:
        yield
    except TieredCkptError:
        raise
    except Exception as error:
        raise Invalid(f"part {name!r} could not {what}: {error}") from error


@contextmanager
def telling_of_parts(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Say in an error of ``like`` or ``into``, which the caller did not give, what that is."""
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
