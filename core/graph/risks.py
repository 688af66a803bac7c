"""Risks: whether a node is sure to run, whatever the nodes that choose will choose.

To decide this exactly is hard (co-NP): let every variable of a logical formula be a node with two readers that chooses
one of them, every term a node that reads some of these readers, and let the output join the terms. The output is sure
to be made if, and only if, the formula is always true. So a rule decides, in polynomial time:

    The branches of a choice are safe where they all meet in one node that joins.

                 +--> left ---+
        check ---|            |---> join       `left` and `right` may be skipped; `join` always runs
                 +--> right --+
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import and_, or_

from core.graph.workflow import Edge, Node, Workflow

NEVER = -1
"""All risks, as bits. A node has them if it needs two branches of one choice, so that it never runs."""


class Risks:
    """The risks of each node of a workflow: a node is skipped if, and only if, one of its risks comes true.

    A risk is a choice (a node chooses one of its readers) or the joint of a node that joins, which comes true when
    several choices together skip the node. The rule:

    - A node that does not join has all risks of its sources. Where it reads a node that chooses, the choice of any
      other reader is a risk, too.
    - A node that joins is skipped if a risk of each source comes true. Two sources whose risks differ only in the
      choices of one node count as one source, whose risks are those that both have. If one source is left in the end,
      the node has its risks. If several are left, the risks that all of them have are the node's, and so is its joint.

    The rule never takes a node for safe that may be skipped. It takes some nodes for unsafe that always run: those that
    join sources of which no two differ in one choice only, such as `left` (of left or right), `up` (of up or down), and
    a node that reads both `right` and `down`. Such a graph is repaired by nodes that join the branches of one choice
    each.
    """

    def __init__(self, workflow: Workflow) -> None:
        # A set of risks is an int, of which each risk is one bit: a graph may have 10,000 choices.
        self._names: list[tuple[str, str]] = []  # by bit: (node that chooses, reader), or (node that joins, "")
        self._bits: dict[tuple[str, str], int] = {}  # the inverse, as 1 << bit
        self._groups: list[int] = []  # by bit: all choices of the same node, or the joint alone
        self._choices: dict[str, int] = {}  # node that chooses -> all of its choices
        self._joints: dict[str, int] = {}  # node that joins and has a joint -> that
        self._sources: dict[str, Collection[int]] = {}  # such a node -> the risks of each source that was left
        self._risks: dict[str, int] = {}
        for node in workflow.nodes:
            self._risks[node.name] = self._risks_of(node)
            readers = workflow.reader_names.get(node.name, ()) if node.chooses else ()
            if readers:
                self._choices[node.name] = self._add([(node.name, reader) for reader in readers])

    def of(self, node: str) -> int:
        """The risks of a node, as bits; 0: it always runs."""
        return self._risks[node]

    def of_edge(self, node: Node, edge: Edge) -> int:
        """The risks that one input of a node brings."""
        choices = self._choices.get(edge.source, 0)
        return self._risks[edge.source] | (choices and choices & ~self._bits[edge.source, node.name])

    def may_skip(self, node: str) -> Mapping[str, str] | None:
        """Choices that skip a node (node that chooses -> its reader). None: it always runs; {}: it never runs, or the
        rule takes it for unsafe and no choices that skip it were found.
        """
        if self._risks[node] in (0, NEVER):
            return {} if self._risks[node] else None
        chosen, true, excluded, joints = dict[str, str](), 0, 0, sum(self._joints.values())
        wanted = [self._risks[node]]  # of each of these sets, one risk has to come true
        while wanted:
            risks = wanted.pop()
            if risks & true:
                continue
            possible = risks & ~excluded
            if not possible:
                return {}
            bit = _lowest_bit(possible & ~joints or possible)
            true, excluded = true | 1 << bit, excluded | self._groups[bit]
            name, reader = self._names[bit]
            if reader:
                chosen[name] = reader
            else:
                wanted += sorted(self._sources[name], key=int.bit_count, reverse=True)  # those with few risks first
        return chosen

    def joints(self, node: str) -> list[str]:
        """The nodes whose joints are among the risks of a node."""
        return [name for name, joint in self._joints.items() if self._risks[node] & joint]

    def _risks_of(self, node: Node) -> int:
        sources = {self.of_edge(node, edge) for edge in node.inputs}
        if not sources or (node.joins and 0 in sources):
            return 0
        if not node.joins:
            risks = reduce(or_, sources)
            harmless = ~risks
            return risks if all(choices & harmless for choices in self._choices.values()) else NEVER
        left = self._united(sources)
        risks = reduce(and_, left)
        if len(left) > 1:
            self._sources[node.name] = left
            self._joints[node.name] = self._add([(node.name, "")])
            risks |= self._joints[node.name]
        return risks

    def _united(self, sources: set[int]) -> set[int]:
        """Take two sources for one as long as any two differ in the choices of one node only."""
        united, left = set[int](), list(sources)
        while left:
            source = left.pop()
            other = next((other for other in united if self._are_one(source, other)), None)
            if other is None:
                united.add(source)
            else:
                united.remove(other)
                left.append(source & other)
        return united

    def _are_one(self, source: int, other: int) -> bool:
        """Whether two sources come to one: they differ in the choices of one node, in one joint, or one has all risks
        of the other.
        """
        common, differing = source & other, source ^ other
        if common in (source, other):
            return True
        return not differing & ~self._groups[_lowest_bit(differing)]

    def _add(self, names: Sequence[tuple[str, str]]) -> int:
        """Add a group of risks, of which one at most comes true."""
        first = len(self._names)
        self._names += names
        self._bits |= {name: 1 << first + index for index, name in enumerate(names)}
        group = (1 << len(names)) - 1 << first
        self._groups += [group] * len(names)
        return group


def _lowest_bit(risks: int) -> int:
    return (risks & -risks).bit_length() - 1
