"""RuntimeAdapters: loads and unloads adapters while the server runs."""

from __future__ import annotations

import asyncio

import msgspec

from core.errors import AdapterNotFoundError, InvalidRequestError, ModelNotFoundError
from core.lora import MAX_NAME_CHARACTERS
from core.messages.worker import DropAdapter
from core.model_choice import choose_model
from core.model_info import ModelInfo
from core.validation import check_filled, check_length, check_matches
from engine.client.services import Services
from engine.client.sessions.session import Session

MAX_PATH_CHARACTERS = 4096
MAX_ADAPTERS = 1024
"""Names of adapters, those from the start included. What they take together is limited by the workers."""


class RuntimeAdapters:
    """A name is served once every engine has its adapter, and an adapter kept until no name and no request has it."""

    def __init__(self, services: Services, changing: asyncio.Lock) -> None:
        """changing: held while names or what engines have are changed, of workflows, too."""
        self._services = services
        self._changing = changing

    async def load(self, name: str, path: str, model: str = "") -> ModelInfo:
        """Load an adapter for a model ("" = the first) and serve it under this name. path: of a file or folder on this
        machine. Raises InvalidRequestError for a name that is taken and a file that cannot be used, ModelNotFoundError,
        EngineDeadError, OverloadedError when the server shuts down; nothing has changed then.
        """
        check_matches("lora_name", name, r"[\w.:-]{1,512}", "letters, digits and _ . : -")
        check_length("lora_name", name, MAX_NAME_CHARACTERS)
        check_filled("lora_path", path)
        check_length("lora_path", path, MAX_PATH_CHARACTERS)
        async with self._services.sessions.until_shutdown(), self._changing:
            return await self._load(name, path, self._base(model))

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that have it end as they began. Raises AdapterNotFoundError."""
        served = self._services.served
        info = served.by_name.get(name)
        if info is None or not info.parent:
            raise AdapterNotFoundError(name)
        served.remove(name)
        self._tell_metrics()
        self._services.sessions.run_in_background(self._drop(info))

    def _base(self, model: str) -> ModelInfo:
        models = self._services.served.by_name
        if model and models.get(model) is not None and models[model].parent:
            raise ModelNotFoundError(model)
        return models[choose_model(models, model).model.name]  # a workflow's name may stand for it

    async def _load(self, name: str, path: str, model: ModelInfo) -> ModelInfo:
        served = self._services.served
        if name in served.by_name or name in served.run_workflows:
            message = f"Invalid 'lora_name': '{name}' is served already; unload it first, or choose another name."
            raise InvalidRequestError(message, param="lora_name", code="name_taken")
        if len(self._names) >= MAX_ADAPTERS:
            message = f"Invalid 'lora_name': {MAX_ADAPTERS} adapters are served already; unload another one first."
            raise InvalidRequestError(message, param="lora_name", code="too_many_adapters")
        added = await self._services.router.additions.load_adapter(model.name, name, path, self._named(model.name))
        own = {"patch": added.patch, "defaults": added.defaults}
        info = msgspec.structs.replace(model, name=name, parent=model.name, **own)
        served.add(info)
        self._tell_metrics()
        return info

    async def _drop(self, adapter: ModelInfo) -> None:
        """Have the engines free an adapter once no request uses it, unless it has a name again by then."""

        def uses_it(session: Session) -> bool:
            return session.model == adapter.parent and adapter.patch in {patch.id for patch in session.patches}

        await self._services.sessions.wait_while_any(uses_it)
        async with self._changing:
            if adapter.patch not in self._named(adapter.parent) and not any(map(uses_it, self._services.sessions)):
                self._services.router.additions.remove(DropAdapter(adapter.parent, adapter.patch))

    def _named(self, model: str) -> set[str]:
        """The patches of a model that have a name."""
        return {info.patch for info in self._services.served.by_name.values() if info.parent == model}

    @property
    def _names(self) -> list[str]:
        return [info.name for info in self._services.served.by_name.values() if info.parent]

    def _tell_metrics(self) -> None:
        self._services.metrics.name_adapters(self._names)
