"""The folders ``checkpoint-N`` of Hugging Face's Trainer: find the store and the save that each of them names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["folders_of", "mean_save", "save_meant", "store_meant"]

_FILE = "tieredckpt.json"
"""The file in a checkpoint folder that names the step of the store."""


def folders_of(run: Path) -> dict[int, Path]:
    """The folders of checkpoints, by step."""
    folders = run.iterdir() if run.is_dir() else iter(())
    return {int(found[1]): path for path in folders if (found := re.fullmatch(r"checkpoint-(\d+)", path.name))}


def save_meant(folder: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Step and serial that a folder names; None for a folder of another Trainer."""
    said = _said(folder)
    try:
        return int(said["step"]), int(said["serial"])
    except (ValueError, KeyError, TypeError):
        return None


def store_meant(folder: str | os.PathLike[str]) -> Any:
    """The identity of the store that a folder names; None if it names none."""
    return _said(folder).get("store")


def mean_save(folder: Path, step: int, serial: int, store: str | None) -> None:
    """Make a folder that names a save; ``store`` is None if the identity is not known now."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").unlink(missing_ok=True)  # of an earlier save
    unfinished = folder / f"{_FILE}.tmp"
    said: dict[str, Any] = {"step": step, "serial": serial}
    if store is not None:
        said["store"] = store
    unfinished.write_text(json.dumps(said) + "\n")
    unfinished.replace(folder / _FILE)


def _said(folder: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        found = json.loads((Path(folder) / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
