"""The stage graph of a workflow: who feeds whom, what repeats, and how far one request has come through it.

A workflow is data: nodes with inputs, one of which may be a loop region. A request's progress is its set of finished
nodes and a loop counter that catches up with its step count; there is no phase enum, so new graphs need no new
scheduler.

    text_encode  --prompt embeddings-----------+
                                               v
    image_encode --latents, condition, ...---> denoise (x steps) --latents--> decode
                                               |
                                               +--clean--> preview (now and then, may be skipped)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

StageName = Literal["text_encode", "image_encode", "denoise", "decode"]
NodeKind = Literal["once", "loop", "side"]


@dataclass(frozen=True, slots=True)
class Edge:
    """An input: the tensor `name` that node `source` made. A node may start when its sources are done; a deferred edge
    is read late in the node's work, so its source only has to be under way on the same rank.
    """

    source: str
    name: str
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One vertex. kind: `once` runs a single time, `loop` runs once per denoising step, `side` hangs on a loop
    iteration and may be skipped. component: the model part it needs (see ModelKey).
    """

    name: str
    stage: StageName
    component: str
    inputs: tuple[Edge, ...] = ()
    kind: NodeKind = "once"


@dataclass(frozen=True, slots=True)
class Workflow:
    """A directed graph of nodes, in topological order, ending in `output`."""

    name: str
    nodes: tuple[Node, ...]
    output: str

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            for edge in node.inputs:
                if edge.source not in seen and edge.source != node.name:
                    raise ValueError(f"workflow {self.name}: {node.name} reads {edge.source} before it is made")
            seen.add(node.name)
        if self.output not in seen:
            raise ValueError(f"workflow {self.name}: no node {self.output}")

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def loop(self) -> Node:
        """The loop region's node."""
        return next(node for node in self.nodes if node.kind == "loop")


INPAINT = Workflow(
    name="inpaint",
    nodes=(
        Node("text_encode", "text_encode", "text_encoder"),
        Node("image_encode", "image_encode", "vae"),
        Node(
            "denoise",
            "denoise",
            "transformer",
            inputs=(
                Edge("text_encode", "prompt_embeds"),
                Edge("text_encode", "text_lengths"),
                Edge("text_encode", "pooled_prompt_embeds"),
                Edge("image_encode", "latents"),
                Edge("image_encode", "condition"),
                Edge("image_encode", "outside"),
                Edge("image_encode", "sigmas"),
            ),
            kind="loop",
        ),
        Node("preview", "decode", "vae", inputs=(Edge("denoise", "clean"),), kind="side"),
        Node("decode", "decode", "vae", inputs=(Edge("image_encode", "latents"),)),
    ),
    output="decode",
)
"""Masked editing with one denoising loop."""


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """After how many steps (1-based) each partial image is due: evenly spaced, before the last step, without repeats.

    Fewer steps than previews give fewer previews.
    """
    due = {round(num_steps * (i + 1) / (num_previews + 1)) for i in range(num_previews)}
    return tuple(sorted(step for step in due if 0 < step < num_steps))


@dataclass(slots=True)
class Progress:
    """How far one request has come. Only the StepScheduler writes it; `*_scheduled` runs ahead of `*_done` while in
    flight.
    """

    num_steps: int
    previews: tuple[int, ...] = ()  # step counts after which a preview is due
    steps_scheduled: int = 0
    steps_done: int = 0
    done: set[str] = field(default_factory=set)  # `once` nodes that finished, and the loop when all its steps did
    in_flight: dict[str, int] = field(default_factory=dict)  # node -> batches out with it
    pending_preview: int | None = None  # index of the preview whose `clean` is being made, waits or is decoded

    @property
    def num_in_flight(self) -> int:
        return sum(self.in_flight.values())

    @property
    def has_started(self) -> bool:
        """Whether a worker may hold tensors of it."""
        return bool(self.done or self.in_flight)

    @property
    def steps_left(self) -> int:
        """Loop iterations not yet scheduled."""
        return self.num_steps - self.steps_scheduled

    def times_left(self, node: Node) -> int:
        """How often `node` has still to be scheduled; side nodes count as none, since they may be skipped."""
        match node.kind:
            case "loop":
                return self.steps_left
            case "once":
                return 0 if node.name in self.done or node.name in self.in_flight else 1
            case "side":
                return 0

    def ready(self, workflow: Workflow) -> list[Node]:
        """Nodes that can be scheduled now, in graph order."""
        return [node for node in workflow.nodes if self._is_ready(node, workflow)]

    def _is_ready(self, node: Node, workflow: Workflow) -> bool:
        if node.kind == "side":
            return self._is_clean_kept() and not self.in_flight.get(node.name) and workflow.loop.name not in self.done
        if node.name in self.done or not self._inputs_done(node):
            return False
        if node.kind == "loop":
            return self.steps_left > 0
        # The loop replaces the tensors it iterates on in place: their readers outside it wait for its end.
        return not self.in_flight.get(node.name) and (node.name != workflow.output or workflow.loop.name in self.done)

    def _inputs_done(self, node: Node) -> bool:
        return all(edge.deferred or edge.source in self.done for edge in node.inputs)

    def start(self, node: Node) -> None:
        """Record that one batch with this node is out."""
        if node.kind == "loop":
            self.steps_scheduled += 1
            if self.pending_preview is None:
                self.pending_preview = self.preview_index(self.steps_scheduled)
        self.in_flight[node.name] = self.in_flight.get(node.name, 0) + 1

    def finish(self, node: Node) -> None:
        """Record that one such batch came back well."""
        self.land(node)
        if node.kind == "loop":
            self.steps_done += 1
            if self.steps_done == self.num_steps:
                self.done.add(node.name)
        elif node.kind == "once":
            self.done.add(node.name)
        else:
            self.pending_preview = None

    def land(self, node: Node) -> None:
        """Record that one batch with this node is no longer out, whatever came of it."""
        self.in_flight[node.name] -= 1
        if not self.in_flight[node.name]:
            del self.in_flight[node.name]

    def retry(self, node: Node) -> None:
        """Record that a loop iteration that was out has changed nothing and is to be scheduled again; it must have been
        the last one.
        """
        if self.pending_preview is not None and self.previews[self.pending_preview] == self.steps_scheduled:
            self.pending_preview = None
        self.land(node)
        self.steps_scheduled -= 1

    @property
    def is_preview_out(self) -> bool:
        """Whether an earlier preview has not left yet; the next one is then skipped."""
        return self.pending_preview is not None

    def _is_clean_kept(self) -> bool:
        """Whether the step that the pending preview shows has been done."""
        return self.pending_preview is not None and self.steps_done >= self.previews[self.pending_preview]

    def preview_index(self, step: int) -> int | None:
        """Which preview is due after `step` steps, if any."""
        return self.previews.index(step) if step in self.previews else None


Placement = Mapping[str, int]
"""node name -> rank of the worker that runs it."""


def place(workflow: Workflow, num_workers: int) -> Placement:
    """Decoding goes to the last worker, all else to the first: a decode never delays the others' next step."""
    return {node.name: num_workers - 1 if node.stage == "decode" else 0 for node in workflow.nodes}
