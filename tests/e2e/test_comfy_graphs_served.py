"""ComfyUI graphs, served as models: what they paint for requests that say nothing is what diffusers composes. Prompts
of ComfyUI's clients paint the same.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import httpx
import numpy as np
import pytest
import torch
from adapters import make_lora
from comfy_graphs import GRAPHS, NEGATIVE, OTHER_SEED, PROMPT, SEED, SIDE, GraphText, txt2img
from control_rig import lines
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    EulerDiscreteScheduler,
    FluxPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from edits import box_mask, picture
from hires_rig import start_from
from pictures import Pixels, decode, encode
from PIL import Image
from server_process import ServerProcess, fork
from websockets.sync.client import connect

from core.errors import WorkflowError
from entrypoints.serve import with_workflows
from entrypoints.serve_args import parse_options
from tools.random_checkpoints import make_flux, make_sd3
from tools.random_controlnets import make_sd_controlnet
from tools.random_unet_checkpoints import make_sd, make_sdxl, make_sdxl_refiner

EDITED = (64, 96)
PICTURE, MASK = picture(1, EDITED), box_mask(EDITED)
LINES = lines(1, (SIDE, SIDE))
FLAGS = ("--threads", "1", "--dtype", "float32", "--no-playground", "--comfy-api")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and graphs."""
    folder = tmp_path_factory.mktemp("models")
    euler: dict[str, Any] = {"scheduler_class": EulerDiscreteScheduler, "native_size": 128}
    make_lora(folder / "hat.safetensors", make_sd(folder / "sd", **euler), text_parts=("text_encoder",))
    make_sd(folder / "inpaint", in_channels=9, seed=3, **euler)
    vae = AutoencoderKL.from_pretrained(make_sdxl(folder / "sdxl", seed=1, **euler) / "vae")
    make_sdxl_refiner(folder / "refiner", seed=2, vae=vae, **euler)
    make_sd_controlnet(folder / "edges")
    make_flux(folder / "flux", guidance_embeds=True)
    make_sd3(folder / "sd3")
    for name, graph in GRAPHS.items():
        (folder / f"{name}_graph.json").write_text(json.dumps(graph()))
    names = ("inpaint", "sdxl", "refiner", "flux", "sd3")
    entries = "".join(
        f'[[model]]\nname = "{name}"\npath = "{name}"\n' + 'refiner = "refiner"\n' * (name == "sdxl") for name in names
    )
    (folder / "models.toml").write_text(
        f"""
        [controlnets]
        edges = "edges"
        [[model]]
        name = "sd"
        path = "sd"
        loras = {{ hat = "hat.safetensors" }}
        controlnets = ["edges"]
        {entries}
        """
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    files = (flag for name in GRAPHS for flag in ("--workflow", str(folder / f"{name}_graph.json")))
    scratch = tmp_path_factory.mktemp("server") / "scratch"
    server = fork(scratch, "--catalog", str(folder / "models.toml"), *FLAGS, *files)
    yield server
    assert server.stop() == 0, server.log.read_text()


def painted(server: ServerProcess, model: str, **fields: Any) -> Pixels:
    """What a model makes of a request that gives pictures alone, besides further fields."""
    files: dict[str, tuple[str, bytes]] = {}
    if model in EDITS:
        files["image"] = ("image.png", encode(transparent() if model == "masked" else PICTURE))
    if model in ("inpainting", "inpainting_model"):
        files["mask_image"] = ("mask.png", encode(MASK * 255))
    if model == "controlnet":
        files["control_image"] = ("lines.png", encode(LINES))
    url = f"{server.base_url}/images/{'edits' if model in EDITS else 'generations'}"
    body = {"model": f"{model}_graph", **fields}
    answer = httpx.post(url, data=body, files=files, timeout=60) if files else httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["stencil"]["ignored"] == []
    return decode(base64.b64decode(content["data"][0]["b64_json"]))[..., :3]


EDITS = ("img2img", "inpainting", "masked", "inpainting_model")


def transparent() -> Pixels:
    return np.dstack([PICTURE, 255 - MASK * 255])


# ------------------------------------------------------------------------------------------------------ diffusers

USUAL: dict[str, Any] = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "guidance_scale": 3.0}


def load(kind: Any, path: Path, **parts: Any) -> Any:
    pipeline = kind.from_pretrained(path, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def seeded(seed: int = SEED) -> dict[str, torch.Generator]:
    return {"generator": torch.Generator("cpu").manual_seed(seed)}


def pixels(result: Any) -> Pixels:
    return np.asarray(result.images[0])


SQUARE = {"width": SIDE, "height": SIDE}


def of_txt2img(folder: Path) -> Pixels:
    return pixels(load(StableDiffusionPipeline, folder / "sd")(**USUAL, **SQUARE, num_inference_steps=4, **seeded()))


def of_lora(folder: Path) -> Pixels:
    pipeline = load(StableDiffusionPipeline, folder / "sd")
    pipeline.load_lora_weights(str(folder / "hat.safetensors"), adapter_name="hat")
    pipeline.set_adapters(["hat"], [0.7])
    return pixels(pipeline(**USUAL, **SQUARE, num_inference_steps=4, **seeded()))


def of_controlnet(folder: Path) -> Pixels:
    net = ControlNetModel.from_pretrained(folder / "edges")
    pipeline = load(StableDiffusionControlNetPipeline, folder / "sd", controlnet=net)
    steered = {"controlnet_conditioning_scale": 0.8, "control_guidance_end": 0.5}
    return pixels(
        pipeline(image=Image.fromarray(LINES), **USUAL, **SQUARE, **steered, num_inference_steps=4, **seeded())
    )


def inpainted(folder: Path, model: str = "sd", **options: Any) -> Pixels:
    """options: of the pipeline's call. At full strength it starts from noise over the picture."""
    pipeline = load(StableDiffusionInpaintPipeline, folder / model)
    prepare = pipeline.prepare_latents

    def over_picture(*args: Any, is_strength_max: bool, **named: Any) -> Any:
        return prepare(*args, is_strength_max=False, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "prepare_latents", over_picture)
        size = {"width": EDITED[0], "height": EDITED[1]}
        return pixels(pipeline(**USUAL, **size, image=Image.fromarray(PICTURE), **options, **seeded()))


def of_img2img(folder: Path) -> Pixels:
    everything = Image.fromarray(np.full_like(MASK, 255))
    return inpainted(folder, mask_image=everything, num_inference_steps=6, strength=0.5)


def of_masked(folder: Path) -> Pixels:
    return inpainted(folder, mask_image=Image.fromarray(MASK * 255), num_inference_steps=6, strength=0.5)


def of_inpainting(folder: Path) -> Pixels:
    return inpainted(folder, mask_image=Image.fromarray(MASK * 255), num_inference_steps=4, strength=1.0)


def of_inpainting_model(folder: Path) -> Pixels:
    return inpainted(folder, "inpaint", mask_image=Image.fromarray(MASK * 255), num_inference_steps=4, strength=1.0)


def of_flux(folder: Path) -> Pixels:
    pipeline = load(FluxPipeline, folder / "flux")
    told = {"prompt": PROMPT, "guidance_scale": 2.5, "max_sequence_length": 16}
    return pixels(pipeline(**told, **SQUARE, num_inference_steps=4, **seeded()))


def of_sd3(folder: Path) -> Pixels:
    pipeline = load(StableDiffusion3Pipeline, folder / "sd3")
    return pixels(pipeline(**USUAL, **SQUARE, max_sequence_length=16, num_inference_steps=4, **seeded()))


def of_refined(folder: Path) -> Pixels:
    base = load(StableDiffusionXLPipeline, folder / "sdxl", add_watermarker=False)
    refiner = load(StableDiffusionXLImg2ImgPipeline, folder / "refiner", add_watermarker=False)
    options: dict[str, Any] = {**USUAL, "num_inference_steps": 5}
    latents = base(**options, **SQUARE, denoising_end=0.6, output_type="latent", **seeded()).images
    return pixels(refiner(**options, image=latents, denoising_start=0.6, **seeded()))


def second_pass(folder: Path, side: int, steps: int, method: str = "bilinear") -> Pixels:
    """The last two of four steps, over the latents of a first pass."""
    first = load(StableDiffusionPipeline, folder / "sd")
    small = first(**USUAL, **SQUARE, num_inference_steps=steps, output_type="latent", **seeded()).images
    start = torch.nn.functional.interpolate(small, size=(side // 8, side // 8), mode=method)
    second = StableDiffusionImg2ImgPipeline(**first.components, requires_safety_checker=False)
    second.set_progress_bar_config(disable=True)
    with pytest.MonkeyPatch.context() as patch:
        start_from(patch, second.scheduler, start)
        options = {"image": torch.zeros_like(start), "num_inference_steps": 4, "strength": 0.5}
        return pixels(second(**USUAL, **options, **seeded(OTHER_SEED)))


def of_hires(folder: Path) -> Pixels:
    return second_pass(folder, 2 * SIDE, steps=3)


def of_enlarged(folder: Path) -> Pixels:
    return second_pass(folder, 2 * SIDE, steps=3, method="nearest-exact")


def of_two_in_a_row(folder: Path) -> Pixels:
    return second_pass(folder, SIDE, steps=4)


COMPOSED: Mapping[str, Callable[[Path], Pixels]] = {
    "txt2img": of_txt2img,
    "img2img": of_img2img,
    "inpainting": of_inpainting,
    "masked": of_masked,
    "inpainting_model": of_inpainting_model,
    "lora": of_lora,
    "controlnet": of_controlnet,
    "flux": of_flux,
    "sd3": of_sd3,
    "refined": of_refined,
    "hires": of_hires,
    "enlarged": of_enlarged,
    "two_in_a_row": of_two_in_a_row,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_paints_what_diffusers_composes(server: ServerProcess, folder: Path, name: str) -> None:
    ours, theirs = painted(server, name), COMPOSED[name](folder)
    has_mask = name in EDITS and name != "img2img"
    inside = MASK > 0 if has_mask else np.ones(theirs.shape[:2], bool)
    assert ours.shape == theirs.shape
    assert np.abs(ours.astype(int) - theirs)[inside].max() <= 2
    np.testing.assert_array_equal(ours[~inside], PICTURE[~inside] if has_mask else theirs[~inside])
    np.testing.assert_array_equal(prompted(server, GRAPHS[name](), name)[-1], ours)


def prompted(server: ServerProcess, graph: GraphText, name: str = "") -> list[Pixels]:
    """What is painted of a graph as a client of ComfyUI asks for it, like the one in its script_examples that listens
    on a websocket: the pictures of the node that is executed last. name: of the graph, by which it has its pictures.
    """
    files = {"person.png": transparent() if name == "masked" else PICTURE, "mask.png": MASK * 255, "lines.png": LINES}
    for file, content in files.items():
        sent = {"image": (file, encode(content), "image/png")}
        assert httpx.post(f"{server.url}/upload/image", files=sent, data={"overwrite": "true"}).status_code == 200
    with connect(f"{server.url.replace('http', 'ws', 1)}/ws?clientId=one", proxy=None) as client:
        body = json.dumps({"prompt": graph, "client_id": "one"}).encode()
        with urlopen(Request(f"{server.url}/prompt", data=body)) as answer:
            prompt_id = json.loads(answer.read())["prompt_id"]
        told = list[dict[str, Any]]()
        while not told or (told[-1]["type"], told[-1]["data"].get("node", "")) != ("executing", None):
            message = client.recv()
            assert isinstance(message, str)
            told.append(json.loads(message))
    assert told[-1]["data"]["prompt_id"] == prompt_id
    with urlopen(f"{server.url}/history/{prompt_id}") as answer:
        entry = json.loads(answer.read())[prompt_id]
    executed = [each["data"] for each in told if each["type"] == "executed"]
    assert {each["node"]: each["output"] for each in executed} == entry["outputs"]
    assert entry["status"]["completed"], entry["status"]
    pictures = list[Pixels]()
    for image in executed[-1]["output"]["images"]:
        with urlopen(f"{server.url}/view?{urlencode(image)}") as answer:
            pictures.append(decode(answer.read())[..., :3])
    return pictures


def test_a_batch_has_the_noise_that_one_seed_draws_in_turn(server: ServerProcess, folder: Path) -> None:
    graph = txt2img()
    next(node for node in graph.values() if node["class_type"] == "EmptyLatentImage")["inputs"]["batch_size"] = 3
    ours = prompted(server, graph)
    pipeline = load(StableDiffusionPipeline, folder / "sd")
    theirs = pipeline(
        **USUAL, **seeded(), width=SIDE, height=SIDE, num_inference_steps=4, num_images_per_prompt=3, output_type="np"
    ).images
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert np.abs(mine.astype(int) - np.round(other * 255)).max() <= 2
    assert np.abs(ours[0].astype(int) - ours[1]).max() > 20


def test_every_result_of_a_graph_is_painted(server: ServerProcess) -> None:
    """Of a graph with a picture between, that is the picture of the first sampler alone."""
    between, last = hires_pictures = prompted_all(server, GRAPHS["hires"]())
    assert [each.shape for each in hires_pictures] == [(SIDE, SIDE, 3), (2 * SIDE, 2 * SIDE, 3)]
    np.testing.assert_array_equal(last, painted(server, "hires"))
    assert between.std() > 0


def prompted_all(server: ServerProcess, graph: GraphText) -> list[Pixels]:
    """The first picture of each node that saves or shows some, in the order of the history."""
    answer = httpx.post(f"{server.url}/api/prompt", json={"prompt": graph}).json()
    deadline = time.monotonic() + 60
    while not (found := httpx.get(f"{server.url}/api/history/{answer['prompt_id']}").json()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    outputs = found[answer["prompt_id"]]["outputs"].values()
    images = [output["images"][0] for output in outputs]
    return [decode(httpx.get(f"{server.url}/api/view", params=image).content)[..., :3] for image in images]


def test_what_a_request_says_goes_before_what_the_graph_says(server: ServerProcess) -> None:
    said = {"prompt": "a cat", "seed": 5, "num_inference_steps": 3, "guidance_scale": 2.0, "size": "128x64"}
    plain = painted(server, "txt2img", **said)
    assert plain.shape == (64, 128, 3)
    assert (painted(server, "txt2img", **said, negative_prompt="") != plain).any()
    options = {"num_inference_steps": 3, "guidance_scale": 2.0, "negative_prompt": NEGATIVE}
    assert (painted(server, "txt2img", prompt="a cat", seed=5, size="128x64", **options) == plain).all()


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (txt2img("xl"), "node 3 (CheckpointLoaderSimple), input ckpt_name: no model is called xl; there are sd, "),
        (txt2img(sampler_name="dpmpp_2m"), "node 7 (KSampler), input sampler_name: sd cannot do that: sampler dpmpp"),
        (txt2img(scheduler="karras"), "node 7 (KSampler), input sampler_name: sd cannot do that: schedule karras nee"),
    ],
)
def test_what_is_not_served_ends_the_start(folder: Path, tmp_path: Path, graph: GraphText, problem: str) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(graph))
    options = parse_options(["--catalog", str(folder / "models.toml"), "--workflow", str(file)])
    with pytest.raises(WorkflowError) as caught:
        with_workflows(options)
    assert str(caught.value).startswith(f"{file}: {problem}")
