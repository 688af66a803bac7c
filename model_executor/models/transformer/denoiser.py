"""The forward pass of transformer denoisers (DiTs), block by block over the sublayers of a diffusers module.

It differs from the module's own forward in the batch: tokens of many requests are rows of one matrix (see
`kernels/ragged.py`), with modulation and attention computed per request. And a request may compute only its active
tokens; their queries also see the keys and values of the other tokens, read from the template's pages. How text,
picture and noise level are embedded before the first block differs by model: see the subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from core.page_scheme import PageDtype, PageLayout
from core.patches import PatchSet
from model_executor.graphs.cuda_capture import capture_on
from model_executor.graphs.static_rows import is_of_one_request, is_repeatable
from model_executor.graphs.step_graphs import StepGraphs
from model_executor.kernels.attention import Attention
from model_executor.kernels.held import hold
from model_executor.kernels.linear import as_linear
from model_executor.kernels.linear_groups import AnyGroup, group_layers, keeps_packed
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.operators import Operators, best_operators
from model_executor.kernels.ragged import Packing, Span, together
from model_executor.kernels.residual import Norm
from model_executor.models.base import ModulationInputs, PrimeRow, Row, Streamed
from model_executor.models.last import Last
from model_executor.models.transformer.blocks import Block
from model_executor.models.transformer.modulation import Modulation
from model_executor.models.transformer.row_sources import EditSource, RowSource, TemplateSource, text_lengths
from model_executor.models.transformer.rows import lacking_pages, with_heads, with_own_heads, with_text
from model_executor.models.transformer.sequence import Shard, Team
from model_executor.models.transformer.stream import Stream
from model_executor.page_cache.pages import PageEntry
from model_executor.parallel.group import Group, shares
from model_executor.patches.batch_patches import BatchPatches, Where, by_patches
from model_executor.patches.group_patches import GroupPatches

CACHED_GRIDS = 32
"""Tables of positions cached, one per text length and sizes of image and references; FLUX's takes 8 bytes * tokens *
head dim / 2."""

MODULATION_BYTES = 64 * 1024**2
GPU_MODULATION_BYTES = 256 * 1024**2
"""Limit on a request's modulation tables, all noise levels and rows together, on a CPU and on a GPU, where computing
them in every step would be a launch for each of several hundred products. The embedded model needs 1.2 MB per row at 28
steps; FLUX.1-dev 106 MB at 50 steps."""


KEPT_MODULATION_BYTES = 8 * 1024**2
"""Largest table that is kept for the next request. One of the embedded model takes 3 ms to make for 8 steps."""


def modulation_limit(device: torch.device) -> int:
    """Most bytes that the modulation tables of a request's rows take on this device."""
    return MODULATION_BYTES if device.type == "cpu" else GPU_MODULATION_BYTES


SMALL_PASS = 2048
"""Largest exact step, in tokens, that is captured as a CUDA graph: a larger one keeps a GPU busy for longer than the
host takes to launch it."""

AnyRow = TypeVar("AnyRow", Row, PrimeRow)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the modulation of one row is computed from, at one noise level. The members are those of `Row`."""

    sigma: Tensor
    pooled_prompt_embeds: Tensor
    guidance_scale: float
    patches: PatchSet

    @classmethod
    def of(cls, row: Row | PrimeRow) -> Conditions:
        return cls(row.sigma, row.pooled_prompt_embeds, row.guidance_scale, row.patches)


class Denoiser(ABC):
    """Runs a diffusers transformer on batches of rows. Construct it after weights are loaded and threads are set (see
    `linear_groups`).

    module: the diffusers transformer. num_train_timesteps: its scheduler's. operators: the kernels to use, None for the
    fastest on the device. owns_module: the module is not run elsewhere, so weights need not be held twice.
    """

    rows_per_token: ClassVar[int] = 1
    """As in `PageLayout`. With 2, a row's condition tokens, if there are any, follow its image tokens: those of the
    template, then those of references. Only blocks that compute all tokens compute them."""

    sees_clean_conditions: bool = False
    """Whether condition tokens are modulated as at noise level 0, and not as at their row's: a row then has two levels.
    The output norm has both too, but no result has condition tokens."""

    embedding: ClassVar[str] = ""
    """The part of the transformer that runs as a whole, row by row, to embed noise level and prompt; "": there is
    none."""

    fits_narrow_adapters: ClassVar[bool] = False
    """Whether an adapter may know only a layer's first inputs; it then leaves the others alone."""

    def __init__(
        self, module: Any, num_train_timesteps: int, operators: Operators | None = None, *, owns_module: bool = False
    ) -> None:
        self.module = module
        # Of layers that have come packed, and of an outline, the parameters are on the meta device.
        self._device: torch.device = next((p.device for p in module.parameters() if not p.is_meta), module.device)
        self._owns_module = owns_module
        self.dtype: torch.dtype = module.dtype  # kept, because diffusers searches all modules for it, 0.6 ms each time
        self._num_train_timesteps = num_train_timesteps
        self._operators = operators or best_operators(self._device)
        nbytes = sum(parameter.nbytes for parameter in module.parameters())
        self._pack = keeps_packed(nbytes, self.dtype, self._operators.kernels)
        self._groups: dict[tuple[nn.Module, ...], AnyGroup] = {}  # layers -> their group
        self._build()
        self.patches = GroupPatches(
            module,
            self._groups,
            self.embedding,
            self._device,
            self.dtype,
            fits_narrow=self.fits_narrow_adapters,
        )
        if owns_module and self._pack:
            _unmap(module)
        self._last_modulation: Last[ModulationInputs, Tensor] = Last()
        self._rotary_table = lru_cache(maxsize=CACHED_GRIDS)(self._make_rotary_table)
        self.graphs = StepGraphs(capture_on(self._device))

    def _build(self) -> None:
        self._blocks = self._make_blocks()
        self._num_heads, self._head_dim = self._heads_of(self.module.config)
        self.num_pages = 0
        for block in self._blocks:
            block.page = self.num_pages
            self.num_pages += block.num_pages
        self._first_pages = [block.page for block in self._blocks]
        last, self._image_out = self._make_output()
        of_blocks = [*(block.modulation for block in self._blocks), last]
        self._modulations = list(dict.fromkeys(of_blocks))
        self._modulation_numbers = list(map(self._modulations.index, of_blocks))

    def computing_with(self, operators: Operators) -> Self:
        """A copy of this denoiser that computes with other operators; the layers are shared and packed as they were."""
        twin = copy(self)
        twin._operators = operators
        twin._last_modulation = Last()
        twin.graphs = StepGraphs(capture_on(self._device))  # a graph repeats the operators that were captured
        return twin

    # ------------------------------------------------------------------------------------------- each model's own

    @staticmethod
    @abstractmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        """Attentions over image tokens in a model of this configuration: each has a page."""

    @staticmethod
    def _heads_of(config: Mapping[str, Any]) -> tuple[int, int]:
        """(heads of attention, head dim) in a model of this configuration."""
        return config["num_attention_heads"], config["attention_head_dim"]

    @abstractmethod
    def _make_blocks(self) -> list[Block]:
        """The blocks in the order they run. Called once `_group` can be used."""

    def _make_output(self) -> tuple[Modulation, AnyGroup]:
        """The modulation of the last norm, and the layer after it."""
        return Modulation([self.module.norm_out.linear], [0], self._group), self._group(self.module.proj_out)

    @abstractmethod
    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        """Embedded text and image tokens of all rows, [tokens, hidden]. computed: per row, the image tokens to embed;
        None for all, with the condition tokens. where: the rows that patches change."""

    @abstractmethod
    def _conditioning(self, rows: Sequence[Conditions], where: Segments) -> Sequence[Tensor]:
        """What each of `_modulations` is computed from, those of the blocks and last the output norm's: each [rows,
        hidden]. A row's bits do not depend on the other rows. where: the rows that patches change."""

    def _make_rotary_table(self, text_tokens: int, grids: tuple[tuple[int, int], ...]) -> Tensor:
        """Rotations of the text tokens, then the image tokens row by row, then the condition tokens of each picture, if
        there are any: complex64 [tokens, 1, 1, head dim / 2]. By default the identity, for models that add positions to
        their tokens. grids: of the image, then of the pictures, as (rows, columns).
        """
        tokens = text_tokens + sum(rows * columns for rows, columns in grids)
        return torch.ones(tokens, 1, 1, self._head_dim // 2, dtype=torch.complex64, device=self._device)

    def _text_tokens(self, row: Row | PrimeRow) -> int:
        """Text tokens of a row in the pass, with fillers."""
        return len(row.prompt_embeds)

    def _fillers(self, row: Row | PrimeRow) -> int:
        """How many of these, the last ones, fill up the image: computed in every pass, they are in no page."""
        return 0

    def prompt_state(self, prompt_embeds: Tensor, patches: PatchSet) -> Tensor | None:
        """What the steps of a run compute from a row's prompt alone, for `Row.prompt_state`: a row for each text token
        but the fillers. None: nothing."""
        return None

    # ------------------------------------------------------------------------------------------------------- pages

    @classmethod
    def layout_of(cls, config: Mapping[str, Any], dtype: PageDtype) -> PageLayout:
        """The shape of the pages of a model with this configuration: keys and values of all its attentions."""
        num_heads, head_dim = cls._heads_of(config)
        return PageLayout(
            num_blocks=cls._count_pages(config),
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=dtype,
            rows_per_token=cls.rows_per_token,
        )

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""
        return self.layout_of(self.module.config, dtype)

    def _group(self, *layers: nn.Module) -> AnyGroup:
        """The layers as one group that shares an input."""
        operators, linears = self._operators, tuple(map(as_linear, layers))
        group = group_layers(linears, operators.linear, self._pack, operators.kernels, owns_layers=self._owns_module)
        self._groups[layers] = group
        return group

    # ------------------------------------------------------------------------------------------------------- passes

    def forward(self, rows: Sequence[Row], group: Group | None = None) -> list[Tensor]:
        """Velocity of each row's active tokens, [active tokens, latent width].

        group: of ranks that compute the tokens together, all of which call this with the same rows and get the same
        result. Raises ValueError for a row with active tokens but without pages, GroupBrokenError.
        """
        rows = mine = [self._with_prompt_state(row) for row in rows]
        if any(row.own is not None for row in rows):
            heads = None if group is None else self._shares(group)[group.me]
            mine = [with_own_heads(row, heads) for row in rows]
            for row in lacking_pages(mine, group):  # one by one: the batch was sized by the tokens that it computes
                self._run([row], group)
        return self._run(mine, group)

    def _with_prompt_state(self, row: Row) -> Row:
        if row.prompt_state is not None:
            return row
        state = self.prompt_state(row.prompt_embeds, row.patches)
        return row if state is None else replace(row, prompt_state=state)

    def _run(self, rows: Sequence[Row], group: Group | None) -> list[Tensor]:
        if group is None and self._is_captured(rows):
            alike = [replace(row, box=None) for row in rows]  # which a transformer does not read
            results = self.graphs.run(alike, self._num_active(rows[0]), self._forward)
        else:
            results = _in_order(rows, self._forward if group is None else partial(self._forward_together, group=group))
        for row in rows:
            if row.own is not None and row.active is None:
                row.own.note_made()
        return results

    def _is_captured(self, rows: Sequence[Row]) -> bool:
        """Whether this step may be a CUDA graph: a mask-aware one of one request, or an exact one of a small picture.
        Larger steps keep a GPU busy for longer than the host takes to launch them."""
        if not self.graphs.enabled or not is_of_one_request(rows) or not self._reads_page_tables:
            return False
        if not all(is_repeatable(row) and row.modulation is not None for row in rows):
            return False
        if rows[0].active is None:
            return sum(self._num_tokens(row) + self._text_tokens(row) for row in rows) <= SMALL_PASS
        return len(rows[0].active) < self._num_tokens(rows[0])

    @property
    def _reads_page_tables(self) -> bool:
        has_norm = any(block.has_norm for block in self._blocks)
        return self._operators.reads_page_tables(self._head_dim, has_norm=has_norm)

    def _num_active(self, row: Row) -> int | None:
        """To how many tokens those of a captured step are filled up: with the text to whole tiles of attention, but to
        less than all, which would be an exact step."""
        if row.active is None:
            return None
        text, tile = self._text_tokens(row), self._operators.query_tile
        tiles = -(-(text + len(row.active)) // tile)
        return max(len(row.active), min(tiles * tile - text, self._num_tokens(row) - 1))

    def _forward(self, rows: Sequence[Row]) -> list[Tensor]:
        edits = list(map(self._edit_source, rows))
        velocities = zip(rows, self._pass(self._start(rows, edits), edits, rows), strict=True)
        return [velocity[: len(row.latents)] for row, velocity in velocities]

    def _edit_source(self, row: Row) -> EditSource:
        sizes = self._num_tokens(row), self._text_tokens(row), self._fillers(row)
        return EditSource(row, *sizes, self._first_pages, self._operators)

    def _forward_together(self, rows: Sequence[Row], group: Group) -> list[Tensor]:
        heads = self._shares(group)
        edits = [self._edit_source(with_heads(row, heads[group.me])) for row in rows]
        shards = [Shard(edit, group, self._device) for edit in edits]
        parts = [with_text(row, shard.text) for row, shard in zip(rows, shards, strict=True)]
        stream = self._start(parts, shards, Team(group, heads))
        return [
            group.gather(velocity, shard.final_lengths())[: len(row.latents)]
            for row, shard, velocity in zip(rows, shards, self._pass(stream, shards, rows), strict=True)
        ]

    def _shares(self, group: Group) -> list[Span]:
        """Every member's heads."""
        return shares(self._num_heads, group.degree)

    def _pass(self, stream: Stream, edits: Sequence[EditSource | Shard], rows: Sequence[Row]) -> list[Tensor]:
        """Velocity of the image tokens that the last block computes, of each row."""
        steered = [number for number, row in enumerate(rows) if row.streamed is not None]
        for number, block in enumerate(self._blocks):
            stream.keep([edit.kept(number) for edit in edits], self._apart(edits, number))
            block.run(stream, number)
            for row in steered:
                self._steer(stream, edits[row], rows[row].streamed, row, number)
        last = len(self._blocks)
        stream.keep([edit.kept(last) for edit in edits], self._apart(edits, last))
        velocity = self._project_out(stream)
        return [velocity[start:stop] for start, stop in stream.packing.image]

    @staticmethod
    def _steer(stream: Stream, edit: EditSource | Shard, streamed: Streamed | None, row: int, number: int) -> None:
        """Add what another model adds behind block `number` to this row's image tokens."""
        added = None if streamed is None else streamed(number)
        if added is not None:
            start, stop = stream.packing.joint_image[row]
            edit.add_to(stream.hidden[start:stop], number, added)

    def _apart(self, sources: Sequence[RowSource], number: int) -> list[int] | None:
        """As for `Packing.of`, in block `number`."""
        return [source.num_conditions(number) for source in sources] if self.sees_clean_conditions else None

    def prime(self, rows: Sequence[PrimeRow], pages: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """Run all image tokens of each row through the blocks whose last page is in [start, stop), and write these
        blocks' pages into the row's entry.

        Returns each row's hidden state for the next chunk, [text and image tokens, hidden]; () after the last block, of
        which only keys and values are computed. A row's bits depend neither on the other rows nor on the chunks.
        """
        return _in_order(rows, partial(self._prime, pages=pages))

    def _prime(self, rows: Sequence[PrimeRow], pages: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        templates = [self._template(row) for row in rows]
        stream = self._start(rows, templates)
        for number, block in enumerate(self._blocks):
            if pages[0] <= block.page + block.num_pages - 1 < pages[1]:
                if number == len(self._blocks) - 1:
                    block.finish(stream, number)
                    return [()] * len(rows)
                block.run(stream, number)
        return [(stream.hidden[start:stop].clone(),) for start, stop in stream.packing.joint]

    def _template(self, row: PrimeRow) -> TemplateSource:
        num_tokens, text_tokens, fillers = self._num_tokens(row), self._text_tokens(row), self._fillers(row)
        return TemplateSource(self._entry(row), text_tokens, num_tokens, num_tokens - len(row.latents), fillers)

    def modulation(self, inputs: ModulationInputs) -> Tensor | None:
        """All blocks' shifts, scales and gates at each of these noise levels, [levels, width], for `Row.modulation`;
        bit-identical to what each step would compute. None if the request's tables would take more than
        MODULATION_BYTES, or GPU_MODULATION_BYTES. On a CPU a small one is kept for the next request with the same
        inputs.
        """
        width = self._levels_per_row * sum(part.width for part in self._modulations)
        size = len(inputs.sigmas) * width * self.dtype.itemsize
        if inputs.num_rows * size > modulation_limit(self._device):
            return None
        if self._keeps_modulation(inputs, size):
            return self._last_modulation.get(inputs, lambda: self._modulation_table(inputs))
        return self._modulation_table(inputs)

    def _keeps_modulation(self, inputs: ModulationInputs, size: int) -> bool:
        """Whether a table of so many bytes is kept. Not on a GPU: the host would wait for all that is queued there to
        compare what is in its memory."""
        may_return = inputs.cache_salt is not None and not inputs.patches
        return may_return and size <= KEPT_MODULATION_BYTES and self._device.type == "cpu"

    def _modulation_table(self, inputs: ModulationInputs) -> Tensor:
        sigmas, patches = inputs.sigmas, inputs.patches
        levels = self._levels(
            Conditions(sigma, inputs.pooled_prompt_embeds, inputs.guidance_scale, patches) for sigma in sigmas
        )
        where = BatchPatches([patches], self._device).segments([(0, len(levels))])
        parts = zip(self._modulations, self._conditioning(levels, where), strict=True)
        table = torch.cat([part.product(conditioning, where) for part, conditioning in parts], dim=1)
        return table.view(len(sigmas), -1)

    # ------------------------------------------------------------------------------------------------------- inputs

    def _start(self, rows: Sequence[Row | PrimeRow], sources: Sequence[RowSource], team: Team | None = None) -> Stream:
        """The stream before its first block. rows: with the text tokens that it contains."""
        computed = [source.computed(0) for source in sources]
        texts, fillers = zip(*map(text_lengths, sources), strict=True)
        images = [
            source.num_tokens if tokens is None else len(tokens)
            for source, tokens in zip(sources, computed, strict=True)
        ]
        packing = Packing.of(texts, images, fillers, self._apart(sources, 0))
        hidden = [row.hidden[0] for row in rows if isinstance(row, PrimeRow) and row.hidden is not None]
        rotary = together([part for each in zip(rows, sources, strict=True) for part in self._rotary(*each)])
        patches = BatchPatches([row.patches for row in rows], self._device)
        where = patches.on(packing)
        joint = torch.cat(hidden) if hidden else self._embed(rows, computed, packing, where)
        modulation, attentions = self._modulation_of(rows, patches), self._attentions(sources, joint, team)
        residual = self._operators.residual(joint)
        return Stream(residual, packing, patches, where, rotary, modulation, sources, *attentions, self._operators)

    def _attentions(
        self, sources: Sequence[RowSource], like: Tensor, team: Team | None
    ) -> tuple[Attention, Attention | None]:
        """Attention over text and image together, and over the image with its fillers where blocks have it; dtype and
        device of `like`."""
        heads = self._num_heads if team is None else team.num_heads
        sizes = [(source.text_tokens, source.num_tokens) for source in sources]
        joint, image = self._operators.attention(sizes, heads, self._head_dim, like), None
        if any(block.has_image_attention for block in self._blocks):
            alone = [(source.fillers, source.num_tokens) for source in sources]
            image = self._operators.attention(alone, heads, self._head_dim, like, joint)
        return (
            (joint, image)
            if team is None
            else (team.attention(joint), image and team.attention(image, with_text=False))
        )

    def _modulation_of(
        self, rows: Sequence[Row | PrimeRow], patches: BatchPatches
    ) -> Callable[[int], Sequence[Tensor]]:
        """Block number -> its shifts, scales and gates, each [requests * levels, hidden]; the last number: the output
        norm's."""
        levels = self._levels_per_row
        known = [row.modulation for row in rows if isinstance(row, Row) and row.modulation is not None]
        if len(known) == len(rows):
            table = together(known).view(levels * len(rows), -1)
            tables = table.split([part.width for part in self._modulations], dim=1)
            return partial(self._parts, lambda index: tables[index])
        where = patches.segments([(levels * number, levels * (number + 1)) for number in range(len(rows))])
        conditioning = self._conditioning(self._levels(map(Conditions.of, rows)), where)
        # Blocks that share a modulation follow each other.
        product_of = lru_cache(maxsize=1)(lambda index: self._modulations[index].product(conditioning[index], where))
        return partial(self._parts, product_of)

    def _parts(self, product_of: Callable[[int], Tensor], number: int) -> Sequence[Tensor]:
        """The shifts, scales and gates of block `number`. product_of: index of a modulation -> its product."""
        index = self._modulation_numbers[number]
        return self._modulations[index].parts(product_of(index))

    @property
    def _levels_per_row(self) -> int:
        return 2 if self.sees_clean_conditions else 1

    def _levels(self, rows: Iterable[Conditions]) -> list[Conditions]:
        """What all levels of these rows are computed from, row by row."""
        if not self.sees_clean_conditions:
            return list(rows)
        pairs = ((row, replace(row, sigma=torch.zeros_like(row.sigma))) for row in rows)
        return [level for pair in pairs for level in pair]

    def _num_tokens(self, row: Row | PrimeRow) -> int:
        """Image and condition tokens of a row."""
        return len(row.latents) + (len(row.condition) if self.rows_per_token > 1 else 0)

    def _rotary(self, row: Row | PrimeRow, source: RowSource) -> list[Tensor]:
        """Rotations of a request's tokens before the first block, in parts: complex64 [tokens, 1, 1, head dim / 2]."""
        beside = source.num_tokens - len(row.latents)
        has_own = beside > sum(rows * columns for rows, columns in row.references)
        grids = (row.grid, *((row.grid,) if has_own else ()), *row.references)
        table, tokens = hold(self._rotary_table(source.text_tokens, grids)), source.computed(0)
        if tokens is None:
            return [table]
        return [table[: source.text_tokens][source.text], table[source.text_tokens :][tokens]]

    def _entry(self, row: PrimeRow) -> PageEntry:
        """The entry to write. The dtype of its pages follows from its size."""
        num_tokens, size = len(row.latents), row.entry.numel()
        for layout in map(self.page_layout, get_args(PageDtype)):
            if row.references:
                layout = layout.with_conditions(len(row.condition))
            if layout.entry_bytes(num_tokens) == size:
                return PageEntry(row.entry, layout, num_tokens, self._operators.quantise)
        raise ValueError(f"an entry of {size} bytes holds no pages of {num_tokens} tokens of this model")

    # ------------------------------------------------------------------------------------------------------- output

    def _project_out(self, stream: Stream) -> Tensor:
        """Velocity of all image tokens, [tokens, latent width]."""
        factor, shift = stream.modulation(len(self._blocks))
        norm = Norm(stream.packing.modulated_image, factor, shift)
        (normed,) = stream.residual.normed(self.module.norm_out.norm.eps, norm)
        return self._image_out(normed, stream.where.image)


def _in_order(rows: Sequence[AnyRow], run: Callable[[Sequence[AnyRow]], list[Result]]) -> list[Result]:
    """The results for rows of which those with the same patches are run side by side."""
    order = by_patches([row.patches for row in rows])
    results = dict(zip(order, run([rows[number] for number in order]), strict=True))
    return [results[number] for number in range(len(rows))]


def _unmap(module: Any) -> None:
    """Copy the few remaining parameters: as views they would keep the whole checkpoint file mapped, which counts as
    memory. Not of a module for which another process has done so (`model_executor/weights`), which shares them."""
    if getattr(module, "is_unmapped", False):
        return
    module.is_unmapped = True
    for parameter in module.parameters():
        if not parameter.is_meta and type(parameter) is nn.Parameter:  # quantised ones are not views of the file
            parameter.data = parameter.data.clone()


def select(x: Tensor, tokens: Tensor | None) -> Tensor:
    """The rows of x for these tokens, None for all."""
    return x if tokens is None else x[tokens]


def with_conditions(row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
    """The denoiser's input for these tokens, None for all, where the clean latents of template and references are
    condition tokens: [tokens, latent width]."""
    return select(torch.cat([row.latents, row.condition]), tokens)


def channels_first(patches: Tensor, side: int) -> Tensor:
    """Patches whose channels come last, [tokens, side * side * channels], as latents have them: [tokens, channels *
    side * side]."""
    channels = patches.shape[1] // side**2
    return patches.view(len(patches), side, side, channels).permute(0, 3, 1, 2).flatten(1)


def channels_last(patches: Tensor, side: int) -> Tensor:
    """The reverse of `channels_first`."""
    channels = patches.shape[1] // side**2
    return patches.view(len(patches), channels, side, side).permute(0, 2, 3, 1).flatten(1)
