"""Keeping and deleting: which steps stay on a tier, in which order others leave, and which packs are reclaimed.

In: policies and the state. Out: deletions. `policies` asks, `safety` refuses to delete a last copy, `retention` chooses
steps to leave by policy and for room, `evictor` removes them, `collector` reclaims packs, `used_packs` tells which ones
steps use, `listed_packs` finds those that came or went unseen, `full_tier` makes room where its own steps fill a tier.
"""
