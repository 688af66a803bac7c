"""ComfyUI graphs become workflows of the language; what no workflow can say is refused by node and class."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from comfy_graphs import (
    GRAPHS,
    OTHER_SEED,
    Draft,
    GraphText,
    controlnet,
    flux,
    hires,
    img2img,
    inpainting,
    inpainting_model,
    lora,
    masked,
    refined,
    sd3,
    two_in_a_row,
    txt2img,
)

import core.scheduling.ops  # noqa: F401  the check of a workflow looks ops up
from core.config import EngineConfig, ModelConfig
from core.errors import WorkflowError
from core.graph.check import check_workflow
from core.graph.workflow import Region
from core.graph.workflow import Workflow as Graph
from core.sampling_params import SamplingParams
from entrypoints.openai.fields.default_fields import check_defaults
from entrypoints.workflows.comfy.__main__ import main
from entrypoints.workflows.comfy.composition_reader import read_composition
from entrypoints.workflows.comfy.graph_file import GraphFile
from entrypoints.workflows.comfy.graph_reader import read_graph
from entrypoints.workflows.comfy.program import program_of
from entrypoints.workflows.comfy.sampler_names import why_not
from entrypoints.workflows.comfy.served_graph import with_graphs
from entrypoints.workflows.comfy.strength import asked_strength, exact_strength
from entrypoints.workflows.import_limits import ImportLimits
from entrypoints.workflows.import_messages import ImportOrder
from entrypoints.workflows.importer import import_text
from entrypoints.workflows.registered import Registered


def workflow_of(graph: GraphText, name: str = "graph") -> Graph:
    """What engines get of a graph."""
    text = program_of(read_composition(read_graph(json.dumps(graph))), name)
    registered = import_text(ImportOrder("graph_of_a_test", "graph.json", text, ImportLimits()))
    (workflow,) = registered.workflows
    check_workflow(workflow)
    check_defaults(workflow)
    assert registered.classes == ()
    return workflow


USUAL = {"prompt": "a red hat", "seed": 8566257, "num_inference_steps": 4, "guidance_scale": 3.0}
GUIDED = USUAL | {"negative_prompt": "grey"}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "txt2img": GUIDED | {"size": "64x64"},
    "img2img": GUIDED | {"num_inference_steps": 6, "strength": 0.5},
    "inpainting": GUIDED | {"mask_aware": False},
    "masked": GUIDED | {"mask_aware": False, "num_inference_steps": 6, "strength": 0.5},
    "inpainting_model": GUIDED | {"mask_aware": False},
    "lora": GUIDED | {"size": "64x64"},
    "controlnet": GUIDED | {"size": "64x64", "control_type": "edges", "control_scale": 0.8, "control_end": 0.5},
    "flux": USUAL | {"size": "64x64", "guidance_scale": 2.5, "max_sequence_length": 256},
    "sd3": GUIDED | {"size": "64x64", "max_sequence_length": 77},
    "refined": GUIDED | {"size": "64x64", "num_inference_steps": 5},
    "hires": GUIDED | {"size": "128x128", "num_inference_steps": 3},
    "enlarged": GUIDED | {"size": "128x128", "num_inference_steps": 3},
    "two_in_a_row": GUIDED | {"size": "64x64"},
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_a_graph_says_is_what_requests_leave_open(name: str) -> None:
    assert workflow_of(GRAPHS[name]()).defaults == DEFAULTS[name]


def test_requests_give_the_prompt_of_a_graph_without_words() -> None:
    assert "prompt" not in workflow_of(with_input(txt2img(), "CLIPTextEncode", text="")).defaults


def test_a_graph_of_one_sampler_is_the_shipped_workflow() -> None:
    for graph in (txt2img(), img2img(), masked(), flux(), sd3(), lora()):
        workflow = workflow_of(graph)
        assert workflow.regions == (Region("loop"),)
        assert workflow.is_mask_aware
    assert workflow_of(lora()).loras == {"hat": 0.7}


def test_the_last_of_a_longer_schedule_are_sampled() -> None:
    workflow = workflow_of(hires())
    assert [(each.strength, each.steps) for each in workflow.regions] == [("strength", 0), (0.5, 4)]
    assert workflow.canvases == {"2.0": 2.0}
    assert [node.literals.get("seed") for node in workflow.nodes if node.op == "image_encode"] == [None, OTHER_SEED]
    assert workflow_of(hires("LatentUpscaleBy")) == workflow


def test_samplers_share_a_schedule() -> None:
    workflow = workflow_of(refined())
    assert [(each.begin, each.end) for each in workflow.regions] == [(0.0, 0.6), (0.6, 1.0)]
    assert {node.role for node in workflow.nodes} == {"", "refiner", "refiner_vae", "refiner_text_encoder"}


def test_noise_is_over_the_picture_at_full_strength_too() -> None:
    def starts_over(graph: GraphText) -> list[bool]:
        nodes = workflow_of(graph).nodes
        return [bool(node.literals.get("starts_over")) for node in nodes if node.op == "image_encode"]

    assert [starts_over(graph) for graph in (txt2img(), inpainting(), inpainting_model())] == [[False], [True], [True]]
    assert starts_over(two_in_a_row(denoise=1.0)) == [False, True]
    assert starts_over(masked()) == [False]


@pytest.mark.parametrize(
    ("model", "schedule", "percent", "share"),
    [
        ("sd", "normal", (0.0, 0.5), (0.0, 0.5)),
        ("sd", "sgm_uniform", (0.0, 0.5), (0.0, 0.75)),
        ("sd", "simple", (0.0, 0.5), (0.0, 0.5)),
        ("sd", "simple", (0.0, 0.51), (0.0, 0.75)),
        ("sd", "simple", (0.5, 1.0), (0.5, 1.0)),
        ("sd", "simple", (0.3, 1.0), (0.5, 1.0)),
        ("sd3", "simple", (0.0, 0.5), (0.0, 0.75)),
        ("sd3", "simple", (0.0, 0.0), (0.0, 0.25)),
        ("sd3", "sgm_uniform", (0.5, 1.0), (0.75, 1.0)),
        ("sd3", "normal", (0.999, 1.0), None),
        ("sd", "ddim_uniform", (0.0, 0.3), (0.0, 0.25)),
        ("sd", "ddim_uniform", (0.0, 0.2), None),
        ("sd", "ddim_uniform", (0.25, 0.5), (0.25, 0.5)),
    ],
)
def test_percents_are_of_training_time(
    model: str, schedule: str, percent: tuple[float, float], share: tuple[float, float] | None
) -> None:
    """Before the four steps of a normal schedule 0, 1/3, 2/3 and all of it have passed; of simple and sgm_uniform ones
    each time a quarter, of a UNet's simple one slightly more; before the first of ddim_uniform ones, a quarter. In flow
    matching nothing goes down to 0, so that slightly less has passed. None: no step is steered.
    """
    if share is None:
        with pytest.raises(WorkflowError, match="no step of node 10 is in this part"):
            workflow_of(steered(model, schedule, percent))
        return
    defaults = workflow_of(steered(model, schedule, percent)).defaults
    assert (defaults.get("control_start", 0.0), defaults.get("control_end", 1.0)) == share


def steered(model: str, schedule: str, percent: tuple[float, float]) -> GraphText:
    graph = controlnet(start_percent=percent[0], end_percent=percent[1])
    graph = with_input(graph, "CheckpointLoaderSimple", ckpt_name=model)
    return with_input(graph, "KSampler", scheduler=schedule)


def test_an_older_node_steers_all_steps_by_the_positive_text_alone() -> None:
    defaults = workflow_of(controlnet("ControlNetApply")).defaults
    assert "control_end" not in defaults
    assert defaults["control_scale"] == 0.8


def test_a_mask_grows_on_each_side() -> None:
    graph = inpainting()
    node = next(node for node in graph.values() if node["class_type"] == "VAEEncodeForInpaint")
    node["inputs"]["grow_mask_by"] = 6
    assert workflow_of(graph).defaults["mask_grow"] == 3


@pytest.mark.parametrize("total", [1, 7, 28, 33, 199, 200])
def test_a_strength_leaves_exactly_the_last_steps(total: int) -> None:
    sampling = SamplingParams(num_inference_steps=total)
    for steps in range(1, total + 1):
        assert sampling.steps_at(exact_strength(steps, total)) == steps
        assert sampling.steps_at(asked_strength(steps, total, is_flow=True)) == steps
        assert int(total * asked_strength(steps, total, is_flow=False)) == steps  # as pipelines of UNets


# ---------------------------------------------------------------------------------------------------------- refused


def with_input(graph: GraphText, kind: str, place: int = 0, **inputs: Any) -> GraphText:
    """The graph with other inputs of one of its nodes of a class."""
    nodes = [node for node in graph.values() if node["class_type"] == kind]
    nodes[place]["inputs"] |= inputs
    return graph


def two_texts() -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    latents = draft.sampled(denoiser, told, draft.empty())
    third = draft.add("CLIPTextEncode", clip=clip, text="a cat")
    return draft.saved(draft.sampled(denoiser, (third, told[1]), latents, denoise=0.5), vae)


def two_guidances() -> GraphText:
    """The second sampler's text passes no FluxGuidance."""
    graph = flux()
    first = next(id_ for id_, node in graph.items() if node["class_type"] == "KSampler")
    second = {"class_type": "KSampler", "inputs": graph[first]["inputs"] | {"latent_image": [first, 0]}}
    text = next(id_ for id_, node in graph.items() if node["class_type"] == "CLIPTextEncode")
    second["inputs"] |= {"positive": [text, 0], "denoise": 0.5}
    graph["99"] = second
    return with_input(graph, "VAEDecode", samples=["99", 0])


def two_pictures() -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    for seed in (1, 2):
        draft.saved(draft.sampled(denoiser, told, draft.empty(), seed=seed), vae)
    return draft.nodes


def resampled_pixels() -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    pixels = draft.add("VAEDecode", samples=draft.sampled(denoiser, told, draft.empty()), vae=vae)
    latents = draft.add("VAEEncode", pixels=pixels, vae=vae)
    return draft.saved(draft.sampled(denoiser, told, latents, denoise=0.5), vae)


def unread_lora_text() -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    scales = {"strength_model": 1.0, "strength_clip": 1.0}
    adapted = draft.add("LoraLoader", model=denoiser, clip=clip, lora_name="hat.safetensors", **scales)
    return draft.saved(draft.sampled(adapted, draft.texts(clip), draft.empty()), vae)


def another_vae() -> GraphText:
    draft = Draft()
    denoiser, clip, _ = draft.checkpoint("sd")
    vae = draft.add("VAELoader", vae_name="mse.safetensors")
    return draft.saved(draft.sampled(denoiser, draft.texts(clip), draft.empty()), vae)


def unknown_node() -> GraphText:
    graph = txt2img()
    graph["99"] = {"class_type": "FreeU_V2", "inputs": {"model": ["3", 0]}}
    return graph


def cycle() -> GraphText:
    graph = two_in_a_row()
    first = next(id_ for id_, node in graph.items() if node["class_type"] == "KSampler")
    last = next(id_ for id_ in reversed(graph) if graph[id_]["class_type"] == "KSampler")
    graph[first]["inputs"]["latent_image"] = [last, 0]
    return graph


REFUSED: Mapping[str, tuple[Callable[[], GraphText], str]] = {
    "class": (unknown_node, r"node 99 \(FreeU_V2\): nothing here does what this class does"),
    "sampler": (lambda: txt2img(sampler_name="dpm_adaptive"), r"node 7 \(KSampler\), input sampler_name: 'dpm_adap"),
    "schedule": (lambda: txt2img(scheduler="kl_optimal"), r"node 7 \(KSampler\), input scheduler: 'kl_optimal'"),
    "cycle": (cycle, r"node 8 \(KSampler\), input latent_image: a cycle: 7 -> 8 -> 7"),
    "steps": (lambda: txt2img(steps=0), "input steps: it is not from 1 to 200"),
    "schedule of too many": (lambda: img2img(denoise=0.001), "input denoise: 3 steps are the last of 3000, and a sch"),
    "no steps": (lambda: img2img(denoise=0.0), "input denoise: no step is run"),
    "noise over nothing": (lambda: txt2img(denoise=0.5), "input denoise: it begins with an empty picture, so all"),
    "batch": (
        lambda: with_input(txt2img(), "EmptyLatentImage", batch_size=2),
        "input batch_size: requests say it, as n",
    ),
    "enlarging": (
        lambda: with_input(hires(), "LatentUpscale", upscale_method="bislerp"),
        "input upscale_method: 'bislerp': latents are not enlarged so; there are bilinear, nearest-",
    ),
    "proportions": (lambda: with_input(hires(), "LatentUpscale", width=192), "it makes 192x128 of 64x64: keep the pro"),
    "texts": (two_texts, r"node 8 \(CLIPTextEncode\), input text: another text than that of node 4, and a request h"),
    "guidance": (lambda: two_in_a_row(cfg=5.0), r"node 8 \(KSampler\), input cfg: node 7 has another, and a request"),
    "guidance of FLUX": (
        two_guidances,
        r"node 99 \(KSampler\), input positive: no FluxGuidance is on its way, so its guidance is 3.5, and",
    ),
    "guidance of a negative text": (
        lambda: flux(cfg=3.0),
        r"node 10 \(KSampler\), input negative: no FluxGuidance is on its way, so its guidance is 3.5",
    ),
    "steers nothing": (
        lambda: steered("sd", "normal", (0.0, 0.0)),
        "input end_percent: no step of node 10 is in this p",
    ),
    "nothing is left": (
        lambda: steered("sd", "normal", (1.0, 1.0)),
        "input end_percent: no step of node 10 is in this p",
    ),
    "pictures": (two_pictures, r"node 13 \(SaveImage\), input images: node 9 has another picture, and a request gets"),
    "pixels": (resampled_pixels, r"node 9 \(VAEEncode\), input pixels: a request gives its picture: read a LoadImage"),
    "scales": (lambda: lora(strength_clip=0.5), "input strength_clip: it is not strength_model, 0.7, and an adapter"),
    "text of a LoRA": (unread_lora_text, r"node 5 \(CLIPTextEncode\), input clip: its text encoders have other adapt"),
    "vae": (another_vae, r"node 9 \(VAEDecode\), input vae: its VAE is not that of node 3, the model's"),
    "weights": (
        lambda: with_input(flux(), "UNETLoader", weight_dtype="fp8_e4m3fn"),
        "input weight_dtype: 'fp8_e4m3fn': weights are as the model is served; there are default",
    ),
    "noise that is left": (
        lambda: with_input(refined(), "KSamplerAdvanced", 1, add_noise="enable"),
        "input add_noise: node 8 leaves noise, and no more is added to that",
    ),
    "a gap": (lambda: refined(start_at_step=4), "input start_at_step: it does not go on where node 8 ends"),
    "no end": (
        lambda: refined(end_at_step=4, return_with_leftover_noise="enable"),
        "input return_with_leftover_noise: no sampler goes on with the noise that it leaves",
    ),
    "type": (
        lambda: with_input(txt2img(), "KSampler", model=["3", 1]),
        "output 1 of node 3 .* is CLIP, and MODEL is",
    ),
    "no node": (lambda: with_input(txt2img(), "KSampler", model=["77", 0]), "input model: there is no node 77"),
    "no output": (lambda: with_input(txt2img(), "KSampler", model=["3", 9]), "has 3 outputs, numbered from 0, and 9"),
    "input": (lambda: with_input(txt2img(), "KSampler", eta=1), "input eta: it has no such input; there are model, "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_workflow_can_say_is_refused_by_node_and_class(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(WorkflowError, match=problem) as caught:
        workflow_of(make())
    assert caught.value.node in make()


def test_a_graphs_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.json", tmp_path / "marked.json"
    plain.write_text(json.dumps(refined()))
    marked.write_text(json.dumps(refined()), encoding="utf-8-sig")
    assert GraphFile.read(marked).program == GraphFile.read(plain).program.replace("plain", "marked")


def test_an_engine_that_has_the_model_of_a_graph_has_the_graph(tmp_path: Path) -> None:
    file = tmp_path / "two models.json"
    file.write_text(json.dumps(refined()))
    models = tuple(ModelConfig(model=name, served_model_name=name) for name in ("sd", "sdxl", "refiner"))
    registered = Registered((workflow_of(refined(), "two_models"),))
    engines = {0: ("sd", "refiner"), 1: ("sdxl",)}
    config = EngineConfig(models=models, engines=engines, data_parallel_size=2, workflows=registered.workflows)
    served = with_graphs(config, [GraphFile.read(file)])
    assert served.engines == {0: ("sd", "refiner"), 1: ("sdxl", "two_models")}
    (*_, graph) = served.models
    assert (graph.name, graph.model, graph.workflow, graph.refiner) == ("two_models", "sdxl", "two_models", "refiner")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"_class_name": "DDIMScheduler", "clip_sample": False}, ""),
        ({"_class_name": "EulerDiscreteScheduler"}, ""),
        ({"_class_name": "DDIMScheduler"}, "its scheduler cuts off large values"),
        ({"_class_name": "DDIMScheduler", "clip_sample": False, "thresholding": True}, "cuts off large values"),
        ({"_class_name": "PNDMScheduler"}, "and its scheduler is PNDMScheduler"),
        ({"_class_name": "EulerDiscreteScheduler", "use_karras_sigmas": True}, "its scheduler has use_karras_sigmas"),
    ],
)
def test_the_scheduler_of_a_checkpoint_does_what_the_sampler_does(config: dict[str, Any], problem: str) -> None:
    why = why_not(config, "euler", "normal")
    assert bool(why) == bool(problem)
    assert problem in why


def test_text_never_becomes_code() -> None:
    hostile = '"""\n\'\'\'\\\nraise SystemExit\n# \u2028 \x00 {__import__\\("os"\\)}'
    graph = with_input(txt2img(), "CLIPTextEncode", text=hostile)
    graph = with_input(graph, "CheckpointLoaderSimple", ckpt_name=hostile)
    renamed = json.loads(json.dumps(graph).replace('"9"', json.dumps('"""\\')))
    assert workflow_of(renamed).defaults["prompt"] == hostile.replace("\\(", "(").replace("\\)", ")")


def test_the_command_writes_a_file_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, output = tmp_path / "graph.json", tmp_path / "workflow.py"
    graph.write_text(json.dumps({"prompt": txt2img(), "client_id": "x"}))
    assert main([str(graph), "-o", str(output)]) == 0
    assert 'with Workflow(name="graph") as workflow:' in output.read_text()
    graph.write_text(json.dumps({"nodes": [], "links": []}))
    assert main([str(graph)]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"error: {graph}: it is a graph as ComfyUI's pages save it; export it in the form of the API\n"
