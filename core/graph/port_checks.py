"""Checks of nodes that have ports of their own: what each port takes and makes, and where it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from core.graph.op import Port
from core.graph.workflow import Node, Workflow, op_of

MAX_PORTS = 64
"""Most inputs, and most outputs, of one node: each is named in the message that runs it."""

MAX_NAME = 64
"""Most characters of a name: of a port, a node, or a result."""

MAX_TEXT_LITERALS = 4 * 1024
"""Most bytes of all texts that one node is given as literals, which its message carries."""

CHOSEN = "chosen"
"""Output of a node that chooses: text, the name of the reader that runs."""

Problem = tuple[str, str]
"""(input, or ""; what is wrong with it)"""


def port_of(ports: Sequence[Port], name: str) -> Port | None:
    """The port of this name; None: there is none."""
    return next((port for port in ports if port.name == name), None)


def problems_of_ports(workflow: Workflow, node: Node) -> Iterator[Problem]:
    """What is wrong with the ports of a node that has its own, and with what it is given."""
    if len(node.name) > MAX_NAME:
        yield "", f"its name has {len(node.name)} characters, and may have {MAX_NAME}"
    for kind, ports in (("inputs", node.takes), ("outputs", node.makes)):
        yield from _problems_of_names(kind, ports)
        for port in ports:
            if problem := _problem_of_form(port):
                yield port.name, f"{'it' if kind == 'inputs' else f'its output {port.name}'}: {problem}"
    if not node.makes:
        yield "", "it makes nothing; declare what its class returns"
    if any(port.is_optional for port in node.makes):
        yield "", "its outputs are always made, none is optional"
    chosen = port_of(node.makes, CHOSEN)
    if node.chooses and (chosen is None or chosen.type != "text"):
        yield "", f"a node that chooses makes the text {CHOSEN}, the name of the reader that runs"
    yield from _problems_of_given(workflow, node)
    yield from _problems_of_literals(node)


def problems_of_ends(workflow: Workflow) -> Iterator[Problem]:
    """What is wrong with a workflow's inputs and outputs, if nodes of it have ports of their own. If others make a
    picture beside them, inputs without a form are fields of requests, which only these others read.
    """
    given = {source for node in workflow.nodes for source in node.given.values()}
    for port in workflow.inputs:
        is_field = workflow.is_for_pictures and port.form is None and port.name not in given
        if not is_field and (problem := _problem_of_form(port) or _problem_of_array(port)):
            yield port.name, problem
    if workflow.is_for_pictures and "picture" not in workflow.outputs:
        yield "picture", "nodes work for a picture that is no result; say in outputs which of them makes it"
    yield from _problems_of_names("inputs", workflow.inputs)
    for region in workflow.regions:
        counted = port_of(workflow.inputs, region.rounds) if isinstance(region.rounds, str) else None
        if counted is not None and (counted.type != "integer" or counted.is_optional):
            yield counted.name, f"region {region.name} has so many rounds, so it is an integer that is always given"
        elif counted is None and region.rounds and isinstance(region.rounds, str):
            yield region.rounds, f"region {region.name} has so many rounds, and the workflow has no such input"
    for name in workflow.output_ports.keys() - workflow.outputs.keys():
        yield name, "output_ports says which output it is, and outputs not of which node"
    made_by = Counter((maker, workflow.output_ports.get(name)) for name, maker in workflow.outputs.items())
    for name, maker in workflow.outputs.items():
        node, wanted = workflow.find(maker), workflow.output_ports.get(name)
        if node is None:
            continue  # which is another check's
        if not op_of(node).has_own_ports:
            if name != "picture" or wanted is not None or not op_of(node).makes_result:
                yield name, f"{maker} makes no such result: op {node.op} has no ports of its own"
            continue
        made = port_of(node.makes, wanted or "")
        if made is None:
            yield name, f"which output of {maker} it is must be named in output_ports, and {wanted or 'none'} is none"
        elif made_by[maker, made.name] > 1:
            yield name, f"another result is output {made.name} of {maker}, too"
        elif len(name) > MAX_NAME:
            yield name, f"a result's name has at most {MAX_NAME} characters"
        elif workflow.is_for_pictures and name == "picture" and made.type != "picture":
            yield name, f"it is a {made.type}, and a picture is due"
        elif problem := _problem_of_array(made):
            yield name, problem


def _problems_of_names(kind: str, ports: Sequence[Port]) -> Iterator[Problem]:
    if len(ports) > MAX_PORTS:
        yield "", f"it has {len(ports)} {kind}; there may be {MAX_PORTS}"
    if twice := next((name for name, times in Counter(port.name for port in ports).items() if times > 1), None):
        yield twice, f"two {kind} have this name"
    for port in ports:
        if not port.name.isidentifier() or len(port.name) > MAX_NAME:
            yield port.name, f"a name is a Python identifier of at most {MAX_NAME} characters"


def _problem_of_form(port: Port) -> str:
    if port.form is None or port.form.kind != port.type:
        return "it has no form; make it by Port.of"
    return port.form.problem


def _problem_of_array(port: Port) -> str:
    """Why a value cannot be an array of the client; "": it can."""
    is_unknown = port.form is not None and port.form.dtype == "bfloat16"
    return "NumPy has no bfloat16; declare float32 where requests give or get a tensor" if is_unknown else ""


def _problems_of_given(workflow: Workflow, node: Node) -> Iterator[Problem]:
    for name, source in node.given.items():
        port, given = port_of(node.takes, name), port_of(workflow.inputs, source)
        if port is None:
            yield name, "it has no input of this name"
        elif given is None:
            yield name, f"the workflow has no input {source}"
        elif port.form is not None and given.form is not None and (problem := port.form.why_not_from(given.form)):
            yield name, problem
        elif given.is_optional and not port.is_optional:
            yield name, f"the workflow's input {source} may be left out, and this one not"


def _problems_of_literals(node: Node) -> Iterator[Problem]:
    for name, literal in node.literals.items():
        port = port_of(node.takes, name)
        if port is None or port.form is None:
            yield name, "it has no input of this name"
        elif problem := port.form.why_not_plain(literal):
            yield name, f"its literal: {problem}"
    texts = [each for each in node.literals.values() if isinstance(each, str)]
    if (nbytes := sum(len(each.encode(errors="replace")) for each in texts)) > MAX_TEXT_LITERALS:
        yield "", f"its literals are {nbytes} bytes of text, and there may be {MAX_TEXT_LITERALS}; give it by an input"
