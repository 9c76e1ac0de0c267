"""The RAM tier's blob store: a folder in shared memory whose one pack is a slab of reusable extents.

`store` is the blob store, `slab` hands out extents, `slab_meta` finds the slab again after a restart, `folder` is
where it lies, `owner` and `find` tell whose RAM it is, `quota` how much memory it may take.
"""
