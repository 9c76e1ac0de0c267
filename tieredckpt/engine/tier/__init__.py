"""One tier: its blob store, the states of its steps, its packs, its health, and the small files that describe it.

In: a `BlobStore` and a tier's configuration. Out: `Tier`, which has `Steps`, `Packs` and `Health`. `commit_file` writes
and deletes manifests, `step_index` reads them, `marker_file` has the marker. `chunk_index` and `slab_index` know where
chunks are, `chunk_reader` reads one, `lease` knows who writes. Knows one tier, and no other.
"""
