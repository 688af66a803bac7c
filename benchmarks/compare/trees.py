"""Source trees to compare: this one as it lies on disk, and another commit's in a temporary folder."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.server import ROOT


@dataclass(frozen=True)
class Tree:
    """root: the sources. cache: its own user cache, empty at first, so that neither tree profits from an older run."""

    name: str
    root: Path
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        """In which `python -m entrypoints.serve` and `import entrypoints` find this tree's sources."""
        return {**os.environ, "PYTHONPATH": str(self.root), "XDG_CACHE_HOME": str(self.cache)}


def this_tree(folder: Path) -> Tree:
    """The working tree, uncommitted changes included. folder: for its cache."""
    return Tree("this", ROOT, _made(folder / "cache_this"))


def tree_of(commit: str, folder: Path) -> Tree:
    """The files of `commit`, written below `folder`. Raises CalledProcessError where git knows no such commit."""
    root = _made(folder / "ref")
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=root, input=archive, check=True)
    return Tree(commit, root, _made(folder / "cache_ref"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
