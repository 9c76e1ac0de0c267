"""The table of what each capture costs a training that donates its state."""

from __future__ import annotations

import sys

import pytest
from support.frameworks import require

from tieredckpt.bench import donation


def test_every_capture_is_measured_and_has_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require("jax")
    monkeypatch.setattr(sys, "argv", ["donation", "--size", "8 MiB", "--repeats", "1"])
    donation.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "capture"
    assert [row.split()[0] for row in rows] == list(donation.CAPTURES)
    assert all(row.split()[-1] in ("ms", "s", "us") for row in rows)
