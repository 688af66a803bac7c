"""Meeting: where the branches of a choice meet, in a workflow's trace."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoints.workflows.choice import Choice


@dataclass(frozen=True, eq=False, slots=True)
class Meeting:
    """Stands behind the calls of all branches."""

    choice: Choice
