"""Loop: finds out what a loop carries from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from core.errors import WorkflowError
from core.graph.workflow import Literal
from entrypoints.workflows.call import Call
from entrypoints.workflows.value import Value

_PLAIN = bool | int | float | str


class Loop:
    """The body of a loop is run twice while the workflow is written, as for the first two rounds. What a call reads in
    both tells what it reads in any round:

        first round                  second round                     in any round
        a value of this round        the same of that round           that of the same round
        a value from outside         the same                         that value
        a value from outside         a value of the first round       *carried*: first the one, then the other of the
                                                                      round before

    All else, such as other models in another round, is refused. So Python's own rules decide which variable means what.
    What holds for two rounds holds for all of them if the second leaves each variable with what the first has left in
    it, or with what the same node has made in its own round. So a number that Python halves in each round is refused,
    and a variable that keeps a value for a later round than the next. (Of variables that are lists or other objects,
    contents are not compared.)
    """

    def __init__(self, name: str, rounds: str | int, workflow: str) -> None:
        """rounds: how many, or the workflow's input that says it. workflow: its name."""
        self.name, self.rounds = name, rounds
        self.first, self.second = list[Call](), list[Call]()
        self.is_second = False  # which of the two is being recorded
        self.carried: dict[tuple[str, str], Value] = {}  # (node, input) -> what it reads from the second round on
        self._workflow = workflow

    def add(self, call: Call) -> None:
        """Record a call of the body."""
        (self.second if self.is_second else self.first).append(call)

    @property
    def next_in_first(self) -> Call | None:
        """While the second round is recorded: the call of the first one in the place of the next one."""
        place = len(self.second)
        return self.first[place] if self.is_second and place < len(self.first) else None

    @property
    def renamed(self) -> dict[str, str]:
        """Node of the second round -> the same in the first one, which stands for it in the graph."""
        return {other.node: one.node for one, other in zip(self.first, self.second, strict=False)}

    def close(self, after_first: Mapping[str, object], after_second: Mapping[str, object]) -> None:
        """Compare the rounds. after_first, after_second: variables after each. Raises WorkflowError that names node and
        input.
        """
        for one, other in zip(self.first, self.second, strict=False):
            if type(one.model) is not type(other.model) or one.model.settings != other.model.settings:
                self._fail(one.node, "", f"the second round has {type(other.model).__name__} in its place")
            if one.arguments.keys() != other.arguments.keys() or one.patches != other.patches:
                self._fail(one.node, "", "the second round gives it other inputs or patches")
        if len(self.first) != len(self.second):
            longer = max(self.first, self.second, key=len)
            self._fail(longer[min(len(self.first), len(self.second))].node, "", "only one of two rounds has this node")
        renamed = self.renamed
        for one, name, first, second in self._arguments():
            self._compare(one, name, first, second, renamed)
        for name, first_value in after_first.items():
            if name in after_second and self._is_changed(first_value, after_second[name], renamed):
                self._fail("", name, "two rounds leave different things in this variable")

    def _arguments(self) -> Iterator[tuple[Call, str, Value | Literal, Value | Literal]]:
        for one, other in zip(self.first, self.second, strict=True):
            for name, first in one.arguments.items():
                yield one, name, first, other.arguments[name]

    def _compare(
        self, call: Call, name: str, first: Value | Literal, second: Value | Literal, renamed: dict[str, str]
    ) -> None:
        if not isinstance(second, Value):
            if isinstance(first, Value) or (type(first), first) != (type(second), second):
                self._fail(call.node, name, f"it is {first} in the first round and {second} in the second")
        elif second.node in renamed.values():
            if isinstance(first, Value) and first.node in renamed.values():
                self._fail(call.node, name, f"it is {first} of the same round first, and then of the round before")
            self.carried[call.node, name] = second
        else:
            expected = renamed.get(second.node, second.node), second.name
            if not isinstance(first, Value) or first.key != expected:
                self._fail(call.node, name, f"it is {first} in the first round and another value in the second")

    @classmethod
    def _is_changed(cls, first: object, second: object, renamed: Mapping[str, str]) -> bool:
        """Whether two rounds leave different things in a variable. renamed: node of the second -> of the first."""
        if isinstance(first, tuple) and isinstance(second, tuple):
            pairs = zip(first, second, strict=False)
            return len(first) != len(second) or any(cls._is_changed(*pair, renamed) for pair in pairs)
        if isinstance(first, Value) and isinstance(second, Value):
            of_first = (renamed.get(second.node, second.node), second.name)
            return first.key != of_first or (second.node != of_first[0]) != (first.node in renamed.values())
        if isinstance(first, Value | _PLAIN) and isinstance(second, Value | _PLAIN):
            return type(first) is not type(second) or first != second
        return False

    def _fail(self, node: str, name: str, problem: str) -> NoReturn:
        where = f"node {node}" if node else self.name
        where = f"{where}, {'input' if node else 'variable'} {name}" if name else where
        rule = "all rounds of a loop are alike, but for what the round before has made"
        raise WorkflowError(f"workflow {self._workflow}, {where}: {problem}; {rule}", node=node, input=name)
