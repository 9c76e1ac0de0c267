"""Layout of Orbax's folders: a tree in a folder, the items of a step in subfolders, the steps of a root by number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.interchange.orbax_metadata import load_json

__all__ = [
    "CUSTOM",
    "DEFAULT",
    "ITEMS",
    "METADATA",
    "METRICS",
    "STEP_METADATA",
    "custom_of",
    "files_of",
    "items_of",
    "locate",
    "metrics_of",
]

METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
DEFAULT = "default"
"""The item of a step that was saved without names."""
ITEMS = "_CHECKPOINT_METADATA"
"""The key in the tree of a step of several items: the kind of each, by name."""
CUSTOM = "_CUSTOM_METADATA"
"""The key in such a tree of the trainer's ``custom_metadata``, as JSON."""
METRICS = "_METRICS"
"""The key in such a tree of metrics that are not numbers, as JSON."""
_JSON = "metadata"
_OF_TREES = ("StandardCheckpointHandler", "PyTreeCheckpointHandler", "ArrayCheckpointHandler", "PyTreeHandler")
"""Classes of Orbax that write a tree, as a step names them."""
_OURS = ("metrics", "descriptor")
"""Items that Orbax adds by itself."""
_NUMBERED = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")
_UNFINISHED = ".orbax-checkpoint-tmp"
_LARGEST = 64 << 20
"""Most bytes of a file of an item of another kind, such as the state of a data loader."""

Kind = Literal["tree", "json", "files"]


def locate(path: Path) -> Path:
    """The folder of a checkpoint: ``path``, or its newest step if it is the root of a `CheckpointManager`.

    Raises `NotFound` for a folder without a checkpoint of Orbax.
    """
    if _UNFINISHED in path.name:
        raise NotFound(f"{path} is a checkpoint that Orbax did not finish")
    if not path.is_dir():
        raise NotFound(f"{path} is not there, or is no folder")
    if (path / METADATA).is_file() or _is_step(path):
        return path
    steps = {}
    for child in path.iterdir():
        number = _NUMBERED.fullmatch(child.name)
        if number and _UNFINISHED not in child.name and child.is_dir() and _is_step(child):
            steps[int(number[1])] = child
    if steps:
        return steps[max(steps)]
    if (path / "checkpoint").is_file() or any(path.glob("*/.zarray")):
        raise Invalid(f"{path} has no {METADATA}: it is of an Orbax of before 2024; restore it, and save it anew")
    raise NotFound(f"{path} is no folder of Orbax: it has neither {METADATA} nor a step")


def _is_step(path: Path) -> bool:
    if (path / STEP_METADATA).is_file():
        return True
    return any((child / METADATA).is_file() for child in path.iterdir() if child.is_dir())


def items_of(step: Path) -> dict[str, Kind]:
    """The items of a step's folder, by name. Raises `NotFound` if there are none, or a tree has lost `METADATA`."""
    found: dict[str, Kind] = {}
    handlers = _noted(step).get("item_handlers")
    of_items = handlers if isinstance(handlers, dict) else {}
    if _is_of_tree(handlers):
        raise _lost(step)
    for child in sorted(step.iterdir()):
        if not child.is_dir() or child.name in _OURS or _UNFINISHED in child.name:
            continue
        if (child / METADATA).is_file():
            found[child.name] = "tree"
        elif {file.name for file in child.iterdir()} - {"commit_success.txt"} == {_JSON} and _is_json(child / _JSON):
            found[child.name] = "json"
        elif _is_of_tree(of_items.get(child.name)):
            raise _lost(child)
        else:
            found[child.name] = "files"
    if not found:
        raise NotFound(f"{step} has no item")
    return found


def _is_of_tree(handler: Any) -> bool:
    return isinstance(handler, str) and handler.endswith(_OF_TREES)


def _lost(folder: Path) -> NotFound:
    return NotFound(f"{folder / METADATA} is not there: the checkpoint was not finished, or lost a file")


def _is_json(path: Path) -> bool:
    try:
        load_json(path)
    except Corrupt:
        return False
    return True


def files_of(item: Path) -> dict[str, bytes]:
    """The files of an item that is neither a tree nor JSON, by their paths in it."""
    found: dict[str, bytes] = {}
    limit, source = memory_limit()
    for file in sorted(item.rglob("*")):
        if file.is_dir() and not file.is_symlink():
            continue
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _LARGEST:
            raise Invalid(f"{file} is no plain file of at most {_LARGEST >> 20} MiB, as an item of files is made of")
        limit -= file.stat().st_size
        if limit < 0:
            raise Invalid(f"{item}: its files take more memory than {source} has, in which an import holds all of them")
        found[file.relative_to(item).as_posix()] = file.read_bytes()
    return found


def metrics_of(step: Path) -> Mapping[str, float]:
    """Metrics that Orbax stored to find the best step; empty if there are none, or if they are not numbers."""
    try:
        found: Any = load_json(step / "metrics" / "metrics")
    except NotFound:
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: float(value) for key, value in found.items() if type(value) in (int, float)}


def custom_of(step: Path) -> dict[str, Any]:
    """The trainer's ``custom_metadata`` of a step; empty if there is none."""
    custom = _noted(step).get("custom_metadata")
    return custom if isinstance(custom, dict) else {}


def _noted(step: Path) -> dict[str, Any]:
    """Orbax's metadata of a step besides its items; empty if there is none."""
    try:
        found: Any = load_json(step / STEP_METADATA)
    except NotFound:
        return {}
    return found if isinstance(found, dict) else {}
