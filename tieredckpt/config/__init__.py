"""The configuration of a store: `store_settings` and `tiers` for the settings, `store` for all.

`exports` has what is exported behind the training, `formats` what a format is. `checks` finds what cannot work. `kinds`
has what a kind of tier is, and finds the one that a table names.
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
