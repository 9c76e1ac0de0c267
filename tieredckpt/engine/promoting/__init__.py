"""Promoting: copy a committed step to a slower tier, writing only the chunks that the tier lacks.

In: a step and two tiers. Out: packs, an index and a commit on the slower tier. `promoter` decides when, `copy_step`
copies one step, `pack_writer` writes packs, `dedupe` finds chunks that are there already, `room` counts what they take.
"""
