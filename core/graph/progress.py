"""Progress: how often each node of its workflow has run for one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from core.graph.skipping import skipped_by
from core.graph.workflow import Node, Workflow


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """Number of steps (1-based) after which each partial image is due: evenly spaced, before the last step, without
    repeats; `num_previews` of them, or num_steps - 1 if that is less.
    """
    due = {round(num_steps * (i + 1) / (num_previews + 1)) for i in range(num_previews)}
    return tuple(sorted(step for step in due if 0 < step < num_steps))


@dataclass(slots=True)
class Progress:
    """Progress of one request. Only the StepScheduler writes it; `scheduled` runs ahead of `done` while in flight.

    No run of a side node is left out: the round that its next run shows, and the output, wait for the run before, so
    that the number of previews depends on the request and never on load.
    """

    workflow: Workflow
    rounds: dict[str, int]  # region -> number of its rounds
    shown: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # side node -> the rounds that its runs show
    # Node -> runs. Of a node that repeats, run r is its round r.
    scheduled: dict[str, int] = field(init=False)
    done: dict[str, int] = field(init=False)
    in_flight: dict[str, int] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)  # nodes that do not run any more
    chosen: dict[str, str] = field(default_factory=dict)  # node that chooses -> the reader that it has chosen
    skipped: frozenset[str] = frozenset()  # nodes that never run
    pending: dict[str, int] = field(default_factory=dict)  # side node -> its run that is being prepared, or runs
    has_started: bool = False  # a worker may have tensors of it
    is_restarting: bool = False  # nothing more is scheduled: it restarts once nothing is in flight
    was_rewound: bool = False  # nodes may be in other rounds than those that they share values with

    def __post_init__(self) -> None:
        self.scheduled = dict.fromkeys((node.name for node in self.workflow.nodes), 0)
        self.done = dict(self.scheduled)
        self.over = {node.name for node in self.workflow.nodes if not self.times(node)}

    # ------------------------------------------------------------------------------------------------ what is left

    def times(self, node: Node) -> int:
        """How often a node runs for this request."""
        if node.name in self.skipped:
            return 0
        if node.region:
            return self.rounds[node.region]
        return len(self.shown.get(node.name, ())) if node.shows else 1

    def times_left(self, node: Node) -> int:
        """How many more times a node has to be scheduled."""
        return self.times(node) - self.scheduled[node.name]

    @property
    def num_in_flight(self) -> int:
        """Batches that are out with nodes of this request."""
        return sum(self.in_flight.values())

    @property
    def steps_left(self) -> int:
        """Steps not yet scheduled, of all regions."""
        left = 0
        for node in self.workflow.counted_steps:  # asked for several times in every pass
            if node.name not in self.skipped:
                left += self.rounds[node.region] - self.scheduled[node.name]
        return left

    @property
    def is_ending(self) -> bool:
        """Whether all that is left is in flight."""
        is_going_on = self.in_flight and not self.is_restarting
        return bool(is_going_on) and all(self._has_begun(node.name) for node in self.workflow.nodes)

    @property
    def steps_done(self) -> int:
        """Steps that are done, of all regions."""
        return sum([self.done[node.name] for node in self.workflow.counted_steps])

    def round_of(self, node: Node) -> int:
        """The next run of a node: of a node that repeats the round (from 0), of a side node the number of rounds that
        are done in what it shows.
        """
        if node.shows:
            return self.shown[node.name][self.pending[node.name]]
        return self.scheduled[node.name] if node.region else 0

    def round_done(self, node: Node) -> int:
        """The same of the run that is the next to finish."""
        return self.done[node.name] if node.region else self.round_of(node)

    # ------------------------------------------------------------------------------------------------ what is ready

    def ready(self) -> list[Node]:
        """Nodes that can be scheduled now, in graph order."""
        if self.is_restarting:
            return []
        return [node for node in self.workflow.nodes if node.name not in self.over and self._is_ready(node)]

    def _is_ready(self, node: Node) -> bool:
        name, links = node.name, self.workflow.links[node.name]
        if not self.over.issuperset(links.before):
            return False
        if node.shows:
            return self._is_shown_round_done(node) and name not in self.in_flight and self._is_fed(node, links.sides)
        if self.scheduled[name] == self.times(node):
            return False
        if links.begun and not all(self._has_begun(source) for source in links.begun):
            return False
        if node.region:
            return self._is_round_ready(node, links.same_round, links.same_round_begun, links.last_round)
        return not self.pending or name not in self.workflow.output_names

    def _is_round_ready(
        self, node: Node, same: Iterable[str], same_begun: Iterable[str], carried: Iterable[str]
    ) -> bool:
        number, done, scheduled = self.scheduled[node.name], self.done, self.scheduled
        if self.pending and any(side.name in self.pending and self._shows_next(side) for side in self._sides(node)):
            return False
        # Most regions have one node, which waits for no other.
        return not (
            (same and any(done[source] <= number for source in same))
            or (same_begun and any(scheduled[source] <= number for source in same_begun))
            or (carried and any(scheduled[source] < number for source in carried))
        )

    def _has_begun(self, name: str) -> bool:
        """Whether all runs of a node that are left are in flight."""
        return name in self.over or not self.times_left(self.workflow.node(name))

    # ------------------------------------------------------------------------------------------------ side nodes

    def is_shown_next(self, node: Node) -> bool:
        """Whether a side node shows the next round of a node."""
        return any(self._shows_next(side) for side in self._sides(node))

    def _sides(self, node: Node) -> tuple[Node, ...]:
        return self.workflow.sides.get(node.name, ())

    def _shows_next(self, side: Node) -> bool:
        index = self.done[side.name] + (side.name in self.pending)
        following = self.scheduled[side.shows] + 1
        return self.shown.get(side.name, ())[index : index + 1] == (following,)

    def _is_shown_round_done(self, side: Node) -> bool:
        return side.name in self.pending and self.done[side.shows] >= self.round_of(side)

    def _is_due(self, side: Node) -> bool:
        """Whether the round that the next run of a side node shows is done."""
        index = self.done[side.name]
        return any(round_ <= self.done[side.shows] for round_ in self.shown.get(side.name, ())[index : index + 1])

    def _is_fed(self, side: Node, sources: Iterable[str]) -> bool:
        """Whether the side nodes that one reads are done with the round that it shows."""
        return all(self.done[source] > self.pending[side.name] for source in sources)

    # ------------------------------------------------------------------------------------------------ what happens

    def start(self, node: Node) -> None:
        """Record that one batch with this node was sent."""
        self.has_started = True
        for side in self._sides(node):
            if self._shows_next(side):
                self.pending[side.name] = self.done[side.name]
        self.scheduled[node.name] += 1
        self.in_flight[node.name] = self.in_flight.get(node.name, 0) + 1

    def finish(self, node: Node) -> None:
        """Record that one batch with this node succeeded."""
        self.land(node)
        self.done[node.name] += 1
        self.pending.pop(node.name, None)
        if self.done[node.name] == self.times(node):
            self.over.add(node.name)

    def land(self, node: Node) -> None:
        """Record that one batch with this node is no longer in flight, successful or not."""
        self.in_flight[node.name] -= 1
        if not self.in_flight[node.name]:
            del self.in_flight[node.name]

    def retry(self, node: Node) -> None:
        """Record that a round in flight has changed nothing and must be scheduled again; it must be the last one that
        was scheduled.
        """
        for side in self._sides(node):
            if side.name in self.pending and self.round_of(side) == self.scheduled[node.name]:
                del self.pending[side.name]
        self.land(node)
        self.scheduled[node.name] -= 1

    def set_rounds(self, region: str, rounds: int) -> None:
        """Change the number of rounds of a region, at least 1, of which none was scheduled yet."""
        nodes = self.workflow.nodes_of(region)
        assert rounds >= 1, f"region {region} needs a round"
        assert not any(self.scheduled[node.name] for node in nodes), f"region {region} has begun"
        self.rounds[region] = rounds
        sides = {side.name for node in nodes for side in self._sides(node)}
        self.shown = {
            name: preview_steps(rounds, len(shown)) if name in sides else shown for name, shown in self.shown.items()
        }
        self.over.update(name for name in sides if not self.shown[name])

    def choose(self, node: Node, reader: str) -> frozenset[str]:
        """Record which of its readers a node has chosen; returns the nodes that are skipped because of it."""
        self.chosen[node.name] = reader
        before, self.skipped = self.skipped, skipped_by(self.workflow, self.chosen)
        self.over |= self.skipped
        return self.skipped - before

    def restart(self, again: Iterable[str]) -> None:
        """Run these nodes again, from their first round; the others stay as they are. Nothing may be in flight. Runs of
        side nodes are not repeated.
        """
        again = {name for name in again if not self.workflow.node(name).shows}
        self.chosen = {name: reader for name, reader in self.chosen.items() if name not in again}
        again |= self.skipped
        self.skipped = skipped_by(self.workflow, self.chosen)
        for name in again:
            self.scheduled[name] = self.done[name] = 0
        self.over = (self.over - again) | self.skipped
        self.pending.clear()
        self.is_restarting = False

    def rewind(self, kept: Mapping[str, int]) -> None:
        """Schedule again what was not done, and of these nodes all runs but the first few (node -> number). Nothing may
        be in flight. Other runs of side nodes that are done are not repeated.
        """
        self.done.update(kept)
        self.scheduled = dict(self.done)
        self.over = {node.name for node in self.workflow.nodes if self.done[node.name] == self.times(node)}
        self.pending = {side.name: self.done[side.name] for side in self.workflow.side_nodes if self._is_due(side)}
        self.is_restarting, self.was_rewound = False, True
