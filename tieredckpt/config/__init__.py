"""The configuration of a store: `store_settings` and `tiers` define the settings, `store` the whole.

`exports` configures exports behind the training; `formats` defines and finds formats. `kinds` defines kinds of tier,
and finds the kind that a table names. `checks` finds configurations that cannot work.
"""

from __future__ import annotations

from tieredckpt.config.exports import ExportConfig
from tieredckpt.config.kinds import TierKind
from tieredckpt.config.shared_tiers import LustreTier, NfsTier, Striping
from tieredckpt.config.store import StoreConfig, dump_with_secrets, load, to_toml
from tieredckpt.config.tiers import ChfsTier, KvstoreTier, PosixTier, RamTier, TierConfig

__all__ = [
    "ChfsTier",
    "ExportConfig",
    "KvstoreTier",
    "LustreTier",
    "NfsTier",
    "PosixTier",
    "RamTier",
    "StoreConfig",
    "Striping",
    "TierConfig",
    "TierKind",
    "dump_with_secrets",
    "load",
    "to_toml",
]
