"""Players: which models play roles for others, whether they can, and what that makes of a model's info."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

import core.scheduling.ops  # noqa: F401  registers the ops that workflows name
from core.config import ModelConfig
from core.errors import ConfigError
from core.graph.catalog import NAMED, WORKFLOWS
from core.graph.foreign_reads import foreign_read
from core.graph.workflow import Workflow
from core.handles import ModelKey
from core.model_info import ModelInfo
from core.run_class import RUN_CLASS
from core.sampler_defaults import SamplerDefaults
from model_executor.models.base import Family


def component_of(role: str, workflows: Iterable[Workflow]) -> str:
    """The kind of component that plays a role. Raises KeyError for a role of none of these workflows."""
    return {role: kind for workflow in workflows for role, kind in workflow.roles.items()}[role]


def borrowed(
    config: ModelConfig, keys: Mapping[str, Mapping[str, ModelKey]], registered: Sequence[Workflow] = ()
) -> tuple[ModelKey, ...]:
    """The components that a model takes from those that play its roles, without what it has itself. keys: model -> part
    of its checkpoint -> the component. registered: workflows of users."""
    wanted = (
        key
        for role, name in config.players.items()
        for key in keys[name].values()
        if key.component == component_of(role, [*WORKFLOWS.values(), *registered])
    )
    return tuple(key for key in dict.fromkeys(wanted) if key not in {*keys[config.name].values()})


def with_players(info: ModelInfo, config: ModelConfig, taken: tuple[ModelKey, ...]) -> ModelInfo:
    """The info of a model with its roles, and with the defaults of its requests. taken: from `borrowed`. Raises
    ConfigError for a default that its sampler cannot do.
    """
    defaults = {f"default_{name}": value for name, value in msgspec.structs.asdict(config.defaults).items()}
    info = msgspec.structs.replace(
        info,
        workflow=config.workflow,
        **{name: value for name, value in defaults.items() if value is not None},
    ).with_players(config.players, taken)
    steps, shift, sigmas = info.default_num_inference_steps, info.default_shift, info.default_sigmas
    sampler = SamplerDefaults(num_inference_steps=steps, shift=shift, sigmas=sigmas)
    if reason := sampler.why_not(
        has_shift=info.has_shift, takes_sigmas=info.takes_sigmas, min_steps=info.min_inference_steps
    ):
        raise ConfigError(f"{info.name}: defaults: {reason}")
    return info


# ---------------------------------------------------------------------------------------------------------- checks


def check_players(
    configs: Sequence[ModelConfig], families: Mapping[str, Family], registered: Sequence[Workflow] = ()
) -> None:
    """Raises ConfigError for a workflow or a role that there is not, and for models that cannot work together. configs:
    whose players are all among them. families: of these models, by name. registered: workflows of users."""
    workflows = [*WORKFLOWS.values(), *registered]
    named = {each.name: each for each in (*NAMED, *registered) if each.is_for_pictures}
    for config in configs:
        _check_roles(config, workflows)
        _check_workflow(config, named)
        for role, name in config.players.items():
            _check_pair(config, role, component_of(role, workflows), families[config.name], families[name])
        for role in config.players:
            _check_use(config, role, workflows)


def _check_roles(config: ModelConfig, workflows: Sequence[Workflow]) -> None:
    kinds = {role: kind for each in workflows for role, kind in each.roles.items() if kind != RUN_CLASS}
    for role in config.players:
        if role not in kinds:
            raise ConfigError(f"{config.name}: roles: no workflow has a role {role}; there are {', '.join(kinds)}")
        if role == kinds[role]:
            raise ConfigError(f"{config.name}: roles: {role} is always played by the model's own {role}; leave it out")


def _check_workflow(config: ModelConfig, named: Mapping[str, Workflow]) -> None:
    if not config.workflow:
        return
    if config.workflow not in named:
        raise ConfigError(f"{config.name}: workflow: there is no {config.workflow}; there are {', '.join(named)}")
    if unused := [role for role in config.players if role not in named[config.workflow].roles]:
        what = f"{config.workflow} has no role {unused[0]}, which another model is to play"
        raise ConfigError(f"{config.name}: workflow: {what}; name a workflow that has it, or none")
    if unbound := _unbound(config, named[config.workflow]):
        what = f"{config.workflow} needs other models as {' and '.join(unbound)}"
        raise ConfigError(f"{config.name}: workflow: {what}; name them in roles, or give a refiner")


def _unbound(config: ModelConfig, workflow: Workflow) -> list[str]:
    """The roles of a workflow that neither another model plays nor a class nor this one, by its own component of this
    kind."""
    return [
        role for role, kind in workflow.roles.items() if role not in config.players and kind not in (role, RUN_CLASS)
    ]


def _check_use(config: ModelConfig, role: str, workflows: Sequence[Workflow]) -> None:
    """Raises ConfigError if the model lacks another role of the workflow that this one is for, or if the two do not go
    together."""
    having = [workflow for workflow in workflows if role in workflow.roles]
    able = [workflow for workflow in having if not _unbound(config, workflow)]
    if not able:
        others = f"needs other models as {' and '.join(_unbound(config, having[0]))} too"
        raise ConfigError(f"{config.name}: roles: {role} is of {having[0].name}, which {others}")
    for workflow in able:
        _check_sources(config, workflow)


def _check_pair(config: ModelConfig, role: str, kind: str, own: Family, player: Family) -> None:
    """Raises ConfigError unless a model can play a role, as far as the two know. kind: of the component."""
    where, name = f"{config.name}: {config.key_of(role)}", config.players[role]
    for model, family in ((config.name, own), (name, player)):
        if not family.info(model).can_edit:
            raise ConfigError(f"{where}: {model} makes pictures of classes, and shares them with no other model")
    if kind == "text_encoder":
        return
    if reason := own.latent_space.why_not(player.latent_space):
        remedy = "two models share a picture only if all of this is equal"
        raise ConfigError(f"{where}: {name} cannot go on with latents of {config.name}: {reason}; {remedy}")


def _check_sources(config: ModelConfig, workflow: Workflow) -> None:
    """Raises ConfigError if a node would read from another model what only its own can make."""
    if found := foreign_read(workflow, config.name, config.players):
        role, what = found
        raise ConfigError(f"{config.name}: {config.key_of(role)}: {what}")
