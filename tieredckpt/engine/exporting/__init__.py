"""Exports behind the training: steps in the formats of other libraries, as policies ask for them.

`due` asks the policies, `exporter` does the work of all exports of a store, one at a time; `export` is what is known of
each. `content` is what a format is given of a step, `held_step` brings it from the tiers, part by part, and `places` is
where the files go.
"""
