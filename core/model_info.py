"""ModelInfo: what a loaded model can do, as the engine, the router and the API server know it."""

from __future__ import annotations

import msgspec

from core.page_scheme import PageScheme
from core.sampling_params import SamplingParams
from core.vision_tokens import VisionTokens


class BlockRun(msgspec.Struct, frozen=True):
    """Equal consecutive blocks of a model that keeps its blocks' outputs."""

    number: int  # of blocks
    pages: int  # of each block
    work: float  # of each block, as a share of the work of all blocks, 0..1


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model can do; learnt by the worker at load time and sent up in the Ready messages.

    native_size: side in pixels of the square whose area caps the generation size. token_size: pixels per token side.
    latent_width: floats per token of the packed latents. max_text_tokens: the text encoder's length.
    extra_text_tokens: further ones that a prompt has in the denoiser, whatever its length. has_guidance: whether
    guidance_scale has a meaning, which with is_guidance_cfg is that of classifier-free guidance, else of an embedding.
    has_true_cfg: whether true_cfg_scale has one; default_true_cfg_scale: where a request gives a negative prompt alone.
    solver_order: the sampler's. extra_steps: calls of the model that it takes beyond those of its order.
    rounds_strength_down: whether a step that strength covers in part is left out; else it is done. min_inference_steps:
    fewest that the sampler can do. max_side: tokens of a picture's longest side, None for any. vision: what the
    template is to a text encoder that sees it, None where it does not. conditions_per_token: condition tokens per image
    token, 1 where the denoiser sees the clean template as tokens of its own. page_scheme: how templates are cached,
    None where the model is served without mask-aware execution. device: its type; which of several alike it is makes no
    difference to anybody. block_runs: what the denoiser's blocks take, of a family that keeps their outputs. parent:
    the model that this is an adapter of, "" for a model itself.
    """

    name: str
    family: str
    native_size: int
    token_size: int
    latent_width: int
    max_text_tokens: int
    default_num_inference_steps: int
    default_guidance_scale: float
    has_guidance: bool
    has_true_cfg: bool
    device: str
    dtype: str
    is_guidance_cfg: bool = False
    extra_text_tokens: int = 0
    default_true_cfg_scale: float = 1.0
    solver_order: int = 1
    extra_steps: int = 0
    rounds_strength_down: bool = False
    min_inference_steps: int = 1
    max_side: int | None = None
    vision: VisionTokens | None = None
    conditions_per_token: int = 0
    page_scheme: PageScheme | None = None
    block_runs: tuple[BlockRun, ...] = ()
    parent: str = ""

    def num_steps(self, sampling: SamplingParams) -> int:
        """Steps of a run, each one call of the model: a solver of order o takes o for each of its noise levels, but one
        for the last, and PNDM one more. sampling: with its num_inference_steps."""
        return self.solver_order * (sampling.num_denoising_steps - 1) + 1 + self.extra_steps

    def num_image_tokens(self, width: int, height: int) -> int:
        """Of a picture of so many pixels."""
        return (width // self.token_size) * (height // self.token_size)

    def num_text_tokens(self, max_sequence_length: int | None = None) -> int:
        """Text tokens of a row in the denoiser, with a prompt of so many at most (None: the encoder's length), but for
        those of a picture that the encoder sees."""
        return (max_sequence_length or self.max_text_tokens) + self.extra_text_tokens

    def text_tokens_beside(self, width: int, height: int) -> int:
        """Text tokens of a row that are not the prompt's, for a template of so many pixels."""
        return self.extra_text_tokens + (0 if self.vision is None else self.vision.count(width, height))
