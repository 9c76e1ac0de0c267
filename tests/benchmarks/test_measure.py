"""The benchmarks run, and check what they restore; no time is asserted, for machines differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measure import main


@pytest.mark.benchmark
def test_the_figures_of_the_documentation_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--size", "16MiB", "--folder", str(tmp_path), "--repeats", "2", "--json"])
    figures = json.loads(capsys.readouterr().out)
    for name in (
        "stall_over_memcpy",
        "promotion_speed_over_direct_write",
        "restore_ram_speed_over_memcpy",
        "restore_disk_speed_over_direct_read",
        "restore_views_s",
        "tiny_save_us",
        "tiny_restore_us",
    ):
        assert figures[name] > 0
    assert figures["incremental_bytes_ratio"] < 0.12
    assert not list(tmp_path.iterdir())
