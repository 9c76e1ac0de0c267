"""The command line, run in the process of a test."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from tieredckpt.cli.app import app

__all__ = ["run", "told"]


def run(*arguments: object) -> Result:
    """How the command ended, and what it said."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(*arguments: object) -> Any:
    """What a verb that succeeds tells with ``--json``."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
