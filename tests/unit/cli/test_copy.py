"""`copy`: what is told of each step, and exit code 1 if one was not copied."""

from __future__ import annotations

from pathlib import Path

from support.command_line import run, told


def test_steps_are_copied_once_and_a_copy_is_a_store(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    (two,) = told("copy", trained, target, "--steps", "2")
    assert two["step"] == 2
    assert two["written"] > 0
    assert [(each["step"], each["written"] > 0) for each in told("copy", trained, target)] == [
        (1, True),
        (2, False),
        (3, True),
    ]
    assert run("verify", target, "--all").exit_code == 0
    assert "copied" in run("copy", trained, target).stdout


def test_what_is_not_copied_is_an_error(trained: Path, tmp_path: Path) -> None:
    for pack in (trained.parent / "disk" / "packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[100] ^= 1
        pack.write_bytes(data)
    result = run("copy", trained.parent / "disk", tmp_path / "copy", "--steps", "1,2")
    assert result.exit_code == 1
    assert "params/w" in result.stderr
    assert "0 of 2 steps are in the other store" in result.stderr
    result = run("copy", trained, tmp_path / "copy", "--steps", "1,x")
    assert result.exit_code == 2
    assert run("copy", tmp_path / "none", tmp_path / "copy").exit_code == 1
