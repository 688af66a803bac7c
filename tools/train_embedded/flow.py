"""Flow matching on masked pictures: from noisy tokens predict the velocity, with most weight on masked tokens."""

from dataclasses import dataclass

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from tools.train_embedded.layout import TEXT_TOKENS, image_ids
from tools.train_embedded.pool import Batch
from tools.train_embedded.sparse import choose_tokens, take

CONTEXT_WEIGHT = 0.1  # of tokens outside the mask, which pasting back replaces
UNCONDITIONAL = 0.1  # share of captions dropped, for classifier-free guidance
TIME_MEAN, TIME_DEVIATION = 0.3, 1.1  # of the logit of t; above 0.5, as captions matter most at high t
TIME_UNIFORM = 0.12  # share of samples with t uniform instead


@dataclass(frozen=True)
class Text:
    """Embedded captions, the transformer's input."""

    pooled: Tensor  # [batch, 128]
    words: Tensor  # [batch, 24, 128]


@dataclass(frozen=True)
class Noised:
    """A batch with noise added, reduced to the tokens chosen for this step."""

    hidden: Tensor  # [batch, tokens, 384]: noisy latents, masked latents, mask
    velocity: Tensor  # [batch, tokens, 64]: noise - target
    time: Tensor  # [batch], 0 is the picture and 1 is noise
    inside: Tensor  # [batch, tokens]: 1 where a token holds a masked pixel
    chosen: Tensor  # [batch, tokens]: indices into the 256 image tokens
    detail: Tensor  # [batch, tokens]: 1 where a token shows a hand or the figure's outline


def draw_times(number: int, device: torch.device) -> Tensor:
    times = torch.sigmoid(torch.randn(number, device=device) * TIME_DEVIATION + TIME_MEAN)
    uniform = torch.rand(number, device=device) < TIME_UNIFORM
    return torch.where(uniform, torch.rand(number, device=device), times).clamp(0.005, 1.0)


def noise_batch(batch: Batch, tokens: int) -> Noised:
    inside = (batch.mask.amax(-1) > 0).float()
    chosen = choose_tokens(inside, tokens)
    target, masked, mask = (take(x, chosen) for x in (batch.target, batch.masked, batch.mask))
    time = draw_times(len(target), target.device)
    noise = torch.randn_like(target)
    noisy = torch.lerp(target, noise, time[:, None, None])
    return Noised(
        torch.cat([noisy, masked, mask], -1),
        noise - target,
        time,
        inside.gather(1, chosen),
        chosen,
        batch.detail.gather(1, chosen),
    )


def read_captions(clip: CLIPTextModel, t5: T5EncoderModel, clip_ids: Tensor, t5_ids: Tensor) -> Text:
    return Text(clip(clip_ids).pooler_output, t5(t5_ids)[0])


def velocity(transformer: FluxTransformer2DModel | nn.Module, noised: Noised, text: Text) -> Tensor:
    """The predicted velocity, [batch, tokens, 64] float32. Call `Positions.select(noised.chosen)` first."""
    out: Tensor = transformer(
        hidden_states=noised.hidden,
        encoder_hidden_states=text.words,
        pooled_projections=text.pooled,
        timestep=noised.time,
        img_ids=image_ids().to(noised.hidden.device)[: noised.hidden.shape[1]],
        txt_ids=torch.zeros(TEXT_TOKENS, 3, device=noised.hidden.device),
        return_dict=False,
    )[0]
    return out.float()


def weighted_error(
    predicted: Tensor, wanted: Tensor, inside: Tensor, importance: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """The loss, and the mean squared error of the masked tokens. importance: [batch, tokens], of masked tokens."""
    error = ((predicted - wanted) ** 2).mean(-1)
    weight = CONTEXT_WEIGHT + (importance - CONTEXT_WEIGHT) * inside
    masked = (error * inside).sum() / inside.sum().clamp(min=1)
    return (error * weight).sum() / weight.sum(), masked.detach()
