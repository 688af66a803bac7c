"""The exported segmenter as any user of transformers runs it."""

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
        self._model = CLIPSegForImageSegmentation.from_pretrained(folder).eval()
        self._processor = CLIPSegProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def probabilities(self, image: Pixels, texts: Sequence[str]) -> NDArray[np.float32]:
        """The probability of each pixel [texts, 256, 256], for a picture [256, 256, 3]."""
        pictures = [Image.fromarray(image)] * len(texts)
        inputs = self._processor(text=list(texts), images=pictures, padding=True, return_tensors="pt")
        probabilities: NDArray[np.float32] = self._model(**inputs).logits.sigmoid().float().numpy()
        return probabilities

    def masks(self, image: Pixels, texts: Sequence[str]) -> NDArray[np.bool_]:
        """The mask of each text, [texts, 256, 256]."""
        return self.probabilities(image, texts) > THRESHOLD
