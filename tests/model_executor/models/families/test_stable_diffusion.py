"""Stable Diffusion 1, 2 and XL: whole edits through the runner against diffusers' inpaint pipelines, float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from edits import Edit
from pipeline_rig import Rig, assert_same

from core.config import ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import ImageInputs, Row
from model_executor.models.registry import make_family
from model_executor.worker.loading.resident import ResidentModels, edit_once
from tools.random_unet_checkpoints import make_sd, make_sdxl

V = {"prediction_type": "v_prediction"}
KINDS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "sd1": (make_sd, {"scheduler_class": PNDMScheduler, "scheduler": {"skip_prk_steps": True}}),
    "sd1-inpaint": (make_sd, {"in_channels": 9}),
    "sd2-v": (make_sd, {"scheduler": V, "use_linear_projection": True}),
    "sdxl": (make_sdxl, {"scheduler_class": EulerDiscreteScheduler}),
    "sdxl-inpaint": (make_sdxl, {"in_channels": 9, "scheduler_class": EulerDiscreteScheduler}),
}
SAMPLERS: list[tuple[Any, dict[str, Any]]] = [
    (DDIMScheduler, {"set_alpha_to_one": False}),
    (DDIMScheduler, V | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
    (PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": False}),
    (PNDMScheduler, V | {"skip_prk_steps": True}),
    (EulerDiscreteScheduler, {"timestep_spacing": "leading"}),
    (EulerDiscreteScheduler, V | {"use_karras_sigmas": True}),
    (EulerAncestralDiscreteScheduler, {}),
    (EulerAncestralDiscreteScheduler, V | {"timestep_spacing": "trailing"}),
    (DPMSolverMultistepScheduler, {}),
    (DPMSolverMultistepScheduler, V | {"solver_order": 3}),
    (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}),
]


def make_rig(make: Callable[..., Path], path: Path, arena: Arena, **options: Any) -> Rig:
    if make is make_sdxl:
        return Rig(make(path, **options), arena, StableDiffusionXLInpaintPipeline, add_watermarker=False)
    parts = {"safety_checker": None, "requires_safety_checker": False}
    return Rig(make(path, **options), arena, StableDiffusionInpaintPipeline, **parts)


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    make, options = KINDS[request.param]
    rig = make_rig(make, tmp_path_factory.mktemp("model") / request.param, arena, **options)
    yield rig
    rig.pages.close()


def make_edit(
    rig: Rig, name: str, size: tuple[int, int], strength: float, scale: float, negative_prompt: str = "", **options: int
) -> Edit:
    """An edit. scale: of guidance; 1 for none."""
    edit = rig.edit(name, size=size, **options)
    info = rig.family.info("tiny")
    edit.strength, edit.solver_order, edit.extra_steps = strength, info.solver_order, info.extra_steps
    edit.guidance_scale = edit.true_cfg_scale = scale
    edit.negative_prompt = negative_prompt if scale > 1 else None
    return edit


def expected(rig: Rig, edit: Edit) -> Any:
    return rig.expected(edit, negative_prompt=edit.negative_prompt or None)


@pytest.mark.parametrize(
    ("size", "strength", "scale", "negative_prompt"),
    [
        ((128, 128), 1.0, 1.0, ""),
        ((96, 160), 1.0, 4.0, "a plain blue hat"),
        ((96, 160), 0.6, 1.0, ""),
        ((128, 128), 0.6, 4.0, ""),
    ],
)
def test_edit_equals_the_pipeline(
    rig: Rig, size: tuple[int, int], strength: float, scale: float, negative_prompt: str
) -> None:
    edit = make_edit(rig, f"{size}-{strength}", size, strength, scale, negative_prompt, seed=3, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))


@pytest.mark.parametrize(("scheduler_class", "scheduler"), SAMPLERS)
def test_every_sampler_equals_the_pipeline(
    tmp_path: Path, arena: Arena, scheduler_class: Any, scheduler: dict[str, Any]
) -> None:
    """Samplers that draw noise draw it after the pipeline's other noise; PNDM calls the model once more."""
    rig = make_rig(make_sd, tmp_path / "sd", arena, scheduler_class=scheduler_class, scheduler=scheduler)
    for strength in (1.0, 0.6):
        edit = make_edit(rig, f"sampled-{strength}", (64, 96), strength, 3.0, seed=8, steps=5)
        assert_same(rig.run(edit), expected(rig, edit))
    rig.pages.close()


def test_pictures_of_a_batch_share_no_noise_of_their_steps(tmp_path: Path, arena: Arena) -> None:
    rig = make_rig(make_sd, tmp_path / "sd", arena, scheduler_class=EulerAncestralDiscreteScheduler)
    picture = torch.zeros(64, 64, 3, dtype=torch.uint8)
    counts = {"num_inference_steps": 4, "num_denoising_steps": 4}
    with torch.inference_mode():
        inputs = [
            ImageInputs(template=picture, mask=picture[..., 0], seed=3, index=index, number=3, **counts)
            for index in range(3)
        ]
        states = [rig.family.encode_image(each).state[-1] for each in inputs]
    assert not any(torch.equal(states[a], states[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    rig.pages.close()


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")
@pytest.mark.parametrize("scheduler_class", [DDIMScheduler, PNDMScheduler])
def test_an_old_schedulers_configuration_is_corrected_as_in_the_pipeline(
    tmp_path: Path, arena: Arena, scheduler_class: Any
) -> None:
    config = {"steps_offset": 0} | ({"skip_prk_steps": False} if scheduler_class is PNDMScheduler else {})
    rig = make_rig(make_sd, tmp_path / "sd", arena, scheduler_class=scheduler_class, scheduler=config)
    edit = make_edit(rig, "old", (64, 96), 1.0, 3.0, seed=8, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Edits of equal and other sizes, strengths and guidance join and leave; each keeps its own bytes, and equals the
    pipeline's.
    """
    shapes = [((96, 160), 4, 1.0, 3.0), ((96, 160), 5, 0.6, 1.0), ((64, 64), 2, 1.0, 2.0), ((96, 160), 5, 0.8, 5.0)]
    edits = [
        make_edit(rig, f"mixed-{i}", size, strength, scale, seed=i, steps=steps)
        for i, (size, steps, strength, scale) in enumerate(shapes)
    ]
    edits[1].prompt = "a plain coat"
    rig.assert_company_changes_nothing(edits, lambda edit: expected(rig, edit))


def test_a_prompt_of_zeros_is_the_checkpoints_choice(tmp_path: Path, arena: Arena) -> None:
    """SDXL's pipeline embeds an empty negative prompt unless the checkpoint says that it is zeros."""
    rig = make_rig(make_sdxl, tmp_path / "sdxl", arena, zero_prompt=False)
    edit = make_edit(rig, "embedded", (64, 96), 1.0, 3.0, seed=8, steps=3)
    assert_same(rig.run(edit), expected(rig, edit))
    assert rig.family.encode_text("", 12).prompt_embeds.abs().max() > 0
    rig.pages.close()


def test_the_preview_of_the_last_step_is_the_picture(rig: Rig) -> None:
    """The last step of these samplers goes to its prediction, exactly or nearly."""
    edit = make_edit(rig, "clean", (128, 128), 1.0, 3.0, seed=2, steps=4)
    rig.do(edit.encode_plan())
    for step in range(edit.num_steps):
        rig.do(edit.denoise_plan(step, keep_clean=True))
    latents, clean = (rig.store.get(edit.state_key(name, edit.num_steps)) for name in ("latents", "clean"))
    inside = torch.zeros(4, 4, dtype=torch.bool)
    inside[1:3, 1:3] = True
    difference = (latents - clean)[inside.flatten()]
    assert difference.abs().max() < 0.2 * clean.std()
    rig.do(edit.decode_plan())


@pytest.mark.filterwarnings("ignore:The configuration file of the unet:FutureWarning")
@pytest.mark.parametrize(("version", "is_old"), [("0.6.0", True), ("0.8.1.dev0", True), ("0.9.0", False)])
def test_an_old_checkpoint_says_a_smaller_size_than_it_was_trained_on(
    tmp_path: Path, version: str, is_old: bool
) -> None:
    """StableDiffusionInpaintPipeline overrides it, too."""
    path = make_sd(tmp_path / "sd", native_size=64)
    file = path / "unet/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"_diffusers_version": version}))
    pipeline = StableDiffusionInpaintPipeline.from_pretrained(path, safety_checker=None)
    side = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    assert describe(str(path)).info.native_size == side
    assert (side == 64) == (not is_old)


def test_model_info_of_stable_diffusion(tmp_path: Path) -> None:
    pndm = {"scheduler_class": PNDMScheduler, "scheduler": {"skip_prk_steps": True}}
    plain = describe(str(make_sd(tmp_path / "sd", native_size=64, **pndm)))
    large = describe(str(make_sdxl(tmp_path / "sdxl", in_channels=9)))
    assert (plain.info.family, large.info.family) == ("sd", "sdxl")
    assert (plain.info.extra_steps, plain.info.min_inference_steps, large.info.extra_steps) == (1, 2, 0)
    assert (plain.info.native_size, large.info.native_size, plain.info.token_size) == (64, 128, 32)
    transformers, residual_blocks, up_samplers = (3 * 8 + 3 * 4 + 1, 3 * 4 + 4 * 2), 3 * 8 + 3 * 4 + 5, 4 + 16
    pages = [number + residual_blocks + up_samplers for number in transformers]
    assert [plain.layout.num_blocks, large.layout.num_blocks] == pages
    assert set(large.parameters) == {"text_encoder", "text_encoder_2", "vae", "unet"}


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (make_sd, {"class_embed_type": "timestep"}, "a denoiser with class_embed_type is not supported"),
        (make_sd, {"time_cond_proj_dim": 8}, "a denoiser with time_cond_proj_dim is not supported"),
        (make_sd, {"only_cross_attention": True}, "a denoiser with only_cross_attention is not supported"),
        (make_sd, {"mid_block_type": "UNetMidBlock2D"}, "a denoiser with UNetMidBlock2D is not supported"),
        (
            make_sd,
            {"block_out_channels": (16, 24, 40)},
            r"block_out_channels \[16, 24, 40\] is not supported: what its blocks give for a token is cached in pages "
            "of one size, and 256 numbers do not fill pages of 40",
        ),
        (make_sd, {"in_channels": 8}, "a denoiser of other than 4 or 9 input channels is not supported"),
        (make_sd, {"scheduler": {"prediction_type": "sample"}}, "prediction_type sample is not supported"),
        (
            make_sd,
            {"scheduler_class": FlowMatchEulerDiscreteScheduler},
            "scheduler is of class FlowMatchEulerDiscreteScheduler; supported: DDIMScheduler, PNDMScheduler, ",
        ),
        (
            make_sdxl,
            {"scheduler_class": PNDMScheduler, "scheduler": {"skip_prk_steps": False}},
            "PNDMScheduler with skip_prk_steps off is not supported",
        ),
    ],
)
def test_configurations_that_would_differ_from_the_pipeline_are_refused(
    tmp_path: Path, make: Callable[..., Path], options: dict[str, Any], reason: str
) -> None:
    path = make(tmp_path / "other", **options)
    with pytest.raises(ConfigError, match=reason):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"requires_aesthetics_score": True}, "input_dim 72 does not fit the other parts, which give 64: 24 of text"),
        ({"text_encoder": [None, None]}, "cross_attention_dim 48 does not fit text encoders of width 24"),
    ],
)
def test_a_denoiser_that_does_not_fit_its_text_encoders_is_refused(
    tmp_path: Path, entry: dict[str, Any], reason: str
) -> None:
    """Such as a refiner's among a base model's parts."""
    path = make_sdxl(tmp_path / "refiner")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | entry))
    with pytest.raises(ConfigError, match=reason):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


SHAPES = [(0, (2, 3), 12), (1, (3, 2), 12), (2, (2, 3), 12), (3, (2, 3), 8)]
"""Seed, grid and text tokens of a row each."""


def make_row(rig: Rig, seed: int, grid: tuple[int, int], text_tokens: int) -> Row:
    generator = torch.Generator().manual_seed(seed)
    picture = torch.zeros(32 * grid[0], 32 * grid[1], 3, dtype=torch.uint8)
    text = rig.family.encode_text("a hat" * seed, text_tokens)
    with torch.inference_mode():
        inputs = ImageInputs(
            template=picture, mask=picture[..., 0], seed=seed, num_inference_steps=4, num_denoising_steps=4
        )
        image = rig.family.encode_image(inputs)
    return Row(
        latents=torch.randn(image.latents.shape, generator=generator),
        condition=image.condition,
        prompt_embeds=text.prompt_embeds,
        pooled_prompt_embeds=text.pooled_prompt_embeds,
        sigma=image.sigmas[0],
        guidance_scale=1.0,
        grid=grid,
    )


def count_passes(unet: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the rows of each pass."""
    run, passes = unet._run, list[int]()

    def counted(rows: Sequence[Row]) -> torch.Tensor:
        passes.append(len(rows))
        predictions: torch.Tensor = run(rows)
        return predictions

    monkeypatch.setattr(unet, "_run", counted)
    return passes


@torch.inference_mode()
def test_rows_of_one_size_share_a_pass_where_they_may(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one pass per size, with predictions in the order of the rows."""
    unet = rig.family._denoiser  # type: ignore[attr-defined]
    rows = [make_row(rig, seed, grid, length) for seed, grid, length in SHAPES]
    alone = [unet.forward([row])[0] for row in rows]
    monkeypatch.setattr(unet, "_is_shared", True)
    passes = count_passes(unet, monkeypatch)
    for ours, expected_one in zip(unet.forward(rows), alone, strict=True):
        torch.testing.assert_close(ours, expected_one, atol=1e-4, rtol=1e-4)
    assert sorted(passes) == [1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["sd1", "sdxl-inpaint"])
def test_half_precision_works(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """SDXL's VAE overflows in float16, so it stays in float32; in bfloat16 its encoder does."""
    make, options = KINDS[kind]
    name = str(dtype).removeprefix("torch.")
    models = ResidentModels.open([ModelConfig(model=str(make(tmp_path / kind, **options)), dtype=name)])
    models.load_all()
    (family,) = models.families.values()
    assert edit_once(family, 64, 12).float().std() > 10
    assert family._vae.dtype == (torch.float32 if kind == "sdxl-inpaint" else dtype)  # type: ignore[attr-defined]
    assert family.encode_template(torch.zeros(64, 64, 3, dtype=torch.uint8)).dtype == dtype


@torch.inference_mode()
def test_in_bfloat16_pictures_are_encoded_in_float32_as_in_the_pipeline(tmp_path: Path, arena: Arena) -> None:
    """Where the VAE's configuration says force_upcast; the pipeline decodes in bfloat16 again."""
    parts = {"in_bfloat16": True, "add_watermarker": False}
    rig = Rig(make_sdxl(tmp_path / "xl"), arena, StableDiffusionXLInpaintPipeline, **parts)
    family: Any = rig.family
    image = torch.randint(0, 2, (1, 3, 64, 64), generator=torch.Generator().manual_seed(1)) * 2.0 - 1.0
    theirs = rig.pipeline._encode_vae_image(image.bfloat16(), torch.Generator().manual_seed(2))
    mine = family._posterior_sample(image, torch.Generator().manual_seed(2), True)
    torch.testing.assert_close(mine.bfloat16(), theirs)
    decoded = rig.pipeline.vae.decode(theirs / rig.pipeline.vae.config.scaling_factor).sample
    assert decoded.dtype == torch.bfloat16
    assert (family._vae.decode(mine) - decoded.float()).abs().mean() < 0.01  # rounding
    assert family._vae._module.decoder.conv_in.weight.dtype == torch.bfloat16
    rig.pages.close()
