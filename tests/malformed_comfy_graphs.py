"""Malformed ComfyUI graphs: makers of those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from comfy_graphs import GRAPHS, GraphText, hires, txt2img

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


def malformed(number: int) -> list[Callable[[Random], GraphText | str]]:
    """So many makers, of all kinds; five of graphs with 10,000 nodes."""
    return [too_many_nodes] * 5 + [MALFORMED[place % len(MALFORMED)] for place in range(number - 5)]
