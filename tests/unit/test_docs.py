"""What the documentation says exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md"), *_ROOT.glob("tests/data/*.md")])
_LINK = re.compile(r"\]\(([^)#:]+?)(?:#[^)]*)?\)")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+)`( \(to come\))?")
_TEST = re.compile(r"`(tests/[\w/.-]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = [link for link in _LINK.findall(page.read_text("utf-8")) if not (page.parent / link).exists()]
    assert not dead


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_every_test_that_is_named_is_there(page: Path) -> None:
    missing = [
        f"{path}::{name}" for path, name in _TEST.findall(page.read_text("utf-8")) if not _has(_ROOT / path, name)
    ]
    assert not missing


def _has(path: Path, name: str) -> bool:
    if not path.is_file():
        return False
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return not name or name in {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_path_of_the_map_exists_or_is_still_to_come() -> None:
    text = _FENCED.sub("", (_ROOT / "docs/explanation/architecture.md").read_text("utf-8"))
    paths = {path: bool(to_come) for path, to_come in _PATH.findall(text) if (_ROOT / path.split("/")[0]).exists()}
    assert len(paths) > 50
    assert not [path for path, to_come in paths.items() if (_ROOT / path).exists() == to_come]


def test_every_decision_is_in_the_index_under_its_title() -> None:
    folder = _ROOT / "docs/decisions"
    index = (folder / "README.md").read_text("utf-8")
    for page in folder.glob("0*.md"):
        number, _, title = page.read_text("utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        assert f"| [{number}]({page.name}) | {title} |" in index
