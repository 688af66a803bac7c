"""Models that play roles for others: what they lend, and which pairs are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
)
from run_workflows import DIAMOND, REPAINTED
from safetensors.torch import load_file, save_file

from core.config import REFINER_ROLES, ModelConfig, RequestDefaults
from core.errors import ConfigError
from core.graph.workflow import Node, Workflow
from core.graph.workflows.refined import REFINED
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_flux, make_klein, make_sd3
from tools.random_dit_checkpoints import make_dit
from tools.random_unet_checkpoints import make_sdxl, make_sdxl_refiner


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    euler = {"scheduler_class": EulerDiscreteScheduler}
    made = {
        "euler": make_sdxl(folder / "euler", **euler),
        "ddim": make_sdxl(folder / "ddim", scheduler_class=DDIMScheduler),
        "fine-euler": make_sdxl_refiner(folder / "fine-euler", **euler),
        "fine-ancestral": make_sdxl_refiner(
            folder / "fine-ancestral", seed=1, scheduler_class=EulerAncestralDiscreteScheduler
        ),
        "fine-dpm": make_sdxl_refiner(folder / "fine-dpm", scheduler_class=DPMSolverMultistepScheduler),
        "flux": make_flux(folder / "flux"),
        "sd3": make_sd3(folder / "sd3"),
        "dit": make_dit(folder / "dit"),
        "scaled": folder / "scaled",
    }
    shutil.copytree(made["fine-euler"], made["scaled"])
    config = made["scaled"] / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"scaling_factor": 0.13025}))
    return made


def opened(
    paths: Mapping[str, Path], base: str, *others: str, workflows: Sequence[Workflow] = (), **settings: object
) -> ResidentModels:
    """workflows: of users. settings: of the first one."""
    configs = [ModelConfig(model=str(paths[name]), served_model_name=name, dtype="float32") for name in (base, *others)]
    return ResidentModels.open([msgspec.structs.replace(configs[0], **settings), *configs[1:]], workflows=workflows)


@pytest.mark.parametrize(
    ("base", "refiner"), [("euler", "fine-euler"), ("euler", "fine-ancestral"), ("ddim", "fine-dpm"), ("flux", "flux2")]
)
def test_a_model_borrows_from_its_refiner_what_it_has_not_itself(
    paths: Mapping[str, Path], base: str, refiner: str
) -> None:
    models = opened({**paths, "flux2": paths["flux"]}, base, refiner, refiner=refiner)
    info, other = models.ready(0).models
    assert info.roles == dict.fromkeys(REFINER_ROLES, refiner)
    assert (info.page_scheme, info.can_skip_steps, info.workflow) == (None, False, "")
    assert {*info.needs} == {*info.components, *other.components}
    assert len(info.needs) == len({*info.needs})
    assert (other.roles, other.borrowed) == ({}, ())
    assert [each.latent_space for each in (info, other)] == [family.latent_space for family in models.families.values()]
    models.load_all(models.first)
    assert {loaded.key for loaded in models.loaded} == {*info.needs}


@pytest.mark.parametrize(
    ("base", "refiner", "said"),
    [
        (
            "euler",
            "fine-dpm",
            "the scheduler EulerDiscreteScheduler, and DPMSolverMultistepScheduler, which keeps noised",
        ),
        (
            "ddim",
            "fine-euler",
            "the scheduler DDIMScheduler, and EulerDiscreteScheduler, which keeps noised latents at",
        ),
        ("euler", "flux", "tokens of 32 pixels' side, and tokens of 16 pixels' side"),
        ("flux", "dit", "dit makes pictures of classes, and shares them with no other model"),
        ("euler", "scaled", "latents scaled with {'scaling_factor': 0.18215}, and latents scaled with {'scaling_f"),
    ],
)
def test_models_that_cannot_share_latents_are_refused(
    paths: Mapping[str, Path], base: str, refiner: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(paths, base, refiner, refiner=refiner)
    assert str(caught.value).startswith(f"{base}: refiner: ")
    assert said in str(caught.value)


def test_kleins_share_latents_if_their_vaes_scale_them_alike(tmp_path: Path) -> None:
    """By the statistics of a batch norm, which are weights; stored in float32 or in bfloat16."""
    paths = {"klein": make_klein(tmp_path / "klein")}
    for name, factor, dtype in (("rounded", 1.0, torch.bfloat16), ("other", 1.05, torch.float32)):
        paths[name] = Path(shutil.copytree(paths["klein"], tmp_path / name))
        file = paths[name] / "vae" / "diffusion_pytorch_model.safetensors"
        weights = load_file(file)
        variance = (weights["bn.running_var"] * factor).to(dtype)
        save_file(weights | {"bn.running_var": variance}, file, {"format": "pt"})
    assert opened(paths, "klein", "rounded", refiner="rounded").families
    with pytest.raises(ConfigError, match=r"other cannot go on with latents of klein: .*batch_norm"):
        opened(paths, "klein", "other", refiner="other")


def test_a_klein_whose_vae_has_no_statistics_is_refused(tmp_path: Path) -> None:
    path = make_klein(tmp_path / "klein")
    file = path / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if name != "bn.running_mean"}, file)
    with pytest.raises(ConfigError, match=r"cannot load vae of .*: the weights lack bn.running_mean"):
        opened({"klein": path, "twin": path}, "klein", "twin", refiner="twin")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workflow": "polished"}, "workflow: there is no polished; there are inpaint, hires"),
        ({"workflow": "refined"}, "workflow: refined needs other models as refiner_text_encoder and refiner_vae and"),
        ({"roles": {"painter": "sd3"}}, "roles: no workflow has a role painter; there are text_encoder, vae"),
        ({"roles": {"refiner": "flux2"}}, "roles: refiner is of refined, which needs other models as refiner_text_"),
        ({"roles": {"vae": "flux2"}}, "roles: vae is always played by the model's own vae; leave it out"),
        ({"refiner": "flux2", "workflow": "inpaint"}, "workflow: inpaint has no role refiner, which another model is"),
    ],
)
def test_roles_and_workflows_that_no_request_could_use_are_refused(
    paths: Mapping[str, Path], settings: Mapping[str, object], said: str
) -> None:
    several = {**paths, "flux2": paths["flux"]}
    with pytest.raises(ConfigError) as caught:
        opened(several, "flux", "flux2", "sd3", **settings)
    assert str(caught.value).startswith(f"flux: {said}")


def second_pass_by_another() -> Workflow:
    """REPAINTED, with roles of their own for the nodes of the second pass."""
    kinds = {"again_encode": "vae", "again": "transformer", "again_decode": "vae"}
    nodes = (replace(each, role=f"second_{kinds.get(each.name, '')}") for each in REPAINTED.nodes if each.name in kinds)
    encode, again, decode = nodes
    text = (replace(each, source="text") if each.source == "text_encode" else each for each in again.inputs)
    first = (each for each in REPAINTED.nodes if each.name not in kinds)
    own = Node("text", "text_encode", role="second_text_encoder")
    return replace(REPAINTED, nodes=(*first, own, encode, replace(again, inputs=tuple(text)), decode))


def test_a_model_names_a_workflow_of_a_user_and_binds_its_roles(paths: Mapping[str, Path]) -> None:
    mine = second_pass_by_another()
    roles = dict.fromkeys(("second_text_encoder", "second_vae", "second_transformer"), "flux2")
    several = {**paths, "flux2": paths["flux"]}
    info, other = opened(several, "flux", "flux2", workflows=[mine], workflow="repainted", roles=roles).ready(0).models
    assert (info.workflow, info.roles) == ("repainted", roles)
    assert {*info.needs} == {*info.components, *other.components}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"workflow": "diamond"},
            "workflow: there is no diamond; there are inpaint, hires, ",
        ),
        ({"workflow": "repainted"}, "workflow: repainted needs other models as second_text_encoder and second_vae and"),
        (
            {"roles": dict.fromkeys(("second_text_encoder", "second_transformer"), "flux2")},
            "roles: second_text_encoder is of repainted, which needs other models as second_vae too",
        ),
        ({"roles": {"guard": "flux2"}}, "roles: no workflow has a role guard; there are"),
    ],
)
def test_what_a_workflow_of_a_user_has_not_is_refused(
    paths: Mapping[str, Path], settings: Mapping[str, object], said: str
) -> None:
    served = [second_pass_by_another(), DIAMOND]
    with pytest.raises(ConfigError) as caught:
        opened({**paths, "flux2": paths["flux"]}, "flux", "flux2", workflows=served, **settings)
    assert str(caught.value).startswith(f"flux: {said}")


def test_defaults_take_the_place_of_the_checkpoints(paths: Mapping[str, Path]) -> None:
    numbers = {"guidance_scale": 2.5, "true_cfg_scale": 3.5, "shift": 1.5, "refiner_start": 0.7}
    defaults = RequestDefaults(num_inference_steps=7, **numbers)
    settings = {"refiner": "flux2", "workflow": REFINED.name, "defaults": defaults}
    models = opened({**paths, "flux2": paths["flux"]}, "flux", "flux2", **settings)
    info, other = models.ready(0).models
    assert info.workflow == REFINED.name
    assert (info.default_num_inference_steps, info.default_guidance_scale) == (7, 2.5)
    assert (info.default_true_cfg_scale, info.default_shift, info.default_refiner_start) == (3.5, 1.5, 0.7)
    assert other.default_num_inference_steps == 28
    assert (info.takes_sigmas, other.takes_sigmas) == (False, True)
