"""The forward pass of UNet denoisers, over diffusers' `UNet2DConditionModel`.

Convolutions need whole pictures, so only pictures of one size can share a pass. Rows with active tokens, and templates
that are primed, go layer by layer (see `unet_layers.py` and `unet_blocks.py`). So do rows that compute every token
where blocks are fused (`unet_fused.py`); elsewhere they go through the diffusers module itself. What shares a pass: on
a GPU, whole rows of one size, templates of one size, and the rows of one masked request, each with the same adapters;
on a CPU, only the whole rows of one request; on a GPU with `--batch-invariant` no rows, since ranks may share out the
rows of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from core.model_info import BlockRun
from core.page_scheme import PageDtype, PageLayout
from core.patches import PatchSet
from model_executor.graphs.cuda_capture import capture_on
from model_executor.graphs.static_rows import is_of_one_request, is_repeatable
from model_executor.graphs.step_graphs import StepGraphs
from model_executor.kernels.cpu_layers import use_onednn
from model_executor.kernels.linear import onednn_keeps_rows
from model_executor.kernels.operators import Operators, best_operators
from model_executor.models.base import PrimeRow, Row
from model_executor.models.latents import pack, unpack
from model_executor.models.unet.control_box import control_box
from model_executor.models.unet.unet_blocks import TOKEN_SIDE, Steering, UnetSource, Walk
from model_executor.models.unet.unet_conditions import UnetConditions, texts
from model_executor.models.unet.unet_fused import FusedEdit, finish, is_affine
from model_executor.models.unet.unet_layers import Layers
from model_executor.models.unet.unet_sources import Templates, UnetEdit, Whole
from model_executor.patches.module_patches import ModulePatches

AnyRow = TypeVar("AnyRow", Row, PrimeRow)

Numbers = Sequence[int]
"""Indices of rows in a batch, ascending."""


class Arranged(NamedTuple):
    """A UNet, with certain adapters or none, and its layers in the order they run, compiled where operators do."""

    module: Any
    layers: Layers


class Unet:
    """Runs a UNet on batches of rows.

    module: the UNet. num_train_timesteps: its scheduler's. token_size: pixels per token side. operators: what reads and
    makes pages, None for the fastest on the device. has_scores: whether it sees an aesthetic score instead of the
    target size.

    On a CPU only the rows of one request share a pass: a product's rounding may depend on its number of rows, and a
    picture must not depend on the other requests in its batch. This costs little: a pass of four rows took 0.85 of the
    time of four passes (320 channels, 16x16 latents, one core). Where oneDNN computes even those differently, in
    bfloat16 with AMX, no two rows do.
    """

    def __init__(
        self,
        module: Any,
        num_train_timesteps: int,
        token_size: int,
        operators: Operators | None = None,
        *,
        has_scores: bool = False,
    ) -> None:
        convolutions: list[Any] = [layer for layer in module.modules() if isinstance(layer, torch.nn.Conv2d)]
        for convolution in convolutions:  # faster, as in `vae.ImageVae`; quantised layers stay
            convolution.to(memory_format=torch.channels_last)
        self.module = module
        self._operators = operators or best_operators(module.device)
        # Whether all rows of one size share a pass; with `--batch-invariant` no two rows do.
        self._is_shared = module.device.type != "cpu" and not self._operators.is_invariant
        self._keeps_rows = not self._operators.is_invariant and onednn_keeps_rows(module.dtype)
        self._fused = self._operators.of_unets(module.device)
        if module.device.type == "cpu" and self._fused is None:
            use_onednn(module)
        self._conditions = UnetConditions(num_train_timesteps, token_size, module.device, has_scores=has_scores)
        self._num_levels = len(module.down_blocks)
        self.patches = ModulePatches(module, module.device, module.dtype, self._arrange)
        self.graphs = StepGraphs(capture_on(module.device))

    def _arrange(self, module: Any) -> Arranged:
        blocks = (m for m in module.modules() if isinstance(m, ResnetBlock2D | BasicTransformerBlock))
        self._operators.compile_(blocks)
        return Arranged(module, Layers(module, self._operators.compiled, self._fused))

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""
        return self.patches.plain.layers.page_layout(dtype)

    def block_runs(self, num_tokens: int) -> tuple[BlockRun, ...]:
        """The shares of compute of this model's blocks, for a picture of `num_tokens`."""
        return self.patches.plain.layers.block_runs(num_tokens)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Prediction for each row's active tokens, [active tokens, latent width]."""
        predictions: dict[int, Tensor] = {}  # row's number -> its prediction
        whole = [number for number, row in enumerate(rows) if row.active is None or len(row.active) == len(row.latents)]
        masked = [number for number in range(len(rows)) if number not in whole]
        alone = _request if self._keeps_rows else id  # other ranks may have the other rows of a request
        for numbers in _alike(rows, whole, _size if self._is_shared else alone):
            predictions |= dict(zip(numbers, self._repeated([rows[n] for n in numbers], None), strict=True))
        for numbers in _alike(rows, masked, _edit if self._is_shared else id):
            active = rows[numbers[0]].active
            assert active is not None
            predictions |= dict(zip(numbers, self._repeated([rows[n] for n in numbers], len(active)), strict=True))
        return [predictions[number] for number in range(len(rows))]

    def _repeated(self, rows: Sequence[Row], num_active: int | None) -> Sequence[Tensor]:
        """Predictions of rows that share a pass, by a CUDA graph where that can be: all rows of one request, since
        launching its many small kernels takes longer than running them. num_active: None computes all tokens."""
        forward = self._run if num_active is None else self._run_masked
        if not self.graphs.enabled:
            return forward(rows)
        if num_active is None:
            rows = [replace(row, active=None, box=None, pages=None) for row in rows]
        elif any(row.box is None for row in rows) or not self.patches.plain.layers.reads_page_tables:
            return forward(rows)
        if not is_of_one_request(rows) or not all(map(is_repeatable, rows)):
            return forward(rows)
        return self.graphs.run(rows, num_active, forward)

    def prime(self, rows: Sequence[PrimeRow], pages: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """Run all image tokens of each row through the blocks whose last page is in [start, stop), and write their
        outputs into the row's entry. Returns each row's state for the next chunk; () after the last block."""
        hidden: dict[int, tuple[Tensor, ...]] = {}  # row's number -> what its next chunk starts from
        for numbers in _alike(rows, range(len(rows)), _size if self._is_shared else id):
            hidden |= dict(zip(numbers, self._prime([rows[number] for number in numbers], *pages), strict=True))
        return [hidden[number] for number in range(len(rows))]

    def _prime(self, rows: Sequence[PrimeRow], start: int, stop: int) -> Sequence[tuple[Tensor, ...]]:
        """rows: of one size, with the same patches, before the same chunk."""
        arranged = self.patches.under(rows[0].patches)
        layers = arranged.layers
        walk = self._start(arranged, rows, Templates(rows, layers.page_layout, self._operators))
        if before := [row.hidden for row in rows if row.hidden is not None]:
            walk.unpack([torch.cat(parts) for parts in zip(*before, strict=True)])
        layers.run(walk, start, stop)
        if stop == layers.num_pages:
            return [()] * len(rows)
        return list(zip(*(part.split(1) for part in walk.pack()), strict=True))

    def _run_masked(self, rows: Sequence[Row]) -> list[Tensor]:
        """Predictions for the active tokens of each row. rows: of one request."""
        row, fused = rows[0], self._fused
        source = UnetEdit(row, self._operators) if fused is None else FusedEdit(row, self._operators, fused)
        prediction = self._by_layers(rows, source)
        return [pack(image, TOKEN_SIDE)[row.active] for image in prediction.split(1)]

    def _run(self, rows: Sequence[Row]) -> list[Tensor]:
        """Predictions for all tokens of each row. rows: of one size, with the same patches."""
        is_steered = rows[0].streamed is not None  # what is added is asked for between layers
        goes_by_module = self._fused is None and not is_steered
        prediction = self._by_module(rows) if goes_by_module else self._by_layers(rows, Whole())
        return [pack(image, TOKEN_SIDE) for image in prediction.split(1)]

    def _by_layers(self, rows: Sequence[Row], source: UnetSource) -> Tensor:
        """The UNet's output, [rows, channels, height / 8, width / 8]. rows: of one size, with the same patches."""
        module, layers = arranged = self.patches.under(rows[0].patches)
        walk = self._start(arranged, rows, source)
        layers.run(walk)
        if self._fused is not None and is_affine(module.conv_norm_out) and isinstance(module.conv_act, torch.nn.SiLU):
            return finish(self._fused, module, walk.map)
        prediction: Tensor = module.conv_out(module.conv_act(module.conv_norm_out(walk.map)))
        return prediction

    def _by_module(self, rows: Sequence[Row]) -> Tensor:
        """The same by the diffusers module as it is."""
        prediction: Tensor = self.patches.under(rows[0].patches).module(
            self._pictures(rows),
            self._conditions.timesteps(rows),
            encoder_hidden_states=texts(rows),
            added_cond_kwargs=self._conditions.added(rows),
            return_dict=False,
        )[0]
        return prediction

    def _start(self, arranged: Arranged, rows: Sequence[Row | PrimeRow], source: UnetSource) -> Walk:
        """The state before the first layer, as in UNet2DConditionModel.forward. arranged: with the patches of the rows,
        which are of one size."""
        module, layers = arranged
        pictures, text = self._pictures(rows), texts(rows)
        time = module.time_embedding(module.get_time_embed(pictures, self._conditions.timesteps(rows)))
        added = module.get_aug_embed(time, text, self._conditions.added(rows))
        time = time if added is None else time + added
        shifts, keys_values, steering = layers.project(time), _keys_values(rows), self._steering(rows)
        return Walk(module.conv_in(pictures), time, text, source, shifts, keys_values, steering)

    def _steering(self, rows: Sequence[Row | PrimeRow]) -> Steering | None:
        """What other models add for these rows. They have the same active tokens, if any."""
        streamed = [row.streamed for row in rows if isinstance(row, Row) and row.streamed is not None]
        if not streamed:
            return None
        row = rows[0]
        assert isinstance(row, Row)
        return Steering(streamed, control_box(row, self._num_levels), row.grid)

    def keys_values(self, prompt_embeds: Tensor, patches: PatchSet) -> Tensor | None:
        """What the steps of a run compute from a row's prompt alone, for `Row.prompt_state`, [text tokens, width]; None
        where they compute it as they go."""
        return self.patches.under(patches).layers.keys_values(prompt_embeds)

    @staticmethod
    def _pictures(rows: Sequence[Row | PrimeRow]) -> Tensor:
        """The UNet's input: latents and condition, [rows, channels, height / 8, width / 8]."""
        images = (torch.cat([row.latents, row.condition], dim=1) for row in rows)
        return torch.cat([unpack(image, row.grid, TOKEN_SIDE) for image, row in zip(images, rows, strict=True)])


def _keys_values(rows: Sequence[Row | PrimeRow]) -> Tensor | None:
    """Keys and values of the prompts, [rows, text tokens, width]; None unless all rows have them."""
    known = [row.prompt_state for row in rows if isinstance(row, Row) and row.prompt_state is not None]
    return torch.stack(known) if len(known) == len(rows) else None


def _size(row: Row | PrimeRow) -> Hashable:
    """Key of rows of one size, image tokens as (rows, columns) and number of text tokens, and with the same patches:
    convolutions compute all pictures of a pass alike. Either something is added for all of them, or for none."""
    is_steered = isinstance(row, Row) and row.streamed is not None
    return row.grid, len(row.prompt_embeds), row.patches, is_steered


def _request(row: Row) -> Hashable:
    """Key of the rows of one request: they have the same latents tensor."""
    return _size(row), id(row.latents)


def _edit(row: Row) -> Hashable:
    """Key of the rows of one masked request: they also have the same active tokens and pages."""
    return _request(row), id(row.active), id(row.pages)


def _alike(rows: Sequence[AnyRow], numbers: Numbers, key: Callable[[AnyRow], Hashable]) -> Collection[Numbers]:
    """Groups these rows by key."""
    alike: dict[Hashable, list[int]] = {}
    for number in numbers:
        alike.setdefault(key(rows[number]), []).append(number)
    return alike.values()
