"""What a model family is to the runner: stages as functions on tensors, free of requests and scheduling.

A family turns prompts, pictures and latents into one another. It holds no per-request state: whatever lives from one
step to the next is a named tensor that the runner keeps in its tensor store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn

from core.messages import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """prompt_embeds: [text tokens, width]. pooled_prompt_embeds: [pooled width]. num_tokens: tokens of the prompt that
    were used, padding not counted. truncated: the prompt was longer than the encoder's length."""

    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """latents: [image tokens, latent width], where sampling starts. condition: [image tokens, condition width], what
    the denoiser sees of template and mask. sigmas: float32 [steps + 1], the noise levels still ahead, ending at 0."""

    latents: Tensor
    condition: Tensor
    sigmas: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's part of a forward pass.

    latents, condition: all image tokens of the request. sigma: float32 scalar, the noise level. grid: image tokens as
    (rows, columns). active: int64 [active tokens], the token indices to compute, ascending; None for all.
    """

    latents: Tensor
    condition: Tensor
    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor
    sigma: Tensor
    guidance_scale: float
    grid: tuple[int, int]
    active: Tensor | None = None


class Family(Protocol):
    """One model architecture, made with the light parts of a checkpoint; parts with weights come and go by name."""

    components: ClassVar[Mapping[str, tuple[str, ...]]]
    """component of a ModelKey -> parts of the checkpoint it consists of, named as in model_index.json."""

    def put(self, part: str, module: nn.Module) -> None:
        """Take a loaded part in use."""

    def drop(self, part: str) -> None:
        """Forget a part; its memory is free once nothing else holds it."""

    def info(self, name: str) -> ModelInfo:
        """What this model can do, read from its configuration alone."""

    def encode_text(self, prompt: str, max_sequence_length: int) -> EncodedText:
        """Embed a prompt, padded or cut to `max_sequence_length` tokens."""

    def encode_image(
        self, template: Tensor, mask: Tensor, *, seed: int, num_inference_steps: int, num_denoising_steps: int
    ) -> EncodedImage:
        """Where sampling starts, and what it is conditioned on. template: uint8 [height, width, 3]; mask: uint8
        [height, width], 1 = edit; sides are multiples of the token size."""

    def predict(self, rows: Sequence[Row]) -> list[Tensor]:
        """Velocity of each row's active tokens, [active tokens, latent width]: one forward pass for all rows."""

    def combine_guidance(self, predictions: Sequence[Tensor]) -> Tensor:
        """One velocity from the predictions of all of a request's rows."""

    def decode(self, latents: Tensor, width: int, height: int) -> Tensor:
        """Pixels of packed latents [image tokens, latent width]: uint8 [height, width, 3]."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Image tokens of a picture as (rows, columns)."""
