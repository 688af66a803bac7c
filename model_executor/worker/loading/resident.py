"""ResidentModels: opens, loads, unloads and warms up the models of a worker, with their adapters."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn

from core.cache_folder import user_cache_folder
from core.config import AdapterConfig, ModelConfig
from core.errors import ConfigError
from core.graph.workflow import Workflow
from core.handles import LoadedComponent, ModelKey
from core.ipc.heap import keep_freed_memory
from core.ipc.logs import of_request
from core.messages.worker import WorkerReady
from core.model_info import ModelInfo
from core.patches import PatchSet
from core.scheduling.ops.text_encode import TEXT_ENCODE
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.page_schemes import with_calibration
from model_executor.models.base import Family, ImageInputs, PrimeRow, Row
from model_executor.models.registry import make_family
from model_executor.page_cache.pages import Pages
from model_executor.patches.adapters import NOTHING_KNOWN, Adapter, read_adapter
from model_executor.worker.loading.component_keys import Opened, component_keys, parts_of_models, prompt_twins
from model_executor.worker.loading.players import borrowed, check_players, with_players
from model_executor.worker.loading.resident_controlnets import ResidentControlnets
from model_executor.worker.loading.resident_segmenters import ResidentSegmenters, open_segmenter, segmenter_parts
from model_executor.worker.loading.side_components import SideComponents

logger = logging.getLogger("stencil.worker")

Read = Callable[[ModelKey], tuple[nn.Module, int]]
"""Loads a component; (module, bytes of its weights)."""

WARM_UP_SIDE = 256
"""Largest side in pixels of the picture that `warm_up` edits."""

KEPT_BYTES = 256 * 1024**2
"""Freed memory that a worker does not return to the system; the VAE needs about 40 MB for 256x256 pixels."""


class ResidentModels:
    """The served models by name; loads and unloads their components, of which models with equal keys share one. Create
    it with `open`, which reads adapters but no other weights. Raises ConfigError for an adapter that cannot be used.

    families: model's name -> its family, with its adapters once it is loaded. segmenters: that find masks for them.
    controlnets: that steer their steps.
    """

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        opened: Mapping[str, Opened],
        keys: Mapping[str, Mapping[str, ModelKey]],
        segmenters: ResidentSegmenters,
        controlnets: ResidentControlnets,
        workflows: Sequence[Workflow] = (),
    ) -> None:
        """keys: from `component_keys`. workflows: of users."""
        self.segmenters, self.controlnets = segmenters, controlnets
        self._beside: tuple[SideComponents, ...] = (segmenters, controlnets)
        self._configs = {config.name: config for config in configs}
        self._checkpoints = {name: each.checkpoint for name, each in opened.items()}
        self.families = {name: each.family for name, each in opened.items()}
        self.keys = keys  # model -> part of its checkpoint -> the component
        self._loaded: dict[ModelKey, LoadedComponent] = {}  # in the order of loading
        self._expected: dict[ModelKey, int] = {}  # what `expected_bytes` has found
        self._least: dict[ModelKey, int] = {}  # what `least_bytes` has found
        self._adapters = {  # model's name -> its adapters
            config.name: [self._read(config.name, adapter) for adapter in config.adapters] for config in configs
        }
        self._prompts_of = prompt_twins(opened, keys)
        self._borrowed = {config.name: borrowed(config, keys, workflows) for config in configs}

    def _read(self, model: str, config: AdapterConfig) -> Adapter:
        """Read an adapter and check that it fits, before minutes are spent on loading. Raises ConfigError."""
        family = self.families[model]
        adapter = read_adapter(config, family.lora_format)
        family.check_adapter(adapter)
        return adapter

    @property
    def prompts_of(self) -> dict[str, str]:
        """Model -> the first model that embeds prompts alike; without those that are this first one."""
        return dict(self._prompts_of)

    @classmethod
    def open(
        cls,
        configs: Sequence[ModelConfig],
        *,
        has_device_tier: bool = False,
        device_index: int = 0,
        num_workers: int = 1,
        model_bytes: int = 0,
        workflows: Sequence[Workflow] = (),
    ) -> ResidentModels:
        """Open all models. has_device_tier: whether device memory may hold pages; without, mask-aware execution on a
        GPU is turned off. device_index, num_workers: as for `resolve_device`. model_bytes: that the weights of each may
        take; 0: no limit. workflows: of users. Raises ConfigError for a checkpoint that cannot be served.
        """
        checkpoints = {
            config.name: ModelCheckpoint.open(config, device_index, num_workers, model_bytes) for config in configs
        }
        for checkpoint in checkpoints.values():
            if checkpoint.device.type == "cuda":
                torch.cuda.set_device(checkpoint.device)  # the default for `cuda` without a number
        if any(checkpoint.device.type != "cpu" for checkpoint in checkpoints.values()) and not has_device_tier:
            logger.warning(
                "every token is computed: mask-aware edits on a GPU need pages in its memory, so "
                "--workers-per-engine 1 and a --cache-device-bytes other than 0"
            )
            configs = [msgspec.structs.replace(config, mask_aware=False) for config in configs]
        for checkpoint in checkpoints.values():
            checkpoint.check_formats()
        families = {name: make_family(checkpoint) for name, checkpoint in checkpoints.items()}
        for checkpoint in checkpoints.values():
            checkpoint.check_quantization()
        check_players(configs, families, workflows)
        opened = {name: Opened(checkpoint, families[name]) for name, checkpoint in checkpoints.items()}
        device = next(iter(checkpoints.values())).device
        segmenters = {config.name: each for config in configs if (each := open_segmenter(config, device)) is not None}
        folder = user_cache_folder(os.environ)
        keys = component_keys(parts_of_models(opened), folder)
        together = device.type != "cpu" and not any(config.batch_invariant for config in configs)
        its_keys = component_keys(segmenter_parts(segmenters), folder)
        finding = ResidentSegmenters(segmenters, its_keys, together=together)
        return cls(configs, opened, keys, finding, ResidentControlnets.open(configs, opened, folder), workflows)

    def log_dtypes(self) -> None:
        """Log which dtypes `auto` is for the models, and why. Called once they are loaded: a start that fails says only
        why it has."""
        for name, checkpoint in self._checkpoints.items():
            if checkpoint.why_dtype:
                dtype = str(checkpoint.dtype).removeprefix("torch.")
                text = "--dtype auto is %s for %s: %s"
                logger.info(text, dtype, name, checkpoint.why_dtype, extra=of_request(""))

    @property
    def device(self) -> torch.device:
        """The device that all models run on."""
        return next(iter(self._checkpoints.values())).device

    @property
    def in_turn(self) -> list[set[ModelKey]]:
        """The components whose weights lie in host memory between uses, in sets that are used at one time: those of one
        kind of each model."""
        return [
            {key for key in (keys[part] for part in parts) if self.is_offloaded(key)}
            for name, keys in self.keys.items()
            for parts in self.families[name].components.values()
        ]

    def load_all(self, names: Collection[str] = (), read: Read | None = None) -> None:
        """Load every component that these models need, by default all, and their adapters. read: by default
        `self.read`. Raises ConfigError."""
        for key in dict.fromkeys(key for name in names or self._configs for key in self.needs(name)):
            self.install(key, *(read or self.read)(key))

    def load(self, key: ModelKey) -> LoadedComponent:
        """Load a component's weights once, for all models that share it, with what their adapters change in them.
        Raises ConfigError; KeyError for a component of no model."""
        return self.install(key, *self.read(key))

    def read(self, key: ModelKey) -> tuple[nn.Module, int]:
        """(module, bytes of its weights) of a component, read from its files. Raises ConfigError."""
        checkpoint, part = self.origin(key)
        module: nn.Module = checkpoint.load(part)
        return module, weight_bytes(module)

    def origin(self, key: ModelKey) -> tuple[ModelCheckpoint, str]:
        """(a checkpoint that contains this component, the part of it that is the component). Raises KeyError for a
        component of no model."""
        if (side := self._side_of(key)) is not None:
            return side.origin(key)
        (name, part), *_ = self._users(key)
        return self._checkpoints[name], part

    def _side_of(self, key: ModelKey) -> SideComponents | None:
        """What a component belongs to that works for models beside their own; None: it is one of their own."""
        return next((side for side in self._beside if side.users_of(key)), None)

    def is_on_demand(self, key: ModelKey) -> bool:
        """Whether a component is loaded only when a request needs it."""
        return self._side_of(key) is not None

    def is_offloaded(self, key: ModelKey) -> bool:
        """Whether a component's weights lie in host memory between uses."""
        checkpoint, part = self.origin(key)
        return checkpoint.is_offloaded(part)

    def install(self, key: ModelKey, module: nn.Module, nbytes: int) -> LoadedComponent:
        """Put a component that was just loaded in use, for all models that share it. nbytes: of its weights."""
        loaded = LoadedComponent(key, nbytes)
        if (side := self._side_of(key)) is not None:
            side.put(key, module)
            self._loaded[key] = loaded
            return loaded
        (name, part), *_ = self._users(key)
        prepared = self.families[name].prepare(part, module)
        if self.is_offloaded(key):
            prepared.keep_on_host()
        for name, part in self._users(key):
            self.families[name].put(part, prepared)
            for adapter in list(self._adapters[name]):
                self._adapt(name, part, adapter)
        self._loaded[key] = loaded
        self._forget_layers()
        return loaded

    def _forget_layers(self) -> None:
        """Drop the layers of adapters whose models are loaded: the families have copies of them."""
        for name, adapters in self._adapters.items():
            if self.is_loaded(name):
                self._adapters[name] = [replace(adapter, parts={}) for adapter in adapters]

    def _adapt(self, name: str, part: str, adapter: Adapter) -> None:
        family = self.families[name]
        try:
            whole = self._with_layers(name, adapter)
        except ConfigError as error:  # it fails its own requests, not the model's
            logger.error("adapter %s is not in use any more: %s", adapter.name, error, extra=of_request(""))
            self.drop_adapter(name, adapter.patch)
            return
        family.put_adapter(adapter.patch, family.prepare_adapter(whole, {part}))

    def add_adapter(
        self,
        model: str,
        config: AdapterConfig,
        patch: str = "",
        max_bytes: int | None = None,
        known: Mapping[str, int] = NOTHING_KNOWN,
    ) -> Adapter:
        """Read an adapter and put it in use for a model, whatever runs meanwhile. Requests must not name it before.
        patch: that its file must have; "": any. max_bytes, known: as for `read_adapter`. Raises ConfigError; KeyError
        for an unknown model.

        May be called in a thread: what other adapters change is not touched, and the rows of a pass under way are not
        of this one.
        """
        family, parts = self.families[model], self._loaded_parts(model)
        adapter = read_adapter(config, family.lora_format, max_bytes, known)
        if not adapter.parts.keys() <= set(parts):
            family.check_adapter(adapter)
        if patch and adapter.patch != patch:
            raise adapter.refuse("the file has changed since it was loaded")
        family.put_adapter(adapter.patch, family.prepare_adapter(adapter, parts))
        if adapter.patch not in {other.patch for other in self._adapters[model]}:
            self._adapters[model].append(adapter)
            self._forget_layers()
        return adapter

    def drop_adapter(self, model: str, patch: str) -> None:
        """Drop an adapter of a model, in parts that models share once no other one has it."""
        self._adapters[model] = [adapter for adapter in self._adapters[model] if adapter.patch != patch]
        users = {name for name, its in self._adapters.items() if patch in {adapter.patch for adapter in its}}
        kept = {key for name in users for key in self.keys[name].values()}
        parts = [part for part in self._loaded_parts(model) if self.keys[model][part] not in kept]
        self.families[model].drop_adapter(patch, parts)

    def _loaded_parts(self, model: str) -> list[str]:
        return [part for part, key in self.keys[model].items() if key in self._loaded]

    def _with_layers(self, model: str, adapter: Adapter) -> Adapter:
        """The adapter with its layers, read again if they were dropped. Raises ConfigError if its file has changed."""
        if adapter.parts:
            return adapter
        again = self._read(model, AdapterConfig(adapter.name, str(adapter.source)))
        if again.patch != adapter.patch:
            raise again.refuse("the file has changed since it was loaded; restart the server")
        return again

    def unload(self, key: ModelKey) -> None:
        """Drop a component's weights. Raises KeyError if it is not loaded."""
        if (side := self._side_of(key)) is not None:
            side.drop(key)
        else:
            for name, part in self._users(key):
                self.families[name].drop(part)
        del self._loaded[key]

    def find(self, key: ModelKey) -> LoadedComponent | None:
        """A component, if it is loaded."""
        return self._loaded.get(key)

    def is_loaded(self, name: str) -> bool:
        """Whether every component of a model is loaded."""
        return self._loaded.keys() >= {*self.keys[name].values()}

    def needs(self, name: str) -> tuple[ModelKey, ...]:
        """The components that requests to a model are computed with, also those of other models."""
        return (*self.keys[name].values(), *self._borrowed[name])

    @property
    def loaded_families(self) -> dict[str, Family]:
        """The families of the models that are loaded, by name."""
        return {name: self.families[name] for name in self._configs if self.is_loaded(name)}

    @property
    def first(self) -> list[str]:
        """The models to load before the worker is ready, if others may follow."""
        return [next(iter(self._configs))]

    @property
    def sizes(self) -> tuple[LoadedComponent, ...]:
        """Every component of every model, with its bytes; of those that are not loaded, as their files say."""
        own = (key for keys in self.keys.values() for key in keys.values())
        every = [*own, *(key for side in self._beside for key in side.keys)]
        known = {key: self.expected_bytes(key) for key in every}
        known |= {loaded.key: loaded.nbytes for loaded in self.loaded}
        return tuple(LoadedComponent(key, nbytes) for key, nbytes in known.items())

    def expected_bytes(self, key: ModelKey) -> int:
        """Bytes that a component takes, as its files say. Raises ConfigError for a file that cannot be read."""
        if key not in self._expected:
            checkpoint, part = self.origin(key)
            self._expected[key] = checkpoint.expected_bytes(part)
        return self._expected[key]

    def least_bytes(self, key: ModelKey) -> int:
        """Bytes that a component keeps at least: without what its files have beside its layers, and without layers of
        text encoders that the family drops."""
        if key not in self._least:
            self._least[key] = self._outlined_bytes(key)
        return self._least[key]

    def _outlined_bytes(self, key: ModelKey) -> int:
        checkpoint, part = self.origin(key)
        stored = self.expected_bytes(key)
        if checkpoint.is_quantized(part):
            return stored
        kept = checkpoint.outline(part)
        if key.component == TEXT_ENCODE.component:
            kept = self.families[self._users(key)[0][0]].prepare(part, kept).plain
        return min(stored, checkpoint.dtype.itemsize * sum(parameter.numel() for parameter in kept.parameters()))

    def users_of(self, key: ModelKey) -> list[str]:
        """The models that a component is of, then those that borrow it; of one beside them, those that it works for.
        Raises KeyError for a component of no model."""
        if (side := self._side_of(key)) is not None:
            return side.users_of(key)
        own = [name for name, _ in self._users(key)]
        return list(dict.fromkeys([*own, *(name for name in self.keys if key in self.needs(name))]))

    def _users(self, key: ModelKey) -> list[tuple[str, str]]:
        """The (model, part) that are this component; at least one."""
        users = [(name, part) for name, keys in self.keys.items() for part, own in keys.items() if own == key]
        if not users:
            raise KeyError(f"no model consists of {key}")
        return users

    @property
    def loaded(self) -> tuple[LoadedComponent, ...]:
        """The components that are loaded."""
        return tuple(self._loaded.values())

    def ready(self, rank: int) -> WorkerReady:
        """The message that describes what this worker serves, models before their adapters. Raises ConfigError."""
        models = {name: self._info(name) for name in self._configs}
        adapters = (_adapted(models[name], adapter) for name, its in self._adapters.items() for adapter in its)
        return WorkerReady(rank=rank, models=(*models.values(), *adapters), components=self.loaded, sizes=self.sizes)

    def _info(self, name: str) -> ModelInfo:
        family, folder = self.families[name], user_cache_folder(os.environ)
        info = msgspec.structs.replace(
            family.info(name), components=tuple(self.keys[name].values()), latent_space=family.latent_space
        )
        info = with_calibration(info, self._configs[name], self._checkpoints[name], family, folder)
        info = with_players(info, self._configs[name], self._borrowed[name])
        for side in self._beside:
            info = side.told_in(info)
        return info

    def warm_up(self) -> None:
        """Edit one small picture with every loaded model, so that the first request does not pay for first calls and
        for untouched memory."""
        keep_freed_memory(KEPT_BYTES)
        for name in filter(self.is_loaded, self._configs):
            family = self.families[name]
            info = family.info(name)
            side = min(info.native_size, WARM_UP_SIDE) // info.token_size * info.token_size
            edit_once(family, side, info.max_text_tokens)
            if self._configs[name].mask_aware and info.can_edit:
                edit_masked_once(family, side, info.max_text_tokens)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, as they are stored."""
    return sum(map(_stored_bytes, chain(module.parameters(), module.buffers())))


def _stored_bytes(tensor: Any) -> int:
    """Bytes of a tensor; of a quantised one, of the tensors that it is made of."""
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return sum(_stored_bytes(getattr(tensor, part)) for part in parts) if parts else int(tensor.nbytes)


def _adapted(model: ModelInfo, adapter: Adapter) -> ModelInfo:
    """The info of a model under the name of an adapter."""
    own = {"name": adapter.name, "patch": adapter.patch, "defaults": adapter.defaults}
    return msgspec.structs.replace(model, parent=model.name, **own)


@torch.inference_mode()
def edit_once(family: Family, side: int, text_tokens: int, patches: PatchSet = ()) -> torch.Tensor:
    """Run a one-step edit of an empty square; returns uint8 [side, side, 3]."""
    empty = torch.zeros(side, side, 3, dtype=torch.uint8)
    text = family.encode_nothing(text_tokens, empty, patches)
    image = family.encode_image(ImageInputs.blank(side, family.info("").min_inference_steps))
    sample = image.begin(family.grid(side, side))
    row = Row(
        latents=family.denoiser_input(sample),
        condition=image.condition,
        prompt_embeds=text.prompt_embeds,
        pooled_prompt_embeds=text.pooled_prompt_embeds,
        sigma=image.sigmas[0],
        guidance_scale=1.0,
        grid=sample.grid,
        patches=patches,
    )
    latents, _ = family.advance(sample, family.combine_guidance(family.predict([row]), 1.0))
    return family.decode(latents, side, side)


@torch.inference_mode()
def edit_masked_once(family: Family, side: int, text_tokens: int) -> None:
    """Run a mask-aware step of an empty square: prime its pages, predict at a keyframe (on a GPU also between two), and
    decode the region."""
    template = torch.zeros(side, side, 3, dtype=torch.uint8)
    text = family.encode_text("", text_tokens, (template,))
    clean, grid, layout = family.encode_template(template), family.grid(side, side), family.page_layout("int8")
    sigma = torch.ones((), device=clean.device)
    latents, condition = family.prime_inputs(clean, family.content_noise(clean, "0" * 64), sigma)
    entry = torch.empty(layout.entry_bytes(len(clean)), dtype=torch.uint8, device=clean.device)
    common: dict[str, Any] = {
        "latents": latents,
        "condition": condition,
        "prompt_embeds": text.prompt_embeds,
        "pooled_prompt_embeds": text.pooled_prompt_embeds,
        "sigma": sigma,
        "guidance_scale": 1.0,
        "grid": grid,
    }
    family.prime([PrimeRow(**common, hidden=None, entry=entry)], (0, layout.num_blocks))
    active = torch.arange(2, device=clean.device)  # not a square: kernels compiled for one do not serve other boxes
    at_keyframe, between = (Pages(layout, len(clean), entry, far, 0.5) for far in (None, entry))
    # On a GPU, reading between two keyframes is another kernel that must be compiled.
    tried = (at_keyframe,) if clean.device.type == "cpu" else (at_keyframe, between)
    rows = [Row(**common, active=active, pages=pages) for pages in tried]
    family.predict(rows)
    if clean.device.type != "cpu":  # a guided edit's two rows share a pass, which is compiled separately
        family.predict([rows[-1], rows[-1]])
    family.decode_region(clean, active, side, side)


def set_threads(num_threads: int) -> None:
    """Set PyTorch's threads per operator; operators do not run in parallel."""
    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
