"""``python -m tieredckpt`` is the command `tieredckpt`."""

from __future__ import annotations

from tieredckpt.cli import main

if __name__ == "__main__":
    main()
