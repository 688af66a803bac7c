"""Training on a subset of the image tokens, with other positions in each sample.

Masked tokens are chosen first, then a random context, so a step costs a fraction of one on all tokens.
"""

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor, nn

from tools.train_embedded.layout import GRID, IMAGE_TOKENS, TEXT_TOKENS, image_ids


class Positions(nn.Module):
    """Replaces `FluxPosEmbed`: rotary tables of the last selected tokens, [batch, text + chosen, head width]."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        ids = torch.cat([torch.zeros(TEXT_TOKENS, 3), image_ids()])
        cos, sin = embed(ids)
        self._tables: tuple[Tensor, Tensor] = (cos, sin)
        self._selected: tuple[Tensor, Tensor] | None = None

    def select(self, chosen: Tensor) -> None:
        """Select the tokens of the next forward pass. chosen: [batch, tokens], indices into the 256 image tokens."""
        self._tables = (self._tables[0].to(chosen.device), self._tables[1].to(chosen.device))
        text = torch.arange(TEXT_TOKENS, device=chosen.device).expand(len(chosen), -1)
        rows = torch.cat([text, chosen + TEXT_TOKENS], 1)
        self._selected = (self._tables[0][rows], self._tables[1][rows])

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self._selected is not None, "select() comes before the forward pass"
        return self._selected


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings. x: [batch, tokens, heads, width]; tables: [batch, tokens, width]; pairs are interleaved
    as in diffusers.
    """
    cos, sin = (table[:, :, None].to(x.dtype) for table in tables)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-imaginary, real], -1).flatten(3) * sin


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of [batch, heads, tokens, width]. On a CPU it is written out: the backward pass of PyTorch's own takes
    as long as all matrix products of a step together (2.13, a CPU with AMX).
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value)
    likeness = (query * query.shape[-1] ** -0.5) @ key.mT
    return torch.softmax(likeness, -1, dtype=torch.float32).to(value.dtype) @ value


class SampleRotaryProcessor:
    """`FluxAttnProcessor` with rotary tables that differ between samples."""

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        heads = (-1, attn.head_dim)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, heads))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, heads))
        value = attn.to_v(hidden_states).unflatten(-1, heads)
        if encoder_hidden_states is not None:
            text_query = attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(-1, heads))
            text_key = attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(-1, heads))
            text_value = attn.add_v_proj(encoder_hidden_states).unflatten(-1, heads)
            query = torch.cat([text_query, query], 1)
            key = torch.cat([text_key, key], 1)
            value = torch.cat([text_value, value], 1)
        assert image_rotary_emb is not None
        query, key = rotate(query, image_rotary_emb), rotate(key, image_rotary_emb)
        mixed = attend(*(x.transpose(1, 2).to(value.dtype) for x in (query, key, value)))
        flat = mixed.transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return flat
        text, image = flat.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


def make_sparse(transformer: FluxTransformer2DModel) -> Positions:
    """Prepare a transformer for training on token subsets. Its weights and their names do not change."""
    positions = Positions(transformer.pos_embed)
    transformer.pos_embed = positions
    transformer.set_attn_processor(SampleRotaryProcessor())
    return positions


def choose_tokens(masked: Tensor, number: int) -> Tensor:
    """Token indices, [batch, number]: preferably masked ones, then neighbours, then others, at random.

    masked: [batch, 256], 1 for tokens with a masked pixel.
    """
    if number == IMAGE_TOKENS:
        return torch.arange(IMAGE_TOKENS, device=masked.device).expand(len(masked), -1)
    near = F.max_pool2d(masked.view(-1, 1, GRID, GRID), 3, 1, 1).flatten(1)
    return (masked * 1.5 + near * 0.5 + torch.rand_like(masked) * 1.5).topk(number, 1).indices


def take(tokens: Tensor, chosen: Tensor) -> Tensor:
    """Select `chosen` [batch, number] of `tokens` [batch, 256, channels]."""
    return tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[-1]))
