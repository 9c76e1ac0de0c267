"""Every example runs as it stands, and those that resume do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from distributed.launch import mpiexec
from support.frameworks import need_modules
from support.lookalike import missing
from support.runs import Run, runs_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 180


@pytest.fixture(autouse=True)
def _configured(tmp_path: Path) -> None:
    """The examples' configuration, in the folder where they run."""
    shutil.copy(EXAMPLES / "ckpt.toml", tmp_path)


def run(name: str, folder: Path, *arguments: str, quiet: bool = True, **environment: str) -> list[str]:
    """The lines that an example prints, run in ``folder``; whatever it says on stderr fails, if it is ``quiet``."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not quiet or done.stderr == ""
    return done.stdout.splitlines()


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")}
    names -= {name for name in names if name.startswith("ranks_")}  # by tests/distributed/test_rank_examples.py
    assert names
    assert {name for name in names if f'"{name}"' not in text} == set()


def test_no_two_examples_open_one_store() -> None:
    """Started one after another in a folder, the examples of many ranks refused each other's steps."""
    stores = [
        name
        for path in (*EXAMPLES.glob("*.py"), EXAMPLES / "ckpt.toml")
        for name in re.findall(r'"([\w-]*checkpoints)"', path.read_text("utf-8"))
    ]
    assert sorted(set(stores)) == sorted(stores)
    assert len(stores) > 10


def test_the_quickstart_goes_on_where_it_was(tmp_path: Path) -> None:
    assert run("quickstart.py", tmp_path) == ["steps [1, 2, 3], newest 3"]
    (line,) = run("quickstart.py", tmp_path)
    assert line.endswith("3, 4, 5, 6], newest 6")


def test_the_async_trainer_follows_its_policies(tmp_path: Path) -> None:
    lines = run("async_trainer.py", tmp_path)
    assert lines[0] == "training from step 1"
    assert any(line.startswith("step 50 is on archive: ") for line in lines)
    assert any(line.startswith("step 100: ") and line.endswith(", archive") for line in lines)
    assert run("async_trainer.py", tmp_path)[0] == "training from step 101"


def test_a_killed_trainer_goes_on_from_ram(tmp_path: Path) -> None:
    lines = run("resume_after_kill.py", tmp_path)
    killed = lines.index("  killed")
    assert lines[killed - 1] == "  saved step 12"
    assert lines[killed + 1] == "  restored step 12 from ram"
    assert lines[killed + 2 : -1] == [f"  saved step {later}" for later in range(13, 21)]
    assert lines[-1] == "  finished at step 20, mean weight 0.882178"


def test_a_killed_jax_training_that_donates_its_state_ends_with_the_same_bits(tmp_path: Path) -> None:
    need_modules("jax")
    *killed, interrupted, _, undisturbed = run("jax_train.py", tmp_path)
    assert killed == ["  step 12 is in RAM", "  killed", "  restored step 12"]
    assert interrupted.startswith("  finished at step 20, loss ")
    assert interrupted == undisturbed
    assert run("jax_train.py", tmp_path)[-1] == undisturbed  # nothing is left to train


def test_a_lost_chfs_is_passed_by_and_caught_up(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    lines = run("chfs_tiers.py", tmp_path)
    assert lines.index("pmem failed, training goes on") < lines.index("pmem is back")
    assert lines[-1] == "step 9 is on ram, pmem, shared"
    lines = run("chfs_tiers.py", tmp_path)
    assert lines[0].startswith("restored step 9 from ")
    assert lines[-1] == "step 18 is on ram, pmem, shared"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which examples that need no framework have run."""
    folder = tmp_path_factory.mktemp("shared")
    run("quickstart.py", folder)
    run("resume_after_kill.py", folder)
    return folder


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_framework_resumes_and_examples_in_one_folder_do_not_disturb_each_other(shared: Path, framework: str) -> None:
    need_modules(framework)
    (shared / framework).mkdir()
    configured = Run((str(shutil.copy(EXAMPLES / "ckpt.toml", shared / framework)),))
    ended = runs_of(
        EXAMPLES / f"{framework}_loop.py",
        *(configured, configured, Run()),
        folder=shared,
        seconds=SECONDS,
        modules=(framework,),
        environment={"JAX_PLATFORMS": "cpu"},
        quiet=True,
    )
    (trained,), (restored, goes_on), (alone,) = (each.lines for each in ended)
    assert trained == "trained to step 25, saved [10, 20]"
    assert restored.startswith(
        {"torch": "restored step 20, learning rate 0.00099", "jax": "restored step 20, loss "}[framework]
    )
    assert goes_on == "trained to step 45, saved [10, 20, 30, 40]"
    assert alone.startswith("trained to step 25, ")


@pytest.mark.parametrize(
    ("name", "module", "again", "told"),
    [
        ("dcp_loop.py", "torch", (), ("trained to step 10", "trained to step 20")),
        ("lightning_loop.py", "lightning", (), ("trained to step 16", "trained to step 32")),
        ("transformers_loop.py", "transformers", ("15",), ("to step 10, saved [5, 10]", "to step 15, saved [10, 15]")),
        ("accelerate_loop.py", "accelerate", (), ("trained to step 10", "trained to step 20")),
        ("orbax_loop.py", "orbax", (), ("trained to step 10", "trained to step 20")),
        ("torch_checkpointing_loop.py", "torch", (), ("trained to step 10", "trained to step 20")),
    ],
)
def test_an_integration_resumes(
    tmp_path: Path, name: str, module: str, again: tuple[str, ...], told: tuple[str, str]
) -> None:
    need_modules(module)
    # Lightning looks for an MPI wherever mpi4py is, which finds that of its own environment alone.
    library = Path(mpiexec() or "").resolve().parents[1] / "lib" / "libmpi.so.12"
    environment = {"JAX_PLATFORMS": "cpu"} | ({"MPI4PY_LIBMPI": str(library)} if library.exists() else {})
    ended = runs_of(EXAMPLES / name, Run(), Run(again), folder=tmp_path, seconds=SECONDS, environment=environment)
    for each, end in zip(ended, told, strict=True):
        assert each.lines[-1].endswith(end)


@pytest.mark.parametrize(
    ("name", "framework"), [("torch_loop.py", "PyTorch"), ("jax_loop.py", "JAX"), ("jax_train.py", "JAX")]
)
def test_a_missing_framework_is_said_and_no_failure(tmp_path: Path, name: str, framework: str) -> None:
    absent = tmp_path / "absent"
    for module in ("torch", "jax"):
        (absent / module).mkdir(parents=True)
        (absent / module / "__init__.py").write_text(f"raise ImportError('no {module} here')\n")
    (line,) = run(name, tmp_path, PYTHONPATH=str(absent))
    assert line.startswith(f"{framework} is not installed: pip install ")
