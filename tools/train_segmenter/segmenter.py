"""Runs the exported segmenter; one pass over a picture serves all texts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import CLIPSegForImageSegmentation, CLIPSegProcessor

from tools.train_embedded.scenes import Pixels

THRESHOLD = 0.5  # of the probability, from which a pixel belongs to what is asked for


class Segmenter:
    """A checkpoint in CLIPSeg's layout."""

    def __init__(self, folder: Path) -> None:
        self.model = CLIPSegForImageSegmentation.from_pretrained(folder).eval()
        self.processor = CLIPSegProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def probabilities(self, image: Pixels, texts: Sequence[str]) -> NDArray[np.float32]:
        """The probability of each pixel [texts, 256, 256], for a picture [height, width, 3]."""
        model, clip = self.model, self.model.clip
        picture = Image.fromarray(image)
        inputs = self.processor(text=list(texts), images=picture, padding=True, truncation=True, return_tensors="pt")
        meanings = clip.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
        hidden = clip.vision_model(inputs["pixel_values"], output_hidden_states=True).hidden_states
        extracted = tuple(hidden[i + 1].expand(len(texts), -1, -1) for i in model.extract_layers)
        probabilities: NDArray[np.float32] = model.decoder(extracted, meanings).logits.sigmoid().numpy()
        return probabilities

    def masks(self, image: Pixels, texts: Sequence[str]) -> NDArray[np.bool_]:
        """The mask of each text, [texts, 256, 256]."""
        return self.probabilities(image, texts) > THRESHOLD
