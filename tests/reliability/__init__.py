"""The reliability rig: crashes, kills, faults and hostile input, at any length, and what the store promises meanwhile.

`journal` records every change to the media and tells what a crash leaves of them; `replay` and `ranks_replay` hold a
store to its promises after each, `kills` after the death of real trainers, `soak` under random faults, `sweep` as each
system call fails (`system`). `ranks` is a training of several ranks in one process, `tiers` puts faults under every
store that is opened, `decoders` has hostile input for all that is read. ``PYTHONPATH=tests python -m reliability``
runs them.
"""
