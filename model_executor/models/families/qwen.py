"""The Qwen-Image and Qwen-Image-Edit families, which follow `diffusers.QwenImageInpaintPipeline`,
`QwenImageEditInpaintPipeline` and `QwenImageEditPlusPipeline`.

The text encoder is a language model, Qwen2.5-VL; in Qwen-Image-Edit it also sees the template. It needs
`mm_token_type_ids`, which mark the picture's tokens; without them these get the positions of text. transformers 4
derived the argument, transformers 5 does not, and the pipelines of diffusers 0.42 do not pass it. It is passed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn

from core.model_info import ModelInfo
from core.patches import PatchSet
from core.reference_pictures import ReferencePictures
from core.vision_tokens import FITTED_SIDE, VisionTokens
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedText, ImageInputs
from model_executor.models.families.latent_family import NoisedTemplate
from model_executor.models.families.vae_family import refuse
from model_executor.models.parts import FLOW_SCHEDULERS, Classes
from model_executor.models.transformer.qwen_transformer import QwenEditTransformer, QwenTransformer
from model_executor.models.vae.qwen_vae import QwenVae
from model_executor.samplers.sampling import dynamic_shift

MAX_TEXT_TOKENS = 512
"""The pipelines' default max_sequence_length."""

MAX_SIDE = 200
"""Tokens. The image processor rejects pictures whose long side is over 200 times the short one."""

OPENING = "user\n"
"""The chat's text between its last special token and a prompt without picture. It is encoded together with the prompt:
two newlines are one token."""

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"

UNSUPPORTED = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
"""Options of the denoiser's configuration that are not supported: checkpoints of other pipelines set them."""


class Qwen(NoisedTemplate):
    """What all Qwen families share. Guidance is classifier-free, and applied only where there is a negative prompt."""

    lora_loader = "QwenImageLoraLoaderMixin"
    vae = QwenVae
    text_parts = ("text_encoder",)
    classes: ClassVar[Classes] = {
        "scheduler": FLOW_SCHEDULERS,
        "transformer": ("QwenImageTransformer2DModel",),
        "vae": ("AutoencoderKLQwenImage",),
        "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
        "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    }
    system: str
    """The chat template's first message."""

    dropped: int
    """Leading tokens of the chat template that the denoiser does not see; the pipeline's number."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        if options := [name for name in UNSUPPORTED if self._transformer_config.get(name)]:
            raise refuse(checkpoint, f"a denoiser with {', '.join(options)} is not supported")
        if self._transformer_config.get("in_channels") != self._latent_width:
            raise refuse(checkpoint, f"a denoiser of other than {self._latent_width} input channels is not supported")
        self._tokenizer = checkpoint.load("tokenizer")

    def info(self, name: str) -> ModelInfo:
        return self._info(
            name,
            native_size=self._checkpoint.defaults.native_size or 1024,
            num_inference_steps=50,
            default_guidance_scale=1.0,
            max_text_tokens=MAX_TEXT_TOKENS,
            has_guidance=False,
            has_true_cfg=True,
            default_true_cfg_scale=self._guidance(4.0),
            can_skip_steps=self._sampling.can_skip_steps,
            max_side=MAX_SIDE,
            **self._conditions_info,
            extra_text_tokens=self._frame_tokens,
            vision=self._vision(),
        )

    @property
    def _frame_tokens(self) -> int:
        """Tokens of the chat template around picture and prompt; not counted as the prompt's."""
        return 0

    def _vision(self) -> VisionTokens | None:
        """`ModelInfo.vision`."""
        return None

    def prepare(self, part: str, module: nn.Module) -> Any:
        """Keeps the language model without its head, which would only choose words."""
        return super().prepare(part, module.get_submodule("model") if part == "text_encoder" else module)

    def recipe(self, part: str) -> str:
        return "without head" if part == "text_encoder" else super().recipe(part)

    def _frame(self, picture: str = "") -> tuple[list[int], list[int]]:
        """Tokens of the chat template before and after a prompt. picture: placeholder for it, if there is one."""
        before = f"<|im_start|>system\n{self.system}<|im_end|>\n<|im_start|>{OPENING}{picture}"
        after = "<|im_end|>\n<|im_start|>assistant\n"
        return self._tokenizer(before).input_ids, self._tokenizer(after).input_ids

    def _prompt_ids(self, prompt: str) -> list[int]:
        """Tokens of a prompt. Text that looks like a special token is encoded as plain text, so that a prompt can
        neither end its own message nor add pictures."""
        ids: list[int] = self._tokenizer(prompt, split_special_tokens=True).input_ids
        return ids

    def _hidden_states(self, ids: list[int], **picture: Any) -> Tensor:
        """The last layer's hidden states [tokens, width], without the `dropped` ones."""
        encoder = self._encoder("text_encoder")
        tokens = torch.tensor([ids], device=self._device)
        output = encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **picture)
        hidden: Tensor = output.last_hidden_state[0, self.dropped :]
        return hidden.to(encoder.dtype)

    def _timesteps(self, num_inference_steps: int, image_tokens: int) -> dict[str, Any]:
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        return {"sigmas": sigmas, "mu": dynamic_shift(self._sampling.config, image_tokens)}

    def combine_guidance(self, predictions: Sequence[Tensor], scale: float) -> Tensor:
        """The guided velocity, rescaled per token to the norm of the prompt's own velocity."""
        guided = super().combine_guidance(predictions, scale)
        if len(predictions) == 1:
            return guided
        norms = [torch.linalg.vector_norm(velocity, dim=-1, keepdim=True) for velocity in (predictions[0], guided)]
        rescaled: Tensor = guided * (norms[0] / norms[1])
        return rescaled


class QwenInpaint(Qwen):
    """Checkpoints of Qwen-Image, whose model_index.json names QwenImagePipeline or QwenImageInpaintPipeline."""

    family = "qwen-image"
    checkpoints = "Qwen-Image"
    summary = "Qwen-Image: keeps the noised template outside the mask; guidance only with a negative prompt"
    denoiser = QwenTransformer
    system = (
        "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
        "objects and background:"
    )
    dropped = 34

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """As encode_prompt, which cuts prompt and chat template together."""
        before, after = self._frame()
        opening, words = self._prompt_ids(OPENING), self._prompt_ids(OPENING + prompt)
        ids = [*before[: -len(opening)], *words, *after]
        length = self.dropped + max_sequence_length
        hidden = self._hidden_states(ids[:length])
        return EncodedText(
            prompt_embeds=hidden,
            pooled_prompt_embeds=hidden.new_empty(0),
            num_tokens=min(len(words) - len(opening), max_sequence_length),
            truncated=len(ids) > length,
        )


class QwenEdit(Qwen):
    """Checkpoints of Qwen-Image-Edit, whose model_index.json names QwenImageEditPipeline or
    QwenImageEditInpaintPipeline.

    Denoiser and text encoder both see the clean template as tokens of its own. Without a mask everything is
    regenerated, as in QwenImageEditPipeline, except that strength below 1 starts from the noised template. The template
    that the denoiser sees is sampled from the posterior with the request's seed, as in the pipeline; pages are made
    with the posterior's mode.
    """

    family = "qwen-image-edit"
    checkpoints = "Qwen-Image-Edit"
    summary = "Qwen-Image-Edit: as Qwen-Image; text encoder and denoiser also see the template"
    denoiser = QwenEditTransformer
    classes: ClassVar[Classes] = {**Qwen.classes, "processor": ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")}
    text_sees_template = True
    system = (
        "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain "
        "how the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
        "requirements while maintaining consistency with the original input where appropriate."
    )
    dropped = 64

    picture_words: ClassVar[str] = PICTURE
    """The place of a picture in the chat, before the prompt; {number}: its number from 1."""

    seen_area: ClassVar[int] = 0
    """`VisionTokens.area`."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        self._processor = checkpoint.load("processor")
        self._picture_id: int = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """As encode_prompt, except that a prompt is cut at `max_sequence_length` tokens of its own."""
        if not pictures:
            raise ValueError("the text encoder sees the picture that a prompt is for")
        seen = self._processor(
            images=list(map(self._seen, pictures)), input_data_format="channels_last", return_tensors="pt"
        )
        words = self._prompt_ids(prompt)
        ids = self._with_pictures(words[:max_sequence_length], seen["image_grid_thw"].prod(dim=1).tolist())
        hidden = self._hidden_states(
            ids,
            pixel_values=seen["pixel_values"].to(self._device),
            image_grid_thw=seen["image_grid_thw"].to(self._device),
            mm_token_type_ids=torch.tensor([[int(token == self._picture_id) for token in ids]], device=self._device),
        )
        return EncodedText(
            prompt_embeds=hidden,
            pooled_prompt_embeds=hidden.new_empty(0),
            num_tokens=min(len(words), max_sequence_length),
            truncated=len(words) > max_sequence_length,
        )

    @property
    def text_recipe(self) -> str:
        return f"{super().text_recipe} {self.picture_words}"

    def _seen(self, template: Tensor) -> npt.NDArray[np.uint8]:
        """The picture that the text encoder's processor gets of a template, uint8 [height, width, 3] both."""
        return template.numpy()

    def _with_pictures(self, words: list[int], num_patches: Sequence[int]) -> list[int]:
        """Tokens of the chat with a prompt and a picture for each of these numbers of patches; merge_size**2 patches
        make one token."""
        places = "".join(self.picture_words.format(number=1 + number) for number in range(len(num_patches)))
        before, after = self._frame(places)
        counts = iter(num_patches)
        filled: list[int] = []
        for token in before:
            is_place = token == self._picture_id
            filled += [token] * (next(counts) // self._processor.merge_size**2 if is_place else 1)
        return [*filled, *words, *after]

    def _vision(self) -> VisionTokens:
        size = self._processor.size
        return VisionTokens(
            side=self._processor.patch_size * self._processor.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
            area=self.seen_area,
            frame_tokens=self._count_frame(2) - self._count_frame(1),
        )

    @property
    def _frame_tokens(self) -> int:
        return self._count_frame(1) - self.dropped

    def _count_frame(self, num_pictures: int) -> int:
        """Tokens of the chat around this many pictures and a prompt."""
        return len(self._with_pictures([], [0] * num_pictures))


class QwenEditPlus(QwenEdit):
    """Checkpoints of Qwen-Image-Edit 2509 and 2511, whose model_index.json names QwenImageEditPlusPipeline
    (diffusers/pipelines/qwenimage/pipeline_qwenimage_edit_plus.py).

    As QwenEdit, with these differences: the picture has a number in the chat; the text encoder sees it at an area of
    its own, whatever the template's; the template that the denoiser sees is the posterior's mode, as in pages; and no
    noise is drawn but the initial one. That pipeline has no mask: one is applied as QwenImageEditInpaintPipeline does.
    """

    family = "qwen-image-edit-plus"
    checkpoints = "Qwen-Image-Edit-2509, -2511"
    summary = "Qwen-Image-Edit 2509 and 2511: as Qwen-Image-Edit, with another chat"
    samples_template = False
    picture_words = f"Picture {{number}}: {PICTURE}"
    seen_area = 384 * 384

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        self._resizer = VaeImageProcessor()

    def _seen(self, template: Tensor) -> npt.NDArray[np.uint8]:
        """Resized as the pipeline does for its `condition_images`."""
        height, width, _ = template.shape
        wide, high = self._vision().fitted(width, height)
        (picture,) = self._resizer.numpy_to_pil(template.numpy() / 255.0)
        return np.array(self._resizer.resize(picture, high, wide))

    def info(self, name: str) -> ModelInfo:
        references = ReferencePictures(most=2, pixels=1024**2, multiple=FITTED_SIDE, grows=True)
        return msgspec.structs.replace(super().info(name), references=references)

    def _draws_masked_image(self, inputs: ImageInputs) -> bool:
        return False
