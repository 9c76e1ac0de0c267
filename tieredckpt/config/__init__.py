"""The configuration of a store: `store` for the whole, `tiers` for each kind of tier, `checks` for what cannot work."""

from __future__ import annotations

from tieredckpt.config.store import StoreConfig, dump_with_secrets, load, to_toml
from tieredckpt.config.tiers import ChfsTier, KvstoreTier, PosixTier, RamTier, TierConfig

__all__ = [
    "ChfsTier",
    "KvstoreTier",
    "PosixTier",
    "RamTier",
    "StoreConfig",
    "TierConfig",
    "dump_with_secrets",
    "load",
    "to_toml",
]
