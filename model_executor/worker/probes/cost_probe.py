"""Measures what batches cost on this machine: times a handful of them before a worker reports ready.

The engine's cost model is fitted to these samples first, so that it can schedule the first edits. They are cached per
model and device, and read by the next start.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from core.config import ModelConfig
from core.graph.op import Op
from core.graph.work import Work
from core.ipc.atomic_file import write_atomically
from core.ipc.small_files import read_small
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from core.page_scheme import PageLayout
from core.sampling_params import MAX_INFERENCE_STEPS
from core.scheduling.ops.decode import DECODE
from core.scheduling.ops.denoise import DENOISE
from core.scheduling.ops.image_encode import IMAGE_ENCODE
from core.scheduling.ops.prime import PRIME
from core.scheduling.ops.text_encode import TEXT_ENCODE
from model_executor.cpu import cpu_description
from model_executor.device_failures import is_out_of_memory, wait_for_device
from model_executor.kernels.operators import chosen_operators
from model_executor.models.base import EncodedImage, EncodedText, Family, ImageInputs, ModulationInputs, PrimeRow, Row
from model_executor.models.boxes import around
from model_executor.models.controlnet.controlnet import ControlNet
from model_executor.models.transformer.denoiser import modulation_limit
from model_executor.page_cache.pages import Pages
from model_executor.parallel.group import Group

PROBE = 2
"""Number of the way in which batches are measured: what an earlier one has measured is not used."""

BUDGET_SECONDS = 2.0
"""Time budget per model, at its first start. A batch that is expected to exceed what is left is skipped."""

CPU_CALLS, GPU_CALLS = 2, 3
"""Calls of a batch, of which the last is timed. On a GPU a step of a new shape may be captured as a CUDA graph in its
second call."""

MIXES = ((0.05,), (1.0,), (0.1,) * 4, (0.3,), (1.0, 0.1), (0.2,) * 8, (1.0, 1.0), (0.1, 0.1), (0.5, 0.2), (0.7,) * 3)
"""Denoising batches to time: each request's share of active tokens; 1 is an exact request."""

PRIMINGS = ((1, 0.5), (1, 1.0), (2, 1.0))
"""Priming batches to time: (keyframes, share of the blocks that they pass through)."""

PICTURES = (0.5, 1.0)
"""Pictures to encode and decode: their side as a share of the native one."""

SHARES = (0.05, 0.1, 0.2, 0.4, 0.7)
"""Mask-aware steps of a profile: their active tokens as shares of all."""

SIDES = (0.25, 0.5, 0.75, 1.0)
"""Exact steps of a profile: the side of their pictures as a share of the native one."""

WITHOUT_OTHERS: dict[str, Any] = {
    **{"segmenter": (), "selects_by": (), "controlnets": {}, "controls": {}},
    **{"workflow": "", "roles": {}, "borrowed": (), "latent_space": None},
}
"""Facts of a model for which no others work."""

Timed = tuple[Op, Work, Callable[[], object]]
"""(op, size of the batch, function that runs it)."""


def known_or_probed(
    families: Mapping[str, Family],
    infos: Sequence[ModelInfo],
    cache_folder: Path,
    configs: Mapping[str, ModelConfig] | None = None,
) -> tuple[CostSample, ...]:
    """Cost samples of all models: cached ones of an earlier start, else new ones. If the folder cannot be written, the
    next start measures again. An adapter has the costs of its model, though it takes a few percent longer.

    families: of the models that are loaded; others have what is known of them already, or nothing. infos: as the worker
    is about to report them. configs: model's name -> its settings, the default ones where missing.
    """
    known = configs or {}
    return tuple(
        sample
        for info in infos
        if not info.parent
        for sample in _samples(families.get(info.name), info, cache_folder, known.get(info.name, ModelConfig()))
    )


@torch.inference_mode()
def probe(family: Family, info: ModelInfo, budget_seconds: float) -> list[CostSample]:
    """Time batches of every op, small ones first, until the time budget is spent."""
    ends, calls = time.monotonic() + budget_seconds, GPU_CALLS if info.device == "cuda" else CPU_CALLS
    samples: list[CostSample] = []
    for op, work, batch in Batches(family, info).all():
        try:
            seconds = _time(batch, ends, _expected(samples, op, work), calls)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            continue  # such a batch cannot be scheduled either
        if seconds is not None:
            samples.append(CostSample(info.name, op.cost_name, work, seconds))
    return samples


def _samples(family: Family | None, info: ModelInfo, cache_folder: Path, config: ModelConfig) -> list[CostSample]:
    path = _path(info, config, cache_folder)
    samples = _read(path)
    if samples is None and family is not None:
        samples = probe(family, info, BUDGET_SECONDS)
        with suppress(OSError):
            write_atomically(path, msgspec.json.encode(samples))
    return [*(samples or ()), *(_read(profile_path(info, config, cache_folder)) or ())]


def _read(path: Path) -> list[CostSample] | None:
    """The samples in a file; None if there is none, or a damaged one."""
    with suppress(OSError, ValueError, msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(read_small(path), type=list[CostSample])
    return None


def _path(info: ModelInfo, config: ModelConfig, cache_folder: Path) -> Path:
    return cache_folder / "costs" / f"{_conditions(info, config)}.json"


def profile_path(info: ModelInfo, config: ModelConfig, cache_folder: Path) -> Path:
    """Where a model's profile is kept, see `model_executor.worker.probes.profiler`."""
    return _path(info, config, cache_folder).with_suffix(".profile.json")


def _conditions(info: ModelInfo, config: ModelConfig) -> str:
    """Hex digest of everything that costs depend on: the model as served, processor, threads, PyTorch, kernels,
    CUDA graphs, where weights lie. Not its components, which depend on the other models, nor what works for it."""
    info = msgspec.structs.replace(info, components=(), **WITHOUT_OTHERS)
    device = torch.device(info.device)
    cores = f"{cpu_description()} x {len(os.sched_getaffinity(0))}"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else cores
    digest = chosen_operators(config.kernels, device, batch_invariant=config.batch_invariant).digest
    graphs = config.cuda_graphs if device.type == "cuda" else ""
    parts = [PROBE, processor, platform.node(), torch.get_num_threads(), torch.__version__, digest, graphs]
    parts += [config.offload] if config.offload == "host" else []
    return hashlib.sha256(msgspec.json.encode(info) + repr(parts).encode()).hexdigest()


def _time(batch: Callable[[], object], ends: float, expected: float, calls: int) -> float | None:
    """Seconds of the last of these calls of a batch; None if there is no time for it. The first is not counted: at a
    new size it took 1.2 to 1.3 times as long (one Zen 5 core), which a request pays once in its many steps.
    """
    for _ in range(calls):
        started = time.monotonic()
        if started + expected > ends:
            return None
        batch()
        wait_for_device()
        expected = time.monotonic() - started
    return expected


def _expected(samples: Sequence[CostSample], op: Op, work: Work) -> float:
    """Expected seconds: those of the op's last sample, in proportion to the tokens; 0 without one."""
    for sample in reversed(samples):
        if sample.op == op.cost_name:
            return sample.seconds * sum(work.queries) / sum(sample.work.queries)
    return 0.0


@dataclass
class Batches:
    """Makes batches of every op, over an empty picture of the native size. group: of ranks that compute steps together,
    all of which make the same batches; None: one rank. references: of every request, as large as can be. controlnets:
    those of the model."""

    family: Family
    info: ModelInfo
    group: Group | None = None
    references: int = 0
    controlnets: Collection[ControlNet] = ()

    def all(self) -> Iterator[Timed]:
        """All batches, ops in turn and smaller ones first, so that every op is sampled even if time runs out."""
        by_op: list[list[Timed]] = [
            self._prompts,
            [self.denoise(mix) for mix in MIXES if self._has_pages or min(mix) == 1.0],
            [self.prime(*priming) for priming in PRIMINGS if self._has_pages],
            [self._picture(IMAGE_ENCODE, self._encode_image, share) for share in PICTURES],
            [self._picture(DECODE, self._decode, share) for share in PICTURES],
        ]
        return (batch for turn in zip_longest(*by_op) for batch in turn if batch is not None)

    def once(self) -> list[Timed]:
        """What is done once for a request, one item each."""
        pictures = [(IMAGE_ENCODE, self._encode_image), (DECODE, self._decode)]
        return [*self._prompts, *(self._picture(op, run, share) for op, run in pictures for share in PICTURES)]

    @property
    def most_rows(self) -> int:
        """Most rows that a request has: its prompt's and, with classifier-free guidance, its negative prompt's."""
        return 2 if self.info.has_true_cfg or self.info.is_guidance_cfg else 1

    @torch.inference_mode()
    def kept_bytes(self, num_states: int = 1) -> int:
        """Bytes of device memory that a request with most rows and most steps keeps between steps. num_states: results
        of steps, with the sampler's state, that are there at once.
        """
        image, text = self._image, self._text
        prompt_state = self.family.prompt_state(text.prompt_embeds)
        of_row = [text.prompt_embeds, text.pooled_prompt_embeds, *([] if prompt_state is None else [prompt_state])]
        of_request = [*num_states * [image.latents, *image.state], self._condition, image.outside, image.sigmas]
        if self._has_pages and self.family.sees_all_latents:
            of_request += 2 * [image.latents]  # the template's clean latents and noise
        on_device = [tensor for tensor in of_request + self.most_rows * of_row if tensor.device == image.latents.device]
        others = self._modulation_bytes(image, text) + self._own_page_bytes(image, num_states)
        return sum(tensor.nbytes for tensor in on_device) + others + self._control_bytes()

    def _control_bytes(self) -> int:
        """Most bytes that a request with a ControlNet keeps for it."""
        if not self.controlnets:
            return 0
        side = self._side(1.0)
        (control,) = self.family.encode_controls([torch.zeros(side, side, 3, dtype=torch.uint8)], 0, is_exact=True)
        return max(net.kept_bytes(control, self._grid, self.most_rows) for net in self.controlnets)

    def _modulation_bytes(self, image: EncodedImage, text: EncodedText) -> int:
        """Most bytes of a request's modulation tables: those of most rows and steps, or else the limit, beyond which
        none are kept."""
        of_step = self._modulation_of(image, text)
        if of_step is None:
            return 0
        return min(modulation_limit(of_step.device), MAX_INFERENCE_STEPS * self.most_rows * of_step.nbytes)

    def _own_page_bytes(self, image: EncodedImage, num_states: int) -> int:
        """Bytes of a request's own pages, and of the latents and the velocity that its state has then besides; 0 if no
        step schedule asks for them."""
        scheme = self.info.page_scheme
        if scheme is None or not any(schedule.full_steps for schedule in self.info.step_schedules):
            return 0
        pages = msgspec.structs.replace(scheme, layout=self._layout).own_page_bytes(len(image.latents))
        return self.most_rows * pages + 2 * num_states * image.latents.nbytes

    @property
    def _has_pages(self) -> bool:
        return self.info.page_scheme is not None

    # ------------------------------------------------------------------------------------------------ encode, decode

    @property
    def _prompts(self) -> list[Timed]:
        """A prompt of full length, if the model reads prompts."""
        return [(TEXT_ENCODE, Work.of([self._text_tokens]), self._encode_text)] if self.info.max_text_tokens else []

    def _picture(self, op: Op, run: Callable[[int], object], share: float) -> Timed:
        side = self._side(share)
        return op, Work.of([(side // self.info.token_size) ** 2]), partial(run, side)

    def _encode_text(self) -> EncodedText:
        side = self._side(1.0)
        empty = [torch.zeros(height, width, 3, dtype=torch.uint8) for width, height in ((side, side), *self._beside)]
        return self.family.encode_longest(self.info.max_text_tokens, empty)

    def _encode_image(self, side: int) -> EncodedImage:
        return self.family.encode_image(ImageInputs.blank(side, self.info.min_inference_steps))

    def _decode(self, side: int) -> Tensor:
        return self.family.decode(self._image.latents[: (side // self.info.token_size) ** 2], side, side)

    # ------------------------------------------------------------------------------------------------ the denoiser

    def prime(self, keyframes: int, share: float) -> Timed:
        """A batch that primes `keyframes` together through the first `share` of the blocks."""
        assert self.info.page_scheme is not None
        num_blocks = self.info.page_scheme.layout.num_blocks
        blocks = max(1, int(num_blocks * share))
        tokens = self.num_row_tokens
        work = Work((tokens * blocks // num_blocks,) * keyframes, (tokens,) * keyframes)
        return PRIME, work, lambda: self.family.prime([self._prime_row] * keyframes, (0, blocks))

    def denoise(self, mix: Sequence[float]) -> Timed:
        """One denoising step of requests with these shares of active tokens; 1 is an exact request."""
        rows = [self._row(share) for share in mix]
        keys = self.num_row_tokens
        queries = [keys if row.active is None else self._text_tokens + len(row.active) for row in rows]
        work = Work.of_pairs((number, keys) for number in queries)
        return DENOISE, work, lambda: self.family.predict(rows, self.group)

    def of_one_request(self, share: float) -> Callable[[], object]:
        """One denoising step of a request with this share of active tokens, and with most rows."""
        rows = [self._row(share)] * self.most_rows
        return lambda: self.family.predict(rows, self.group)

    def steps(self, numbers: Iterable[int]) -> Iterator[Timed]:
        """Denoising steps of each of these numbers of like rows: exact ones by SIDES, mask-aware ones by SHARES. Models
        that edit nothing have pictures of one size."""
        sides = SIDES if self.info.can_edit else (1.0,)
        for number in numbers:
            yield from (self.whole_pictures(side, number) for side in sides)
            if self._has_pages:
                yield from (self.denoise((share,) * number) for share in SHARES)

    def whole_pictures(self, share: float, number: int) -> Timed:
        """One denoising step of exact requests for pictures of this share of the native side."""
        side = self._side(share)
        image, grid = self._encode_image(side), self.family.grid(side, side)
        latents = self.family.denoiser_input(image.begin(grid))
        row = replace(self._row(1.0), latents=latents, condition=image.condition, grid=grid)
        tokens = self._text_tokens + (1 + self.info.conditions_per_token) * grid[0] * grid[1]
        return DENOISE, Work.of([tokens] * number), lambda: self.family.predict([row] * number, self.group)

    def _row(self, share: float) -> Row:
        """The row of a request with this share of its tokens active, or of an exact one."""
        number = max(1, int(share * self._num_tokens))
        is_exact, active = number == self._num_tokens, torch.arange(number)
        return Row(
            **self._of_any_row,
            active=None if is_exact else active.to(self._image.latents.device),
            box=None if is_exact else around(active, self._grid[1]),
            pages=None if is_exact else self._pages,
            modulation=self._modulation,
            prompt_state=self._prompt_state,
        )

    @cached_property
    def _modulation(self) -> Tensor | None:
        """As in a run, which has a table of all levels; without it a GPU's steps are not captured. None on a CPU: what
        is predicted there was held against real runs with steps that compute it, which took 4 to 10 % longer."""
        if self.info.device == "cpu":
            return None
        return self._modulation_of(self._image, self._text)

    def _modulation_of(self, image: EncodedImage, text: EncodedText) -> Tensor | None:
        """One step's row of a modulation table."""
        pooled, scale = text.pooled_prompt_embeds, self.info.default_guidance_scale
        return self.family.modulation(ModulationInputs(pooled, scale, image.sigmas[:1], self.most_rows))

    @cached_property
    def _prompt_state(self) -> Tensor | None:
        return self.family.prompt_state(self._text.prompt_embeds)

    @cached_property
    def _prime_row(self) -> PrimeRow:
        assert self.info.page_scheme is not None
        nbytes = self._layout.entry_bytes(self._num_tokens)
        entry = torch.zeros(nbytes, dtype=torch.uint8, device=self._image.latents.device)
        return PrimeRow(**self._of_any_row, hidden=None, entry=entry)

    @property
    def _of_any_row(self) -> dict[str, Any]:
        """The fields that a `Row` and a `PrimeRow` share."""
        return {
            "latents": self.family.denoiser_input(self._image.begin(self._grid)),
            "condition": self._condition,
            "prompt_embeds": self._text.prompt_embeds,
            "pooled_prompt_embeds": self._text.pooled_prompt_embeds,
            "sigma": self._image.sigmas[0],
            "guidance_scale": self.info.default_guidance_scale,
            "grid": self._grid,
            "references": tuple(self.family.grid(*size) for size in self._beside),
        }

    @cached_property
    def _pages(self) -> Pages:
        """Pages between two keyframes, the most frequent case."""
        near = self._prime_row.entry
        return Pages(self._layout, self._num_tokens, near, near.clone(), 0.5)

    @property
    def _layout(self) -> PageLayout:
        assert self.info.page_scheme is not None
        layout = self.info.page_scheme.layout
        return layout.with_conditions(self._num_conditions) if self.references else layout

    # ------------------------------------------------------------------------------------------------ sizes

    @cached_property
    def _text(self) -> EncodedText:
        return self._encode_text()

    @cached_property
    def _image(self) -> EncodedImage:
        return self._encode_image(self._side(1.0))

    @property
    def _condition(self) -> Tensor:
        """That of the picture; with references zeros of its size, since no number in it matters."""
        condition = self._image.condition
        return condition.new_zeros(self._num_conditions, condition.shape[1]) if self.references else condition

    @property
    def _num_conditions(self) -> int:
        beside = self.info.num_reference_tokens(self._beside)
        return self.info.num_condition_tokens(self._num_tokens, has_template=True, reference_tokens=beside)

    @property
    def _beside(self) -> Sequence[tuple[int, int]]:
        """(width, height) of each reference: squares, made smaller."""
        rule = self.info.references
        return () if rule is None else self.references * (rule.size(rule.pixels, rule.pixels),)

    @property
    def _text_tokens(self) -> int:
        side = self._side(1.0)
        return self.info.max_text_tokens + self.info.text_tokens_beside(side, side, self._beside)

    @property
    def num_row_tokens(self) -> int:
        """Tokens of an exact row: text, image and condition tokens."""
        return self._text_tokens + self._num_tokens + self._num_conditions

    def share_of(self, tokens: float) -> float:
        """The share of active tokens, at least 0, with which a row computes this many tokens, those of its text
        included."""
        return max(0.0, (tokens - self._text_tokens) / self._num_tokens)

    @property
    def _grid(self) -> tuple[int, int]:
        return self.family.grid(self._side(1.0), self._side(1.0))

    @property
    def _num_tokens(self) -> int:
        rows, columns = self._grid
        return rows * columns

    def _side(self, share: float) -> int:
        """A share of the native side in pixels, rounded down to a multiple of the token size."""
        token_size = self.info.token_size
        return max(token_size, int(self.info.native_size * share) // token_size * token_size)
