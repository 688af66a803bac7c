"""GraphFile: a file with a ComfyUI graph."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from core.errors import WorkflowError
from entrypoints.workflows.comfy.composition import Composition
from entrypoints.workflows.comfy.composition_reader import read_composition
from entrypoints.workflows.comfy.graph_reader import read_graph
from entrypoints.workflows.comfy.program import program_of

MAX_BYTES = 4 * 1024 * 1024
"""Most bytes of a file."""

MAX_NAME = 64
"""Most characters of a workflow's name."""


def is_graph(path: str | Path) -> bool:
    """Whether a file is one, by its name."""
    return Path(path).suffix == ".json"


@dataclass(frozen=True, slots=True)
class GraphFile:
    """Its graph, read but not run."""

    path: Path
    composition: Composition

    @classmethod
    def read(cls, path: Path) -> GraphFile:
        """Raises WorkflowError that names the file, the node by its id and class, and its input."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:  # cut off, perhaps within a letter
                raise WorkflowError(f"{path}: has more than {MAX_BYTES} bytes", node="")
            text = data.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise WorkflowError(f"{path}: cannot be read: {error}", node="") from error
        try:
            return cls(path, read_composition(read_graph(text)))
        except WorkflowError as error:
            raise WorkflowError(f"{path}: {error}", node=error.node, input=error.input) from error

    @property
    def name(self) -> str:
        """Of its workflow: that of the file without its ending."""
        return re.sub(r"[^\w.-]", "_", self.path.stem)[:MAX_NAME]

    @property
    def program(self) -> str:
        """The text of a file of the language."""
        return program_of(self.composition, self.name)
