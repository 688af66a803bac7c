"""Workflows of the classes in `user_classes.py`, which this module does not import, and requests for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from core.graph.form import INTEGER, NUMBER, TRUTH, Form, picture, tensor, text
from core.graph.op import Port
from core.graph.workflow import Edge, Node, Region, Workflow
from core.graph.workflows.inpaint import INPAINT
from core.handles import ArrayRef
from core.messages.engine import EngineRequest
from core.messages.specs import RunSpec
from core.run_class import RunClass

VECTOR, PICTURE, TEXT = tensor("float32", 16), picture(8, 8), text(64)

CLASSES = tuple(
    RunClass(name=name.lower(), path=f"user_classes:{name}")
    for name in ("Mixer", "Shouter", "Inverter", "Wayward", "Teller", "Sleeper", "Broken", "Guard")
)


def _node(
    name: str, role: str, takes: Mapping[str, Form], makes: Mapping[str, Form], optional: Sequence[str] = ()
) -> Node:
    ports = tuple(Port.of(each, form, is_optional=each in optional) for each, form in takes.items())
    return Node(name, "run", role=role, takes=ports, makes=tuple(Port.of(each, form) for each, form in makes.items()))


def mixer(name: str) -> Node:
    takes = {"a": VECTOR, "b": VECTOR, "scale": NUMBER}
    return _node(name, "mixer", takes, {"y": VECTOR, "mean": NUMBER}, optional=("b", "scale"))


def shouter(name: str) -> Node:
    return _node(name, "shouter", {"words": TEXT, "times": INTEGER}, {"y": TEXT, "count": INTEGER}, optional=("times",))


def inverter(name: str) -> Node:
    makes = {"y": PICTURE, "means": tensor("float32", 3)}
    return _node(name, "inverter", {"image": PICTURE, "flip": TRUTH}, makes, optional=("flip",))


WAYWARD = Workflow(
    "wayward",
    (replace(_node("does", "wayward", {"how": text(16)}, {"y": VECTOR}), given={"how": "how"}),),
    {"y": "does"},
    inputs=(Port.of("how", text(16)),),
    output_ports={"y": "y"},
)
TELLING = Workflow(
    "telling",
    (
        replace(
            _node("tells", "teller", {"how": text(16), "number": NUMBER}, {"count": INTEGER, "type": text(16)}),
            given={"how": "how"},
            literals={"number": 2},
        ),
    ),
    {"count": "tells", "type": "tells"},
    inputs=(Port.of("how", text(16)),),
    output_ports={"count": "count", "type": "type"},
)
BROKEN = Workflow("broken", (_node("never", "broken", {}, {"y": VECTOR}),), {"y": "never"}, output_ports={"y": "y"})

SLEEPING = Workflow(
    "sleeping", (_node("never", "sleeper", {}, {"y": VECTOR}),), {"y": "never"}, output_ports={"y": "y"}
)

INPUTS = (Port.of("vector", VECTOR), Port.of("words", TEXT), Port.of("image", PICTURE))
LITERALS: dict[str, tuple[Any, ...]] = {"scale": (0.5, 2, -1.0), "times": (1, 3), "flip": (False, True)}


def random_workflow(random: Random, name: str, num_nodes: int) -> Workflow:
    """A graph of all three classes, in which every value of the right form may be read, and what is made at the end of
    each branch is a result.
    """
    made: list[tuple[Node, Port]] = []
    nodes: list[Node] = []
    for index in range(num_nodes):
        node = random.choice([mixer, mixer, shouter, inverter])(f"n{index}")
        node = _connected(random, node, made)
        nodes.append(node)
        made += [(node, port) for port in node.makes]
    read = {edge.source for node in nodes for edge in node.inputs}
    ends = [node for node in nodes if node.name not in read]
    results = {f"{node.name}_{port.name}": (node.name, port.name) for node in ends for port in node.makes}
    return Workflow(
        name,
        tuple(nodes),
        {result: maker for result, (maker, _) in results.items()},
        inputs=INPUTS,
        output_ports={result: port for result, (_, port) in results.items()},
    )


def _connected(random: Random, node: Node, made: Sequence[tuple[Node, Port]]) -> Node:
    edges: list[Edge] = []
    given: dict[str, str] = {}
    literals: dict[str, Any] = {}
    for port in node.takes:
        assert port.form is not None
        fitting = [
            (source.name, each.name)
            for source, each in made
            if each.form is not None and not port.form.why_not_from(each.form)
        ]
        sources = [each.name for each in INPUTS if each.form is not None and not port.form.why_not_from(each.form)]
        if port.is_optional and random.random() < 0.4:
            continue
        if fitting and (random.random() < 0.8 or not sources):
            source, value = random.choice(fitting)
            edges.append(Edge(source, value, port.name))
        elif sources:
            given[port.name] = random.choice(sources)
        else:
            literals[port.name] = random.choice(LITERALS[port.name])
    return replace(node, inputs=tuple(edges), given=given, literals=literals)


def random_inputs(random: Random) -> dict[str, Any]:
    rng = np.random.default_rng(random.randrange(1 << 30))
    return {
        "vector": rng.standard_normal(random.randint(3, 16)).astype(np.float32),
        "words": random.choice(["", "a red hat", "grüße", "x" * 40]),
        "image": rng.integers(0, 256, (random.randint(1, 8), random.randint(1, 8), 3), np.uint8),
    }


PROMPT = Port.of("prompt", text(4096))
STAMP = picture(16, 16)
GUARD = replace(
    _node(
        "guard",
        "guard",
        {"image": picture(1024, 1024), "words": text(4096), "strictness": NUMBER, "stamp": STAMP},
        {"image": picture(1024, 1024), "is_bad": TRUTH, "mean": NUMBER},
        optional=("strictness", "stamp"),
    ),
    inputs=(Edge("decode", "picture", "image"),),
    given={"words": "prompt", "strictness": "strictness"},
)
STAMPING_GUARD = replace(GUARD, given={**GUARD.given, "stamp": "stamp"})
STRICTNESS = Port.of("strictness", NUMBER, is_optional=True)
GUARD_OF_PREVIEWS = replace(GUARD, name="guard_preview", inputs=(Edge("preview", "picture", "image"),), shows="denoise")

GUARDED = Workflow(
    "guarded",
    (*INPAINT.nodes, STAMPING_GUARD, replace(GUARD_OF_PREVIEWS, given=STAMPING_GUARD.given)),
    {"picture": "guard", "is_bad": "guard", "mean": "guard"},
    INPAINT.regions,
    (PROMPT, *INPAINT.inputs[1:], STRICTNESS, Port.of("stamp", STAMP, is_optional=True)),
    is_mask_aware=True,
    output_ports={"picture": "image", "is_bad": "is_bad", "mean": "mean"},
)
"""An edit whose picture a class of the user may black out or stamp, and its previews likewise."""

UNSHOWN = replace(GUARDED, name="unshown", nodes=(*(node for node in INPAINT.nodes if not node.shows), GUARD))
"""As GUARDED, without previews."""

JUDGED = Workflow(
    "judged",
    (*INPAINT.nodes, GUARD),
    {"picture": "decode", "is_bad": "guard", "mean": "guard"},
    INPAINT.regions,
    (PROMPT, *INPAINT.inputs[1:], STRICTNESS),
    is_mask_aware=True,
    output_ports={"is_bad": "is_bad", "mean": "mean"},
)
"""An edit whose picture a class of the user sees."""


def _again(edge: Edge) -> Edge:
    """The edge of the second pass that corresponds to one of the first."""
    source = "again_encode" if edge.source == "image_encode" else edge.source
    return replace(edge, source=source, carried="again" if edge.carried else "")


REPAINTED = Workflow(
    "repainted",
    (
        *(node for node in INPAINT.nodes if not node.shows),
        GUARD,
        Node("again_encode", "image_encode", inputs=(Edge("guard", "image", "picture"),)),
        Node("again", "denoise", inputs=tuple(map(_again, INPAINT.node("denoise").inputs)), region="again"),
        Node("again_decode", "decode", inputs=(Edge("again", "latents"),)),
    ),
    {"picture": "again_decode", "is_bad": "guard"},
    (*INPAINT.regions, Region("again", strength=0.5)),
    (PROMPT, *INPAINT.inputs[1:], STRICTNESS),
    output_ports={"is_bad": "is_bad"},
)
"""Two passes, of which the second one paints over what a class of the user has made of the first."""


def run_request(request_id: str, workflow: Workflow, **head: Any) -> EngineRequest:
    """A request as from an AsyncEngine; its handles point nowhere. It gives the greatest value of each input."""
    inputs = {port.name: ArrayRef(0, 0, port.form.shape, port.form.dtype) for port in workflow.inputs if port.form}
    outputs = dict.fromkeys(workflow.outputs, ArrayRef(0, 0, (64,), "uint8"))
    spec = RunSpec(inputs=inputs, outputs=outputs)
    common = {"model": "", "arrival": 0.0, "rounds": ()} | head
    return EngineRequest(request_id=request_id, workflow=workflow.name, spec=spec, **common)


DIAMOND = Workflow(
    "diamond",
    (
        replace(mixer("top"), given={"a": "vector"}),
        replace(mixer("left"), inputs=(Edge("top", "y", "a"),), literals={"scale": 2.0}),
        replace(mixer("right"), inputs=(Edge("top", "y", "a"), Edge("top", "mean", "scale"))),
        replace(mixer("end"), inputs=(Edge("left", "y", "a"), Edge("right", "y", "b"))),
    ),
    {"sum": "end", "mean": "end"},
    inputs=(Port.of("vector", VECTOR),),
    output_ports={"sum": "y", "mean": "mean"},
)
"""Two branches that meet, of one class."""

DOUBLING = Workflow(
    "doubling",
    (
        replace(mixer("begin"), given={"a": "vector"}),
        replace(
            mixer("double"), inputs=(Edge("begin", "y", "a", carried="double"),), literals={"scale": 2.0}, region="r"
        ),
        replace(mixer("end"), inputs=(Edge("double", "y", "a"), Edge("begin", "y", "b"))),
    ),
    {"sum": "end"},
    (Region("r"),),
    inputs=(Port.of("vector", VECTOR),),
    output_ports={"sum": "y"},
)
"""A loop."""
