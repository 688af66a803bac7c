"""Class-conditional DiTs: whole pictures through the runner against diffusers' DiTPipeline, float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import DiTPipeline, DPMSolverMultistepScheduler, EulerDiscreteScheduler
from edits import Edit
from pipeline_rig import Rig, assert_same

from core.config import AdapterConfig, ModelConfig
from core.errors import ConfigError, InvalidRequestError
from core.ipc.shared_array import Arena
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import ImageInputs
from model_executor.models.registry import make_family
from model_executor.models.transformer.dit_transformer import DiTTransformer
from model_executor.worker.loading.resident import ResidentModels
from tools.random_dit_checkpoints import CLASSES, DIT_S_2, TINY, dit_transformer, make_dit

SIDE = 64
KARRAS = {"use_karras_sigmas": True, "solver_order": 3}
KINDS: dict[str, dict[str, Any]] = {
    "ddim": {},
    "dpm-solver++": {"scheduler_class": DPMSolverMultistepScheduler, "scheduler": {}},
}


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = Rig(make_dit(tmp_path_factory.mktemp("model") / "dit", **KINDS[request.param]), arena, DiTPipeline)
    yield rig
    rig.pages.close()


def of_class(rig: Rig, label: int, *, seed: int = 3, steps: int = 5, scale: float = 4.0) -> Edit:
    """A picture of a class. scale: of guidance; 1 for none."""
    edit = rig.edit(f"{label}-{seed}-{steps}-{scale}", seed=seed, steps=steps, size=(SIDE, SIDE), prompt="")
    edit.class_label, edit.guidance_scale, edit.true_cfg_scale = label, scale, max(scale, 1.0)
    return edit


def expected(rig: Rig, edit: Edit) -> npt.NDArray[np.uint8]:
    pictures = rig.pipeline(
        class_labels=[edit.class_label],
        guidance_scale=edit.guidance_scale,
        num_inference_steps=edit.steps,
        generator=torch.Generator("cpu").manual_seed(edit.seed),
    )
    pixels: npt.NDArray[np.uint8] = np.asarray(pictures.images[0])
    return pixels


@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5, 4.0])
def test_a_picture_equals_the_pipelines(rig: Rig, steps: int, scale: float) -> None:
    edit = of_class(rig, 207, steps=steps, scale=scale)
    assert_same(rig.run(edit), expected(rig, edit))


@pytest.mark.parametrize(
    "options",
    [
        {"out_channels": 4},
        {"patch_size": 4},
        {"attention_bias": False, "norm_eps": 1e-3},
        {"attention_head_dim": 24},
        {"scheduler": {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}},
        {"scheduler_class": DPMSolverMultistepScheduler, "scheduler": KARRAS},
    ],
)
def test_every_configuration_equals_the_pipeline(tmp_path: Path, arena: Arena, options: dict[str, Any]) -> None:
    rig = Rig(make_dit(tmp_path / "dit", **options), arena, DiTPipeline)
    edit = of_class(rig, 1)
    assert_same(rig.run(edit), expected(rig, edit))
    rig.pages.close()


def test_company_at_other_steps_changes_nothing(rig: Rig) -> None:
    """Requests of other classes, steps and guidance join and leave; each keeps its bytes, and equals the pipeline's."""
    wanted = [(207, 4, 4.0), (0, 5, 1.0), (999, 2, 2.0), (207, 5, 7.5)]
    edits = [
        of_class(rig, label, seed=seed, steps=steps, scale=scale) for seed, (label, steps, scale) in enumerate(wanted)
    ]
    rig.assert_company_changes_nothing(edits, lambda edit: expected(rig, edit))


def test_classes_are_other_pictures(rig: Rig) -> None:
    pictures = {rig.run(of_class(rig, label)).tobytes() for label in (0, 1, 207)}
    assert len(pictures) == 3


def test_checkpoints_of_before_the_transformer_had_a_class_of_its_own(tmp_path: Path, arena: Arena) -> None:
    """As facebook/DiT-XL-2-256 is stored."""
    path = make_dit(tmp_path / "dit")
    for file, name in (("model_index.json", "transformer"), ("transformer/config.json", "_class_name")):
        content = json.loads((path / file).read_text())
        content[name] = ["diffusers", "Transformer2DModel"] if name == "transformer" else "Transformer2DModel"
        (path / file).write_text(json.dumps(content))
    rig = Rig(path, arena, DiTPipeline, transformer=dit_transformer(**TINY).from_pretrained(path / "transformer"))
    edit = of_class(rig, 5)
    assert_same(rig.run(edit), expected(rig, edit))
    rig.pages.close()


def test_any_class_is_the_one_after_the_last(tmp_path: Path) -> None:
    """Also where there are other classes than ImageNet's, which the pipeline does not guide."""
    models = ResidentModels.open([ModelConfig(model=str(make_dit(tmp_path / "dit", num_embeds_ada_norm=10)))])
    models.load_all()
    (family,) = models.families.values()
    assert family.info("").num_classes == 10
    any_class = family.encode_class(None).pooled_prompt_embeds
    tables = [
        block.norm1.emb.class_embedder.embedding_table.weight
        for block in family._denoiser.module.transformer_blocks  # type: ignore[attr-defined]
    ]
    assert torch.equal(any_class, torch.cat([table[10] for table in tables]))


def test_names_are_the_pipelines_labels(rig: Rig) -> None:
    info = rig.family.info("tiny")
    assert info.class_names == rig.pipeline.labels
    assert info.class_names["toilet paper"] == 999
    assert (info.num_classes, info.native_size, info.can_edit) == (CLASSES, SIDE, False)


def test_a_model_without_names_has_none(tmp_path: Path) -> None:
    card = describe(str(make_dit(tmp_path / "dit", has_names=False)))
    assert card.info.class_names == {}
    assert card.layout is None


def test_it_reads_no_prompts_and_takes_no_adapters(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="of a class"):
        rig.family.encode_text("a hat", 8)
    path = make_dit(tmp_path / "dit")
    with pytest.raises(ConfigError, match="take no adapters"):
        ResidentModels.open([ModelConfig(model=str(path), adapters=(AdapterConfig("red", "red.safetensors"),))])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"activation_fn": "geglu"}, "activation_fn geglu"),
        ({"norm_elementwise_affine": True}, "norm_elementwise_affine"),
        ({"out_channels": 5}, "output channels"),
        ({"num_embeds_ada_norm": None}, "makes no DiTPipeline"),
    ],
)
def test_other_transformers_are_refused(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    path = make_dit(tmp_path / "dit")
    file = path / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ConfigError, match=reason):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


def test_a_scheduler_whose_noise_the_pipeline_does_not_scale_is_refused(tmp_path: Path) -> None:
    path = make_dit(tmp_path / "dit", scheduler_class=EulerDiscreteScheduler, scheduler={})
    with pytest.raises(ConfigError, match="EulerDiscreteScheduler"):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


def test_names_that_are_no_names_are_refused(tmp_path: Path) -> None:
    path = make_dit(tmp_path / "dit")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"id2label": {"seven": "a hat"}}))
    with pytest.raises(ConfigError, match="makes no DiTPipeline"):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


def test_dit_s_2_has_its_published_size() -> None:
    """33 million parameters (Peebles and Xie, table 1), without the embeddings that diffusers keeps in every block."""
    with torch.device("meta"):
        module = dit_transformer(**DIT_S_2)
    embeddings = sum(p.numel() for block in module.transformer_blocks[1:] for p in block.norm1.emb.parameters())
    assert 32.5e6 < sum(p.numel() for p in module.parameters()) - embeddings < 33.5e6
    assert DiTTransformer(module, 1000).num_pages == 12


def test_pictures_of_a_batch_have_the_noise_that_one_seed_draws_in_turn(rig: Rig) -> None:
    picture = torch.zeros(SIDE, SIDE, 3, dtype=torch.uint8)
    counts = {"num_inference_steps": 4, "num_denoising_steps": 4}
    with torch.inference_mode():
        first, second = (
            rig.family.encode_image(
                ImageInputs(template=picture, mask=picture[..., 0], seed=3, index=index, number=2, **counts)
            ).latents
            for index in range(2)
        )
    assert not torch.equal(first, second)
