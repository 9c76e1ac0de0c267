"""Add to errors what only a `TrainingState` knows: the part, and where the arguments came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tieredckpt.errors import Invalid, TieredCkptError

__all__ = ["naming", "telling_of_parts"]


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
