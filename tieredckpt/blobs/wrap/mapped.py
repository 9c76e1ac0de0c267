"""Maps errors of a blob store that are none of `tieredckpt.errors`, as the store should have done."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tieredckpt._redact import redacted_text
from tieredckpt.errors import TieredCkptError, TierUnavailable

__all__ = ["UNMAPPED", "mapped"]

UNMAPPED: Final = "%s raised an error that is none of tieredckpt.errors:\n%s"
"""The message of the log, with the traceback: it may be a mistake in the store's code."""

_log = logging.getLogger("tieredckpt")


@contextmanager
def mapped(what: str, logged: set[type[Exception]]) -> Iterator[None]:
    """Raise `TierUnavailable` for an unmapped error of a store: the tier fails, and training goes on without it.

    Logs it, unless its type is one of ``logged``, to which it adds that. Secrets are removed: a library may name the
    URL that it signed.
    """
    try:
        yield
    except (TieredCkptError, MemoryError):
        raise
    except Exception as error:
        if type(error) not in logged:
            logged.add(type(error))
            _log.error(UNMAPPED, what, redacted_text("".join(traceback.format_exception(error))))
        raise TierUnavailable(redacted_text(f"{what}: {type(error).__name__}: {error}")) from None
