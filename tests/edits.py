"""Runs one edit as a worker receives it: arrays in an arena, and plans that take it through every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from core.graph.op import OpWork
from core.handles import ArrayRef, TensorKey, TensorRef
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from core.messages.worker import Batch, Free, Item, StepPlan
from core.patches import PatchSet
from core.sampling_params import SamplingParams
from core.scheduling.ops.decode import Decode
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.image_encode import ImageEncode
from core.scheduling.ops.text_encode import TextEncode
from core.scheduling.ops.upscale import Upscale

SIZE = (96, 64)
"""width, height in pixels."""

TOKEN = 16

_numbers = count()


def picture(seed: int, size: tuple[int, int] = SIZE) -> npt.NDArray[np.uint8]:
    """Random RGB, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def box_mask(size: tuple[int, int] = SIZE) -> npt.NDArray[np.uint8]:
    """A box in the middle, uint8 [height, width], 1 = edit."""
    mask = np.zeros((size[1], size[0]), dtype=np.uint8)
    mask[size[1] // 4 : -size[1] // 4, size[0] // 5 : -size[0] // 5] = 1
    return mask


class Edit:
    """An edit of `picture(seed)` under `box_mask()`."""

    def __init__(
        self,
        arena: Arena,
        space: ArenaAllocator,
        request_id: str,
        *,
        seed: int,
        steps: int = 3,
        prompt: str = "a red striped shirt",
        size: tuple[int, int] = SIZE,
        model: str = "tiny",
    ) -> None:
        self.request_id, self.seed, self.steps, self.prompt, self.size = request_id, seed, steps, prompt, size
        self.model = model
        self.strength = 1.0
        self.guidance_scale = 30.0
        self.true_cfg_scale = 1.0
        self.negative_prompt: str | None = None
        self.class_label: int | None = None  # instead of a prompt
        self.patches: PatchSet = ()
        self.shift: float | None = None
        self.sigmas: tuple[float, ...] | None = None
        self.solver_order = 1
        self.extra_steps = 0
        self._arena, self._space = arena, space
        width, height = size
        self.template = self.share(picture(seed, size))
        self.mask = self.share(box_mask(size))
        self.pixels = self.share(np.zeros((height, width, 3), dtype=np.uint8))
        self.upload_size = size  # of the picture that a pipeline is given
        self.seen = self.template  # by the text encoder
        self.references: tuple[ArrayRef, ...] = ()
        self.num_controls = 0

    def result(self) -> npt.NDArray[np.uint8]:
        """The decoded picture."""
        return self._arena.view(self.pixels).copy()

    @property
    def num_steps(self) -> int:
        """Steps that are run: strength below 1 omits the first ones, a solver of order 2 takes each twice, and PNDM one
        of them.
        """
        return self.solver_order * (self.num_denoising_steps - 1) + 1 + self.extra_steps

    @property
    def num_denoising_steps(self) -> int:
        return SamplingParams(num_inference_steps=self.steps, strength=self.strength).num_denoising_steps

    def key(self, node: str, name: str, version: int = 0) -> TensorKey:
        return TensorKey(self.request_id, node, name, version)

    def state_key(self, name: str, steps: int) -> TensorKey:
        """Key of latents or sampler state after so many steps."""
        return self.key("denoise", name, steps) if steps else self.key("image_encode", name)

    def encode_plan(self, max_sequence_length: int = 16, start: TensorRef | None = None) -> StepPlan:
        """start: latents that sampling starts from instead of the template's."""
        text = TextEncode(
            prompt=self.prompt,
            max_sequence_length=max_sequence_length,
            negative_prompt=self.negative_prompt,
            template=self.seen,
            references=self.references,
            content_id=self.request_id,
            patches=self.patches,
        )
        image = ImageEncode(
            template=self.template,
            mask=self.mask,
            width=self.size[0],
            height=self.size[1],
            seed=self.seed,
            num_inference_steps=self.steps,
            num_denoising_steps=self.num_denoising_steps,
            computed_steps=tuple(range(self.num_denoising_steps)),
            is_exact=True,
            references=self.references,
            num_controls=self.num_controls,
            shift=self.shift,
            sigmas=self.sigmas,
        )
        texts = [self._batch("text_encode", [self._item("text_encode", text)])] if self.class_label is None else []
        images = self._batch("image_encode", [self._item("image_encode", image, () if start is None else (start,))])
        return _plan(*texts, images)

    def denoise_plan(self, step: int, *, keep_clean: bool = False) -> StepPlan:
        return _plan(self._batch("denoise", [self._denoise_item(step, keep_clean)]))

    def decode_plan(self, rank: int = 0, latents: TensorRef | None = None) -> StepPlan:
        """A plan that decodes; what it frees is to be freed after it. latents: where they are, if not on `rank`."""
        work = Decode(width=self.size[0], height=self.size[1], pixels=self.pixels)
        last = latents or TensorRef(self.state_key("latents", self.num_steps), 0)
        item = Item(self.request_id, "decode", self.model, work, (last,))
        batch = self._batch("decode", [item], rank)
        free = Free(TensorKey(self.request_id, "", ""), tuple({0, rank}))
        return StepPlan(seq=next(_numbers), batches=(batch,), free=(free,))

    @staticmethod
    def denoise_batch(edits: Sequence[Edit], steps: Mapping[Edit, int]) -> Batch:
        """One step of all edits together, each at its own step number. All must have one denoiser."""
        return edits[0]._batch("denoise", [edit._denoise_item(steps[edit], False) for edit in edits])

    def _denoise_item(self, step: int, keep_clean: bool) -> Item:
        work = Denoise(
            step=step,
            width=self.size[0],
            height=self.size[1],
            active=None,
            guidance_scale=self.guidance_scale,
            true_cfg_scale=self.true_cfg_scale,
            class_label=self.class_label,
            keep_clean=keep_clean,
            patches=self.patches,
            reference_sizes=tuple((ref.shape[1], ref.shape[0]) for ref in self.references),
        )
        texts = ("prompt_embeds", "text_lengths", "pooled_prompt_embeds") if self.class_label is None else ()
        inputs = (
            *(self._ref("text_encode", name) for name in texts),
            TensorRef(self.state_key("latents", step), 0),
            TensorRef(self.state_key("sampler", step), 0),
            self._ref("image_encode", "condition"),
            self._ref("image_encode", "outside"),
            self._ref("image_encode", "sigmas"),
        )
        return Item(self.request_id, "denoise", self.model, work, inputs, step + 1)

    def _batch(self, stage: str, items: Sequence[Item], rank: int = 0) -> Batch:
        return Batch(next(_numbers), stage, (rank,), tuple(items))

    def upscale_plan(self, first: Edit) -> StepPlan:
        """Enlarge the last latents of `first` to this edit's size, as the output `latents` of the node upscale."""
        work = Upscale(width=first.size[0], height=first.size[1], to_width=self.size[0], to_height=self.size[1])
        latents = TensorRef(first.state_key("latents", first.num_steps), 0)
        return _plan(self._batch("upscale", [self._item("upscale", work, (latents,))]))

    def _item(self, node: str, work: OpWork, inputs: tuple[TensorRef, ...] = ()) -> Item:
        return Item(self.request_id, node, self.model, work, inputs)

    def _ref(self, node: str, name: str) -> TensorRef:
        return TensorRef(self.key(node, name), 0)

    def share(self, array: npt.NDArray[np.generic]) -> ArrayRef:
        ref = carve(self._space.alloc(array.nbytes), 0, array.shape, array.dtype.name)
        self._arena.view(ref)[...] = array
        return ref


def _plan(*batches: Batch) -> StepPlan:
    return StepPlan(seq=next(_numbers), batches=batches)
