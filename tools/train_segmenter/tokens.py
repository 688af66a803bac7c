"""The segmenter's forward pass over chosen tokens of a picture, with gradients for all weights.

Transformers' own forward trains the decoder only, and needs every token. Edges are in a quarter of the tokens, and most
of the others show a flat wall, so training sees some of them: attention costs the square of their number.
"""

import torch
from torch import Tensor
from transformers import CLIPSegForImageSegmentation


def logits_of(
    model: CLIPSegForImageSegmentation, pixels: Tensor, text_ids: Tensor, prompts: int, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of the chosen patches, or of all of them in order: [pictures * prompts, patches, pixels of a patch]. And
    what the picture's encoder says of them, [pictures, patches, width].

    pixels: [pictures, 3, height, width]; text_ids: [pictures * prompts, tokens], those of one picture in a row; chosen:
    indices of patches, [pictures, patches].
    """
    vision = model.clip.vision_model
    hidden = vision.embeddings(pixels)
    if chosen is not None:
        kept = torch.cat([torch.zeros_like(chosen[:, :1]), chosen + 1], dim=1)  # the class token too
        hidden = hidden.gather(1, kept[..., None].expand(-1, -1, hidden.shape[-1]))
    hidden = vision.pre_layrnorm(hidden)
    extracted = []
    for i, layer in enumerate(vision.encoder.layers):
        hidden = layer(hidden, attention_mask=None)
        if i in model.extract_layers:
            extracted.append(hidden)
    meanings = model.clip.get_text_features(text_ids).pooler_output
    return _decode(model, extracted, meanings, prompts), hidden[:, 1:]


def _decode(model: CLIPSegForImageSegmentation, extracted: list[Tensor], meanings: Tensor, prompts: int) -> Tensor:
    """extracted: [pictures, 1 + patches, width], the first layer's first; meanings: [pictures * prompts, width]."""
    decoder, output = model.decoder, None
    for i, hidden in enumerate(reversed(extracted)):
        reduced = decoder.reduces[i](hidden).repeat_interleave(prompts, dim=0)
        output = reduced if output is None else output + reduced
        if i == decoder.conditional_layer:
            output = decoder.film_mul(meanings)[:, None] * output + decoder.film_add(meanings)[:, None]
        output = decoder.layers[i](output, attention_mask=None)
    head = decoder.transposed_convolution  # each patch by itself, since its stride is its kernel's size
    assert output is not None
    logits: Tensor = output[:, 1:] @ head.weight.flatten(1) + head.bias
    return logits


def to_patches(pictures: Tensor, patch: int) -> Tensor:
    """[pictures, height, width] to [pictures, patches, pixels of a patch], in the order of `logits_of`."""
    number, height, width = pictures.shape
    cells = pictures.view(number, height // patch, patch, width // patch, patch).transpose(2, 3)
    return cells.reshape(number, -1, patch * patch)
