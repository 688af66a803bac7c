"""Choice: a value that decides which branch of a workflow runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.graph.form import TRUTH, Form
from entrypoints.workflows.branch import Branch
from entrypoints.workflows.value import Value


@dataclass(eq=False, slots=True)
class Choice:
    """A node that chooses between branches, and one in which they meet."""

    node: str  # that chooses
    join: str  # in which they meet
    verdict: Value  # text: the name of the branch that runs
    branch: Branch | None  # in which it stands itself
    branches: list[Branch] = field(default_factory=list)
    form: Form = TRUTH  # of the result, once the branches are recorded
