"""Saving: copy the state into RAM while the trainer waits, and commit it there.

In: a tree. Out: a committed step in the first tier. `snapshot` plans and copies, `copy_to_slab` finds the memory,
`save` commits, `spill` writes past RAM where the state does not fit, to the tiers that `slower_tiers` tells of.
`pending` starts the saves of each ``save(capture=)``, and waits for those that go on behind the trainer; a `call` is
what it hands on, `capture` and `lazy` tell until when a save may read the arrays.
"""
