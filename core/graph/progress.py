"""Progress: which nodes of its workflow one request has finished, and how many of its denoising steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from core.graph.workflow import Node, Workflow


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """Number of steps (1-based) after which each partial image is due: evenly spaced, before the last step, without
    repeats; `num_previews` of them, or num_steps - 1 if that is less.
    """
    due = {round(num_steps * (i + 1) / (num_previews + 1)) for i in range(num_previews)}
    return tuple(sorted(step for step in due if 0 < step < num_steps))


@dataclass(slots=True)
class Progress:
    """Progress of one request. Only the StepScheduler writes it; `*_scheduled` runs ahead of `*_done` while in flight.
    No preview is skipped: the step that the next preview shows, and the output, wait for the preview before, so that
    the number of previews depends on the request and never on load.
    """

    num_steps: int
    previews: tuple[int, ...] = ()  # step counts after which a preview is due
    steps_scheduled: int = 0
    steps_done: int = 0
    done: set[str] = field(default_factory=set)  # `once` nodes that finished, and the loop when all its steps did
    in_flight: dict[str, int] = field(default_factory=dict)  # node -> batches out with it
    previews_done: int = 0  # number of previews made, in their order
    pending_preview: int | None = None  # index of the preview whose `clean` is being made, waits or is decoded
    has_started: bool = False  # a worker may have tensors of it
    is_restarting: bool = False  # nothing more is scheduled: it restarts once nothing is in flight

    @property
    def num_in_flight(self) -> int:
        return sum(self.in_flight.values())

    @property
    def steps_left(self) -> int:
        """Loop iterations not yet scheduled."""
        return self.num_steps - self.steps_scheduled

    def times_left(self, node: Node) -> int:
        """How many more times `node` has to be scheduled."""
        match node.kind:
            case "loop":
                return self.steps_left
            case "once":
                return 0 if node.name in self.done or node.name in self.in_flight else 1
            case "side":
                return len(self.previews) - self.previews_done - self.in_flight.get(node.name, 0)

    def is_over(self, node: Node) -> bool:
        """Whether `node` has finished as often as it runs."""
        match node.kind:
            case "loop":
                return self.steps_done == self.num_steps
            case "once":
                return node.name in self.done
            case "side":
                return self.previews_done == len(self.previews)

    def rounds_before(self, node: Node, *, is_done: bool) -> int:
        """Rounds of the loop that are done before `node` reads the loop's values: for the loop itself, before its next
        round to be scheduled or, with `is_done`, to finish.
        """
        match node.kind:
            case "loop":
                return self.steps_done if is_done else self.steps_scheduled
            case "side":
                assert self.pending_preview is not None
                return self.previews[self.pending_preview]
            case "once":
                return self.num_steps

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
        # Nodes after the loop read what its last round has made.
        is_early = workflow.reads_loop(node) and workflow.loop.name not in self.done
        has_preview_ahead = node.name == workflow.output and self.is_preview_out
        return not (is_early or has_preview_ahead or self.in_flight.get(node.name))

    def _inputs_done(self, node: Node) -> bool:
        return all(edge.deferred or edge.source in self.done for edge in node.inputs)

    def start(self, node: Node) -> None:
        """Record that one batch with this node was sent."""
        self.has_started = True
        if node.kind == "loop":
            if self.is_preview_next:
                self.pending_preview = self.previews_done
            self.steps_scheduled += 1
        self.in_flight[node.name] = self.in_flight.get(node.name, 0) + 1

    def finish(self, node: Node) -> None:
        """Record that one batch with this node succeeded."""
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
        """Record that one batch with this node is no longer in flight, successful or not."""
        self.in_flight[node.name] -= 1
        if not self.in_flight[node.name]:
            del self.in_flight[node.name]

    def retry(self, node: Node) -> None:
        """Record that a loop iteration in flight has changed nothing and must be scheduled again; it must be the last
        one that was scheduled.
        """
        if self.pending_preview is not None and self.previews[self.pending_preview] == self.steps_scheduled:
            self.pending_preview = None
        self.land(node)
        self.steps_scheduled -= 1

    def restart(self, kept: Iterable[str]) -> None:
        """Restart at the first step; of the finished nodes only `kept` stay finished. Nothing may be in flight.
        Previews already made are not repeated.
        """
        self.done.intersection_update(kept)
        self.steps_scheduled = self.steps_done = 0
        self.pending_preview = None
        self.is_restarting = False

    @property
    def is_preview_out(self) -> bool:
        """Whether a preview's step has been scheduled and the preview is not finished."""
        return self.pending_preview is not None

    @property
    def is_preview_next(self) -> bool:
        """Whether a preview shows the next step."""
        index = self.previews_done + self.is_preview_out
        return self.previews[index : index + 1] == (self.steps_scheduled + 1,)

    def _is_clean_kept(self) -> bool:
        """Whether the step that the pending preview shows has been done."""
        return self.pending_preview is not None and self.steps_done >= self.previews[self.pending_preview]
