"""The compiler: lowers a workflow that a user has composed to the engine's graph (LegoDiffusion, section 4.2)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from core.errors import WorkflowError
from core.graph.form import text
from core.graph.op import Port
from core.graph.port_checks import CHOSEN
from core.graph.workflow import Edge, Literal, Node, Region
from core.graph.workflow import Workflow as Graph
from core.run_class import RunClass
from entrypoints.workflows.branch import Branch
from entrypoints.workflows.built_in import Count, Gate, Join, Same, Switch
from entrypoints.workflows.call import Call
from entrypoints.workflows.canvases import scale_of
from entrypoints.workflows.choice import Choice
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.loop import Loop
from entrypoints.workflows.lowered import Lowered
from entrypoints.workflows.optimizations import optimized
from entrypoints.workflows.passes import Passes
from entrypoints.workflows.previews import previews_of
from entrypoints.workflows.registered import Registered
from entrypoints.workflows.request_fields import NUM_STEPS, RequestFields
from entrypoints.workflows.value import Value
from entrypoints.workflows.workflow import Workflow

_NAME = text(64)  # of a node
_GATES = text(4096)


def compile_workflow(workflow: Workflow) -> Registered:
    """The workflow as data, which `core.graph.check` has still to check. Raises WorkflowError that names node and
    input.

    A call becomes the node that its model is lowered to. What the engine's graph has no edge for becomes a node
    between: a loop's first value that no node makes under the carried one's name, a result that a loop or nobody makes,
    the beginning of a branch, and its end. Then the optimizations that the workflow asks for rewrite the graph.
    """
    workflow.check_closed()
    return _Compiler(workflow).compiled()


class _Compiler:
    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow
        self._nodes: list[Node] = []
        self._classes: dict[str, RunClass] = {}
        self._fields = RequestFields()
        self._loras: Mapping[str, float] | None = None
        self._previews: dict[str, Node] = {}  # node that makes a picture -> what shows it on the way
        self._carried = {key: value for loop in workflow.loops for key, value in loop.carried.items()}
        self._region_of = {call.node: call.region for call in workflow.trace if isinstance(call, Call)}
        self._passes = Passes(self._region_of)
        self._results: list[tuple[str, str]] = []  # (node, output) that are results
        self._begun: dict[tuple[object, ...], Node] = {}  # (first value, carried value) -> the node that begins with it
        self._passed: dict[Branch, dict[tuple[str, str], Value]] = {}  # what its gate passes on
        self._is_read: set[tuple[str, str]] = set()  # keys of values
        for value, branch, node, name in self._reads():
            self._is_read.add(value.key)
            self._pass_into(value, branch, node, name)

    def compiled(self) -> Registered:
        workflow = self._workflow
        for each in workflow.trace:
            if isinstance(each, Call):
                self._lower(each)
            elif isinstance(each, Choice):
                self._open(each)
            else:
                self._close(each.choice)
        regions = tuple(map(self._region, workflow.loops))
        results = {name: self._result(value) for name, value in workflow.outputs.items()}
        nodes = tuple(self._passes.joined(self._nodes))
        previews = self._previews_of(nodes, results["picture"][0]) if "picture" in results else ()
        has_ports = {node.name for node in self._nodes if node.makes}
        graph = Graph(
            workflow.name,
            nodes + previews,
            {name: node for name, (node, _) in results.items()},
            output_ports={name: port for name, (node, port) in results.items() if node in has_ports},
            regions=regions,
            inputs=tuple(self._inputs(regions)),
            canvases={node.canvas: scale_of(node.canvas) for node in self._nodes if node.canvas},
            is_mask_aware=len({node.region for node in self._nodes if node.region and not node.makes}) == 1,
            loras=self._loras or {},
            defaults=workflow.defaults,
        )
        return Registered((optimized(graph, workflow.optimizations.values()),), tuple(self._classes.values()))

    # ------------------------------------------------------------------------------------------------ requests

    def _region(self, loop: Loop) -> Region:
        """A loop's region: of classes, or of denoising steps, whose number is a field of requests."""
        nodes = [node for node in self._nodes if node.region == loop.name]
        steps = next((node for node in nodes if not node.makes), None)
        if steps is None:
            return Region(loop.name, rounds=loop.rounds)
        if other := next((node for node in nodes if node.makes), None):
            problem = f"it is in a loop of {steps.name}, where the engine alone computes; put it before or behind"
            raise self._error(other.name, "", problem)
        region = self._passes.region(loop.name, steps)
        if region is None:
            problem = "a loop begins with what a LatentsGenerator makes; to go on with others, give it them as latents"
            raise self._error(steps.name, "latents", problem)
        if isinstance(loop.rounds, str):
            self._note_field(steps.name, loop.rounds, NUM_STEPS)
            return region
        if not self._passes.is_second(steps):
            problem = f"steps({loop.rounds}): requests say how many; give an int that is an input of the workflow"
            raise self._error(steps.name, "", problem)
        return replace(region, steps=loop.rounds)

    def _previews_of(self, nodes: tuple[Node, ...], picture: str) -> tuple[Node, ...]:
        """What shows the picture that a node makes on its way."""
        decoding = dict[str, Node]()
        for name, side in self._previews.items():
            if self._region_of.get(side.shows):
                shown = self._passes.shown(side.shows)
                inputs = tuple(replace(edge, source=shown) for edge in side.inputs)
                decoding[name] = replace(side, name=self._workflow.named(side.name), inputs=inputs, shows=shown)
        return previews_of(nodes, decoding, picture, self._workflow.named)

    def _inputs(self, regions: Iterable[Region]) -> Iterator[Port]:
        counted = {region.rounds for region in regions if isinstance(region.rounds, str)}
        of_classes = counted.union(*(node.given.values() for node in self._nodes))
        if name := self._fields.unreadable(of_classes):
            problem = "classes read no field of requests but the prompt, as an input called prompt"
            raise self._error("", name, problem)
        return self._fields.ports(self._workflow.inputs, of_classes)

    def _note_fields(self, call: Call, connected: Connected, lowered: Lowered) -> None:
        for name, source in connected.given.items():
            if (field := lowered.fields.get(name)) is not None:
                value, required = self._workflow.inputs[source]
                if not required and field.type == "number":
                    raise self._error(call.node, name, f"each request gives its {field.name}; leave required=False out")
                if problem := call.model.inputs[name].form.why_not_from(value.form):
                    raise self._error(call.node, name, problem)
                self._note_field(call.node, source, field)

    def _note_loras(self, call: Call, lowered: Lowered) -> None:
        if lowered.loras is not None and self._loras not in (None, lowered.loras):
            raise self._error(call.node, "", "another step has other adapters, and a request has the same in all steps")
        self._loras = self._loras if lowered.loras is None else lowered.loras

    def _note_field(self, node: str, name: str, field: Port) -> None:
        if problem := self._fields.add(name, field):
            raise self._error(node, name, problem)

    # ------------------------------------------------------------------------------------------------ calls

    def _lower(self, call: Call) -> None:
        """Add the node of a call."""
        if isinstance(call.model, Count) and (call.node, "step") not in self._is_read:
            return
        carried = {name: by for name in call.arguments if (by := self._carried.get((call.node, name))) is not None}
        fixed = {name: value for name, value in call.arguments.items() if name not in carried}
        deferred = {each.name for each in call.model.inputs.values() if each.deferred}
        begun = [self._begin(name, call.arguments[name], by) for name, by in carried.items()]
        connected = self._connected(call.node, fixed, call.branch, deferred)
        if call.branch is not None and not connected.edges:
            problem = f"it reads nothing from outside of branch {call.branch.name}, so that it would always run"
            raise self._error(call.node, "", problem)
        lowered = call.model.lower(
            replace(
                connected,
                edges=(*connected.edges, *begun),
                region=call.region,
                patches=call.patches,
                canvases={node.name: node.canvas for node in self._nodes},
            )
        )
        self._nodes.append(lowered.node)
        self._note_fields(call, connected, lowered)
        self._note_loras(call, lowered)
        if lowered.begin is not None:
            self._passes.add(lowered.node.name, lowered.begin)
        if lowered.preview is not None:
            self._previews[lowered.node.name] = lowered.preview
        self._classes |= {each.name: each for each in lowered.classes}

    def _connected(
        self, node: str, inputs: Mapping[str, Value | Literal], branch: Branch | None, deferred: Collection[str] = ()
    ) -> Connected:
        """Where the inputs of a node come from. branch: in which it is."""
        edges, given, literals = list[Edge](), dict[str, str](), dict[str, Literal]()
        for name, value in inputs.items():
            if not isinstance(value, Value):
                literals[name] = value
                continue
            source, output = self._source(value, branch)
            if source:
                edges.append(Edge(source, output, name, deferred=name in deferred))
            else:
                given[name] = output
        return Connected(node, tuple(edges), given, literals)

    def _source(self, value: Value, branch: Branch | None) -> tuple[str, str]:
        """(node, output) that a node in a branch reads for a value; node "": an input of the workflow."""
        if branch is None or branch is self._workflow.branch_of(value):
            return value.node, value.name
        return branch.gate, f"value_{list(self._passed[branch]).index(value.key)}"

    def _add(
        self,
        name: str,
        kind: type,
        takes: Iterable[Port],
        makes: Iterable[Port],
        inputs: Mapping[str, Value | Literal],
        branch: Branch | None = None,
    ) -> Node:
        """Add a node that no call is. kind: its class. branch: where it reads its inputs."""
        path = f"{kind.__module__}:{kind.__name__}"
        connected = self._connected(name, inputs, branch)
        node = Node(
            name,
            "run",
            connected.edges,
            role=path,
            takes=tuple(takes),
            makes=tuple(makes),
            given=connected.given,
            literals=connected.literals,
        )
        self._classes[path] = RunClass(name=path, path=path)
        self._nodes.append(node)
        return node

    # ------------------------------------------------------------------------------------------------ loops

    def _begin(self, name: str, first: Value | Literal, carried: Value) -> Edge:
        """The edge of an input that has one value in the first round, and then what the round before has made."""
        source = first.node if isinstance(first, Value) and first.name == carried.name else ""
        if not source or self._region_of.get(source):
            key = (first.key if isinstance(first, Value) else (type(first), first), carried.key)
            if key not in self._begun:
                port = Port.of(carried.name, first.form if isinstance(first, Value) else carried.form)
                begin = self._workflow.named(f"{carried.node}_begin")
                self._begun[key] = self._add(begin, Same, [port], [port], {carried.name: first})
            source = self._begun[key].name
        return Edge(source, carried.name, name, carried=carried.node)

    def _result(self, value: Value) -> tuple[str, str]:
        """(node, output) that is a result: no node that repeats, and none twice."""
        if value.node and not self._region_of.get(value.node) and value.key not in self._results:
            self._results.append(value.key)
            return value.key
        port = Port.of(value.name, value.form)
        return self._add(self._workflow.named("result"), Same, [port], [port], {value.name: value}).name, value.name

    # ------------------------------------------------------------------------------------------------ branches

    def _reads(self) -> Iterator[tuple[Value, Branch | None, str, str]]:
        """All values that are read: (value, branch that reads it, node, input)."""
        for each in self._workflow.trace:
            if isinstance(each, Call):
                for name, value in each.arguments.items():
                    if isinstance(value, Value):
                        yield value, each.branch, each.node, name
                    by = self._carried.get((each.node, name))
                    if by is not None and by.node != each.node:
                        yield by, each.branch, each.node, name
            elif isinstance(each, Choice):
                yield each.verdict, each.branch, each.node, "verdict"
            else:
                for branch in each.choice.branches:
                    assert branch.result is not None, "a choice is recorded with the results of its branches"
                    yield branch.result, branch, each.choice.join, branch.name
        for name, value in self._workflow.outputs.items():
            yield value, None, "", name

    def _pass_into(self, value: Value, branch: Branch | None, node: str, name: str) -> None:
        """Have the gates of all branches around a reader pass a value on that is made outside of them."""
        own = self._workflow.branch_of(value)
        while branch is not own:
            if branch is None:
                assert own is not None, "who reads is outside of all branches"
                problem = f"{value} is made in branch {own.name}, and read outside; let the branch return it"
                raise self._error(node, name, problem)
            self._passed.setdefault(branch, {})[value.key] = value
            branch = branch.parent

    def _open(self, choice: Choice) -> None:
        """Add the node that chooses, and the gates of its branches."""
        for branch in choice.branches:
            if branch not in self._passed:
                raise self._error(choice.node, branch.name, "the branch reads nothing from outside of it")
        gates = json.dumps({branch.name: branch.gate for branch in choice.branches})
        takes = [Port.of("verdict", choice.verdict.form), Port.of("gates", _GATES)]
        chosen = Port.of(CHOSEN, _NAME)
        switch = self._add(
            choice.node, Switch, takes, [chosen], {"verdict": choice.verdict, "gates": gates}, choice.branch
        )
        self._nodes[-1] = replace(switch, chooses=True)
        for branch in choice.branches:
            passed = {f"value_{index}": value for index, value in enumerate(self._passed[branch].values())}
            ports = [Port.of(name, value.form) for name, value in passed.items()]
            gate = self._add(branch.gate, Gate, [chosen, *ports], ports, passed, branch.parent)
            self._nodes[-1] = replace(gate, inputs=(Edge(choice.node, CHOSEN), *gate.inputs))

    def _close(self, choice: Choice) -> None:
        """Add the node in which the branches meet."""
        results = {branch.name: branch for branch in choice.branches}
        edges, ports = list[Edge](), list[Port]()
        for name, branch in results.items():
            assert branch.result is not None, "a choice is recorded with the results of its branches"
            edges.append(Edge(*self._source(branch.result, branch), name))
            ports.append(Port.of(name, branch.result.form, is_optional=True))
        join = self._add(choice.join, Join, ports, [Port.of("value", choice.form)], {})
        self._nodes[-1] = replace(join, inputs=tuple(edges), joins=True)

    def _error(self, node: str, name: str, problem: str) -> WorkflowError:
        where = f"{f', node {node}' if node else ''}{f', input {name}' if name else ''}"
        return WorkflowError(f"workflow {self._workflow.name}{where}: {problem}", node=node, input=name)
