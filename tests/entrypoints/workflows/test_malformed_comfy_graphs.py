"""500 malformed ComfyUI graphs: each is one refusal of a line, and nothing else happens."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from comfy_graphs import GRAPHS, GraphText, hires, txt2img

from core.errors import WorkflowError
from entrypoints.workflows.workflow_files import read_workflows

NUMBER = 500
MOST_SECONDS = 10.0
MOST_CHARACTERS = 1000
WRONG: tuple[Any, ...] = (None, [], {}, ["3"], ["3", "0"], ["3", -1], ["3", 10**40], [[], 0], True, float("nan"), 1e999)
NAMES = ("", "FreeU", "KSampler ", "ksampler", "\ud800", "\x00", "a\nb", "Ж" * 5000, "__class__", "<script>", "{0}")


def _any_graph(random: Random) -> GraphText:
    return random.choice(list(GRAPHS.values()))()


def _any_input(random: Random, graph: GraphText, *, is_link: bool) -> tuple[dict[str, Any], str]:
    found = [
        (node["inputs"], name)
        for node in graph.values()
        for name, value in node["inputs"].items()
        if isinstance(value, list) == is_link and name not in ("upload", "filename_prefix")
    ]
    return random.choice(found)


def a_cycle(random: Random) -> GraphText:
    graph = _any_graph(random)
    samplers = [id_ for id_, node in graph.items() if node["class_type"].startswith("KSampler")]
    graph[samplers[0]]["inputs"]["latent_image"] = [samplers[-1], 0]
    return graph


def a_long_cycle(random: Random) -> GraphText:
    graph, number = txt2img(), random.randint(2, 400)
    for place in range(number):
        graph[f"x{place}"] = {
            "class_type": "FluxGuidance",
            "inputs": {"conditioning": [f"x{(place + 1) % number}", 0], "guidance": 1.0},
        }
    return graph


def a_missing_input(random: Random) -> GraphText:
    graph = _any_graph(random)
    inputs, name = _any_input(random, graph, is_link=random.random() < 0.5)
    del inputs[name]
    return graph if name not in ("noise_mask", "batch_size") else a_missing_input(random)


def a_missing_node(random: Random) -> GraphText:
    graph = _any_graph(random)
    inputs, name = _any_input(random, graph, is_link=True)
    inputs[name] = [f"{random.randint(100, 999)}", 0]
    return graph


def no_link(random: Random) -> GraphText:
    graph = _any_graph(random)
    inputs, name = _any_input(random, graph, is_link=True)
    inputs[name] = random.choice((*WRONG, "text", 4))
    return graph


def no_value(random: Random) -> GraphText:
    graph = _any_graph(random)
    inputs, name = _any_input(random, graph, is_link=False)
    inputs[name] = random.choice([each for each in WRONG if not isinstance(each, bool)])
    return graph


def a_link_of_another_type(random: Random) -> GraphText:
    graph = _any_graph(random)
    inputs, name = _any_input(random, graph, is_link=True)
    texts = next(id_ for id_, node in graph.items() if node["class_type"] == "CLIPTextEncode")
    loader = next(id_ for id_, node in graph.items() if node["class_type"] in ("CheckpointLoaderSimple", "UNETLoader"))
    inputs[name] = [loader if name in ("positive", "negative", "conditioning") else texts, 0]
    return graph


def a_custom_node(random: Random) -> GraphText:
    graph = _any_graph(random)
    node = random.choice(list(graph.values()))
    node["class_type"] = random.choice((*NAMES, None, 3, [], f"Custom{random.random()}"))
    return graph


def an_unknown_input(random: Random) -> GraphText:
    graph = _any_graph(random)
    random.choice(list(graph.values()))["inputs"][random.choice(NAMES)] = random.choice((1, "x", ["3", 0]))
    return graph


def no_node(random: Random) -> GraphText:
    graph = _any_graph(random)
    graph[random.choice(list(graph))] = random.choice((None, 3, [], {}, {"class_type": "KSampler"}, "x"))
    return graph


def no_picture(random: Random) -> GraphText:
    graph = _any_graph(random)
    return {id_: node for id_, node in graph.items() if node["class_type"] not in ("SaveImage", "PreviewImage")}


def too_many_nodes(random: Random) -> GraphText:
    graph, number = hires(), 10_000
    node = {"class_type": "VAELoader", "inputs": {"vae_name": "ae.safetensors"}}
    return graph | {f"{random.random()}-{place}": node for place in range(number)}


def no_json(random: Random) -> str:
    text = json.dumps(_any_graph(random))
    return text[: random.randint(0, len(text) - 1)]


def no_graph(random: Random) -> str:
    deep = "[" * 100_000
    return random.choice(
        ("", "null", "3", '"x"', "[]", "{}", '{"nodes": []}', deep, "{" * 1000, "9" * 5000, '{"prompt": 1}')
    )


MALFORMED: tuple[Callable[[Random], GraphText | str], ...] = (
    a_cycle,
    a_long_cycle,
    a_missing_input,
    a_missing_node,
    no_link,
    no_value,
    a_link_of_another_type,
    a_custom_node,
    an_unknown_input,
    no_node,
    no_picture,
    no_json,
    no_graph,
)


def test_each_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process would import what was read."""

    def start(*args: object, **named: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    random, file = Random(0), tmp_path / "graph.json"
    makers = [too_many_nodes] * 5 + [MALFORMED[place % len(MALFORMED)] for place in range(NUMBER - 5)]
    seconds = 0.0
    for make in makers:
        made = make(random)
        file.write_text(made if isinstance(made, str) else json.dumps(made))
        began = time.perf_counter()
        with pytest.raises(WorkflowError) as caught:
            read_workflows([file])
        seconds += time.perf_counter() - began
        problem = str(caught.value)
        assert problem.startswith(f"{file}: "), make.__name__
        assert len(problem) - len(str(file)) < MOST_CHARACTERS, make.__name__
        assert problem.isprintable(), (make.__name__, problem)
    assert seconds < MOST_SECONDS
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(WorkflowError, match="cannot be read"):
        read_workflows([file])
    file.write_bytes(b" " * (4 * 1024 * 1024 + 1))
    with pytest.raises(WorkflowError, match="has more than 4194304 bytes"):
        read_workflows([file])
    with pytest.raises(WorkflowError, match="cannot be read"):
        read_workflows([tmp_path / "none.json"])
