"""``python -m tieredckpt.testing`` prints the figures of reliability."""

from __future__ import annotations

from tieredckpt.testing.commands import app

if __name__ == "__main__":
    app(prog_name="python -m tieredckpt.testing")
