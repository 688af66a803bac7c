"""The ControlNet, and the embedded model that it steers, which does not change."""

from inspect import signature
from typing import cast

import torch
from diffusers import FluxControlNetModel, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from tools.train_embedded.flow import Noised, Text
from tools.train_embedded.layout import LATENTS, TEXT_TOKENS, image_ids
from tools.train_embedded.sparse import Positions, make_sparse
from tools.train_unet.models import EMBEDDED

SINGLE_BLOCKS = 1  # 1.35M parameters; a double block alone has 2.4M


def frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


def embedded_transformer() -> FluxTransformer2DModel:
    transformer = FluxTransformer2DModel.from_pretrained(EMBEDDED / "transformer", torch_dtype=torch.float32)
    return cast(FluxTransformer2DModel, frozen(transformer))


def embedded_encoders() -> tuple[CLIPTextModel, T5EncoderModel]:
    clip = CLIPTextModel.from_pretrained(EMBEDDED / "text_encoder", dtype=torch.float32)
    t5 = T5EncoderModel.from_pretrained(EMBEDDED / "text_encoder_2", dtype=torch.float32)
    return cast(CLIPTextModel, frozen(clip)), cast(T5EncoderModel, frozen(t5))


def build_controlnet(transformer: FluxTransformer2DModel) -> FluxControlNetModel:
    """A ControlNet that adds nothing yet. It begins with the transformer's embeddings and its first single block, and
    sees the noised latents, not the masked picture and the mask: so it is served.
    """
    names = signature(FluxControlNetModel.__init__).parameters
    config = {name: value for name, value in transformer.config.items() if name in names}
    sizes = {"in_channels": LATENTS, "num_layers": 0, "num_single_layers": SINGLE_BLOCKS}
    net = FluxControlNetModel(**(config | sizes))
    for name in ("time_text_embed", "context_embedder"):
        getattr(net, name).load_state_dict(getattr(transformer, name).state_dict())
    net.single_transformer_blocks.load_state_dict(transformer.single_transformer_blocks.state_dict(), strict=False)
    with torch.no_grad():
        net.x_embedder.weight.copy_(transformer.x_embedder.weight[:, :LATENTS])
        net.x_embedder.bias.copy_(transformer.x_embedder.bias)
    net.controlnet_x_embedder.reset_parameters()  # at zero, as the last layer is, it would learn nothing at first
    return net


class Steering:
    """The transformer with the ControlNet, on a subset of the image tokens."""

    def __init__(self, net: FluxControlNetModel, transformer: FluxTransformer2DModel) -> None:
        self._net, self._transformer = net, transformer
        self._positions: tuple[Positions, ...] = tuple(make_sparse(each) for each in (net, transformer))

    def velocity(self, noised: Noised, control: Tensor, text: Text) -> Tensor:
        """The steered velocity, [batch, tokens, 64] float32. control: [batch, tokens, 64], of the chosen tokens."""
        for positions in self._positions:
            positions.select(noised.chosen)
        shared = {
            "encoder_hidden_states": text.words,
            "pooled_projections": text.pooled,
            "timestep": noised.time,
            "img_ids": image_ids()[: noised.hidden.shape[1]],
            "txt_ids": torch.zeros(TEXT_TOKENS, 3),
            "return_dict": False,
        }
        _, added = self._net(noised.hidden[..., :LATENTS], control, **shared)
        out: Tensor = self._transformer(noised.hidden, controlnet_single_block_samples=added, **shared)[0]
        return out.float()
