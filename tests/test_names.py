"""The names of core: one class for one name, and a file for each noun."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "engine/client")


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def public(path: Path, *kinds: type[ast.stmt]) -> list[str]:
    """Public names that a module defines as one of these kinds."""
    found = [each.name for each in ast.parse(path.read_text()).body if isinstance(each, kinds)]  # type: ignore[attr-defined]
    return [name for name in found if not name.startswith("_")]


def aliases(path: Path) -> Iterator[str]:
    """Public names of types that a module defines by an assignment, such as `Point = tuple[float, float]`."""
    for each in ast.parse(path.read_text()).body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            name = each.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name


def camel(path: Path) -> str:
    """The file's name, written like a class."""
    return path.stem.replace("_", "").lower()


def test_no_two_types_of_core_have_one_name() -> None:
    places = defaultdict[str, list[str]](list)
    for path in files("core"):
        for name in [*public(path, ast.ClassDef), *aliases(path)]:
            places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: where for name, where in places.items() if len(where) > 1 and len(name) > 1} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_class_is_in_the_file_that_has_its_name(folder: str) -> None:
    """Who looks for it opens that file."""
    by_name = defaultdict[str, list[Path]](list)
    for path in files(folder):
        by_name[camel(path)].append(path)
    classes = [(name, path) for path in files(folder) for name in public(path, ast.ClassDef)]
    assert {name: str(path) for name, path in classes if path not in by_name.get(name.lower(), [path])} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_of_one_class_has_its_name_or_the_end_of_it(folder: str) -> None:
    """As `scheduler.py` has StepScheduler. A file with functions may be named after what they do."""
    found = {path: public(path, ast.ClassDef) for path in files(folder) if not public(path, ast.FunctionDef)}
    alone = {path: classes[0] for path, classes in found.items() if len(classes) == 1}
    assert len(alone) > 10
    assert {str(path): name for path, name in alone.items() if not name.lower().endswith(camel(path))} == {}
