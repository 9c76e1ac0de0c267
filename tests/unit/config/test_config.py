"""Configurations: what the forms mean, what is refused, and what the refusal says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tieredckpt_policies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tieredckpt_policies import promotion, retention, schedule

from tieredckpt._redact import redacted
from tieredckpt.config import (
    KvstoreTier,
    LustreTier,
    NfsTier,
    PosixTier,
    RamTier,
    StoreConfig,
    Striping,
    load,
    to_toml,
)
from tieredckpt.errors import Invalid, NotFound
from tieredckpt.policy.base import Promotion, register

for _policy in tieredckpt_policies.POLICIES:
    register(_policy)

FULL = """\
[store]
name = "run-7"
chunk_size = "8 MiB"
threads = 2
when_full = "replace"
grace = "2h"

[store.schedule]
kind = "every"
interval = "90 s"

[tiers.ram]
kind = "ram"
capacity = "4 GiB"

[tiers.nvme]
kind = "posix"
path = "fast"
capacity = "1.5 TB"
direct = true
deadline = "5 s"
min_bandwidth = "100 MB/s"
retain = { kind = "last_n", n = 3 }

[tiers.bucket]
kind = "kvstore"
spec = { driver = "gcs", bucket = "b", path = "run/" }
rate_limit = "1 GB/s"
[tiers.bucket.promote]
kind = "any_of"
policies = [ { kind = "every_n_steps", n = 1000 }, { kind = "every", interval = "1h" } ]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "ckpt.toml"
    path.write_text(text, "utf-8")
    return path


def disk(**more: Any) -> dict[str, Any]:
    return {"tiers": {"disk": {"kind": "posix", "path": "/d", **more}}}


def test_a_file_says_what_the_store_is_made_of(tmp_path: Path) -> None:
    config = load(write(tmp_path, FULL))
    assert config == StoreConfig(
        name="run-7",
        chunk_size=8 * 2**20,
        threads=2,
        when_full="replace",
        grace=7200.0,
        schedule=schedule.Every(interval=90.0),
        tiers=(
            RamTier(name="ram", capacity=4 * 2**30),
            PosixTier(
                name="nvme",
                path=tmp_path / "fast",
                capacity=1_500_000_000_000,
                direct=True,
                deadline=5.0,
                min_bandwidth=100_000_000,
                retain=retention.LastN(n=3),
            ),
            KvstoreTier(
                name="bucket",
                spec={"driver": "gcs", "bucket": "b", "path": "run/"},
                rate_limit=10**9,
                promote=promotion.AnyOf(policies=(promotion.EveryNSteps(n=1000), promotion.Every(interval=3600.0))),
            ),
        ),
    )
    assert [tier.name for tier in config.tiers] == ["ram", "nvme", "bucket"]


def test_a_folder_is_ram_and_that_folder(tmp_path: Path) -> None:
    for source in (tmp_path, str(tmp_path)):
        config = load(source)
        assert [(tier.name, tier.kind) for tier in config.tiers] == [("ram", "ram"), ("disk", "posix")]
        assert isinstance(config.tiers[1], PosixTier)
        assert config.tiers[1].path == tmp_path


def test_unset_settings_are_the_documented_defaults() -> None:
    config = load("/somewhere")
    ram, durable = config.tiers
    assert (ram.retain, durable.retain) == (retention.LastN(n=1), retention.LastN(n=5))
    assert {ram.promote, durable.promote} == {promotion.Always()}
    assert config.schedule == schedule.Always()
    assert (config.chunk_size, config.grace, config.lease_ttl) == (16 * 2**20, 3600, 60)


def test_a_config_is_taken_as_it_is() -> None:
    config = load("/somewhere")
    assert load(config) is config


def test_what_is_dumped_loads_again_and_so_does_its_toml(tmp_path: Path) -> None:
    config = load(write(tmp_path, FULL))
    assert load(json.loads(config.model_dump_json())) == config
    assert load(config.model_dump(mode="json")) == config
    again = tmp_path / "elsewhere"
    again.mkdir()
    assert load(write(again, to_toml(config))) == config


_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)

_json = st.recursive(st.booleans() | st.integers(0, 2**53) | _text, st.lists, max_leaves=5)


@given(
    path=_text,
    spec=st.dictionaries(_text, _json).filter(lambda spec: redacted(spec) == spec),
    capacity=st.none() | st.integers(2**24, 2**50),
    grace=st.floats(61, 1e6),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_configuration_survives_json_and_toml(
    path: str, spec: dict[str, Any], capacity: int | None, grace: float
) -> None:
    config = StoreConfig(
        name="x",
        grace=grace,
        tiers=(
            RamTier(name="ram", path=Path("/shm") / "r", capacity="auto" if capacity is None else capacity),
            PosixTier(name="a", path=Path("/a", "x" + path), capacity=capacity),
            KvstoreTier(name="b", spec={**spec, "driver": "memory"}),
        ),
    )
    assert load(config.model_dump(mode="json")) == config
    assert load(tomllib.loads(to_toml(config))) == config


def test_null_in_a_spec_is_refused_where_toml_cannot_say_it() -> None:
    config = load({"tiers": {"b": {"kind": "kvstore", "spec": {"driver": "memory", "x": None}}}})
    assert load(config.model_dump(mode="json")) == config
    with pytest.raises(Invalid, match="no null"):
        to_toml(config)


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    write(tmp_path / "conf", '[tiers.disk]\nkind = "posix"\npath = "../data"\n')
    monkeypatch.chdir(tmp_path)
    (tier,) = load("conf/ckpt.toml").tiers
    assert tier.location == str(tmp_path / "data")
    (tier,) = load(disk(path="data")).tiers
    assert tier.location == str(tmp_path / "data")


def test_where_the_current_folder_was_removed_absolute_paths_are_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for source in (tmp_path / "run", disk(path=str(tmp_path / "run"))):
        assert load(source).tiers[-1].location == str(tmp_path / "run")
    with pytest.raises(Invalid, match="'data': the current folder was removed"):
        load("data")


def test_home_and_variables_are_expanded_in_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RUN", "r7")
    for text, path in [
        ("~/c", "/home/me/c"),
        ("/d/$RUN", "/d/r7"),
        ("/d/${RUN}x", "/d/r7x"),
        ("/d/$$RUN", "/d/$RUN"),
    ]:
        (tier,) = load(disk(path=text)).tiers
        assert tier.location == path
    (tier,) = load(disk(path=Path("/d/$RUN"))).tiers
    assert tier.location == "/d/$RUN"
    assert load("/d/$RUN").tiers[1].location == "/d/r7"


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    with pytest.raises(Invalid, match=r"tiers\.disk\.path: .*NO_SUCH_VARIABLE"):
        load(disk(path="/d/$NO_SUCH_VARIABLE"))


def test_every_problem_of_a_file_has_its_line_its_setting_and_what_to_write(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
chunk_size = "1 MiB"
[store]
when_full = "wiat"
chunk_sise = 3
grace = "soon"
schedule = "evry"

[tiers.disk]
kind = "posix"
path = "/d"
capcity = "1 GiB"
retain = { kind = "last_n", n = 0 }

[tiers.Other]
kind = "posix"
path = "/o"

[tiers.far]
kind = "s4"

[tiers.kept]
kind = "posix"
path = "/k"
[tiers.kept.retain]
kind = "union"
policies = [
    { kind = "last_n", n = 1 },
    { kind = "best", metric = "loss", mode = "mox" },
]
""",
    )
    with pytest.raises(Invalid) as raised:
        load(path)
    assert [line.removeprefix(f"{path}:") for line in str(raised.value).splitlines()] == [
        "1: chunk_size: `chunk_size` is not a table of a configuration; it belongs in [store]",
        "3: store.when_full: should be 'wait', 'skip' or 'replace', not 'wiat'; did you mean `wait`?",
        "4: store.chunk_sise: `chunk_sise` is not a setting of a store; did you mean `chunk_size`?",
        "5: store.grace: 'soon' is not a duration; write for example '30 s', '15 min' or '1h30m'",
        "6: store.schedule.kind: `evry` is not a kind of schedule; did you mean `every`?",
        "11: tiers.disk.capcity: `capcity` is not a setting of a posix tier; did you mean `capacity`?",
        "12: tiers.disk.retain.n: should be greater than or equal to 1, not 0",
        "14: tiers.Other.name: should match the pattern ^[a-z][a-z0-9_-]*$, not 'Other'",
        "19: tiers.far.kind: `s4` is not a kind of tier; there are: azure, chfs, gcs, kvstore, lustre, nfs, posix, "
        "ram, s3; for another one, install the package that offers it",
        "29: tiers.kept.retain.policies[1].mode: should be 'min' or 'max', not 'mox'; did you mean `max`?",
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, r"tiers: there is none; add one"),
        ({"tiers": {}}, r"tiers: there is none; add one"),
        ({"tiers": {"ram": {"kind": "ram"}}}, r"store\.name: is required"),
        (
            {"tiers": {"disk": {"path": "/d"}}},
            r"tiers\.disk\.kind: is required: one of azure, chfs, gcs, kvstore, lustre, nfs, posix, ram, s3",
        ),
        ({"tiers": {"disk": {"knd": "posix"}}}, r"tiers\.disk\.kind: is required: .*; `knd` is not a setting"),
        ({"tiers": {"disk": {"kind": "posix"}}}, r"tiers\.disk\.path: is required"),
        ({"tiers": {"disk": 3}}, r"tiers\.disk: should be a table"),
        ({"tiers": 3}, r"tiers: should be one table per tier"),
        ({"store": 3, **disk()}, r"store: should be a table"),
        ({"store": {"tiers": []}, **disk()}, r"store\.tiers: every tier is a table of its own"),
        (
            disk(schedule="every"),
            r"tiers\.disk\.schedule: `schedule` is not a setting of a posix tier; it belongs in \[store\]$",
        ),
        (
            {"store": {"promote": "always"}, **disk()},
            r"store\.promote: `promote` is not a setting of a store; it belongs in \[tiers\.NAME\]$",
        ),
        ({"store": {"lease_ttl": "1h"}, **disk()}, r"store\.grace: must be longer than lease_ttl"),
        ({"store": {"chunk_size": "2 KiB"}, **disk()}, r"store\.chunk_size: should be greater"),
        ({"store": {"repack_below": 1.0}, **disk()}, r"store\.repack_below: should be less than 1"),
        ({"store": {"name": "../up"}, **disk()}, r"store\.name: should match"),
        ({"store": {"threads": True}, **disk()}, r"store\.threads: should be a valid integer"),
        (disk(capacity=0), r"tiers\.disk\.capacity: should be greater than 0"),
        (disk(capacity="1 MiB"), r"tiers\.disk\.capacity: 1 MiB cannot hold one chunk of 16 MiB; raise it"),
        (disk(path=""), r"tiers\.disk\.path: '' is not a path"),
        (disk(path="/a\0b"), r"tiers\.disk\.path: .* is not a path"),
        (
            disk(path="/a\ud800"),
            r"tiers\.disk\.path: '/a\\ud800' has characters that file names",
        ),
        (disk(path="/a$"), r"tiers\.disk\.path: .*write '\$\$'"),
        (disk(path="~nobody has this name/a"), r"tiers\.disk\.path: .*the home folder is not known; write the path"),
        (
            {"store": {"promote_in": "agent"}, **disk()},
            r"store\.promote_in: is `agent`, which promotes from a ram tier",
        ),
        (disk(path=3), r"tiers\.disk\.path: should be a path"),
        (disk(name="other"), r"tiers\.disk\.name: its table is called disk"),
        (disk(promote="never"), r"tiers\.disk\.promote: the nearest tier gets every save"),
        (disk(retries=-1), r"tiers\.disk\.retries: should be greater than or equal to 0"),
        (disk(deadline=0), r"tiers\.disk\.deadline: should be greater than 0"),
        (disk(survives="process"), r"tiers\.disk\.survives: should be 'node' or 'site'"),
        (
            {"tiers": [{"kind": "posix", "name": "a", "path": "/a"}] * 2},
            r"tiers\.a: there are two tiers",
        ),
        ({"tiers": [{"kind": "posix", "path": "/a"}]}, r"tiers\[0\]\.name: is required"),
        (
            {"tiers": {"a": {"kind": "posix", "path": "/a/../x"}, "b": {"kind": "posix", "path": "/x/"}}},
            r"tiers\.b: is at /x like the tier a",
        ),
        (
            {"tiers": {"a": {"kind": "posix", "path": "/a/b/c"}, "b": {"kind": "posix", "path": "/a"}}},
            r"tiers\.b\.path: /a and /a/b/c of the tier a lie in each other; give each a folder of its own",
        ),
        (
            {"tiers": {**disk()["tiers"], "k": {"kind": "kvstore", "spec": "file:///d/k/"}}},
            r"tiers\.k: /d/k and /d of the tier disk lie in each other; give each a folder of its own",
        ),
        (
            {"tiers": {**disk()["tiers"], "ram": {"kind": "ram"}}},
            r"tiers\.ram: a ram tier must be",
        ),
        (
            {"tiers": {"ram": {"kind": "ram"}, "more": {"kind": "ram"}, **disk()["tiers"]}},
            r"tiers\.more: a ram tier must be the only one",
        ),
        (
            {"tiers": {"ram": {"kind": "ram", "capacity": 0}, **disk()["tiers"]}},
            r"tiers\.ram\.capacity: should be",
        ),
        (
            {"tiers": {"ram": {"kind": "ram", "codec": "fast"}, **disk()["tiers"]}},
            r"tiers\.ram\.codec: is not for a ram tier",
        ),
        (
            {"tiers": {"ram": {"kind": "ram", "codec_threads": 2}, **disk()["tiers"]}},
            r"tiers\.ram\.codec_threads: is not for a ram tier",
        ),
        (disk(codec="zip"), r"tiers\.disk\.codec: should be"),
        ({"tiers": {"k": {"kind": "kvstore", "spec": "bucket"}}}, r"tiers\.k\.spec: should be a URL"),
        ({"tiers": {"k": {"kind": "kvstore", "spec": {"path": "/k"}}}}, r"tiers\.k\.spec: .*`driver`"),
        (
            {"tiers": {"k": {"kind": "kvstore", "spec": {"driver": "file", "x": float("nan")}}}},
            r"tiers\.k\.spec: .*JSON",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_change(data: dict[str, Any], told: str) -> None:
    with pytest.raises(Invalid, match=rf"(?m)^{told}"):
        load(data)


def test_what_is_nested_too_deeply_is_refused_as_such(tmp_path: Path) -> None:
    names = ".".join(["a"] * 5000)
    file = write(tmp_path, f"[tiers.k]\nkind = 'kvstore'\n[tiers.k.spec]\ndriver = 'file'\n[tiers.k.spec.{names}]\n")
    for source in (file, tomllib.loads(file.read_text())):
        with pytest.raises(Invalid, match="nested too deeply; write it flatter"):
            load(source)


@pytest.mark.parametrize("source", [3, None, b"\xff", ["/d"]])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(Invalid, match="a store is a path"):
        load(source)


def test_a_file_that_is_missing_unreadable_or_no_toml_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"gone\.toml"):
        load(tmp_path / "gone.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(Invalid, match=r"folder\.toml: .*cannot be read"):
        load(tmp_path / "folder.toml")
    with pytest.raises(Invalid, match=r"ckpt\.toml: is not a TOML file: .*line 2"):
        load(write(tmp_path, "[store]\nname = \n"))
    (tmp_path / "ckpt.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(Invalid, match=r"ckpt\.toml: is not a TOML file"):
        load(tmp_path / "ckpt.toml")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.toml"
    path.write_text('[tiers.disk]\nkind = "posix"\npath = "disk"\n', "utf-8-sig")
    assert load(path).tiers[0].location == str(tmp_path / "disk")


def test_text_in_the_place_of_a_list_is_told_so() -> None:
    with pytest.raises(Invalid, match=r"store\.frozen: should be a list, such as \['base/\*\*'\], not 'base/\*\*'"):
        load({"store": {"frozen": "base/**"}, "tiers": {"disk": {"kind": "posix", "path": "/disk"}}})


def test_constructing_a_config_from_wrong_values_raises_invalid() -> None:
    tiers: Any = [{"kind": "posix", "name": "a", "path": "/a", "retain": {"kind": "last_n", "n": 0}}]
    with pytest.raises(Invalid, match=r"StoreConfig\.tiers\.a\.retain\.n: should be greater than or equal to 1"):
        StoreConfig(tiers=tiers)
    with pytest.raises(Invalid, match=r"PosixTier\.path: is required"):
        PosixTier(name="a")  # type: ignore[call-arg]  # which it needs


def test_a_spec_is_not_changed_through_what_it_was_made_from() -> None:
    spec: dict[str, Any] = {"driver": "memory", "context": ["a"]}
    tier = KvstoreTier(name="k", spec=spec)
    spec["context"].append("b")
    assert tier.spec == {"driver": "memory", "context": ["a"]}


def test_a_store_is_told_from_others_by_its_name_or_by_where_its_durable_tiers_are() -> None:
    assert load({"store": {"name": "mine"}, "tiers": {"ram": {"kind": "ram"}}}).identity == "mine"
    same = load("/a"), load({"tiers": {"ram": {"kind": "ram"}, "other": {"kind": "posix", "path": "/a"}}})
    assert same[0].identity == same[1].identity
    assert same[0].identity == load({"tiers": {"d": {"kind": "posix", "path": "/a"}}}).identity
    assert same[0].identity != load("/b").identity
    assert len(same[0].identity) == 16


def test_copy_threads_are_at_most_four_and_at_least_one() -> None:
    assert 1 <= load("/a").copy_threads <= 4
    assert load({"store": {"threads": 9}, **disk()}).copy_threads == 9


def test_a_policy_in_a_config_is_the_registered_class() -> None:
    (tier,) = load(disk(retain="all")).tiers
    assert type(tier.retain) is retention.All
    assert isinstance(tier.promote, Promotion)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "http://user:secret@host/x", "abfss://a@b/c"])
def test_a_url_is_no_folder_and_is_told_what_to_use(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt.toml").write_text(f'[tiers.disk]\nkind = "posix"\npath = "{url}"\n')
    for source in ("ckpt.toml", {"tiers": {"disk": {"kind": "posix", "path": url}}}):
        with pytest.raises(Invalid, match="kind = 's3', 'gcs' or 'azure'") as raised:
            load(source)
        assert "secret" not in str(raised.value)
    with pytest.raises(Invalid, match="without 'file://'"):
        load("file:///tmp/run")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.toml"]


@pytest.mark.parametrize("url", [Path("s3://bucket/run"), "s3:/bucket/run"])
def test_a_url_that_lost_a_slash_is_no_folder(url: str | Path) -> None:
    for source in (url, {"tiers": {"disk": {"kind": "posix", "path": url}}}):
        with pytest.raises(Invalid, match="'s3://…' is a URL, not a path"):
            load(source)


@pytest.mark.parametrize("url", ["http://user:secret@host/x", "abfss://a@b/c", "s4://bucket/run"])
def test_a_url_of_no_kind_is_refused_with_those_that_are_known(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", url)
    for source in (url, "$WHERE"):
        with pytest.raises(Invalid, match=r"known are az://, gs://, s3://.* kind = 'kvstore'") as raised:
            load(source)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "kind"),
    [("s3://bucket/run/1", "s3"), ("S3://bucket/run/1/", "s3"), ("gs://b/c", "gcs"), ("az://b/c", "azure")],
)
def test_a_url_is_ram_and_a_tier_there(url: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", url)
    for source in (url, "$WHERE"):
        ram, there = load(source).tiers
        assert (ram.kind, there.kind, there.name) == ("ram", kind, kind)
        assert there.location == url.replace("S3", "s3").rstrip("/")
    with pytest.raises(Invalid, match="is a file, and no object"):
        load(f"{url.rstrip('/')}/ckpt.toml")


@pytest.mark.parametrize("name", ["a:b", "s3:", "c:/x", "x/s3://y", "1://x", ":"])
def test_an_odd_name_of_a_folder_is_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(name).tiers[1].location == str(Path(tmp_path, name))


class TestSharedFileSystems:
    def test_each_kind_has_deadlines_above_those_of_its_client(self) -> None:
        assert NfsTier(name="nfs", path="/nfs").deadline > 60
        assert LustreTier(name="lustre", path="/lustre").deadline > 100

    def test_a_striping_is_a_table_or_inherited(self) -> None:
        tier = LustreTier(name="lustre", path="/l", striping={"count": 4, "size": "16 MiB", "pool": "flash"})
        assert tier.striping == Striping(count=4, size=16 << 20, pool="flash")
        assert LustreTier(name="lustre", path="/l").striping == "inherit"
        assert LustreTier(**tier.model_dump(mode="json")) == tier

    @pytest.mark.parametrize(
        "striping",
        [{"count": 2001}, {"count": 4, "size": "100 KiB"}, {"count": 4, "size": "4 GiB"}, {"count": 4, "pool": "a b"}],
    )
    def test_one_that_lustre_refuses_is_refused(self, striping: dict[str, Any]) -> None:
        with pytest.raises(Invalid, match="striping"):
            LustreTier(name="lustre", path="/l", striping=striping)
