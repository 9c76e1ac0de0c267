"""The configuration of a tier: what every kind has, and the kinds of this library."""

from __future__ import annotations

import json
import os
import re
import string
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, PlainSerializer, SerializationInfo, ValidationInfo

from tieredckpt._redact import is_redacted, redacted
from tieredckpt.config.lossy import LossyRule
from tieredckpt.errors import Invalid
from tieredckpt.policy.base import AnyEviction, AnyPromotion, AnyRetention, Eviction, Promotion, Retention, parse
from tieredckpt.settings import Settings
from tieredckpt.units import Duration, Rate, Size, parse_size

__all__ = [
    "CHFS_FOLDER",
    "LOOKALIKE",
    "WITH_SECRETS",
    "AbsolutePath",
    "Capacity",
    "ChfsTier",
    "Flag",
    "FolderTier",
    "Interval",
    "KvstoreTier",
    "PosixTier",
    "RamTier",
    "Threads",
    "TierConfig",
    "absolute",
    "expand",
    "normal",
    "refuse_url",
    "substitute",
    "url_scheme",
]


def _path(value: object, info: ValidationInfo) -> Path:
    """An absolute path: of text, after ``~`` and ``$NAME`` (``$$`` is a dollar sign); of a Path, as it is."""
    if isinstance(value, str):
        value = expand(value)
    elif not isinstance(value, Path):
        raise Invalid(f"should be a path, not {value!r}")
    return absolute(info.context["folder"] if info.context else Path(), value)


def absolute(folder: Path, path: Path) -> Path:
    """A path, which starts at ``folder`` if it is relative; raises `Invalid` where file names cannot be so here."""
    refuse_url(str(path))
    try:
        found = Path(folder, path).absolute()
    except FileNotFoundError as error:
        raise Invalid(f"{str(path)!r}: the current folder was removed; write the path from '/' on") from error
    try:
        os.fsencode(found)
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        raise Invalid(
            f"{str(found)!r} has characters that file names of this process have not, which are {encoding}; set "
            "PYTHONUTF8=1, or name another path"
        ) from error
    return found


def expand(text: str) -> Path:
    """The path that ``text`` stands for, after ``~`` and ``$NAME``; raises `Invalid`."""
    expanded = substitute(text)
    refuse_url(expanded)
    try:
        return Path(expanded).expanduser()
    except RuntimeError as error:
        raise Invalid(f"{text!r}: the home folder is not known; write the path from '/' on") from error


def substitute(text: str) -> str:
    """A path or URL with the variables of the environment in the place of ``$NAME``; raises `Invalid`."""
    if not text or "\0" in text:
        raise Invalid(f"{text!r} is not a path")
    try:
        return string.Template(text).substitute(os.environ)
    except KeyError as error:
        raise Invalid(f"{text!r} needs the environment variable {error.args[0]}, which is not set") from error
    except ValueError as error:
        raise Invalid(f"{text!r} has a '$' that names no variable; write '$$' for the character") from error


def refuse_url(text: str) -> None:
    """Raise `Invalid` for text that begins with a URL scheme: as a path it would name a local folder ``s3:``."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", text)  # one slash is left of two in `Path("s3://bucket")`
    if found is None:
        return
    scheme = found[1]
    what = f"'{scheme}://…' is a URL, not a path"  # the rest of it may hold a password
    if scheme.lower() == "file":
        raise Invalid(f"{what}; write the path alone, without 'file://'")
    raise Invalid(f"{what}; a tier in an object store has kind = 's3', 'gcs' or 'azure', and the URL as its `url`")


def url_scheme(text: str) -> str | None:
    """The scheme of a URL; None for any other text."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    return None if found is None else found[1]


def normal(path: Path) -> str:
    """The path without ``.``, ``..`` and doubled slashes."""
    # By its text alone: a file system that hangs must not hang the reading of a configuration.
    return os.path.normpath(path)


def _auto_or_size(value: object) -> Any:
    if value == "auto":
        return value
    nbytes = parse_size(value)
    if nbytes == 0:
        raise Invalid("should be greater than 0, or 'auto'")
    return nbytes


def _kvstore_spec(value: object) -> Any:
    if is_redacted(value):
        raise Invalid("has REDACTED in the place of a secret: put the secret there, or leave its member out")
    if isinstance(value, str):
        if not re.match(r"[a-z0-9_.+-]+:", value):
            raise Invalid(f"should be a URL such as 'gs://bucket/folder/' or a table, not {redacted(value)!r}")
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("driver"), str):
        raise Invalid("should be a TensorStore kvstore spec: a URL, or a table with its `driver`")
    try:
        return json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"should be a TensorStore kvstore spec made of JSON values: {error}") from error


def _without_secrets(spec: Any, info: SerializationInfo) -> Any:
    return spec if info.context is WITH_SECRETS else redacted(spec)


def _chfs_path(value: object) -> str:
    """An absolute path in CHFS, as CHFS takes it: no component twice, aliased or with a colon."""
    if not isinstance(value, str) or not re.fullmatch(r"(/[^/:\0]{1,200}){1,8}", value):
        raise Invalid(f"should be a folder in CHFS such as '/tieredckpt', not {value!r}")
    if any(part in (".", "..") for part in value.split("/")):
        raise Invalid(f"should have no '.' or '..' in it, not {value!r}")
    return value


def _chfs_server(value: object, info: ValidationInfo) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise Invalid(f"should be the address of a CHFS server, or 'directory:PATH' for a look-alike, not {value!r}")
    if not value.startswith(LOOKALIKE):
        return value
    return f"{LOOKALIKE}{_path(value.removeprefix(LOOKALIKE), info)}"


def _chfs_chunk(value: object) -> int:
    nbytes = parse_size(value)
    if not 4096 <= nbytes <= 64 << 20 or nbytes % 4096:
        raise Invalid("should be a multiple of 4 KiB, 64 MiB at most")
    return nbytes


WITH_SECRETS = {"secrets": True}
"""Context of a dump with the secrets of the tiers; other dumps omit them."""

LOOKALIKE = "directory:"
"""Prefix of the address of a look-alike of CHFS; its directory follows."""

CHFS_FOLDER = "/tieredckpt"
"""The folder in CHFS of stores without an identity."""

AbsolutePath = Annotated[
    Path,
    BeforeValidator(_path),
    PlainSerializer(lambda path: str(path).replace("$", "$$"), return_type=str, when_used="json"),
]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]
Threads = Annotated[int, Field(strict=True, ge=1, le=256)]
Interval = Annotated[Duration, Field(gt=0)]
Capacity = Annotated[Size, Field(gt=0)]
Flag = Annotated[bool, Field(strict=True)]


class TierConfig(Settings):
    """Settings of every kind of tier. A kind derives its model from this, with a literal as the default of ``kind``."""

    kind: str
    name: Name
    promote: AnyPromotion = Field(default_factory=lambda: parse(Promotion, "always"))
    retain: AnyRetention = Field(default_factory=lambda: parse(Retention, {"kind": "last_n", "n": 5}))
    evict: AnyEviction = Field(default_factory=lambda: parse(Eviction, "oldest"))
    retries: Annotated[int, Field(strict=True, ge=0, le=100)] = 3
    """How often an operation that failed is tried again before the tier counts as failed."""
    deadline: Interval = 30.0
    """Time limit of one operation, in seconds, plus the time for its bytes at ``min_bandwidth``."""
    min_bandwidth: Annotated[Rate, Field(gt=0)] = 10_000_000
    """Bytes a second; an operation on more bytes may take so much longer."""
    rate_limit: Annotated[Rate, Field(gt=0)] | None = None
    """Bytes a second that promotion to this tier may use; None for all there are."""
    codec: Literal["none", "fast", "small"] = "none"
    """How chunks are compressed, without loss: ``fast`` by LZ4, ``small`` by Zstandard. Stock readers open both."""
    codec_threads: Threads = 1
    """How many threads compress at a time."""
    lossy: tuple[LossyRule, ...] = ()
    """What the tier keeps less of, by key: it then has derived steps alone, which never count as copies of the exact
    ones, and lies in the folder ``derived`` of its place."""

    if TYPE_CHECKING:  # every kind has its own, as a field or a property; pydantic would give them all these

        @property
        def location(self) -> str | None:
            """Location for people, without secrets; no other tier of a store may be there."""

        @property
        def capacity(self) -> int | Literal["auto"] | None:
            """Bytes that it may use; None for no bound."""

        @property
        def survives(self) -> Literal["process", "node", "site"] | None:
            """What the tier outlives according to the user; None where the user does not say."""

    @classmethod
    def noun(cls) -> str:
        return f"a {cls.model_fields['kind'].default} tier"

    @property
    def location_with_secrets(self) -> str | None:
        """Location with secrets, for a digest; it is neither shown nor stored."""
        return self.location

    def located(self, identity: str | None) -> Self:
        """This tier with its place, which may be named after the store's ``identity``, if that is known."""
        return self

    def earlier(self) -> Self | None:
        """This tier at its place in earlier versions, if it names no place and that place was another."""
        return None


class RamTier(TierConfig):
    """Shared memory of this node; survives the process."""

    kind: Literal["ram"] = "ram"
    retain: AnyRetention = Field(default_factory=lambda: parse(Retention, {"kind": "last_n", "n": 1}))
    capacity: Annotated[Size | Literal["auto"], BeforeValidator(_auto_or_size)] = "auto"
    """Bytes of the slab. ``auto`` takes what two snapshots need, more only for steps that are retained, wait for their
    promotion or are being read, and at most a quarter of the memory."""
    path: AbsolutePath | None = None
    """The shared-memory folder; None for the system's own."""

    on_close: Literal["auto", "keep", "release"] = "auto"
    """What happens to the memory when the store is closed: ``keep`` leaves it for the next process, ``release``
    gives it back if slower tiers hold all of it, ``auto`` releases it unless an error ends the training."""
    replicas: Annotated[int, Field(strict=True, ge=1, le=8)] = 1
    """On how many nodes each rank's part of a step is kept, its own among them. Each more takes ``capacity`` bytes of
    another node's memory for every rank."""

    @property
    def survives(self) -> Literal["process"]:
        return "process"

    def keeps(self, *, clean: bool) -> bool:
        """Whether the memory stays when the store is closed, ``clean`` unless an error ends the training."""
        return self.on_close == "keep" or (self.on_close == "auto" and not clean)

    @property
    def location(self) -> str | None:
        """The place that no other tier may use; None where the system's own folder is taken."""
        return None if self.path is None else normal(self.path)


class FolderTier(TierConfig):
    """Settings that the kinds of folders share."""

    path: AbsolutePath
    capacity: Capacity | None = None
    """Bytes that the tier may use; None for all that the file system has."""
    direct: Flag | None = None
    """Whether to bypass the page cache; None to find out whether the file system can."""
    fsync: Flag = True
    """False: nothing is synced (promise 3 does not hold); after a crash of the node this tier may hold nothing."""
    access: Literal["private", "group"] = "private"
    """Who may use what is made there: its user alone, or the group of the folder too, whatever the umask is."""
    survives: Literal["node", "site"] = "node"
    threads: Threads = 4
    """How many calls block at a time, and twice as many that read chunks."""

    @property
    def location(self) -> str:
        return normal(self.path)


class PosixTier(FolderTier):
    """A folder: NVMe, or anything else that is mounted."""

    kind: Literal["posix"] = "posix"


class ChfsTier(TierConfig):
    """CHFS: a parallel file system on the persistent memory or NVMe of the compute nodes, for the time of a job."""

    kind: Literal["chfs"] = "chfs"
    path: Annotated[str, BeforeValidator(_chfs_path)] | None = None
    """The store's folder in CHFS; None for one that is named after the store, see `located`."""
    server: (
        Annotated[
            str,
            BeforeValidator(_chfs_server),
            PlainSerializer(
                lambda server: server.replace("$", "$$") if server.startswith(LOOKALIKE) else server,
                return_type=str,
                when_used="json",
            ),
        ]
        | None
    ) = None
    """Address of one server; None for ``CHFS_SERVER``; ``directory:PATH`` for a look-alike over that directory."""
    library: AbsolutePath | None = None
    """libchfs; None for ``TIEREDCKPT_LIBCHFS``, then for what the loader finds."""
    chunk_size: Annotated[int, BeforeValidator(_chfs_chunk)] = 4 << 20
    """Bytes of a CHFS chunk, the unit that is spread over the servers."""
    threads: Threads = 8
    """How many of its calls are under way at a time."""
    servers: Annotated[int, Field(strict=True, ge=1, le=100_000)] | None = None
    """How many servers there must be, from now on; None for as many as the store was written with. Say it for a new
    store: else nothing is written there before no server has joined for a while."""
    rpc_timeout: Interval = 30.0
    """Seconds; at least three times that of the servers (``chfsd -t``)."""
    survives: Literal["process", "node"] = "process"
    """``node`` states that the servers run on other machines than the trainer."""
    via: Literal["auto", "worker", "tensorstore"] = "auto"
    """Whether a worker process hosts libchfs, or TensorStore's ``chfs`` driver in this process does."""
    capacity: Capacity | None = None
    """Bytes that the tier may use; None for all that CHFS has."""

    @property
    def location(self) -> str:
        """The place that no other tier may use."""
        return f"chfs:{self.server or ''}:{self.folder}"

    @property
    def folder(self) -> str:
        """``path``, or the folder in which earlier versions put every store without one."""
        return self.path or CHFS_FOLDER

    def located(self, identity: str | None) -> Self:
        if self.path is not None:
            return self
        return self.model_copy(update={"path": CHFS_FOLDER if identity is None else f"{CHFS_FOLDER}-{identity}"})

    def earlier(self) -> Self | None:
        return None if self.path is not None else self.model_copy(update={"path": CHFS_FOLDER})


class KvstoreTier(TierConfig):
    """Any store that TensorStore has a driver for."""

    kind: Literal["kvstore"] = "kvstore"
    spec: Annotated[dict[str, JsonValue] | str, BeforeValidator(_kvstore_spec), PlainSerializer(_without_secrets)]
    """A TensorStore kvstore spec: its JSON form, or a URL. Better without secrets: drivers find their credentials in
    the environment. Those that it has are in no dump and no repr of this model."""
    capacity: Capacity | None = None
    """Bytes that the tier may use; None for no bound."""
    survives: Literal["process", "node", "site"] | None = None
    """None for what the driver promises."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [(name, redacted(value)) for name, value in super().__repr_args__()]

    @property
    def location(self) -> str:
        spec = redacted(self.spec)
        return spec if isinstance(spec, str) else json.dumps(spec, sort_keys=True)

    @property
    def location_with_secrets(self) -> str:
        return self.spec if isinstance(self.spec, str) else json.dumps(self.spec, sort_keys=True)
