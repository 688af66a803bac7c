"""RuntimeAdapters: loads and unloads adapters while the server runs."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from core.errors import (
    AdapterNotFoundError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    StencilError,
)
from core.ipc.logs import of_request
from core.lora import MAX_NAME_CHARACTERS
from core.messages.worker import DropAdapter
from core.model_choice import choose_model
from core.model_info import ModelInfo
from core.validation import check_filled, check_length, check_matches
from engine.client.resolve.loading_adapters import LoadingAdapter
from engine.client.services import Services
from engine.client.sessions.session import Session

logger = logging.getLogger("stencil.engine")

MAX_PATH_CHARACTERS = 4096
MAX_ADAPTERS = 1024
"""Names of adapters, those from the start included. What they take together is limited by the workers."""

MOST_DEATHS, RETRY_SECONDS = 3, 0.5
"""Of processes that die while they load an adapter in the background, after which it is given up, as its file may be to
blame; and how long it waits before it is tried again."""


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
        _check(name, path)
        async with self._services.sessions.until_shutdown(), self._changing:
            base = self._base(model)
            self._check_free(name)
            info = await self._load(name, path, base)
            self._serve(info)
            return info

    def begin(self, name: str, path: str, model: str = "") -> ModelInfo:
        """As `load`, in the background: until then, only requests may name it that may begin without. If it cannot be
        loaded, these fail and it is logged. Returns what is known.
        """
        _check(name, path)
        base = self._base(model)
        self._check_free(name)
        loading = self._services.served.loading.begin(name, base.name)
        self._services.sessions.run_in_background(self._load_late(loading, path, base))
        return msgspec.structs.replace(base, name=name, parent=base.name)

    async def _load_late(self, loading: LoadingAdapter, path: str, base: ModelInfo) -> None:
        known, num_deaths = self._services.served.loading, 0
        try:
            async with self._services.sessions.until_shutdown():
                while known.has(loading):
                    try:
                        return await self._serve_late(loading, path, base)
                    except EngineDeadError:  # the requests that wait are sent again, too
                        num_deaths += 1
                        if num_deaths == MOST_DEATHS:
                            raise
                    except OverloadedError:  # no engine is up
                        pass
                    await asyncio.sleep(RETRY_SECONDS)
        except StencilError as error:
            logger.warning("adapter %s was not loaded: %s", loading.name, error, extra=of_request(""))
            known.end(loading, error)

    async def _serve_late(self, loading: LoadingAdapter, path: str, base: ModelInfo) -> None:
        known = self._services.served.loading
        async with self._changing:
            self._check_not_served(loading.name)
            info = await self._load(loading.name, path, base)
            if known.has(loading):
                self._serve(info)
                known.end(loading)
                return
        self._services.sessions.run_in_background(self._drop(info))  # it was unloaded meanwhile

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that have it end as they began; those that wait for it fail. Raises
        AdapterNotFoundError.
        """
        served = self._services.served
        if (loading := served.loading.find(name)) is not None:
            served.loading.end(loading, InvalidRequestError("It was unloaded.", param="lora_name"))
            return
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

    def _check_free(self, name: str) -> None:
        """Raises InvalidRequestError unless one more adapter may be loaded under this name."""
        loading = self._services.served.loading
        self._check_not_served(name)
        if loading.find(name) is not None:
            raise _taken(f"'{name}' is being loaded")
        if len(self._names) + len(loading) >= MAX_ADAPTERS:
            message = f"Invalid 'lora_name': {MAX_ADAPTERS} adapters are served already; unload another one first."
            raise InvalidRequestError(message, param="lora_name", code="too_many_adapters")

    def _check_not_served(self, name: str) -> None:
        served = self._services.served
        if name in served.by_name or name in served.run_workflows:
            raise _taken(f"'{name}' is served already")

    async def _load(self, name: str, path: str, model: ModelInfo) -> ModelInfo:
        added = await self._services.engines.additions.load_adapter(model.name, name, path, self._named(model.name))
        own = {"patch": added.patch, "defaults": added.defaults}
        return msgspec.structs.replace(model, name=name, parent=model.name, **own)

    def _serve(self, info: ModelInfo) -> None:
        self._services.served.add(info)
        self._tell_metrics()

    async def _drop(self, adapter: ModelInfo) -> None:
        """Have the engines free an adapter once no request uses it, unless it has a name again by then, or they end."""

        def uses_it(session: Session) -> bool:
            return session.model == adapter.parent and adapter.patch in {patch.id for patch in session.patches}

        try:
            await self._services.sessions.wait_while_any(uses_it)
        except OverloadedError:
            return
        async with self._changing:
            if adapter.patch not in self._named(adapter.parent) and not any(map(uses_it, self._services.sessions)):
                self._services.engines.additions.remove(DropAdapter(adapter.parent, adapter.patch))

    def _named(self, model: str) -> set[str]:
        """The patches of a model that have a name."""
        return {info.patch for info in self._services.served.by_name.values() if info.parent == model}

    @property
    def _names(self) -> list[str]:
        return [info.name for info in self._services.served.by_name.values() if info.parent]

    def _tell_metrics(self) -> None:
        self._services.metrics.name_adapters(self._names)


def _check(name: str, path: str) -> None:
    check_matches("lora_name", name, r"[\w.:-]{1,512}", "letters, digits and _ . : -")
    check_length("lora_name", name, MAX_NAME_CHARACTERS)
    check_filled("lora_path", path)
    check_length("lora_path", path, MAX_PATH_CHARACTERS)


def _taken(why: str) -> InvalidRequestError:
    message = f"Invalid 'lora_name': {why}; unload it first, or choose another name."
    return InvalidRequestError(message, param="lora_name", code="name_taken")
