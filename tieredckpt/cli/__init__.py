"""The command `tieredckpt`: one module per verb, and shared modules.

`app` names the verbs and turns errors into exit codes, `opening` opens stores, `console` prints.
"""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit: 0 when all is well, 1 for an error or damage, 2 for wrong usage."""
    from tieredckpt.cli.streams import standard_streams

    with standard_streams():
        try:
            from tieredckpt.cli.app import app  # the demo's training runs inside this package, and needs no typer
            from tieredckpt.cli.ending import ends_in_time

            with ends_in_time():
                app(prog_name="tieredckpt")
        except KeyboardInterrupt:  # during the imports, which take a second; later ones become exit code 130 in `app`
            sys.exit(128 + signal.SIGINT)
