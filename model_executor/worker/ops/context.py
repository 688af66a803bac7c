"""WorkerContext: what the ops of one worker compute with: models, tensors, pages, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from core.errors import InvalidRequestError
from core.handles import ArrayRef, EntryRef, TensorKey, TensorRef
from core.messages.canvas import EMPTY_RGB
from core.messages.worker import Item
from core.patches import PatchSet
from core.run_class import RUN_CLASS
from model_executor.models.base import Family
from model_executor.models.controlnet.controlnet import ControlNet
from model_executor.page_cache.page_store import PageStore
from model_executor.parallel.group import Group
from model_executor.worker.stores.exchange import Exchange
from model_executor.worker.stores.mask_finder import MaskFinder
from model_executor.worker.stores.prompt_cache import PromptCache
from model_executor.worker.stores.tensor_store import MissingValueError, SharedMemory, TensorStore
from model_executor.worker.stores.time_limits import TimeLimits
from model_executor.worker.stores.user_classes import UserClasses

_NONE: Mapping[str, str] = MappingProxyType({})


class WorkerContext:
    """The state of one worker that its ops share. Ops themselves have none.

    models: name -> family, whose components the worker loads. prompts_of: model -> the model that embeds prompts alike,
    whose prompt cache it shares. exchange: with other ranks; None: there are none. wait_for_adapters: until those
    that are being loaded are in use. finders: model -> who finds its masks, for models with a segmenter.
    classes: of users, and time_limits: of their runs; None: there are no classes. controlnets: model -> name -> the
    ControlNet, for models that have some.
    """

    def __init__(
        self,
        models: Mapping[str, Family],
        store: TensorStore,
        arena: SharedMemory,
        pages: PageStore,
        prompts_of: Mapping[str, str] = _NONE,
        exchange: Exchange | None = None,
        wait_for_adapters: Callable[[], None] = lambda: None,
        finders: Mapping[str, MaskFinder] = MappingProxyType({}),
        classes: UserClasses | None = None,
        time_limits: TimeLimits | None = None,
        controlnets: Mapping[str, Mapping[str, ControlNet]] = MappingProxyType({}),
    ) -> None:
        self.models = models
        self.store = store
        self.pages = pages
        self.exchange = exchange or Exchange(store)
        self.group: Group | None = None  # of the batch that runs; None: this rank runs it alone
        self._arena = arena
        self._wait_for_adapters = wait_for_adapters
        self.finders = finders
        self.controlnets = controlnets
        self.classes = classes or UserClasses()
        self.time_limits = time_limits or TimeLimits(store.rank, lambda failed: None)
        self.device = store.device
        prompts = {name: PromptCache(family) for name, family in models.items() if name not in prompts_of}
        self.prompts = {name: prompts[prompts_of.get(name, name)] for name in models}  # model -> its prompt cache
        infos = {name: family.info(name) for name, family in models.items()}
        self._dtypes: dict[str, torch.dtype] = {name: getattr(torch, info.dtype) for name, info in infos.items()}
        self._latent_widths = {name: info.latent_width for name, info in infos.items()}
        self._token_sizes = {name: info.token_size for name, info in infos.items()}

    def family(self, model: str, patches: PatchSet) -> Family:
        """A model, for an item with these patches. Raises InvalidRequestError if one of them is not in use."""
        family = self.models[model]
        if family.lacking(patches):
            self._wait_for_adapters()
        if family.lacking(patches):
            raise InvalidRequestError("Its adapter is not loaded any more; load it again.", param="lora")
        return family

    def weights(self, model: str, component: str) -> AbstractContextManager[None]:
        """A block in which a model's components of one kind are on the device; what a class has loaded is, always."""
        return nullcontext() if component == RUN_CLASS else self.models[model].weights(component).held()

    def token_size(self, model: str) -> int:
        """Pixels of a token's side."""
        return self._token_sizes[model]

    def shared(self, ref: ArrayRef) -> Tensor:
        """A tensor over an array in shared memory, without a copy."""
        return torch.from_numpy(self._arena.view(ref))

    def picture(self, ref: ArrayRef | None, width: int, height: int) -> Tensor:
        """A template, uint8 [height, width, 3]; an empty canvas if there is none."""
        if ref is not None:
            return self.shared(ref)
        return torch.full((height, width, 3), EMPTY_RGB, dtype=torch.uint8)

    def mask(self, ref: ArrayRef | None, width: int, height: int) -> Tensor:
        """A mask, uint8 [height, width], 1 = edit; all of it if there is none."""
        return torch.ones(height, width, dtype=torch.uint8) if ref is None else self.shared(ref)

    def read(self, ref: TensorRef) -> Tensor:
        """An input of an item. Waits for a deferred one. Raises MissingValueError if it was not made."""
        if ref.is_deferred:
            self.exchange.wait(ref.key)
        return self.store.resolve(ref)

    def read_series(self, ref: TensorRef) -> tuple[Tensor, ...]:
        """The same for a series; () if there is none."""
        if ref.is_deferred:
            with suppress(MissingValueError):  # a sampler may have no state to send
                self.exchange.wait(ref.key)
        return self.store.resolve_series(ref)

    def read_parts(self, ref: TensorRef) -> Callable[[int], Tensor]:
        """A series, tensor by tensor: number -> the tensor, waited for if another rank is still to send it. Raises
        MissingValueError, now or then, if it was not made.
        """
        if ref.is_deferred:
            self.exchange.check(ref.key)
            return partial(self.exchange.part, ref.key)
        series = self.store.resolve_series(ref)
        if not series:
            raise MissingValueError(f"{ref.key.node}.{ref.key.name} of {ref.key.request_id} was not made")
        return series.__getitem__

    def put(self, item: Item, named: Mapping[str, Tensor]) -> tuple[TensorRef, ...]:
        """Store tensors as outputs of the item's node."""
        return tuple(
            self.store.put(TensorKey(item.request_id, item.node, name, item.version), t) for name, t in named.items()
        )

    def put_state(self, item: Item, state: Sequence[Tensor]) -> tuple[TensorRef, ...]:
        """Store the sampler's state as an output of the item's node; () if the sampler has none."""
        key = TensorKey(item.request_id, item.node, "sampler", item.version)
        return (self.store.put_series(key, state),) if state else ()

    def clean_latents(self, model: str, ref: EntryRef, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Clean latents of a template and of its references, [tokens, latent width] each, read-only. num_tokens: image
        tokens of the template."""
        latents = self.pages.on_device(ref).view(self._dtypes[model]).view(-1, self._latent_widths[model])
        return latents[:num_tokens], latents[num_tokens:]


def noise_id(content_id: str, cache_salt: str) -> str:
    """The key of a template's cached noise. The content id alone seeds it; the salt keeps owners apart."""
    return content_id + cache_salt
