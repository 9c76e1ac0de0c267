"""Every name on disk: of files relative to a tier's root, and of the library's own keys in a step index."""

from __future__ import annotations

import re
import secrets
from functools import lru_cache

from tieredckpt.errors import Invalid

__all__ = [
    "ALIGNMENT",
    "BLOCKS",
    "CATALOGS",
    "CHUNK_DIGESTS",
    "DERIVED",
    "DERIVED_VERSION",
    "ENCODED_VERSION",
    "FOLDERS",
    "FORMAT_VERSION",
    "FORMAT_VERSIONS",
    "LEASES",
    "MANIFEST",
    "MARKER",
    "MARKER_MAX",
    "MAX_NUMBER",
    "PACKS",
    "PINS",
    "RANKS",
    "STEPS",
    "STEP_RECORD",
    "aligned",
    "array_key",
    "block_key",
    "btree_key",
    "catalog_key",
    "manifest_key",
    "new_pack_id",
    "pack_key",
    "parse_block_key",
    "parse_catalog_key",
    "parse_pack_key",
    "parse_pin_key",
    "parse_step_folder",
    "part_key",
    "pin_key",
    "step_folder",
]

FORMAT_VERSION = 1
"""Version of everything under a root; a reader refuses what it does not know."""

ENCODED_VERSION = 2
"""Version of the marker of a tier that may hold compressed chunks, and of the footers of packs that do."""

DERIVED_VERSION = 3
"""Version of the marker of a root of derived steps, which readers of exact steps refuse."""

FORMAT_VERSIONS = FORMAT_VERSION, ENCODED_VERSION, DERIVED_VERSION
"""Format versions that this version reads."""

MARKER = "tieredckpt.json"
"""The file that identifies the store of this root; written once."""

MARKER_MAX = 64 << 10
"""Bytes of the largest marker that is read."""

ALIGNMENT = 4096
"""Extents begin at multiples of this many bytes."""

MAX_NUMBER = (1 << 63) - 1
"""Largest step and largest serial."""

DERIVED = "derived/"
"""Below the root of a tier: a root of its own, whose steps are derived from exact ones with loss."""

STEPS = "steps/"
PACKS = "packs/"
CATALOGS = "catalogs/"
"""Folder of catalogs: packs and steps that need not be read; a catalog counts where it agrees with the listing."""

LEASES = "leases/"
PINS = "pins/"
"""Folder of empty objects, one for each step that is to stay on the tier."""

RANKS = "ranks/"
"""Messages between ranks that have no other way to communicate; no part of any step."""

FOLDERS = (STEPS, PACKS, CATALOGS, LEASES, PINS, RANKS)
"""The folders of a root, each made when it is needed."""

MANIFEST = "manifest.ocdbt"
"""Name of the commit file in the folder of a step."""

STEP_RECORD = "tieredckpt/step.json"
"""Key in a step index: the record of the step, JSON."""

CHUNK_DIGESTS = "tieredckpt/chunks"
"""Key in a step index: the digests of all chunks, back to back."""

BLOCKS = "tieredckpt/blocks/"
"""Keys in a step index: the blocks of arrays that are stored in several boxes, each a zarr array of its own."""

_MAX_AXES = 32
_LARGEST = (1 << 63) - 1
_OFFSET = re.compile(r"(?:0|[1-9]\d{0,18})(?:\.(?:0|[1-9]\d{0,18}))*", re.ASCII)
_STEP_FOLDER = re.compile(r"steps/(\d{10,})-(\d{6,})/", re.ASCII)
_PACK_KEY = re.compile(r"packs/([0-9a-f]{2})/(\1[0-9a-f]{30})\.pack")
_CATALOG_KEY = re.compile(r"catalogs/([0-9a-f]{32})")
_PACK_ID = re.compile(r"[0-9a-f]{32}")


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def step_folder(step: int, serial: int) -> str:
    """Folder of a step, ``steps/0000001000-000007/`` for step 1000 of serial 7.

    Zero padding makes names sort by step while the numbers keep to 10 and 6 digits; larger ones are longer.

    Raises:
        Invalid: ``step < 0``, ``serial < 1``, or either is beyond `MAX_NUMBER`.
    """
    if step < 0 or serial < 1:
        raise Invalid(f"step {step} with serial {serial} has no folder: steps begin at 0, serials at 1")
    if max(step, serial) > MAX_NUMBER:
        raise Invalid(f"step {step} with serial {serial} has no folder: neither may exceed 2**63 - 1")
    return f"{STEPS}{step:010d}-{serial:06d}/"


def parse_step_folder(name: str) -> tuple[int, int] | None:
    """``(step, serial)`` of a name that `step_folder` makes, None for any other."""
    match = _STEP_FOLDER.fullmatch(name)
    # Python refuses to convert thousands of digits; no step number has so many.
    if match is None or len(name) > 64:
        return None
    step, serial = int(match[1]), int(match[2])
    if serial < 1 or max(step, serial) > MAX_NUMBER:
        return None
    return (step, serial) if step_folder(step, serial) == name else None


def manifest_key(step: int, serial: int) -> str:
    """The commit file of a step. Raises `Invalid` as `step_folder` does."""
    return step_folder(step, serial) + MANIFEST


def btree_key(step: int, serial: int) -> str:
    """The file with the index nodes of a step. Raises `Invalid` as `step_folder` does."""
    return step_folder(step, serial) + "btree"


def part_key(step: int, serial: int, rank: int) -> str:
    """Key of a rank's part of a step that is being committed. Raises `Invalid` as `step_folder` does."""
    if rank < 0:
        raise Invalid(f"rank {rank} has no part: ranks begin at 0")
    return f"{step_folder(step, serial)}parts/{rank}"


def pin_key(step: int, serial: int) -> str:
    """Key of the object that keeps a step on its tier. Raises `Invalid` as `step_folder` does."""
    return PINS + step_folder(step, serial)[len(STEPS) : -1]


def parse_pin_key(key: str) -> tuple[int, int] | None:
    """``(step, serial)`` of a key that `pin_key` makes, None for any other."""
    return parse_step_folder(f"{STEPS}{key.removeprefix(PINS)}/") if key.startswith(PINS) else None


def block_key(key: str, offset: tuple[int, ...]) -> str:
    """Key of the block of array ``key`` that begins at ``offset``: ``tieredckpt/blocks/<key>/4096.0``.

    Raises:
        Invalid: an array without axes, which is never cut, or a negative offset.
    """
    if not 1 <= len(offset) <= _MAX_AXES or not all(0 <= start <= _LARGEST for start in offset):
        raise Invalid(f"array {key!r} has no block at {offset}: offsets are at least 0, one for each axis")
    return f"{BLOCKS}{key}/{'.'.join(map(str, offset))}"


def parse_block_key(storage_key: str) -> tuple[str, tuple[int, ...]] | None:
    """``(key, offset)`` of a name that `block_key` makes, None for any other, as the key of a whole array is."""
    if not storage_key.startswith(BLOCKS):
        return None
    key, _, tail = storage_key.removeprefix(BLOCKS).rpartition("/")
    offset = _parse_offset(tail)
    return (key, offset) if key and offset is not None else None


def array_key(storage_key: str) -> str:
    """Key of the array that is stored, whole or a block of it, as ``storage_key``."""
    block = parse_block_key(storage_key)
    return storage_key if block is None else block[0]


# A step of many ranks has a million blocks at a few thousand offsets.
@lru_cache(maxsize=16384)
def _parse_offset(text: str) -> tuple[int, ...] | None:
    if not _OFFSET.fullmatch(text):
        return None
    offset = tuple(map(int, text.split(".")))
    return offset if len(offset) <= _MAX_AXES and max(offset) <= _LARGEST else None


def new_pack_id() -> str:
    """A pack's identity: 128 random bits as 32 lower-case hexadecimal digits."""
    return secrets.token_hex(16)


def pack_key(pack_id: str) -> str:
    """File of a pack, in one of 256 folders by the first two digits of its identity.

    Raises:
        Invalid: not 32 lower-case hexadecimal digits.
    """
    if not _PACK_ID.fullmatch(pack_id):
        raise Invalid(f"{pack_id!r} is not a pack id: 32 lower-case hexadecimal digits, see new_pack_id()")
    return f"{PACKS}{pack_id[:2]}/{pack_id}.pack"


def parse_pack_key(key: str) -> str | None:
    """Identity of the pack in a file that `pack_key` names, None for any other file."""
    match = _PACK_KEY.fullmatch(key)
    return match[2] if match else None


def catalog_key(identity: str) -> str:
    """File of a catalog, by its identity of 32 lower-case hexadecimal digits."""
    return f"{CATALOGS}{identity}"


def parse_catalog_key(key: str) -> str | None:
    """Identity of the catalog in a file that `catalog_key` names, None for any other file."""
    match = _CATALOG_KEY.fullmatch(key)
    return match[1] if match else None
