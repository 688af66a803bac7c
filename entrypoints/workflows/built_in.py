"""Classes of the nodes that the compiler adds: workers import them as they import users' classes."""

from __future__ import annotations

import json
from typing import Any

from entrypoints.workflows.model import Model


class Count(Model):
    """The number of a loop's round."""

    def setup_io(self) -> None:
        self.add_input("step", int)
        self.add_output("step", int)

    def load(self, device: str, dtype: Any) -> int:
        return 0

    def execute(self, step: int) -> dict[str, object]:
        return {"step": step + 1}


class Same:
    """Passes values on: where a loop begins with a value that no node has made, or ends with a result."""

    def load(self, device: str, dtype: Any) -> int:
        return 0

    def execute(self, **values: object) -> dict[str, object]:
        return values


class Switch:
    """Chooses a branch."""

    def load(self, device: str, dtype: Any) -> int:
        return 0

    def execute(self, verdict: str, gates: str) -> dict[str, object]:
        """gates: JSON, branch -> the node that begins it."""
        known = json.loads(gates)
        if verdict not in known:
            raise ValueError(f"it was told to choose {verdict[:80]!r}, and its branches are {', '.join(known)}")
        return {"chosen": known[verdict]}


class Gate:
    """Begins a branch: passes on what the branch reads."""

    def load(self, device: str, dtype: Any) -> int:
        return 0

    def execute(self, chosen: str, **values: object) -> dict[str, object]:
        return values


class Join:
    """Where branches meet: the value of the one that has run."""

    def load(self, device: str, dtype: Any) -> int:
        return 0

    def execute(self, **values: object) -> dict[str, object]:
        (value,) = values.values()
        return {"value": value}
