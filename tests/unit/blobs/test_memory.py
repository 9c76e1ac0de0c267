"""The memory that a process may use is what its cgroups and the machine allow, whichever is least."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from tieredckpt.blobs.memory import memory_limit

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED = 9223372036854771712  # what version 1 says where nothing was set


def limit_of(root: Path, membership: str, **files: int | str) -> tuple[int, str]:
    """The limit under cgroups with these files; ``__`` stands for a folder."""
    for name, value in files.items():
        path = root / name.replace("__", "/").replace("memory_max", "memory.max").replace("_bytes", ".limit_in_bytes")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (root / "membership").write_text(membership)
    return memory_limit(groups=root, membership=root / "membership")


def test_without_cgroups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_limit(groups=tmp_path, membership=tmp_path / "none") == (MACHINE, "the machine's memory")


def test_of_version_2_the_own_group_limits(tmp_path: Path) -> None:
    found = limit_of(tmp_path, "0::/jobs/7\n", jobs__7__memory_max=1000, jobs__memory_max="max")
    assert found == (1000, f"the cgroup limit in {tmp_path}/jobs/7/memory.max")


def test_of_version_2_every_parent_limits_too(tmp_path: Path) -> None:
    found = limit_of(tmp_path, "0::/jobs/7\n", jobs__7__memory_max=1000, jobs__memory_max=900)
    assert found == (900, f"the cgroup limit in {tmp_path}/jobs/memory.max")


def test_in_a_container_the_own_group_is_the_root(tmp_path: Path) -> None:
    assert limit_of(tmp_path, "0::/\n", memory_max=800)[0] == 800
    assert limit_of(tmp_path, "0::/not/mounted/here\n", memory_max=800)[0] == 800


def test_of_version_1_the_memory_controllers_group_limits(tmp_path: Path) -> None:
    membership = "5:devices:/other\n4:cpu,memory:/jobs/7\n0::/\n"
    assert limit_of(tmp_path, membership, memory__jobs__7__memory_bytes=700, memory__other__memory_bytes=1)[0] == 700
    assert limit_of(tmp_path, membership, memory__memory_bytes=600)[0] == 600


def test_a_group_whose_name_is_no_text_limits_as_any(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"jobs/\xff")).mkdir(parents=True)
    (tmp_path / os.fsdecode(b"jobs/\xff/memory.max")).write_text("1000")
    (tmp_path / "membership").write_bytes(b"0::/jobs/\xff\n")
    assert memory_limit(groups=tmp_path, membership=tmp_path / "membership")[0] == 1000


@pytest.mark.parametrize("value", [UNLIMITED, "max", "", "nonsense"])
def test_what_is_no_limit_is_passed_over(tmp_path: Path, value: int | str) -> None:
    found = limit_of(tmp_path, "4:memory:/a\n0::/a\n", memory__a__memory_bytes=value, a__memory_max=value)
    assert found == (MACHINE, "the machine's memory")


def test_a_group_outside_of_what_is_mounted_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1")
    root = tmp_path / "root"
    assert limit_of(root, "0::/../..\n", memory_max=500)[0] == 500


def test_a_membership_that_cannot_be_parsed_leaves_the_roots_limit(tmp_path: Path) -> None:
    assert limit_of(tmp_path, "no colons\n", memory_max=400)[0] == 400


def test_a_limit_of_the_address_space_is_of_one_process_and_none_of_the_machines_memory(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MACHINE - 1, before[1]))
    try:
        limit, _ = memory_limit(groups=tmp_path, membership=tmp_path / "none")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert limit == MACHINE
