"""The stage graph of a workflow: who feeds whom, what repeats, and how far one request has come through it.

A workflow is data: nodes with inputs, one of which may be a loop region. A request's progress is its set of finished
nodes and a loop counter that catches up with its step count; there is no phase enum, so new graphs need no new
scheduler.

    text_encode  --prompt embeddings-----------+
                                               v
    image_encode --latents, condition, ...---> denoise (x steps) --latents--> decode
                                               |
                                               +--clean--> preview (after some steps)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """One vertex. kind: `once` runs a single time, `loop` runs once per denoising step, `side` once for each preview,
    of what the loop has made up to then. component: the model part it needs (see ModelKey).
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
    """After how many steps (1-based) each partial image is due: evenly spaced, before the last step, without repeats:
    `num_previews` of them, or num_steps - 1 where that is less.
    """
    due = {round(num_steps * (i + 1) / (num_previews + 1)) for i in range(num_previews)}
    return tuple(sorted(step for step in due if 0 < step < num_steps))


@dataclass(slots=True)
class Progress:
    """How far one request has come. Only the StepScheduler writes it; `*_scheduled` runs ahead of `*_done` while in
    flight. Every preview is made: the step that the next one shows, and the output, wait for the one before, so that
    the number of previews is a function of the request and never of load.
    """

    num_steps: int
    previews: tuple[int, ...] = ()  # step counts after which a preview is due
    steps_scheduled: int = 0
    steps_done: int = 0
    done: set[str] = field(default_factory=set)  # `once` nodes that finished, and the loop when all its steps did
    in_flight: dict[str, int] = field(default_factory=dict)  # node -> batches out with it
    previews_done: int = 0  # the first so many previews have been made
    pending_preview: int | None = None  # index of the preview whose `clean` is being made, waits or is decoded
    is_restarting: bool = False  # nothing more is scheduled: it begins again once nothing is in flight

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
        """How often `node` has still to be scheduled."""
        match node.kind:
            case "loop":
                return self.steps_left
            case "once":
                return 0 if node.name in self.done or node.name in self.in_flight else 1
            case "side":
                return len(self.previews) - self.previews_done - self.in_flight.get(node.name, 0)

    def ready(self, workflow: Workflow) -> list[Node]:
        """Nodes that can be scheduled now, in graph order."""
        return [] if self.is_restarting else [node for node in workflow.nodes if self._is_ready(node, workflow)]

    def _is_ready(self, node: Node, workflow: Workflow) -> bool:
        if node.kind == "side":
            return self._is_clean_kept() and not self.in_flight.get(node.name)
        if node.name in self.done or not self._inputs_done(node):
            return False
        if node.kind == "loop":
            return self.steps_left > 0 and not (self.is_preview_out and self.is_preview_next)
        # The loop replaces the tensors it iterates on in place: their readers outside it wait for its end.
        is_early = node.name == workflow.output and (workflow.loop.name not in self.done or self.is_preview_out)
        return not (is_early or self.in_flight.get(node.name))

    def _inputs_done(self, node: Node) -> bool:
        return all(edge.deferred or edge.source in self.done for edge in node.inputs)

    def start(self, node: Node) -> None:
        """Record that one batch with this node is out."""
        if node.kind == "loop":
            if self.is_preview_next:
                self.pending_preview = self.previews_done
            self.steps_scheduled += 1
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
            self.previews_done += 1
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

    def restart(self, kept: Iterable[str]) -> None:
        """Begin again at the first step; of the nodes that are done only `kept` stay so. Nothing may be in flight.
        Previews that were made are not made again.
        """
        self.done.intersection_update(kept)
        self.steps_scheduled = self.steps_done = 0
        self.pending_preview = None
        self.is_restarting = False

    @property
    def is_preview_out(self) -> bool:
        """Whether a preview's step has been scheduled, and the preview has not been made."""
        return self.pending_preview is not None

    @property
    def is_preview_next(self) -> bool:
        """Whether a preview is to show the next step."""
        index = self.previews_done + self.is_preview_out
        return self.previews[index : index + 1] == (self.steps_scheduled + 1,)

    def _is_clean_kept(self) -> bool:
        """Whether the step that the pending preview shows has been done."""
        return self.pending_preview is not None and self.steps_done >= self.previews[self.pending_preview]


Placement = Mapping[str, int]
"""node name -> rank of the worker that runs it."""


def place(workflow: Workflow, num_workers: int) -> Placement:
    """Decoding goes to the last worker, all else to the first: a decode never delays the others' next step."""
    return {node.name: num_workers - 1 if node.stage == "decode" else 0 for node in workflow.nodes}
