"""Sends edits to a server with a small checkpoint, and checks what must hold for every model."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
from pictures import BOX, Pixels, alpha_mask, decode, encode, photo
from server_process import ServerProcess, fork

PHOTO, ALPHA = encode(photo()), alpha_mask()


@contextmanager
def serving(checkpoint: Path, folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server with the checkpoint, which must exit cleanly. folder: for its files."""
    small = ("--served-model-name", "tiny", "--threads", "1", "--dtype", "float32", "--no-playground")
    server = fork(folder / "scratch", "--model", str(checkpoint), *small, *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@contextmanager
def client_of(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def edit(
    client: openai.OpenAI,
    image: bytes = PHOTO,
    mask: bytes | None = ALPHA,
    *,
    prompt: str = "a red hat",
    **fields: Any,
) -> tuple[Pixels, dict[str, Any]]:
    """Run an edit of four steps; returns the picture and the answer's `stencil` object. mask: None for the image's own
    transparency. fields: further fields; a template_id replaces the image.
    """
    result = client.images.edit(
        image=openai.omit if "template_id" in fields else image,
        mask=openai.omit if mask is None else mask,
        prompt=prompt,
        extra_body={"seed": 1, "num_inference_steps": 4} | fields,
    )
    assert result.data
    return decode(base64.b64decode(result.data[0].b64_json or "")), result.stencil  # type: ignore[attr-defined]


def assert_cold_is_warm(client: openai.OpenAI) -> None:
    """Assert that the first edit of PHOTO paints only the box, and that a second one over its pages paints the same."""
    first, cold = edit(client)
    again, warm = edit(client)
    np.testing.assert_array_equal(again, first)
    assert (cold["cache"], warm["cache"]) == ("miss", "hit")
    assert cold["num_inference_steps"] == 4
    outside = np.ones(first.shape[:2], bool)
    outside[BOX] = False
    np.testing.assert_array_equal(first[outside][:, :3], photo()[outside])
    assert np.abs(first[BOX][..., :3].astype(int) - photo()[BOX]).mean() > 10


Answers = list[tuple[Pixels, dict[str, Any]]]


def assert_company_changes_nothing(
    client: openai.OpenAI, wanted: Sequence[Mapping[str, Any]], times: int = 1
) -> tuple[Answers, Answers]:
    """Assert that all edits, sent at once and repeated, equal those sent alone. Returns the answers to both."""
    alone = [edit(client, **each) for each in wanted]
    everything = [*wanted] * times
    with ThreadPoolExecutor(len(everything)) as pool:
        together = list(pool.map(lambda each: edit(client, **each), everything))
    for (picture, _), (before, _) in zip(together, alone * times, strict=True):
        np.testing.assert_array_equal(picture, before)
    return alone, together
