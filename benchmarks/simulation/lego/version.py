"""Version: of what decides about a system, so that records of an older one are not taken for its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from inspect import getfile
from pathlib import Path
from types import ModuleType

from benchmarks.baselines import clusters, monoliths
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.lego.numbers import DATA
from benchmarks.simulation.lego.systems import ABLATIONS, FIXED
from core import scheduling
from core.scheduling.policies.papers import lego

SIMULATION = 1
"""To be raised where the simulation has changed so much that all systems are to be run again."""


@cache
def version_of(system: str, *data: Path) -> str:
    """Eight hexadecimal digits. Ours changes with any file of the scheduler; Algorithm 1 and the baselines, which are
    to be run again more rarely, with the file of their own policy alone. data: that are read besides DATA.
    """
    digest = sha256(f"{SIMULATION}".encode() + DATA.read_bytes())
    for path in (*_files(system), *data):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _files(system: str) -> Sequence[Path]:
    if system == OURS or system in ABLATIONS:
        return sorted(Path(getfile(scheduling)).parent.rglob("*.py"))
    module: ModuleType = lego if system == "lego" else clusters if system in FIXED else monoliths
    return [Path(getfile(module))]
