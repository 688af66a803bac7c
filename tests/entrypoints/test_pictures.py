"""Pictures given to the offline engine."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from entrypoints.pictures import encode_picture


def test_edits_may_share_a_picture_that_is_not_decoded_yet() -> None:
    """Threads encode the pictures of edits side by side, and Pillow decodes an opened file at its first use."""
    file, pixels = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    with ThreadPoolExecutor(8) as threads:
        for _ in range(40):
            opened = Image.open(io.BytesIO(file.getvalue()))
            encoded = list(threads.map(lambda _, shared=opened: encode_picture(shared, "image"), range(8)))
            assert len(set(encoded)) == 1
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded[0]))), pixels)
