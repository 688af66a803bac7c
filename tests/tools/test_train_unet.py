"""The UNet's training: it learns, resumes, and exports a checkpoint that can be served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionInpaintPipeline
from pipeline_rig import Rig

from core.ipc.shared_array import Arena
from model_executor.models.families import vae_family
from model_executor.models.families.vae_family import to_image
from model_executor.models.latents import pack as family_pack
from model_executor.models.unet.unet_layers import Layers
from tools.train_embedded.layout import pack, pack_mask
from tools.train_embedded.pool import Batch
from tools.train_embedded.training import set_rate, state_of
from tools.train_unet.diffusion import noise_batch
from tools.train_unet.export import averaged, export
from tools.train_unet.models import Sizes, build_scheduler, build_unet, embedded_vae
from tools.train_unet.trainer import Recipe, Trainer

TINY = Recipe(sizes=Sizes(channels=(8, 16, 32), heads=(1, 1, 2), norm_groups=4), batch=2, warm_pool=6)
BUDGET = 1e6  # seconds
STEPS = 8


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, 1 << 26)
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], Trainer]:
    """The folder of a finished training, and the errors under the masks, step by step."""
    work = tmp_path_factory.mktemp("train_unet")
    torch.manual_seed(0)
    trainer = Trainer(TINY, work, BUDGET)
    trainer.pool.grow()
    set_rate(trainer.optimisers, 6e-3)
    errors = [trainer.learn(trainer.pool.batch(TINY.batch)) for _ in range(STEPS)]
    trainer.keep()
    return work, errors, trainer


def test_the_error_falls(trained: tuple[Path, list[float], Trainer]) -> None:
    _, errors, _ = trained
    assert sum(errors[-4:]) < 0.8 * sum(errors[:4])


def test_it_goes_on_where_it_was(trained: tuple[Path, list[float], Trainer]) -> None:
    work, _, trainer = trained
    resumed = Trainer(TINY, work, BUDGET)
    assert (resumed.step, resumed.shown, resumed.pool.drawn) == (STEPS, STEPS * TINY.batch, trainer.pool.drawn)
    for name, module in resumed.models.named().items():
        for key, value in state_of(trainer.models.named()[name]).items():
            assert module.state_dict()[key].equal(value), key
    resumed.learn(resumed.pool.batch(TINY.batch))
    assert resumed.step == STEPS + 1


def test_its_export_is_served(
    trained: tuple[Path, list[float], Trainer], tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the latents that it was trained on, which are not centred."""
    monkeypatch.setattr(vae_family, "cpu_gains_by_bfloat16", lambda: False)  # compared in float32
    export(trained[0], tmp_path / "model")
    parts = {"safety_checker": None, "requires_safety_checker": False}
    rig = Rig(tmp_path / "model", arena, StableDiffusionInpaintPipeline, **parts)
    info = rig.family.info("tiny")
    assert (info.family, info.native_size, info.default_num_inference_steps) == ("sd", 256, 20)
    edit = rig.edit("edit", seed=3, steps=3, size=(96, 128), prompt="a red striped shirt")
    edit.guidance_scale = edit.true_cfg_scale = 2.0
    edit.negative_prompt = ""
    assert rig.run(edit).std() > 10
    grey = torch.full((64, 64, 3), 140, dtype=torch.uint8)
    vae = embedded_vae()
    latents = vae.encode(to_image(grey)).latent_dist.mode() * vae.config.scaling_factor
    assert rig.family.encode_template(grey).allclose(family_pack(latents, 4), atol=1e-3)
    rig.pages.close()


def test_the_full_size_is_served_mask_aware() -> None:
    assert Layers(build_unet(Sizes())).uneven_width is None


def test_the_averaged_weights_are_what_is_exported(trained: tuple[Path, list[float], Trainer]) -> None:
    work, _, trainer = trained
    exported, latest = averaged(work).unet.conv_out.weight, trainer.models.unet.conv_out.weight
    assert exported.abs().max() > 0
    assert not exported.equal(latest)


def test_the_denoiser_sees_the_picture_the_pipeline_shows_it() -> None:
    """The mask as `interpolate` shrinks it; at the lowest noise level the latents are the pool's, shifted."""
    mask = (torch.rand(2, 256, 256) > 0.5).float()
    latents = torch.randn(2, 16, 32, 32)
    ids = torch.zeros(2, 24, dtype=torch.long)
    batch = Batch(
        target=pack(latents),
        masked=pack(2 * latents),
        mask=pack_mask(mask),
        clip=ids,
        t5=ids,
        detail=torch.zeros(mask.shape[0], 256),
    )
    scheduler = build_scheduler()
    scheduler.alphas_cumprod = torch.ones_like(scheduler.alphas_cumprod)
    noised = noise_batch(batch, 0.25, scheduler)
    nearest = torch.nn.functional.interpolate(mask[:, None], size=(32, 32))
    assert noised.hidden.allclose(torch.cat([latents + 0.25, nearest, 2 * latents + 0.25], dim=1))
    assert noised.inside.equal(torch.nn.functional.max_pool2d(mask, 8))
