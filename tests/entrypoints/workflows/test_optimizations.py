"""What the compiler does to a graph that asks for it."""

from __future__ import annotations

import pytest

import core.scheduling.ops  # noqa: F401  nodes name ops
from core.errors import InvalidRequestError, WorkflowError
from core.graph.catalog import with_registered
from core.graph.check import check_workflow
from core.graph.workflow import Workflow as Graph
from core.graph.workflows.hires import HIRES
from entrypoints.workflows import Workflow, steps
from entrypoints.workflows.compiler import compile_workflow
from entrypoints.workflows.families import VAE, Denoiser, LatentsGenerator, LoRA, TextEncoder, denoise
from entrypoints.workflows.optimizations import ApproximateCaching, AsynchronousAdapters


def written(*loras: LoRA) -> Workflow:
    """A picture of a prompt."""
    workflow = Workflow(name="written")
    denoiser, vae = Denoiser(), VAE()
    for lora in loras:
        denoiser.add_patch(lora)
    seed, prompt = workflow.add_input("seed", int), workflow.add_input("prompt", str)
    latents = LatentsGenerator()(seed)
    prompt_embeds = TextEncoder()(prompt)
    for _ in steps(workflow.add_input("num_inference_steps", int)):
        latents = denoise(denoiser(latents, prompt_embeds), latents)
    workflow.add_output(vae(latents, mode="decode"), name="picture")
    return workflow


def graph_of(workflow: Workflow) -> Graph:
    (graph,) = compile_workflow(workflow).workflows
    check_workflow(graph)
    return graph


def test_asynchronous_adapters_change_nothing_but_when_steps_begin() -> None:
    plain, optimized = written(LoRA("hat")), written(LoRA("hat"))
    optimized.optimize(AsynchronousAdapters(steps=9))
    optimized.optimize(AsynchronousAdapters(steps=4))
    before, after = graph_of(plain), graph_of(optimized)
    assert (before.steps_without_lora, after.steps_without_lora) == (0, 4)
    assert after.nodes == before.nodes
    assert after.loras == before.loras == {"hat": 1.0}


def test_approximate_caching_looks_up_the_first_latents_of_requests_that_recall() -> None:
    plain, optimized = written(), written()
    optimized.optimize(ApproximateCaching())
    before, after = graph_of(plain), graph_of(optimized)
    assert (before.approximate_caching, after.approximate_caching) == (False, True)
    assert after.nodes == before.nodes, "of other requests"
    graphs = with_registered([after], ())
    recalled = graphs["recalled_written"]
    check_workflow(recalled)
    (recall,) = [node for node in recalled.nodes if node.op == "recall"]
    (steps,) = [node for node in recalled.nodes if node.op == "denoise"]
    assert [edge.source for edge in steps.inputs if edge.name == "latents"] == [recall.name]


def test_what_an_optimization_is_not_for_is_refused() -> None:
    workflow = written()
    workflow.optimize(AsynchronousAdapters(steps=4))
    with pytest.raises(WorkflowError, match="written, asynchronous adapters: its denoiser has none"):
        compile_workflow(workflow)
    with pytest.raises(WorkflowError, match="hires, approximate caching: it needs one loop of steps"):
        ApproximateCaching().rewrite(HIRES)
    with pytest.raises(WorkflowError, match="optimize: 4 is none; there are AsynchronousAdapters"):
        workflow.optimize(4)  # type: ignore[arg-type]
    for number in (0, 201):
        with pytest.raises(InvalidRequestError, match="'steps'"):
            AsynchronousAdapters(steps=number)
