"""Checkpoints in the formats of other libraries: `import_step` saves one to a store, `export_step` writes one.

An import reads a file or folder of another library and saves a step; an export does the reverse. One module has all
knowledge of a format, and is an entry point of the group `tieredckpt.formats`. `tieredckpt.config.formats` defines what
a format offers, `formats` finds it, and `stored_step` reads a step part by part. `importing` and `exporting` do the
rest, which is the same for all formats. Framework modules are imported when their format is used. Exports behind the
training: `engine/exporting`.
"""

from __future__ import annotations

from tieredckpt.interchange.exporting import Exported, export_step
from tieredckpt.interchange.importing import Imported, ReadCheckpoint, import_step, read_checkpoint

__all__ = ["Exported", "Imported", "ReadCheckpoint", "export_step", "import_step", "read_checkpoint"]
