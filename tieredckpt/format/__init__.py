"""The format of a checkpoint on every tier, as pure functions on bytes: no I/O, no asyncio, no threads.

The nouns, in the order in which they build on each other:

array
    A leaf of the tree with a shape and a dtype, under a key such as ``params/dense/kernel``.
grid, cell
    A grid divides an array into equal cells. Of an array that one rank saves, every cell is one contiguous
    range in row-major order, so its shape is ``(1, ..., 1, r, full, ...)``; where ranks have boxes of an array,
    cells may be any boxes. The last cell of an axis may reach beyond the array.
block
    A box of an array, stored as an array of its own.
chunk
    The bytes of one cell, in full cell size: what lies beyond the array is zero.
digest
    XXH3-128 of a chunk's bytes before any codec. Two chunks of one digest are one chunk.
encoding
    How a chunk's bytes are stored on a tier: as they are in RAM, followed by their CRC-32C below it.
extent
    Where bytes are: a file relative to the tier's root, an offset, and a length in bytes.
pack
    An immutable file of chunks back to back, each on a 4096-byte boundary; its footer lists digest, offset
    and length of each, so that packs alone tell what a tier holds.
step index
    The ordered map from the keys of one step (``<array>/zarr.json``, ``<array>/c/i/j``, ``tieredckpt/...``)
    to inline values and extents: a B+tree in TensorStore's OCDBT format, in the file ``btree``.
manifest
    The small file that names the root of a step index and carries its own length and CRC-32C. It is written
    last: a step exists exactly when its manifest does.
part
    A rank's contribution to a step: a file with the chunks of its blocks, which the commit merges and deletes.

Modules: `layout` names files, `digest` hashes, `casts` rounds floats to 16 bits, `boxes` and `grid` divide arrays,
`zarr` describes them, `encoding` turns a chunk into what is stored, `pack` writes footers, `ocdbt` writes and reads
step indexes, `manifest` assembles a step from all of these, `marker` names the store of a tier, `part` writes what a
rank contributes, `merging` makes one step of all parts, and `joining` one array of blocks.
"""
