"""Rules of lossy tiers: those that mean nothing are refused, and so is a ladder without exact steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.lossy import SEVEN_BITS
from support.scenes import config, folder, ram

from tieredckpt.config import StoreConfig
from tieredckpt.errors import Invalid


@pytest.mark.parametrize(
    ("lossy", "wrong"),
    [
        ([{"keys": ["a"]}], "exactly one of"),
        ([{"keys": ["a"], "max_error": 0.1, "drop": True}], "exactly one of .* `max_error` and `drop` are given"),
        ([{"keys": [], "max_error": 0.1}], "should be a list of keys"),
        ([{"keys": "opt/**", "max_error": 0.1}], "should be a list of keys"),
        ([{"keys": ["/opt"], "max_error": 0.1}], "begins with a slash"),
        ([{"keys": [3], "max_error": 0.1}], "is no key and no pattern"),
        ([{"keys": ["a"], "max_error": "60%"}], "at most 50%"),
        ([{"keys": ["a"], "max_error": "much"}], "should be a share"),
        ([{"keys": ["a"], "max_error": 0}], "above 0"),
        ([{"keys": ["a"], "max_abs_error": 1e-40}], "between"),
        ([{"keys": ["a"], "max_eror": 0.1}], "did you mean `max_error`"),
    ],
)
def test_rules_that_mean_nothing_are_refused_with_what_to_say(tmp_path: Path, lossy: Any, wrong: str) -> None:
    with pytest.raises(Invalid, match=f"(?s)tiers.archive.lossy.*{wrong}"):
        config({"disk": folder(tmp_path / "disk"), "archive": folder(tmp_path / "archive", lossy=lossy)})


def test_a_store_needs_an_exact_tier_below_ram_and_first(tmp_path: Path, shared_memory: Path) -> None:
    archive = folder(tmp_path / "archive", lossy=SEVEN_BITS)
    with pytest.raises(Invalid, match="no tier below RAM would have the steps as they were saved"):
        config({"ram": ram(shared_memory), "archive": archive})
    with pytest.raises(Invalid, match="the nearest tier gets what is saved"):
        config({"archive": archive, "disk": folder(tmp_path / "disk")})
    with pytest.raises(Invalid, match="not for a ram tier"):
        config({"ram": ram(shared_memory, lossy=SEVEN_BITS), "disk": folder(tmp_path / "disk")})
    ladder = config({"ram": ram(shared_memory), "archive": archive, "disk": folder(tmp_path / "disk")})
    assert [tier.name for tier in ladder.exact] == ["ram", "disk"]
    assert StoreConfig.model_validate(ladder.model_dump(mode="json")) == ladder
