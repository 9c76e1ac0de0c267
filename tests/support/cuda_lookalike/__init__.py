"""A look-alike of the CUDA runtime, with which torch's own code for GPUs runs where there is none.

`environment` is for a process that begins with it; ``runtime.cpp`` says what it plays, `kernels` computes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["environment", "missing"]

_HERE = Path(__file__).parent


def _headers() -> Path | None:
    """Those of the CUDA version that torch was built for, from the wheels that it brings."""
    from torch.version import cuda

    found = find_spec("nvidia") if cuda else None
    roots = (found and found.submodule_search_locations) or ()
    folders = (f"cu{str(cuda).partition('.')[0]}", "cuda_runtime")  # since CUDA 13, and before
    places = (Path(root, folder, "include") for root in roots for folder in folders)
    return next((place for place in places if (place / "cuda_runtime_api.h").exists()), None)


def missing() -> str:
    """Why it cannot be had; empty if it can."""
    if sys.platform != "linux" or shutil.which("c++") is None:
        return "needs Linux and a C++ compiler"
    if find_spec("torch") is None or _headers() is None:
        return "needs a PyTorch with CUDA and its headers"
    return ""


def environment(folder: Path, **settings: int) -> dict[str, str]:
    """Build it in ``folder``; variables for a process that uses it.

    Settings are ``devices``, bytes of ``memory`` of each, ``speed`` of a link in bytes a second, and ``lockable``
    bytes of host memory. What a program does wrong is written to ``folder / "faults"``.
    """
    library = folder / "libcuda.so.1"
    if not library.exists():
        include = [f"-I{_HERE / 'include'}", f"-I{_headers()}"]
        options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(
            ["c++", *options, *include, _HERE / "runtime.cpp", "-o", library, "-ldl", "-pthread"], check=True
        )
    (folder / "libnvidia-ml.so.1").touch()  # torch asks NVIDIA's for devices that it knows; this one cannot be loaded
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))
    chosen = {f"CUDA_LOOKALIKE_{name.upper()}": str(value) for name, value in settings.items()}
    about = {"CUDA_LOOKALIKE_FAULTS": str(folder / "faults"), "LD_LIBRARY_PATH": path, "LD_PRELOAD": str(library)}
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | chosen | about
