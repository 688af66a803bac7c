"""Random programs in the language of workflows: their graphs make what the same programs make when Python runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from random import Random
from typing import Any

import pytest

import core.scheduling.ops  # noqa: F401  the check of a workflow looks ops up
from core.errors import WorkflowError
from core.graph.check import check_workflow
from core.graph.skipping import skipped_by
from core.graph.workflow import Node
from core.graph.workflow import Workflow as Graph
from core.run_class import RunClass
from entrypoints.workflows import Model, Workflow, choose, steps, text
from entrypoints.workflows.compiler import compile_workflow
from entrypoints.workflows.registered import Registered

VARIABLES = "abc"
PROGRAMS = 400


class Mix(Model):
    """Two numbers from three."""

    def setup_io(self) -> None:
        for name in ("x", "y", "z"):
            self.add_input(name, int, required=name != "z")
        self.add_output("one", int)
        self.add_output("other", int)

    def load(self, device: str, dtype: Any) -> None:
        """It has no weights."""

    def execute(self, x: int, y: int, z: int = 5) -> dict[str, object]:
        factor = int(self.settings.get("factor", 7))
        return {"one": (factor * x + 3 * y + z) % 1009, "other": (x - y * y + factor * z) % 1013}


class Parity(Model):
    """Says whether a number is even."""

    def setup_io(self) -> None:
        self.add_input("x", int)
        self.add_output("parity", text(8))

    def load(self, device: str, dtype: Any) -> None:
        """It has no weights."""

    def execute(self, x: int) -> dict[str, object]:
        return {"parity": "odd" if x % 2 else "even"}


class Written:
    """The language, as it is."""

    def __init__(self) -> None:
        self.mix, self.mix_twice, self.parity = Mix(), Mix(factor=11), Parity()
        self.steps, self.choose = steps, choose


class Run:
    """The same, run by Python."""

    def __init__(self) -> None:
        self.steps: Callable[[Any], Iterator[Any]] = range

    def mix(self, x: int, y: int, z: int = 5) -> tuple[Any, ...]:
        return tuple(Mix().execute(x, y, z).values())

    def mix_twice(self, x: int, y: int, z: int = 5) -> tuple[Any, ...]:
        return tuple(Mix(factor=11).execute(x, y, z).values())

    def parity(self, x: int) -> object:
        return Parity().execute(x)["parity"]

    def choose(self, verdict: str, **branches: Callable[[], object]) -> object:
        return branches[verdict]()


def assignment(random: Random, names: str) -> str:
    """A statement that assigns variables."""
    one, other, third = (random.choice(names) for _ in range(3))
    literal = random.choice([third, str(random.randint(0, 99))])
    targets = ", ".join(random.sample(VARIABLES, 2))
    return random.choice(
        [
            f"{targets} = do.mix({one}, {literal}, {third})",
            f"{targets} = do.mix({one}, {other})",
            f"{targets} = do.mix_twice({literal}, {other}, {one})",
            f"{targets} = {one}, {other}",
            f"{targets} = {targets[::-1]}",
        ]
    )


def program(random: Random) -> str:
    """Assignments, loops and choices one after the other."""
    lines: list[str] = []
    for _ in range(random.randint(1, 4)):
        kind = random.choice(["plain", "loop", "loop", "choice"])
        if kind == "plain":
            lines.append(assignment(random, VARIABLES))
        elif kind == "loop":
            lines.append(f"for step in do.steps({random.choice(['n', '2', '3'])}):")
            names = VARIABLES + ("s" if random.random() < 0.5 else "")
            body = [assignment(random, names) for _ in range(random.randint(1, 4))]
            lines += [f"    {line}" for line in ["s = step" if "s" in names else "pass", *body]]
        else:
            one, other = random.sample(VARIABLES, 2)
            branches = [f"do.mix({random.choice(VARIABLES)}, {other})[{random.randint(0, 1)}]", one]
            inner = f"do.choose(do.parity({other}), odd=lambda: {branches[0]}, even=lambda: {other})"
            even = random.choice([*branches, inner])
            verdict = f"do.parity({random.choice(VARIABLES)})"
            lines.append(f"{one} = do.choose({verdict}, odd=lambda: {branches[0]}, even=lambda: {even})")
    return "\n".join(lines)


def compiled(source: str, num_rounds: int) -> Registered:
    """The graph of a program. Raises WorkflowError."""
    with Workflow(name="program") as workflow:
        names = {name: workflow.add_input(name, int) for name in (*VARIABLES, "n")} | {"do": Written()}
        exec(source, names)
        for name in VARIABLES:
            workflow.add_output(names[name], name)
    registered = compile_workflow(workflow)
    check_workflow(registered.workflows[0])
    return registered


def python(source: str, inputs: Mapping[str, int]) -> dict[str, Any]:
    """What a program makes if Python runs it."""
    names: dict[str, Any] = {**inputs, "do": Run()}
    exec(source, names)
    return {name: names[name] for name in VARIABLES}


class Interpreter:
    """Runs a graph of users' classes in this process."""

    def __init__(self, graph: Graph, classes: Mapping[str, RunClass], inputs: Mapping[str, Any]) -> None:
        self._graph, self._classes, self._inputs = graph, classes, inputs
        self._made: dict[tuple[str, str], Any] = {}
        self._chosen: dict[str, str] = {}

    def results(self) -> dict[str, Any]:
        for node in self._graph.nodes:
            region = self._graph.nodes_of(node.region) if node.region else (node,)
            if node is region[-1]:
                for index in range(self._rounds(node.region)):
                    before = dict(self._made)
                    for each in region:
                        self._run(each, before if index else {})
        return {name: self._made[maker, self._graph.output_ports[name]] for name, maker in self._graph.outputs.items()}

    def _rounds(self, name: str) -> int:
        rounds = next((region.rounds for region in self._graph.regions if region.name == name), 1)
        return self._inputs[rounds] if isinstance(rounds, str) else rounds

    def _run(self, node: Node, before: Mapping[tuple[str, str], Any]) -> None:
        """before: what the round before has made; {}: this is the first one."""
        skipped = skipped_by(self._graph, self._chosen)
        if node.name in skipped:
            return
        inputs = {name: self._inputs[source] for name, source in node.given.items()} | dict(node.literals)
        for edge in node.inputs:
            if edge.carried and before:
                inputs[edge.input] = before[edge.carried, edge.name]
            elif edge.source not in skipped:
                inputs[edge.input] = self._made[edge.source, edge.name]
        config = self._classes[node.role]
        module, _, name = config.path.partition(":")
        made = getattr(import_module(module), name)(**config.settings).execute(**inputs)
        assert made.keys() == {port.name for port in node.makes}
        self._made |= {(node.name, port): value for port, value in made.items()}
        if node.chooses:
            self._chosen[node.name] = made["chosen"]


def test_graphs_make_what_python_makes() -> None:
    """But for programs that the language refuses: such whose second round reads what the first one does not make, and
    loops that carry nothing.
    """
    random, num_equal, reasons = Random(5), 0, set[str]()
    for _ in range(PROGRAMS):
        source = program(random)
        inputs = {name: random.randint(0, 99) for name in VARIABLES} | {"n": random.randint(1, 4)}
        try:
            registered = compiled(source, inputs["n"])
        except WorkflowError as error:
            reasons.add(str(error).partition("; ")[2] or str(error).rpartition(" ")[0])
            continue
        classes = {each.name: each for each in registered.classes}
        assert Interpreter(registered.workflows[0], classes, inputs).results() == python(source, inputs), source
        num_equal += 1
    assert num_equal > PROGRAMS / 2, (num_equal, reasons)


@pytest.mark.parametrize("source", ["for step in do.steps(n):\n    a = do.mix(a, step)[0]\n    b, c = a, c"])
def test_a_variable_may_have_its_first_value_anywhere(source: str) -> None:
    registered = compiled(source, 3)
    inputs = {"a": 1, "b": 2, "c": 3, "n": 3}
    classes = {each.name: each for each in registered.classes}
    assert Interpreter(registered.workflows[0], classes, inputs).results() == python(source, inputs)
