"""LoadingAdapters: the adapters that engines load in the background, which requests may name already."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.errors import InvalidRequestError, StencilError
from core.lora import Lora


@dataclass(frozen=True, slots=True, eq=False)
class LoadingAdapter:
    """An adapter of a model, from the order to load it until it is served or cannot be."""

    name: str
    model: str
    over: asyncio.Future[StencilError | None]  # why it is not served; None: it is


class LoadingAdapters:
    """By name."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoadingAdapter] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def models(self) -> Mapping[str, str]:
        """Name -> the model that it is for."""
        return {each.name: each.model for each in self._by_name.values()}

    def find(self, name: str) -> LoadingAdapter | None:
        """The one of this name; None: there is none."""
        return self._by_name.get(name)

    def has(self, loading: LoadingAdapter) -> bool:
        """Whether an adapter is still wanted."""
        return self.find(loading.name) is loading

    def begin(self, name: str, model: str) -> LoadingAdapter:
        """Note that an adapter is loaded, whose name no other has. Called in the event loop."""
        loading = self._by_name[name] = LoadingAdapter(name, model, asyncio.get_running_loop().create_future())
        return loading

    def end(self, loading: LoadingAdapter, error: StencilError | None = None) -> None:
        """Note that an adapter is served from now on, or why it will not be. Only the first call counts."""
        if self.has(loading):
            del self._by_name[loading.name]
            loading.over.set_result(error)

    async def wait(self, loras: Iterable[Lora]) -> None:
        """Wait until none of these adapters is loading. Raises InvalidRequestError for one that cannot be used or was
        unloaded, which does not tell the request of the file that another has named, and other StencilErrors as its
        load has ended with.
        """
        for loading in [each for lora in loras if (each := self.find(lora.name)) is not None]:
            error = await asyncio.shield(loading.over)
            if isinstance(error, InvalidRequestError):
                why = "it was unloaded, or its file cannot be used, which the server's log tells"
                message = f"Invalid 'lora': '{loading.name}' was not loaded: {why}."
                raise InvalidRequestError(message, param="lora", code="adapter_not_loaded") from error
            if error is not None:
                raise error
