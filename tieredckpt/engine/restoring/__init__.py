"""Restoring: choose a step, find each chunk on the nearest tier that has it intact, read it into its place.

In: a step number, keys and targets. Out: filled arrays, or views of RAM. `lookup` chooses, `source` says where chunks
are, `reader` reads and verifies them, `targets` and `pieces` say where they belong.
"""
