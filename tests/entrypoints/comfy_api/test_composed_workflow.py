"""Workflows that are made of prompts' graphs are those that a graph's file becomes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from comfy_graphs import GRAPHS

import core.scheduling.ops  # noqa: F401  the check of a workflow looks ops up
from core.graph.check import check_workflow
from entrypoints.comfy_api.composed_workflow import NAME, composed_workflow
from entrypoints.workflows.comfy.composition_reader import read_composition
from entrypoints.workflows.comfy.graph_reader import read_graph
from entrypoints.workflows.comfy.program import program_of
from entrypoints.workflows.import_limits import ImportLimits
from entrypoints.workflows.import_messages import ImportOrder
from entrypoints.workflows.importer import import_text


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_composed_as_its_program_says(name: str) -> None:
    composition = read_composition(read_graph(json.dumps(GRAPHS[name]())))
    text = program_of(composition, NAME)
    (programmed,) = import_text(ImportOrder("graph_of_a_test", "graph.json", text, ImportLimits())).workflows
    composed = composed_workflow(composition)
    check_workflow(composed)
    assert replace(programmed, defaults={}, loras={}) == replace(composed, loras={})


def test_what_requests_say_makes_no_other_workflow() -> None:
    graph = GRAPHS["lora"]()
    first = composed_workflow(read_composition(read_graph(json.dumps(graph))))
    for node in graph.values():
        node["inputs"] |= {
            "KSampler": {"seed": 5, "steps": 9, "cfg": 2.0},
            "CLIPTextEncode": {"text": "a cat"},
            "EmptyLatentImage": {"width": 128},
            "LoraLoader": {"strength_model": 0.1, "strength_clip": 0.1},
        }.get(node["class_type"], {})
    assert composed_workflow(read_composition(read_graph(json.dumps(graph)))) == first
