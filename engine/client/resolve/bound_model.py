"""The model that makes a workflow's pictures: whether a server has all that this takes, and who plays which role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from core.config import REFINER_ROLES, EngineConfig
from core.errors import InvalidRequestError, ModelNotFoundError
from core.graph.foreign_reads import foreign_read
from core.graph.workflow import Node, Workflow, op_of, role_of
from core.model_info import ModelInfo
from core.run_class import RUN_CLASS
from core.validation import shorten


class BoundModel(msgspec.Struct, frozen=True):
    """What a registration says of the workflows of its file that make pictures."""

    model: str = ""  # name of the served model whose pictures they make; "": the first one
    players: dict[str, str] = {}  # role -> name of the model that plays it; "refiner" stands for all its roles

    @property
    def roles(self) -> dict[str, str]:
        """Role -> name of the model that plays it."""
        refiner = self.players.get("refiner")
        return ({} if refiner is None else dict.fromkeys(REFINER_ROLES, refiner)) | self.players

    def check_use(self, workflows: Iterable[Workflow]) -> None:
        """Raises InvalidRequestError for what none of these workflows needs."""
        for_pictures = [each for each in workflows if each.is_for_pictures]
        if self.model and not for_pictures:
            message = "Invalid 'model': no workflow of the file makes pictures of a model; leave it out."
            raise InvalidRequestError(message, param="model")
        for name in self.players:
            meant = REFINER_ROLES if name == "refiner" else (name,)
            if not any(_may_be_played(each, role) for each in for_pictures for role in meant):
                raise _refuse_player(name, "no workflow of the file has a role of this name; leave it out")

    def info_for(self, workflow: Workflow, models: Mapping[str, ModelInfo], engine: EngineConfig) -> ModelInfo:
        """The info of the model with these roles, under its own name. models: that are served, by name, adapters and
        names of workflows included. Raises InvalidRequestError that names what is missing, and the remedy;
        ModelNotFoundError.
        """
        model = models.get(self.model or next(iter(models)))
        if model is None or not _is_model(self.model or model.name, models):
            raise ModelNotFoundError(shorten(self.model))
        own = {role: name for role, name in self.roles.items() if _may_be_played(workflow, role)}
        for role, name in own.items():
            _check_player(role, workflow.roles[role], name, model, models)
        if own:
            roles = model.roles | own
            lent = (key for role, name in own.items() for key in models[name].keys_of(workflow.roles[role]))
            borrowed = tuple(key for key in dict.fromkeys((*model.borrowed, *lent)) if key not in model.components)
            model = model.with_players(roles, borrowed)
        _check_components(workflow, model, models)
        _check_engines(workflow, model, engine)
        return model


def _may_be_played(workflow: Workflow, role: str) -> bool:
    """Whether a workflow has a role that a model may play; a class plays the one of its name, and nobody else."""
    return workflow.roles.get(role, RUN_CLASS) != RUN_CLASS


def _is_model(name: str, models: Mapping[str, ModelInfo]) -> bool:
    """Whether a name is a model's, and no adapter's or workflow's."""
    return name in models and not models[name].parent and models[name].name == name


def _check_player(role: str, kind: str, name: str, model: ModelInfo, models: Mapping[str, ModelInfo]) -> None:
    """Raises InvalidRequestError unless a model can play a role for another, as far as is known."""
    if not _is_model(name, models):
        known = ", ".join(other for other in models if _is_model(other, models) and other != model.name) or "no others"
        raise _refuse_player(role, f"no model is called '{shorten(name)}'; there are {known}")
    if name == model.name:
        raise _refuse_player(role, f"{name} is the model itself; name another one, or leave it out")
    if role == kind:
        raise _refuse_player(role, f"it is always played by the model's own {kind}; leave it out")
    player = models[name]
    if not (model.can_edit and player.can_edit):
        raise _refuse_player(role, "models of classes share their pictures with no other model; leave it out")
    if kind == "text_encoder" or model.latent_space is None or player.latent_space is None:
        return
    if why := model.latent_space.why_not(player.latent_space):
        remedy = "two models share a picture only if all of this is equal"
        raise _refuse_player(role, f"{name} cannot go on with latents of {model.name}: {why}; {remedy}")


def _check_components(workflow: Workflow, model: ModelInfo, models: Mapping[str, ModelInfo]) -> None:
    """Raises InvalidRequestError for a component or an adapter that there is not."""
    for node in workflow.nodes:
        if op_of(node).component != RUN_CLASS:
            _check_node(workflow, node, model, models)
    for name in workflow.loras:
        if name not in models or models[name].parent != model.name:
            remedy = "load it (POST /v1/load_lora_adapter), or start the server with it (`loras` in the catalog)"
            raise _refuse(workflow, f"{model.name} has no adapter '{name}'", remedy)
    if found := foreign_read(workflow, model.name, model.roles):
        _, what = found
        raise _refuse(workflow, what.partition("; ")[0], "give both calls one role, or none")


def _check_node(workflow: Workflow, node: Node, model: ModelInfo, models: Mapping[str, ModelInfo]) -> None:
    role, kind = role_of(node), op_of(node).component
    if role not in (kind, *model.roles):
        setting = "refiner" if role in REFINER_ROLES else role
        problem = f"no other model plays the role {role} for {model.name}"
        raise _refuse(workflow, problem, f"name a served one (?{setting}=NAME)", node)
    player = models[model.roles.get(role, model.name)]
    if not player.keys_of(kind):
        remedy = "name another model (?model=NAME)"
        if kind == "controlnet":
            remedy = f"start the server with one (`controlnets` in the catalog's entry of {player.name})"
        raise _refuse(workflow, f"{player.name} has no {kind}", remedy, node)


def _check_engines(workflow: Workflow, model: ModelInfo, engine: EngineConfig) -> None:
    """Raises InvalidRequestError if an engine has the model, and not those that play its roles."""
    players = {model.roles[role] for role in workflow.roles if role in model.roles}
    for rank in range(engine.most_engines):
        names = {each.name for each in engine.models_of(rank)}
        if model.name in names and (lacking := sorted(players - names)):
            problem = f"engine {rank} has {model.name}, and not {lacking[0]}"
            raise _refuse(workflow, problem, "start the server with both in one engine (`engines` in the catalog)")


def _refuse(workflow: Workflow, problem: str, remedy: str, node: Node | None = None) -> InvalidRequestError:
    where = f"'{workflow.title}'" if node is None else f"'{workflow.title}', node {node.name}"
    message = f"Invalid workflow: {where}: {problem}; {remedy}."
    return InvalidRequestError(message, param=None if node is None else node.name, code="invalid_workflow")


def _refuse_player(role: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{shorten(role)}': {problem}.", param=shorten(role))
