"""Run a Python program with the devices of the look-alike, such as a training, or the command ``tieredckpt``.

``PYTHONPATH=tests python -m support.cuda_lookalike speed=1000000000 $(which tieredckpt) bench gpu``; what stands before
the program is what `environment` takes. Faults are told when it has ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

from support.cuda_lookalike import environment, missing

_RUN = """
import runpy, sys
from support.cuda_lookalike import kernels
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> int:
    if missing():
        sys.exit(missing())
    settings = list(takewhile(lambda each: "=" in each, sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: int(value) for name, _, value in (each.partition("=") for each in settings)}
        program = [sys.executable, "-c", _RUN, *sys.argv[1 + len(settings) :]]
        status = subprocess.run(program, check=False, env=environment(Path(folder), **chosen)).returncode
        if (faults := Path(folder, "faults")).exists():
            sys.exit(faults.read_text())
    return status


sys.exit(main())
