"""What calls of models become: nodes of users' classes, or of ops of the engine."""

from __future__ import annotations

from typing import Any

import core.scheduling.ops  # noqa: F401  nodes name ops
from core.graph.workflow import Edge, Node
from entrypoints.workflows import Model, Workflow, tensor, text
from entrypoints.workflows.compiler import compile_workflow
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.lowered import Lowered


class Letters(Model):
    """A class of a user's own."""

    def setup_io(self) -> None:
        self.add_input("words", str)
        self.add_output("vector", tensor("float32", 26))

    def load(self, device: str, dtype: Any) -> None:
        """It has no weights."""

    def execute(self, words: str) -> dict[str, object]:
        return {"vector": [words.count(chr(97 + letter)) for letter in range(26)]}


class Decoder(Letters):
    """A model of a family that the engine knows, with a patch."""

    def setup_io(self) -> None:
        self.add_input("latents", tensor("float32", 26))
        self.add_output("picture", text(9))

    def lower(self, connected: Connected) -> Lowered:
        role = "vae" if not connected.patches else f"vae with {len(connected.patches)} patches"
        return Lowered(Node(connected.node, "decode", connected.edges, role=role, region=connected.region))


def test_a_model_says_itself_what_it_becomes() -> None:
    with Workflow(name="made") as workflow:
        letters, decoder, patch = Letters(), Decoder(path="a"), Letters()
        decoder.add_patch(patch)
        patched = decoder(letters(workflow.add_input("words", str)))
        decoder.rm_patch(patch)
        workflow.add_output(patched, name="patched")
        workflow.add_output(decoder(letters("literal")), name="plain")
    registered = compile_workflow(workflow)
    (graph,), (letters_class,) = registered.workflows, registered.classes
    assert letters_class.path == f"{__name__}:Letters"
    assert [node.op for node in graph.nodes] == ["run", "decode", "run", "decode"]
    assert [node.role for node in graph.nodes][1::2] == ["vae with 1 patches", "vae"]
    assert graph.nodes[3].inputs == (Edge("letters_2", "vector", "latents"),)
    assert graph.nodes[2].literals == {"words": "literal"}


def test_equal_classes_with_equal_settings_are_one() -> None:
    with Workflow(name="made") as workflow:
        words = workflow.add_input("words", str)
        for index, settings in enumerate(({"path": "a"}, {"path": "a"}, {"path": "b" * 200}, {})):
            workflow.add_output(Letters(**settings)(words), name=f"y{index}")
    names = [each.name for each in compile_workflow(workflow).classes]
    assert names[0] == f"{__name__}:Letters(path='a')"
    assert len(names) == 3
    assert all(len(name) < 100 for name in names)


def test_a_result_of_a_loop_or_of_nobody_passes_a_node() -> None:
    with Workflow(name="made") as workflow:
        words = workflow.add_input("words", str)
        workflow.add_output(words, name="one")
        vector = Letters()(words)
        workflow.add_output(vector, name="two")
        workflow.add_output(vector, name="three")
    (graph,) = compile_workflow(workflow).workflows
    assert graph.outputs == {"one": "result", "two": "letters", "three": "result_2"}
    assert graph.output_ports == {"one": "words", "two": "vector", "three": "vector"}
