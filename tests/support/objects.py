"""Trees of the small objects and containers that trainers hand over, and what a step brings back of a tree."""

from __future__ import annotations

import argparse
import cmath
import enum
import types
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from support.trees import SCALARS, arrays, fingerprint
from tieredckpt.format.structure import decode_structure, encode_structure
from tieredckpt.tree import flatten, host_view, match, unflatten
from tieredckpt.tree.arrays import MadeAs


class Colour(enum.Enum):
    """An enum of a program."""

    RED = 1
    GREEN = "green"
    BLUE = (0.0, 0.5, b"x")
    NONE = None


class Level(enum.IntEnum):
    """One whose members are integers too."""

    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    """One whose members are text too."""

    YES = "yes"


class Access(enum.Flag):
    """One whose members can be joined."""

    READ = 1
    WRITE = 2


class Point(NamedTuple):
    """A namedtuple of a program."""

    x: Any
    y: Any


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=-3, minutes=30)), timezone(timedelta(microseconds=1))])
PLAIN_OBJECTS = st.one_of(
    st.datetimes(timezones=_ZONES, allow_imaginary=False),
    st.datetimes().map(lambda value: value.replace(fold=1)),
    st.dates(),
    st.timedeltas(),
    _TEXT.filter(lambda text: "\0" not in text).map(Path),
    _TEXT.map(PurePosixPath),
    _TEXT.map(PureWindowsPath),
    st.builds(range, st.integers(-9, 9), st.integers(-(2**80), 2**80), st.integers(1, 3)),
    st.sampled_from([np.dtype("f4"), np.dtype(">i8"), np.dtype("M8[ns]"), np.dtype("U7"), np.dtype(object)]),
    st.sampled_from([np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4), np.dtype("M8[25us]")]),
)
"""What comes back without ``like``, and can be a key of a dict."""
ENUMS = st.sampled_from([*Colour, *Level, *Word, Access.READ, Access.READ | Access.WRITE, Access(0)])

_HASHABLE = st.recursive(
    SCALARS.filter(lambda value: not (isinstance(value, float | complex) and cmath.isnan(value)))
    | PLAIN_OBJECTS,  # a NaN is no key that can be found
    lambda items: st.lists(items, max_size=3).map(tuple) | st.frozensets(items, max_size=3),
    max_leaves=4,
)
KEYS: st.SearchStrategy[Any] = _HASHABLE | st.sampled_from(
    ["", "=", "=1", "1", 1, True, 0, -0.0, "=null", None, (), ("a", 1), frozenset()]
)
"""Keys of dicts, alike ones of different types among them."""

LEAVES = st.one_of(
    SCALARS, arrays(), PLAIN_OBJECTS, st.sets(_HASHABLE, max_size=3), _HASHABLE, st.just(slice(1, None, 2.5))
)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What a step stores with its type."""
    named = st.dictionaries(_TEXT, children, max_size=3)
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=4),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(deque, st.lists(children, max_size=3), st.none() | st.integers(3, 9)),
        st.dictionaries(KEYS, children, max_size=3).map(Counter),
        named.map(lambda found: types.SimpleNamespace(**found)),
        named.map(lambda found: argparse.Namespace(**found)),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=8)
"""Trees that come back without ``like``."""
TREES_OF_CLASSES = st.recursive(
    LEAVES | ENUMS | st.frozensets(ENUMS, min_size=1, max_size=3),
    lambda children: st.one_of(
        containers(children),
        st.builds(Point, children, children),
        st.dictionaries(KEYS, children, max_size=2).map(OrderedDict),
        st.dictionaries(ENUMS, children, max_size=2).map(lambda found: defaultdict(list, found)),
    ),
    max_leaves=8,
)
"""Trees that come back by the classes of ``like``."""


def stored(tree: object) -> tuple[Any, dict[str, Any]]:
    """What a step stores of a tree: the structure, decoded anew, and copies of the arrays."""
    flat = flatten(tree)
    arrays = {leaf.key: host_view(leaf).copy() for leaf in flat.arrays}
    return decode_structure(encode_structure(flat.structure)), arrays


def again(tree: object, made: MadeAs = "numpy") -> Any:
    """The tree as it comes back without ``like``, with arrays made so."""
    return unflatten(*stored(tree), made)


def by(like: object, tree: object) -> Any:
    """The tree as it comes back by the classes of ``like``."""
    structure, arrays = stored(tree)
    return match(like, structure).build(arrays)


def bits_of(value: Any) -> object:
    """As `fingerprint`, of these trees too."""
    match value:
        case dict():
            items = [(bits_of(key), bits_of(child)) for key, child in value.items()]
            return (type(value), getattr(value, "default_factory", None), items)
        case deque():
            return ("deque", value.maxlen, [bits_of(child) for child in value])
        case list() | tuple():
            return (type(value), [bits_of(child) for child in value])
        case set() | frozenset():
            return (type(value), sorted((bits_of(item) for item in value), key=repr))
        case argparse.Namespace() | types.SimpleNamespace():
            return (type(value), bits_of(vars(value)))
        case range() | slice():
            return (type(value), value.start, value.stop, value.step)
        case enum.Enum():
            return (type(value), value.name)
        case datetime():
            return (datetime, value.isoformat(), value.fold)
        case date() | timedelta():
            return (type(value), repr(value))
        case _:
            return fingerprint(value)
