"""The RAM tier's blob store: a folder in shared memory whose one pack is a slab of reusable extents.

`store` is the blob store, `slab` hands out extents, `slab_meta` finds the slab again after a restart, `folder` manages
the folder, `owner` and `find` tell which store owns it, and `quota` how much memory it may take.
"""
