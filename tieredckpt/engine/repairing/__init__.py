"""Repairing: find damaged chunks, and write good bytes back from another tier.

In: a step, or a report of damage. Out: new packs and a new index. `verify` reads a step because a person asks, `scrub`
reads all steps in the background; `check` reads and compares for both, `repair` repairs. `repack` rewrites packs that
are mostly dead.
"""
