"""Repairing: find damaged chunks, and write good bytes back from another tier.

In: a step, or a report of damage. Out: new packs and a new index. A person asks `verify` to read a step, and `scrub` to
read whole tiers; `check` finds the damage for both. `background` takes what a restore has found, `repair` repairs it.
`repack` rewrites packs that are mostly dead.
"""
