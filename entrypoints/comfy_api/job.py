"""Job: a prompt that is in the queue or is executed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from entrypoints.comfy_api.files import StoredFile
from entrypoints.comfy_api.graph_edits import ReadGraph
from entrypoints.comfy_api.prompt import Prompt


@dataclass(slots=True, eq=False)
class Job:
    """Of one caller. messages: what its client was told of the execution."""

    owner: str
    prompt: Prompt
    number: float
    read: ReadGraph
    loaded: Mapping[str, StoredFile]  # node that loads a picture -> the file
    request_ids: list[str] = field(default_factory=list)  # of its edits
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # node -> what it shows
    executed: list[str] = field(default_factory=list)  # nodes
    is_interrupted: bool = False  # its client has ended it while it ran

    @property
    def id(self) -> str:
        """Of the prompt."""
        return self.prompt.prompt_id

    @property
    def item(self) -> list[Any]:
        """As the queue and the history show it."""
        return [self.number, self.id, self.prompt.prompt, self.prompt.extra, list(self.read.saved)]

    def note(self, event: str, **data: Any) -> dict[str, Any]:
        """Note a message that tells of the execution; the message."""
        told = {"prompt_id": self.id, **data, "timestamp": int(time.time() * 1000)}
        self.messages.append((event, told))
        return told

    def entry(self, *, succeeded: bool) -> dict[str, Any]:
        """As the history shows it."""
        status = {
            "status_str": "success" if succeeded else "error",
            "completed": succeeded,
            "messages": self.messages,
        }
        meta = {
            node: {"node_id": node, "display_node": node, "parent_node": None, "real_node_id": node}
            for node in self.outputs
        }
        return {"prompt": self.item, "outputs": self.outputs, "status": status, "meta": meta}

    def failure(self, kind: str, message: str, node: str) -> dict[str, Any]:
        """What `execution_error` says of an error of a node. kind: name of its class."""
        return {
            "node_id": node,
            "node_type": self.read.nodes[node].kind,
            "executed": self.executed,
            "exception_message": message,
            "exception_type": kind,
            "traceback": [],
            "current_inputs": {},
            "current_outputs": list(self.outputs),
        }
