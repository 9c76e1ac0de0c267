"""One tier: its blob store, what it holds, its health, and the small files that describe its steps.

In: a `BlobStore` and a tier's configuration. Out: `Tier`, `HeldSteps`, `StepIndex`. `commit_file` reads and writes
manifests, `chunk_index` and `slab_index` know where chunks are, `chunk_reader` reads one,
`lease` knows who writes. Knows one tier, and no other.
"""
