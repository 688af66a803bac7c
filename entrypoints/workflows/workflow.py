"""Workflow: what a user's file composes of models."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NoReturn, Self

from core.errors import WorkflowError
from core.graph.form import Form
from core.graph.workflow import Literal
from core.sampling_params import MAX_INFERENCE_STEPS
from entrypoints.workflows.branch import Branch
from entrypoints.workflows.built_in import Count
from entrypoints.workflows.call import Call
from entrypoints.workflows.choice import Choice
from entrypoints.workflows.data_type import form_of
from entrypoints.workflows.loop import Loop
from entrypoints.workflows.meeting import Meeting
from entrypoints.workflows.model import Model
from entrypoints.workflows.optimizations import OPTIMIZATIONS, Optimization
from entrypoints.workflows.recorder import current_recorder, recorder_for
from entrypoints.workflows.value import Value

MAX_CALLS = 1000
"""Most nodes of a workflow."""


class Workflow:
    """A graph of models (LegoDiffusion, section 4.1, figure 7). From here on, invocations of models in this thread are
    its nodes, until another workflow begins; as a context manager, until its block ends.

        workflow = Workflow(name="soft")
        image = workflow.add_input("image", Image)
        workflow.add_output(Blur()(image, radius=3.0), name="blurred")
    """

    def __init__(self, name: str) -> None:
        """name: under which it is served: letters, digits and ``_.-``. Raises WorkflowError."""
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
            raise WorkflowError(f"workflow {name!r}: a name has 1 to 64 letters, digits and _.-", node="")
        self.name = name
        self.inputs: dict[str, tuple[Value, bool]] = {}  # name -> (value, whether requests must give it)
        self.outputs: dict[str, Value] = {}
        self.defaults: dict[str, Literal] = {}  # field of requests for pictures -> its value where they leave it out
        self.optimizations: dict[type[Optimization], Optimization] = {}
        self.trace: list[Call | Choice | Meeting] = []  # a choice stands before its branches, a meeting behind them
        self.loops: list[Loop] = []
        self._loop: Loop | None = None  # in whose body it is
        self._branch: Branch | None = None  # likewise
        self._names: set[str] = set()  # of nodes and loops
        self._made: dict[Value, None] = {}  # the values that it has handed out
        self._branch_of: dict[str, Branch | None] = {}  # node -> the branch that it is in
        self._renamed: dict[str, str] = {}  # node of a second round -> the one that stands for it
        self._is_of_first: set[str] = set()  # nodes of first rounds, of loops that are over
        self._num_calls = 0
        current_recorder.set(self)

    def __enter__(self) -> Self:
        current_recorder.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        current_recorder.set(None)

    def add_input(self, name: str, data_type: object, *, required: bool = True) -> Value:
        """An input that requests give. data_type: see `data_type.form_of`. Raises WorkflowError."""
        if not isinstance(name, str) or not name.isidentifier() or name in self.inputs:
            self._fail("", f"input {name!r}: an input has a name of its own, a Python identifier")
        value = self._made_here(Value(name, form_of(data_type, f"workflow {self.name}", name)))
        self.inputs[name] = value, required
        return value

    def add_output(self, value: Value, name: str) -> None:
        """A result that requests get. Raises WorkflowError."""
        if not isinstance(name, str) or not name.isidentifier() or name in self.outputs:
            self._fail("", f"output {name!r}: an output has a name of its own, a Python identifier")
        if self._loop is not None or self._branch is not None:
            self._fail("", f"output {name}: add it after the loop, which runs to its end, or the choice")
        self.outputs[name] = self._settled("", name, value)

    def set_defaults(self, **fields: str | int | float | bool) -> None:
        """What requests for pictures over HTTP are that leave these fields out: set_defaults(guidance_scale=4.5). They
        go before those of the model and its adapters. The server checks them when it starts. Raises WorkflowError.
        """
        for name, value in fields.items():
            if not isinstance(value, str | int | float | bool):
                self._fail("", f"default {name}: it is a {type(value).__name__}; give text, a number or a bool")
        self.defaults |= fields

    def optimize(self, optimization: Optimization) -> None:
        """Have the compiler rewrite the graph: optimize(AsynchronousAdapters(steps=4)). The last one of a kind counts.
        Raises WorkflowError.
        """
        if type(optimization) not in OPTIMIZATIONS:
            known = ", ".join(kind.__name__ for kind in OPTIMIZATIONS)
            self._fail("", f"optimize: {optimization!r:.80} is none; there are {known}")
        self.optimizations[type(optimization)] = optimization

    # ------------------------------------------------------------------------------------------------ what models do

    def record(self, model: Model, arguments: Mapping[str, object]) -> tuple[Value, ...]:
        """Note an invocation; what stands for its outputs. Raises WorkflowError that names node and input."""
        self._num_calls += 1
        node = self._name_of_call(model)
        if self._num_calls > MAX_CALLS:
            self._fail(node, f"a workflow has at most {MAX_CALLS} nodes")
        if not model.outputs:
            self._fail(node, "it has no outputs; add_output declares one")
        given = {name: self._argument(node, name, value) for name, value in arguments.items() if value is not None}
        if unknown := next((name for name in given if name not in model.inputs), ""):
            self._fail(node, f"it has no such input; there are {', '.join(model.inputs) or 'none'}", unknown)
        if lacking := next(
            (each.name for each in model.inputs.values() if each.required and each.name not in given), ""
        ):
            self._fail(node, "it is not given", lacking)
        loop = self._loop
        call = Call(node, model, given, tuple(model.patches), loop.name if loop else "", self._branch)
        loop.add(call) if loop else self.trace.append(call)
        return tuple(self._made_here(Value(each.name, each.form, node)) for each in model.outputs.values())

    def loop(self, number: object) -> Iterator[Value]:
        """See `steps`."""
        if self._loop is not None:
            self._fail("", "a loop cannot be in a loop, or follow one that was left before its end")
        if self._branch is not None:
            self._fail("", "a loop cannot be in a branch; put it before or behind the choice")
        loop = self._loop = Loop(self.named("loop"), self._rounds(number), self.name)
        counter = Count()
        (step,) = self.record(counter, {"step": -1})
        yield step
        after_first = dict(sys._getframe(1).f_locals)  # of the code that the loop is in
        loop.is_second = True
        (step,) = self.record(counter, {"step": step})
        yield step
        self._loop = None
        loop.close(after_first, sys._getframe(1).f_locals)
        self._renamed |= loop.renamed
        self._is_of_first |= set(loop.renamed.values())
        self.loops.append(loop)
        self.trace += loop.first

    def choose(self, verdict: object, branches: Mapping[str, Callable[[], object]]) -> Value:
        """See `choose`."""
        node = self.named("choice")
        if self._loop is not None:
            self._fail(node, "a choice cannot be in a loop; put it before or behind")
        told = self._argument(node, "verdict", verdict)
        if not isinstance(told, Value) or told.form.kind != "text":
            self._fail(node, "what chooses is a text, the name of a branch", "verdict")
        if len(branches) < 2:
            self._fail(node, "a choice has two branches or more")
        choice = Choice(node, self.named(f"{node}_end"), told, self._branch)
        self.trace.append(choice)
        for name, make in branches.items():
            branch = self._branch = Branch(name, self.named(f"{node}_{name}"), choice.branch)
            choice.branches.append(branch)
            try:
                result = self._argument(node, name, make())
            finally:
                self._branch = choice.branch
            if not isinstance(result, Value):
                self._fail(node, "a branch returns one value that a model makes", name)
            branch.result = result
        self.trace.append(Meeting(choice))
        choice.form = self._joined_form(choice)
        return self._made_here(Value("value", choice.form, choice.join))

    # ------------------------------------------------------------------------------------------------ what it knows

    def check_closed(self) -> None:
        """Raises WorkflowError for a loop that was left before its end."""
        if self._loop is not None:
            self._fail("", "a loop was left before its end; steps(...) says how many rounds it has, break cannot")

    def branch_of(self, value: Value) -> Branch | None:
        """The branch that makes a value."""
        return self._branch_of[value.node] if value.node else None

    def _made_here(self, value: Value) -> Value:
        self._made[value] = None
        if value.node:
            self._branch_of[value.node] = self._branch
        return value

    def _argument(self, node: str, name: str, value: object) -> Value | Literal:
        """What an input is given. Raises WorkflowError."""
        if isinstance(value, bool | int | float | str):
            return value
        if not isinstance(value, Value):
            self._fail(node, f"it is a {type(value).__name__}; give a value, bool, int, float or str", name)
        return self._settled(node, name, value)

    def _settled(self, node: str, name: str, value: object) -> Value:
        """A value as the graph knows it: after a loop, that of its last round."""
        if not isinstance(value, Value) or value not in self._made:
            self._fail(node, f"{value!s:.80} is no value of this workflow", name)
        if value.node in self._is_of_first:
            self._fail(
                node, f"{value} is of a loop's first round; after the loop, read what its last one has made", name
            )
        return Value(value.name, value.form, self._renamed.get(value.node, value.node))

    def _rounds(self, number: object) -> str | int:
        if isinstance(number, Value):
            told = self._settled("", "steps", number)
            if told.node or told.form.kind != "integer":
                self._fail("", f"steps({number}): a number, or an int that is an input of the workflow")
            return told.name
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_INFERENCE_STEPS:
            self._fail("", f"steps({number!s:.80}): 1 to {MAX_INFERENCE_STEPS}, or an input of the workflow")
        return number

    def _joined_form(self, choice: Choice) -> Form:
        """What the results of all branches fit into."""
        forms = [branch.result.form for branch in choice.branches if branch.result is not None]
        first = forms[0]
        if any(
            (each.kind, each.dtype, len(each.shape)) != (first.kind, first.dtype, len(first.shape)) for each in forms
        ):
            self._fail(choice.node, f"its branches make different things: {', '.join(map(str, forms))}")
        sides = tuple(max(sides) for sides in zip(*(each.shape for each in forms), strict=True))
        return Form(first.kind, sides, first.tensor_dtype)

    def _name_of_call(self, model: Model) -> str:
        """As its class is called, in lower case; in the second round of a loop, after the one in its place."""
        same = self._loop.next_in_first if self._loop is not None else None
        if same is not None:
            return f"{same.node}'"
        return self.named(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(model).__name__).lower())

    def named(self, base: str) -> str:
        """A name for a node that no other has."""
        name = next(
            name for number in count(1) if (name := base if number == 1 else f"{base}_{number}") not in self._names
        )
        self._names.add(name)
        return name

    def _fail(self, node: str, problem: str, name: str = "") -> NoReturn:
        node = node.rstrip("'")  # of a second round
        where = f"{f', node {node}' if node else ''}{f', input {name}' if name else ''}"
        raise WorkflowError(f"workflow {self.name}{where}: {problem}", node=node, input=name)


def steps(number: object) -> Iterator[Any]:
    """``for step in steps(n)``: a loop of n rounds, at least one, whose number a request may say.

        for step in steps(num_steps):
            latents = denoise(latents, step)

    What a round reads of the round before is found by running the body twice, see `Loop`; afterwards, variables have
    the values of the last round. The loop runs to its end, and no loop or choice is in it. number: of rounds, or an
    input of the workflow that is an int; of denoising steps, an input that is a request's num_inference_steps. Yields
    the number of the round, from 0, as a value for models. Raises WorkflowError.
    """
    return recorder_for("steps").loop(number)


def choose(verdict: object, **branches: Callable[[], object]) -> Any:
    """The value of one of several branches, of which only the one that `verdict` names will run.

        picture = choose(judge(image), fine=lambda: image, unsafe=lambda: blacken(image))

    verdict: a text that a model makes. branches: by name, what records each of them and returns its value; its nodes
    must read something from outside of it. Raises WorkflowError.
    """
    return recorder_for("choose").choose(verdict, branches)
