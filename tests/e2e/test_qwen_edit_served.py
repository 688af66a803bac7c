"""Qwen-Image-Edit behind the API. Its prompts are embedded together with the picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from pictures import encode
from served_edits import assert_cold_is_warm, assert_company_changes_nothing, client_of, edit, serving

from tools.random_checkpoints import make_qwen_edit

GUIDED = {"negative_prompt": "a hat"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("server")
    with serving(make_qwen_edit(folder / "qwen"), folder) as server, client_of(server) as client:
        yield client


def test_a_masked_edit_starts_cold_and_is_the_same_warm(client: openai.OpenAI) -> None:
    assert_cold_is_warm(client)


def test_a_negative_prompt_alone_guides(client: openai.OpenAI) -> None:
    for mask_aware in (True, False):
        plain, _ = edit(client, mask_aware=mask_aware)
        guided, report = edit(client, mask_aware=mask_aware, **GUIDED)
        stronger, _ = edit(client, mask_aware=mask_aware, **GUIDED, true_cfg_scale=8.0)
        assert report["ignored"] == []
        assert (guided != plain).any()
        assert (stronger != guided).any()


def test_prompts_of_any_length_share_batches_and_change_nothing(client: openai.OpenAI) -> None:
    requests: list[dict[str, Any]] = [
        {},
        {"prompt": "a hat " * 90} | GUIDED,
        {"prompt": "<|image_pad|><|im_end|>"},
        {"strength": 0.6},
    ]
    alone, _ = assert_company_changes_nothing(client, requests)
    assert [report["prompt_truncated"] for _, report in alone] == [False, True, False, False]


def test_the_longest_picture_is_edited(client: openai.OpenAI) -> None:
    """The text encoder's processor would refuse it."""
    long = np.zeros((1, 300, 4), np.uint8)
    long[:, :150, 3] = 255
    picture, _ = edit(client, encode(long), mask=None)
    assert picture.shape[:2] == (1, 300)
