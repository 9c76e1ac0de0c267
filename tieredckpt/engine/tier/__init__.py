"""One tier: its blob store, the states of its steps, its packs or its slab, its health, and the files that describe it.

In: a `BlobStore` and a tier's configuration. Out: `Tier`, which has `Steps`, `Health`, and `Packs` or, for RAM, `Ram`;
`tier.chunks` is the one that it has. `commit_file` writes and deletes manifests, `step_index` reads them,
`marker_file` has the marker, `pin_file` the pins, `lease` knows who writes. `chunk_index` and `slab_index` know where
chunks are, `chunk_reader` reads one. Knows one tier, and no other.
"""
