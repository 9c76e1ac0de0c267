"""Checkpoints in the formats of other libraries: `import_step` saves one to a store, `export_step` writes one.

In come a file or folder of another library; out goes a step, or the other way round. One module has all that is known
of a format, and is a line in `formats.FORMATS`; `formats` finds it, `base` says what it offers, `stored_step` reads a
step part by part, `importing` and `exporting` do the rest, which is the same for all. Framework modules are imported
when their format is used.
"""

from __future__ import annotations

from tieredckpt.interchange.exporting import Exported, export_step
from tieredckpt.interchange.importing import Imported, import_step

__all__ = ["Exported", "Imported", "export_step", "import_step"]
