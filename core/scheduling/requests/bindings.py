"""Bindings: which models, and which classes of users, play the roles of the workflows, for each served model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.class_users import ClassUsers
from core.graph.op import OPS
from core.graph.workflow import Node, Workflow, op_of, role_of
from core.handles import ModelKey
from core.model_info import ModelInfo
from core.run_class import RUN_CLASS, RunClass


@dataclass(frozen=True, slots=True, eq=False)
class ModelKeys:
    """The components that a node computes with. Models that share all of these have one object, so it is compared by
    identity: their nodes share batches, cost lines and profiles.
    """

    family: str  # whose code runs it
    device: str
    keys: tuple[ModelKey, ...]
    seconds: float = 0.0  # of a user's class: the most that one run of a node may take; 0: there is no limit

    @property
    def makes_steps(self) -> bool:
        """Whether steps, which read pages, or pages are made with these."""
        return any(key.component == "transformer" for key in self.keys)


CONTROLNET = "controlnet"
"""The kind of component that requests choose themselves: one or several of their model's."""

ControlNets = tuple[str, ...]
"""Names of ControlNets, in alphabetical order."""

Needs = tuple[ModelKeys, ...]
"""What a request, or a model, computes with: the components of one node must be on one rank, those of two need not."""


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """Who plays the roles of a workflow for one served model. Mappings are by name of the node. There is one for each
    model, workflow and set of ControlNets, so it is compared by identity.
    """

    models: Mapping[str, str]  # name of the model whose family runs the node, or of the class
    keys: Mapping[str, ModelKeys]  # the components that it computes with
    needs: Needs  # all of these


class Bindings:
    """One per scheduler. A role that a served model binds to no other model is played by its own components."""

    def __init__(
        self, models: Mapping[str, ModelInfo], classes: Iterable[RunClass] = (), workflows: Iterable[Workflow] = ()
    ) -> None:
        """models: name -> info; those that play roles are among them. classes: of users, which play the roles that are
        named as they are. workflows: that name them.
        """
        self.models = models
        self._users = ClassUsers(classes, {each.name: each.class_names for each in workflows})
        self._keys: dict[tuple[str, tuple[str, ...]], ModelKeys] = {}  # (model, kinds of components) -> its keys
        self._distinct: dict[tuple[str, str, tuple[ModelKey, ...], float], ModelKeys] = {}
        self._roles: dict[str, Mapping[str, str]] = {}  # workflow that was added -> its model's roles with it
        # (model, workflow, nets, whether its templates are primed) -> its binding
        self._bindings: dict[tuple[str, str, ControlNets, bool], Binding] = {}

    @property
    def classes(self) -> Mapping[str, RunClass]:
        """Name -> class, of those that workflows name now."""
        return self._users.by_name

    def add(self, workflow: str, classes: Iterable[RunClass], roles: Mapping[str, str] | None) -> None:
        """Note a further workflow, with all classes that it names. roles: of its model, with this workflow; None: those
        that each model has.
        """
        self._users.add(workflow, classes)
        if roles is not None:
            self._roles[workflow] = roles

    def drop(self, workflow: str) -> set[ModelKey]:
        """Forget a workflow that no request has; the classes that nobody names any more."""
        for known in [each for each in self._bindings if each[1] == workflow]:
            del self._bindings[known]
        self._roles.pop(workflow, None)
        unnamed = self._users.drop(workflow)
        for each in unnamed:
            self._keys.pop((each.name, (RUN_CLASS,)), None)
        gone = {each.key for each in unnamed} - {each.key for each in self.classes.values()}
        for facts in [facts for facts in self._distinct if not gone.isdisjoint(facts[2])]:
            del self._distinct[facts]
        return gone

    def of(
        self, model: str, workflow: Workflow, controlnets: ControlNets = (), *, reads_template: bool = False
    ) -> Binding:
        """The binding of a served model for a workflow; "": of none, if classes play all roles. controlnets: names of
        those that the request uses, in alphabetical order. reads_template: whether it reads its template's pages, which
        may have to be made first. Raises KeyError for an unknown model or ControlNet.
        """
        found = self._bindings.get((model, workflow.name, controlnets, reads_template))
        if found is None:
            roles = self._roles.get(workflow.name, self.models[model].roles if model else {})
            models = {node.name: self._player(node, roles, model) for node in workflow.nodes}
            keys = {node.name: self._keys_of(node, models[node.name], controlnets) for node in workflow.nodes}
            paged = workflow.paged if reads_template else None
            priming = () if paged is None else self.priming(models[paged.name])
            needs = tuple(each for each in dict.fromkeys((*keys.values(), *priming)) if each.keys)
            found = Binding(models, keys, needs)
            self._bindings[model, workflow.name, controlnets, reads_template] = found
        return found

    def _keys_of(self, node: Node, model: str, controlnets: ControlNets) -> ModelKeys:
        op = op_of(node)
        chosen = op.component == CONTROLNET
        return self.controlnets(model, controlnets) if chosen else self.keys(model, *op.components)

    def controlnets(self, model: str, names: ControlNets) -> ModelKeys:
        """Some of a model's ControlNets. names: in alphabetical order. Raises KeyError for an unknown one."""
        info = self.models[model]
        facts = info.family, info.device, tuple(info.controlnets[name] for name in names), 0.0
        return self._distinct.setdefault(facts, ModelKeys(*facts))

    @staticmethod
    def _player(node: Node, roles: Mapping[str, str], model: str) -> str:
        role = role_of(node)
        return role if op_of(node).component == RUN_CLASS else roles.get(role, model)

    def keys(self, model: str, *kinds: str) -> ModelKeys:
        """A model's components of these kinds; of the kind RUN_CLASS, those of the class that is named instead."""
        found = self._keys.get((model, kinds))
        if found is None:
            facts = self._facts(model, kinds)
            found = self._keys[model, kinds] = self._distinct.setdefault(facts, ModelKeys(*facts))
        return found

    def _facts(self, model: str, kinds: tuple[str, ...]) -> tuple[str, str, tuple[ModelKey, ...], float]:
        if kinds == (RUN_CLASS,):
            mine, device = self.classes[model], next(iter(self.models.values())).device  # all have the same one
            return mine.path, device, (mine.key,), mine.seconds
        info = self.models[model]
        return info.family, info.device, info.keys_of(*kinds), 0.0

    def priming(self, model: str) -> Needs:
        """What the activation cache makes the pages of a model's templates with; () if it has none."""
        has_pages = model in self.models and self.models[model].page_scheme is not None
        return tuple(self.keys(model, *op.components) for op in OPS if op.part == "prime") if has_pages else ()

    def needs(self, model: str) -> Needs:
        """What a model's requests compute with, but for those whose mask is to be found, or with a ControlNet."""
        info = self.models[model]
        own = [(model, key.component) for key in info.components]
        players = dict.fromkeys(info.roles.values())
        lent = [(name, key.component) for name in players for key in self.models[name].own if key in info.borrowed]
        return tuple(dict.fromkeys(self.keys(name, kind) for name, kind in (*own, *lent)))
