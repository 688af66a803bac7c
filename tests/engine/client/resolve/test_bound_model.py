"""Whether a server has what a workflow of a model's pictures takes, and who plays which role then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fakes import MODEL
from run_workflows import GUARDED

import core.scheduling.ops  # noqa: F401  a workflow looks ops up
from core.config import REFINER_ROLES, EngineConfig, ModelConfig
from core.errors import InvalidRequestError, ModelNotFoundError
from core.graph.controlling import controlled
from core.graph.workflow import Workflow
from core.graph.workflows.inpaint import INPAINT
from core.graph.workflows.refined import REFINED
from core.handles import ModelKey
from core.latent_space import LatentSpace
from core.model_info import ModelInfo
from engine.client.resolve.bound_model import BoundModel

KINDS = ("text_encoder", "vae", "transformer")
SPACE = LatentSpace(token_size=16, latent_width=64, scaling={"scaling_factor": 0.5}, noise="sum", sampler="Euler")


def model(name: str, kinds: tuple[str, ...] = KINDS, **facts: Any) -> ModelInfo:
    components = tuple(ModelKey(f"{name}-{kind}", kind) for kind in kinds)
    given = {"name": name, "components": components, "latent_space": SPACE} | facts
    return msgspec.structs.replace(MODEL, **given)


MODELS = {
    each.name: each
    for each in (
        model("base"),
        model("polish"),
        model("style", parent="base", patch="p"),
        model("classes", ("vae", "transformer"), num_classes=3),
        model("other", latent_space=msgspec.structs.replace(SPACE, latent_width=32)),
        model("refined").with_players(dict.fromkeys(REFINER_ROLES, "polish"), ()),
    )
} | {"added": model("base", workflow="added@1")}
CONFIG = EngineConfig(models=tuple(ModelConfig(served_model_name=name) for name in ("base", "polish")))


def info(workflow: Workflow, model: str = "", config: EngineConfig = CONFIG, **players: str) -> ModelInfo:
    bound = BoundModel(model, players)
    bound.check_use([workflow])
    return bound.info_for(workflow, MODELS, config)


def test_it_is_the_first_model_or_the_one_that_is_named() -> None:
    assert info(INPAINT) == MODELS["base"]
    assert info(GUARDED, "polish") == MODELS["polish"]
    assert info(replace(INPAINT, loras={"style": 1.0})) == MODELS["base"]


def test_roles_are_those_of_the_model_and_those_that_are_given() -> None:
    found = info(REFINED, "base", refiner="polish")
    assert found.roles == dict.fromkeys(REFINER_ROLES, "polish")
    assert {*found.borrowed} == {*MODELS["polish"].components}
    assert (found.name, found.page_scheme, found.can_skip_steps) == ("base", None, False)
    assert info(REFINED, "refined") == MODELS["refined"]
    assert info(REFINED, "refined", refiner="base").roles == dict.fromkeys(REFINER_ROLES, "base")


LACKING: dict[str, tuple[Workflow, str, dict[str, str], str]] = {
    "a ControlNet": (controlled(INPAINT), "base", {}, r"node controlnet: base has no controlnet; start the server"),
    "a text encoder": (INPAINT, "classes", {}, r"node text_encode: classes has no text_encoder; name another model"),
    "an adapter": (replace(INPAINT, loras={"shirt": 1.0}), "", {}, r"base has no adapter 'shirt'; load it \(POST"),
    "its adapter": (replace(INPAINT, loras={"style": 1.0}), "polish", {}, r"polish has no adapter 'style'"),
    "a refiner": (REFINED, "base", {}, r"plays the role refiner_text_encoder for base; .*\(\?refiner=NAME\)"),
    "that refiner": (REFINED, "base", {"refiner": "none"}, r"no model is called 'none'; there are polish, "),
    "another refiner": (REFINED, "base", {"refiner": "base"}, r"base is the model itself"),
    "an adapter as refiner": (REFINED, "base", {"refiner": "style"}, r"no model is called 'style'"),
    "a name as refiner": (REFINED, "base", {"refiner": "added"}, r"no model is called 'added'"),
    "pictures": (REFINED, "base", {"refiner": "classes"}, r"models of classes share"),
    "its latents": (REFINED, "base", {"refiner": "other"}, r"other cannot go on with latents of base: 64 numbers in"),
    "one player": (
        REFINED,
        "base",
        {"refiner": "polish", "refiner_vae": "refined"},
        r"makes .* of polish; give",
    ),
    "such a role": (INPAINT, "base", {"refiner": "polish"}, r"'refiner': no workflow of the file has a role"),
    "a class's role": (GUARDED, "base", {"guard": "polish"}, r"'guard': no workflow of the file has a role"),
    "a role of others": (INPAINT, "base", {"vae": "polish"}, r"'vae'.* always played by the model's own vae"),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_lacking_is_named(what: str) -> None:
    workflow, model, players, told = LACKING[what]
    with pytest.raises(InvalidRequestError, match=told):
        info(workflow, model, **players)


@pytest.mark.parametrize("name", ["none", "style", "added"])
def test_a_model_that_there_is_not_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        info(INPAINT, name)


def test_one_engine_has_both_models() -> None:
    apart = msgspec.structs.replace(CONFIG, data_parallel_size=2, engines={0: ("base",), 1: ("polish",)})
    assert info(INPAINT, "base", apart) == MODELS["base"]
    with pytest.raises(InvalidRequestError, match="engine 0 has base, and not polish; start the server with both"):
        info(REFINED, "base", apart, refiner="polish")
