"""``python -m reliability`` prints the figures of reliability."""

from __future__ import annotations

from reliability.commands import app

if __name__ == "__main__":
    app(prog_name="python -m reliability")
