"""The rules that tools can check, each as a test, so that `pytest` alone is the whole gate."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
"""The source checkout; the tools read their settings from its pyproject.toml."""


def assert_passes(tool: str, *command: str) -> None:
    """Run a tool over the checkout, and fail with what it says."""
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f'{tool} is not installed; pip install -e ".[test]" brings it')
    environment = os.environ | {"NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{tool}:\n{done.stdout}", pytrace=False)


def test_no_lint_rule_is_broken() -> None:
    assert_passes("ruff", "-m", "ruff", "check", "--quiet", "--no-cache", ".")


def test_every_file_is_formatted() -> None:
    assert_passes("ruff", "-m", "ruff", "format", "--check", "--quiet", "--no-cache", ".")


@pytest.mark.timeout(1800)  # without its cache mypy reads all that is imported
def test_types_are_complete_and_agree() -> None:
    assert_passes("mypy", "-m", "mypy", "--no-error-summary")


def test_modules_import_downwards_only() -> None:
    lint = "import sys; from importlinter.cli import lint_imports_command as main; sys.exit(main())"
    assert_passes("importlinter", "-P", "-c", lint, "--no-cache")


def test_every_module_is_under_400_lines() -> None:
    modules = [*ROOT.glob("tieredckpt/**/*.py"), *ROOT.glob("policies/**/*.py")]
    assert modules
    long = {str(m.relative_to(ROOT)): n for m in modules if (n := len(m.read_text().splitlines())) >= 400}
    assert long == {}


def test_what_runs_as_a_program_runs_when_all_of_its_module_is_defined() -> None:
    for module in ROOT.glob("tieredckpt/**/*.py"):
        body = ast.parse(module.read_text()).body
        programs = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
        assert programs in ([], body[-1:]), module


_MAX_FIELDS, _MAX_METHODS = 22, 32
_LARGE = {
    "Limits": "one value of all times and sizes, so that tests and users find them in one place",
    "CheckpointStore": "the public facade: one method for each thing that a store can do",
}
"""Classes beyond the maximum, and why."""


def test_no_class_collects_the_duties_of_others() -> None:
    """A larger class does work that belongs in a value or a module of its own."""
    modules = [*ROOT.glob("tieredckpt/**/*.py"), *ROOT.glob("policies/**/*.py")]
    classes = [node for module in modules for node in ast.walk(ast.parse(module.read_text())) if _is_class(node)]
    sizes = [(node.name, len(_fields(node)), len(_methods(node))) for node in classes]
    large = {name: size for name, *size in sizes if size[0] > _MAX_FIELDS or size[1] > _MAX_METHODS}
    assert large.keys() == _LARGE.keys(), large


def _is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _fields(node: ast.ClassDef) -> set[str]:
    """Names declared in the body, and attributes that the initializers set."""
    found = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    for method in _methods(node):
        if method.name in ("__init__", "__post_init__"):
            stored = (each for each in ast.walk(method) if isinstance(each, ast.Attribute))
            found |= {
                each.attr
                for each in stored
                if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name) and each.value.id == "self"
            }
    return found


def test_every_shipped_policy_is_an_entry_point() -> None:
    from tieredckpt_policies import POLICIES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["tieredckpt.policies"]
    classes = {f"{policy.__module__}:{policy.__name__}" for policy in POLICIES}
    assert set(declared.values()) == classes
    installed = {e.name: e for e in entry_points(group="tieredckpt.policies") if e.name in declared}
    assert {name: entry.value for name, entry in installed.items()} == declared
    for name, entry in installed.items():
        policy = entry.load()
        assert name == f"{policy.question}.{policy.model_fields['kind'].default}"
