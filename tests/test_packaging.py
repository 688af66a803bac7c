"""pyproject.toml's version ranges, and the pinned versions of constraints.txt that `make` and CI install."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = canonicalize_name(PROJECT["name"])

BOUNDED = {"diffusers"}
"""Requirements with an upper bound; pyproject.toml says why."""


def requirements() -> list[Requirement]:
    """Requirements of the project and its extras, without references to its own extras."""
    lines = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    return [each for each in map(Requirement, lines) if canonicalize_name(each.name) != OWN]


def pins() -> dict[str, str]:
    """Package, in canonical form -> version."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_to_a_release_that_it_allows(requirement: Requirement) -> None:
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_hold_on_every_machine() -> None:
    """A local version, such as 2.13.0+cpu, exists in one index only."""
    assert [name for name, version in pins().items() if Version(version).local] == []


def test_only_what_is_known_to_break_has_an_upper_bound() -> None:
    bounded = {each.name for each in requirements() for each_bound in each.specifier if each_bound.operator != ">="}
    assert bounded == BOUNDED


def test_make_installs_what_is_pinned_but_for_the_newest() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [line.strip() for line in makefile.splitlines() if "pip install" in line]
    pinned = [line for line in lines if "--constraint constraints.txt" in line]
    assert all("$(BIN)" in line for line in pinned)
    (newest,) = set(lines) - set(pinned)
    assert newest.startswith("$(LATEST)/bin/python")
    assert re.search(r"^\$\(RUNTIME\): pyproject.toml constraints.txt ", makefile, re.MULTILINE)
