"""What tests of the posix store share: sizes of objects, the files of a root, and watched system calls."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from support.scenes import files_below

SMALL, LARGE = 10_000, 3 << 20

sizes = pytest.mark.parametrize("nbytes", [SMALL, LARGE], ids=["small", "large"])


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in files_below(root)}


class Calls:
    """Wraps a function of `os`: notes its first arguments, and fails or waits where told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.seen: list[Any] = []
        self.error: int | None = None
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self._real = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(args[0])
        self.entered.set()
        assert self.go_on.wait(30)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return self._real(*args, **kwargs)
