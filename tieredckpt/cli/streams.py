"""The standard streams of the command: a vanished reader, a full disk or an ASCII terminal is not reported as a defect.

If its output cannot be written, the command says so and fails; if its reader has gone, it ends as by SIGPIPE.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["OutputFailed", "standard_streams"]


class OutputFailed(Exception):
    """The output cannot be written. No OSError, for those are of the store's files."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.errno = error.errno


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputFailed(error) from error


class _Errors(io.FileIO):
    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):  # there is nowhere to report it
            return super().write(data)
        return len(data)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Exit with 1 and a message when the output cannot be written, with 141 when its reader has gone."""
    _open_what_is_closed()
    sys.stdout, sys.stderr = _text(_Output(1, "w", closefd=False)), _text(_Errors(2, "w", closefd=False))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputFailed as error:
        _throw_away_what_is_left()
        if error.errno == errno.EPIPE:
            sys.exit(128 + signal.SIGPIPE)
        sys.stderr.write(f"tieredckpt: write error: {error}\n")
        sys.exit(1)


def _open_what_is_closed() -> None:
    """Open closed standard streams: else the next opened file, perhaps a store's, would become the output."""
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken. Writes to the output fail; errors are discarded.
            os.open(os.devnull, flags)


def _text(raw: io.FileIO) -> io.TextIOWrapper:
    before = sys.__stdout__ if raw.fileno() == 1 else sys.__stderr__
    encoding = "utf-8" if before is None else before.encoding
    to_people = raw.fileno() == 2 or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=to_people)


def _throw_away_what_is_left() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
