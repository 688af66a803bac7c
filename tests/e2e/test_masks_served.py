"""Masks that are found instead of drawn, behind the API: by words, points and boxes, with a small random CLIPSeg."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pictures import Pixels, alpha_mask, decode, encode, photo
from safetensors.torch import load_file, save_file
from served_edits import PHOTO, client_of, edit, serving
from server_process import ServerProcess, fork

from tools.random_checkpoints import make_klein
from tools.random_segmenter_checkpoints import make_clipseg

THINGS = ("hat", "coat", "shirt")
WORDS = {"mask_prompt": "the hat"}


def mask_of(server: ServerProcess, image: bytes = PHOTO, **fields: Any) -> httpx.Response:
    files = {"image": ("photo.png", image)}
    return httpx.post(f"{server.base_url}/images/masks", data=fields, files=files, timeout=60)


def found(answer: httpx.Response) -> tuple[Pixels, dict[str, Any], dict[str, Any]]:
    """The mask's file, what is said of it, and the answer's `stencil`."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    (entry,) = body["data"]
    return decode(base64.b64decode(entry.pop("b64_json"))), entry, body["stencil"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    finder = make_clipseg(folder / "clipseg", seed=3, things=THINGS)
    model = make_klein(folder / "klein", is_distilled=True)
    with serving(model, folder, "--segmenter", str(finder), "--workers-per-engine", "2") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.mark.parametrize(
    "asked",
    [
        WORDS,
        WORDS | {"mask_grow": 3, "mask_margin": 4},
        {"mask_points": "[[20, 30]]"},
        {"mask_prompt": "a coat", "mask_box": "[10, 10, 60, 60]"},
    ],
    ids=["words", "grown", "points", "words in a box"],
)
def test_an_edit_is_that_of_the_mask_it_asks_for(
    server: ServerProcess, client: openai.OpenAI, asked: dict[str, Any]
) -> None:
    """The picture has the size that the engine works at, so that nothing is resized between the two."""
    image = encode(photo(64, 64))
    of_mask = {name: value for name, value in asked.items() if name != "mask_margin"}
    mask, about, stencil = found(mask_of(server, image, **of_mask))
    margin = {name: value for name, value in asked.items() if name == "mask_margin"}
    given, before = edit(client, image, encode(mask), **margin)
    sought, report = edit(client, image, None, **asked)
    np.testing.assert_array_equal(sought, given)
    for name in ("mask_ratio", "active_tokens", "image_tokens", "full_steps", "cache", "crop"):
        assert name == "cache" or report[name] == before[name]
    assert report["mask"]["score"] == about["score"]
    assert report["mask"]["box"] == about["box"]
    assert sum(length for _, length in report["mask"]["tokens"]) == report["active_tokens"]
    assert 0 < sum(length for _, length in stencil["tokens"]) <= stencil["image_tokens"]
    left, top, right, bottom = about["box"]
    assert (mask[..., 3] < 255).nonzero()[0].min() == top
    assert 0 <= left < right <= 64
    assert bottom <= 64
    assert report["ms"]["segment"] >= 0


def test_what_is_outside_the_mask_stays(client: openai.OpenAI, server: ServerProcess) -> None:
    image = photo(200, 160)  # larger than the engine's size, so the mask is resized, too
    mask, _, _ = found(mask_of(server, encode(image), **WORDS))
    picture, report = edit(client, encode(image), None, **WORDS)
    assert mask.shape == (160, 200, 4)
    kept = mask[..., 3] == 255
    assert kept.any()
    np.testing.assert_array_equal(picture[kept][:, :3], image[kept])
    assert (picture[~kept][:, :3] != image[~kept]).any()
    assert report["crop"] is None


def test_edits_in_company_and_of_other_shapes_are_as_alone(client: openai.OpenAI) -> None:
    wanted: list[dict[str, Any]] = [
        {"mask": None, **WORDS},
        {"mask": None, "mask_prompt": "a coat", "prompt": "a green coat"},
        {"mask": None, "mask_points": "[[50, 40]]", "mask_feather": 2.5},
        {"mask": None, "image": encode(photo(64, 96, seed=5)), **WORDS},
        {},
    ]
    alone = [edit(client, **each)[0] for each in wanted]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda each: edit(client, **each)[0], wanted * 2))
    for picture, before in zip(together, alone * 2, strict=True):
        np.testing.assert_array_equal(picture, before)


def test_two_passes_and_several_pictures(client: openai.OpenAI) -> None:
    _, report = edit(client, PHOTO, None, **WORDS, hires_scale=2.0)
    assert "both passes run exact" in report["notes"][0]
    result = client.images.edit(
        image=PHOTO, prompt="a hat", n=3, extra_body={"seed": 1, "num_inference_steps": 3, **WORDS}
    )
    assert result.data
    assert len({each.b64_json for each in result.data}) == 3


def test_the_body_may_be_json(server: ServerProcess) -> None:
    url = "data:image/png;base64," + base64.b64encode(PHOTO).decode()
    body = {"image": {"image_url": url}, "mask_points": [[20, 30]], "mask_box": None}
    answer = httpx.post(f"{server.base_url}/images/masks", json=body, timeout=60)
    as_form = mask_of(server, mask_points=json.dumps([[20, 30]]))
    np.testing.assert_array_equal(found(answer)[0], found(as_form)[0])


def test_a_registered_template_is_a_picture(server: ServerProcess, client: openai.OpenAI) -> None:
    made = httpx.post(f"{server.base_url}/templates", files={"image": ("p.png", PHOTO)}, timeout=60).json()
    asked = {"template_id": made["id"], "mask_prompt": "a hat"}
    answer = httpx.post(f"{server.base_url}/images/masks", json=asked, timeout=60)
    np.testing.assert_array_equal(found(answer)[0], found(mask_of(server, mask_prompt="a hat"))[0])
    np.testing.assert_array_equal(
        edit(client, PHOTO, None, template_id=made["id"], **WORDS)[0], edit(client, PHOTO, None, **WORDS)[0]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mask_points": "[[500, 10]]"}, "mask_points"),
        ({"mask_points": "[[-1, 10]]"}, "mask_points"),
        ({"mask_points": json.dumps([[1, 1]] * 1000)}, "mask_points"),
        ({"mask_points": "[[1, 1"}, "mask_points"),
        ({"mask_points": '{"x": 1}'}, "mask_points"),
        ({"mask_points": "[[1e999, 1]]"}, "mask_points"),
        ({"mask_points": "[[1, 1, 0]]"}, "mask_points"),
        ({"mask_points": "[[1, 1, -1]]"}, "mask_points"),
        ({"mask_box": "[50, 10, 20, 30]"}, "mask_box"),
        ({"mask_box": "[0, 0, 97, 80]"}, "mask_box"),
        ({"mask_box": "[0, 0, 10]"}, "mask_box"),
        ({"mask_prompt": ""}, "mask_prompt"),
        ({"mask_prompt": " \t "}, "mask_prompt"),
        ({"mask_prompt": "a" * 1001}, "mask_prompt"),
        ({"mask_prompt": "hat", "mask_grow": "-1"}, "mask_grow"),
        ({"mask_prompt": "hat", "mask_grow": "5000"}, "mask_grow"),
        ({"mask_prompt": "hat", "mask_feather": "nan"}, "mask_feather"),
        ({"mask_prompt": "hat", "template_id": "none"}, "template_id"),
        ({}, "mask_prompt"),
    ],
)
def test_what_cannot_be_meant_is_refused(server: ServerProcess, fields: dict[str, str], param: str) -> None:
    answer = mask_of(server, **fields)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("words", ["\x00", "🙂" * 300, "a hat" * 150, "\u202e<script>", "%s%n{}", "ä\ufffd"])
def test_any_words_are_answered(server: ServerProcess, words: str) -> None:
    answer = mask_of(server, mask_prompt=words)
    assert answer.status_code in (200, 400, 422), answer.text


def test_fields_that_nobody_filled_in_are_not_given(server: ServerProcess) -> None:
    asked = {"mask_prompt": "a hat", "mask_points": "", "mask_box": " "}
    np.testing.assert_array_equal(found(mask_of(server, **asked))[0], found(mask_of(server, mask_prompt="a hat"))[0])


def test_no_point_is_not_everything(server: ServerProcess) -> None:
    data = {"prompt": "a hat", "mask_points": "[]"}
    answer = httpx.post(f"{server.base_url}/images/edits", data=data, files={"image": ("p.png", PHOTO)}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mask_points")


def test_the_most_that_can_be_asked_is_answered_soon(server: ServerProcess) -> None:
    points = [[4 + index, 20] for index in range(3)] + [[index % 16, index + 1, -1] for index in range(61)]
    wish = {"mask_prompt": "a hat", "mask_points": json.dumps(points), "mask_grow": "1024", "mask_feather": "256"}
    assert mask_of(server, encode(photo(16, 96)), **wish).status_code in (200, 422)


@pytest.mark.parametrize("fields", [{}, {"padding_mask_crop": 4}], ids=["whole", "crop"])
def test_a_soft_edge_never_takes_the_mask_away(client: openai.OpenAI, fields: dict[str, int]) -> None:
    """Of a mask of one pixel nothing is seen then, and that is all."""
    mask = np.full((80, 96, 4), 255, np.uint8)
    mask[40, 50, 3] = 0
    picture, _ = edit(client, PHOTO, encode(mask), mask_feather=60, **fields)
    assert np.abs(picture[..., :3].astype(int) - photo()).max() < 30


def test_masks_are_counted_whether_anything_is_found_or_not(server: ServerProcess) -> None:
    def count(reason: str) -> float:
        text = httpx.get(f"{server.url}/metrics").text
        lines = [line for line in text.splitlines() if "request_success_total" in line and f'="{reason}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before = count("stop")
    found(mask_of(server, mask_prompt="a hat"))
    assert count("stop") == before + 1


def test_a_mask_is_given_or_found_and_not_both(server: ServerProcess) -> None:
    files = {"image": ("p.png", PHOTO), "mask": ("m.png", alpha_mask())}
    data = {"prompt": "a hat", **WORDS}
    answer = httpx.post(f"{server.base_url}/images/edits", data=data, files=files, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "mask_prompt"
    data = {"prompt": "a hat", "padding_mask_crop": "8", **WORDS}
    answer = httpx.post(f"{server.base_url}/images/edits", data=data, files={"image": ("p.png", PHOTO)}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "padding_mask_crop")


def test_a_segmenter_that_cannot_be_loaded_fails_only_its_requests(folder: Path, tmp_path: Path) -> None:
    """Its files look well when the server starts; its weights do not."""
    broken = make_clipseg(tmp_path / "clipseg")
    weights = broken / "model.safetensors"
    tensors = load_file(weights)
    del tensors["decoder.film_mul.weight"]
    save_file(tensors, weights, {"format": "pt"})
    catalog = tmp_path / "catalog.toml"
    catalog.write_text(
        f'[[model]]\nname = "whole"\npath = "{folder / "klein"}"\n'
        f'[[model]]\nname = "broken"\npath = "{folder / "klein"}"\nsegmenter = "{broken}"\n'
    )
    flags = ("--catalog", str(catalog), "--threads", "1", "--dtype", "float32", "--no-playground")
    server = fork(tmp_path / "scratch", *flags)
    with client_of(server) as client:
        before, _ = edit(client, model="broken")
        answer = mask_of(server, mask_prompt="a hat", model="broken")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        assert "retry-after" in answer.headers
        np.testing.assert_array_equal(edit(client, model="broken")[0], before)
        answer = mask_of(server, mask_prompt="a hat", model="whole")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mask_prompt")
        assert "--segmenter" in answer.json()["error"]["message"]
    assert server.stop() == 0
