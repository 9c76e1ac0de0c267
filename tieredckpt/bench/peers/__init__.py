"""The peers that are measured side by side: this library and other ways to store a state, a module for each kind."""

from __future__ import annotations

from tieredckpt.bench.peers.base import Peer
from tieredckpt.errors import Invalid

__all__ = ["OURS", "all_peers", "peer_named"]

OURS = "tieredckpt"
"""The peer whose figures are compared with the limits."""


def all_peers() -> tuple[Peer, ...]:
    """Every peer, installed or not, this library first. Loads none of their frameworks."""
    from tieredckpt.bench.peers import dcp, deepspeed, orbax, ours, tensor_file, zarr3

    return (
        *ours.PEERS,
        *orbax.PEERS,
        *dcp.PEERS,
        *tensor_file.PEERS,
        *deepspeed.PEERS,
        *zarr3.PEERS,
    )


def peer_named(name: str) -> Peer:
    """One of `all_peers`. Raises `Invalid` for an unknown name."""
    for peer in all_peers():
        if peer.name == name:
            return peer
    raise Invalid(f"{name!r} is no peer; choose of {', '.join(each.name for each in all_peers())}")
