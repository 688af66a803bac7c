"""POST /v1/images/edits and /generations: every field, in multipart and JSON bodies."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from types import NoneType
from typing import Any

import httpx
import msgspec
import pytest
from api_calls import IMAGE, MASK, assert_refused, post_edit, post_json
from fake_engine import MODEL, REPORT, FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.lora import named_loras
from core.reference_pictures import ReferencePictures
from core.sampling_params import SamplingParams
from entrypoints.openai.fields.default_fields import OF_CONTROLS
from entrypoints.openai.fields.fields import EDIT_FIELDS

BOUNDED = sorted({name for name, field in EDIT_FIELDS.items() if field.high} & {*SamplingParams.__struct_fields__})


@pytest.mark.parametrize("name", BOUNDED)
def test_a_field_has_the_upper_bound_of_its_sampling_parameter(name: str) -> None:
    high = EDIT_FIELDS[name].high
    assert high is not None
    SamplingParams(**{name: high})
    with pytest.raises(InvalidRequestError):
        SamplingParams(**{name: high + 1})


async def test_plain_edit(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post_edit(client, [IMAGE, MASK])
    assert response.status_code == 200
    body = response.json()
    assert base64.b64decode(body["data"][0]["b64_json"]) == engine.payload
    assert body["size"] == "48x32"
    assert body["output_format"] == "png"
    assert "quality" not in body
    assert body["usage"] == {
        "total_tokens": 39,
        "input_tokens": 23,
        "output_tokens": 16,
        "input_tokens_details": {"text_tokens": 7, "image_tokens": 16, "cached_tokens": 0},
        "prompt_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": 16},
    }
    assert body["stencil"]["ignored"] == []
    assert body["stencil"]["notes"] == []
    assert engine.files == {"image": b"image bytes", "mask": b"mask bytes"}
    assert engine.last.mask_kind == "alpha"
    assert engine.last.prompt == "a red hat"
    assert engine.last.output_size is None
    assert int(response.headers["openai-processing-ms"]) >= 0
    assert int(response.headers["content-length"]) == len(response.content)


@pytest.mark.parametrize(("cache", "cached"), [("hit", 12), ("miss", 0), ("off", 0)])
def test_usage_counts_the_tokens_that_were_cached(cache: Any, cached: int) -> None:
    """16 image tokens, 4 of them active."""
    assert replace(REPORT, cache=cache).cached_tokens == cached


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post_edit(
        client,
        num_inference_steps="3",
        seed="42",
        n="2",
        strength="0.5",
        priority="-7",
        timeout="1e1",
        max_sequence_length="5",
        output_format="jpeg",
        output_compression="80",
        size="64x48",
    )
    assert response.status_code == 200
    sampling, edit = engine.last.sampling, engine.last
    assert (sampling.num_inference_steps, sampling.seed, sampling.n, sampling.strength) == (3, 42, 2, 0.5)
    assert (sampling.priority, sampling.timeout, sampling.max_sequence_length) == (-7, 10.0, 5)
    assert (edit.output_format, edit.compression, edit.output_size) == ("jpeg", 80, (64, 48))
    assert [image["seed"] for image in response.json()["data"]] == [42, 43]
    assert response.json()["stencil"]["seed"] == 42
    assert response.json()["stencil"]["ignored"] == []
    assert response.json()["usage"]["output_tokens"] == 32


async def test_two_passes_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post_edit(client, hires_scale="2", hires_strength="0.4")
    assert (engine.last.sampling.hires_scale, engine.last.sampling.hires_strength) == (2.0, 0.4)
    assert response.json()["stencil"]["ignored"] == []
    response = await client.post("/v1/images/generations", json={"prompt": "p", "hires_scale": 1.5})
    assert (engine.last.sampling.hires_scale, engine.last.sampling.hires_strength) == (1.5, 0.6)
    assert response.json()["stencil"]["ignored"] == []


async def test_the_strength_of_a_second_pass_is_ignored_without_one(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await post_edit(client, hires_strength="0.4")
    assert response.json()["stencil"]["ignored"] == ["hires_strength"]
    assert engine.last.sampling.hires_scale is None


@pytest.mark.parametrize(
    ("quality", "steps", "shown"),
    [
        ("low", 4, "low"),
        ("medium", 8, "medium"),
        ("high", 16, "high"),
        ("hd", 16, "high"),
        ("max", 32, "max"),
        ("auto", None, None),
        ("standard", None, None),
    ],
)
async def test_quality_scales_the_default_steps(
    client: httpx.AsyncClient, engine: FakeEngine, quality: str, steps: int | None, shown: str | None
) -> None:
    response = await post_edit(client, quality=quality)
    assert engine.last.sampling.num_inference_steps == steps
    assert response.json().get("quality") == shown


async def test_steps_win_over_quality_which_is_named(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post_edit(client, quality="high", steps="5")
    assert engine.last.sampling.num_inference_steps == 5
    assert response.json()["stencil"]["ignored"] == ["quality"]
    assert "quality" not in response.json()


async def test_random_seed(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post_edit(client, seed="-1")
    assert engine.last.sampling.seed is None


async def test_fields_without_effect_are_named(client: httpx.AsyncClient) -> None:
    fields = {
        "guidance_scale": "4",
        "true_cfg_scale": "2",
        "negative_prompt": "blur",
        "input_fidelity": "high",
        "moderation": "low",
        "frame_count": "2",
        "output_compression": "50",
        "partial_images": "2",
        "background": "opaque",
        "never_heard_of": "1",
        "svg[model]": "x",
    }
    response = await post_edit(client, **fields)
    assert response.status_code == 200
    assert sorted(response.json()["stencil"]["ignored"]) == sorted(fields)


async def test_guidance_has_an_effect_where_the_model_has_it(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    model = msgspec.structs.replace(MODEL, has_guidance=True, has_true_cfg=True)
    engine.models = {model.name: model}
    response = await post_edit(client, guidance_scale="4", true_cfg_scale="2", negative_prompt="blur")
    assert response.json()["stencil"]["ignored"] == []
    assert engine.last.sampling.guidance_scale == 4.0
    assert engine.last.sampling.negative_prompt == "blur"


@pytest.mark.parametrize(
    ("model", "fields", "ignored"),
    [
        ({"has_true_cfg": True}, {"true_cfg_scale": "2"}, ["true_cfg_scale"]),
        ({"has_true_cfg": True}, {"negative_prompt": "blur"}, ["negative_prompt"]),
        ({"has_guidance": True, "is_guidance_cfg": True}, {"guidance_scale": "4", "negative_prompt": "blur"}, []),
        ({"has_guidance": True, "is_guidance_cfg": True}, {"negative_prompt": "blur"}, []),
        (
            {"has_guidance": True, "is_guidance_cfg": True},
            {"guidance_scale": "1", "negative_prompt": "blur"},
            ["negative_prompt"],
        ),
        ({"has_guidance": True, "is_guidance_cfg": True}, {"true_cfg_scale": "2"}, ["true_cfg_scale"]),
        (
            {"has_guidance": True, "is_guidance_cfg": True, "neutral_guidance_scale": 0.0},
            {"guidance_scale": "1", "negative_prompt": "blur"},
            [],
        ),
    ],
)
async def test_guidance_that_changes_nothing_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, model: dict[str, Any], fields: dict[str, str], ignored: list[str]
) -> None:
    engine.models = {MODEL.name: msgspec.structs.replace(MODEL, **model)}
    response = await post_edit(client, **fields)
    assert response.json()["stencil"]["ignored"] == ignored


async def test_defaults_are_not_named_as_ignored(client: httpx.AsyncClient) -> None:
    fields = {"quality": "auto", "background": "auto", "mask_aware": "false", "partial_images": "0", "model": ""}
    response = await post_edit(client, response_format="b64_json", stream="false", size="auto", user="me", **fields)
    assert response.json()["stencil"]["ignored"] == []
    assert response.json()["safety_identifier"] == "me"


@pytest.mark.parametrize(("output_format", "is_opaque"), [("png", False), ("webp", False), ("jpeg", True)])
async def test_background_is_echoed_where_it_has_an_effect(
    client: httpx.AsyncClient, output_format: str, is_opaque: bool
) -> None:
    """An edit keeps the upload's transparency, except in jpeg, which has none."""
    body = (await post_edit(client, background="opaque", output_format=output_format)).json()
    assert body.get("background") == ("opaque" if is_opaque else None)
    assert body["stencil"]["ignored"] == ([] if is_opaque else ["background"])


async def test_a_user_that_is_overruled_is_named(client: httpx.AsyncClient) -> None:
    body = (await post_edit(client, user="me", safety_identifier="you")).json()
    assert (body["safety_identifier"], body["stencil"]["ignored"]) == ("you", ["user"])


async def test_unmasked_note(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.report = replace(engine.report, unmasked=True)
    assert "whole image" in (await post_edit(client)).json()["stencil"]["notes"][0]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "empty_string", "prompt"),
        ({"prompt": "x" * 32001}, "string_above_max_length", "prompt"),
        ({"n": "0"}, "integer_below_min_value", "n"),
        ({"n": "11"}, "integer_above_max_value", "n"),
        ({"n": "2.0"}, "invalid_type", "n"),
        ({"n": "true"}, "invalid_type", "n"),
        ({"n": ""}, "invalid_type", "n"),
        ({"n": " 2"}, "invalid_type", "n"),
        ({"n": "1_0"}, "invalid_type", "n"),
        ({"n": "٣"}, "invalid_type", "n"),
        ({"n": "9" * 5000}, "invalid_type", "n"),
        ({"output_compression": "101"}, "integer_above_max_value", "output_compression"),
        ({"partial_images": "4"}, "integer_above_max_value", "partial_images"),
        ({"num_inference_steps": "0"}, "integer_below_min_value", "num_inference_steps"),
        ({"steps": "201"}, "integer_above_max_value", "steps"),
        ({"steps": "3", "num_inference_steps": "3"}, "invalid_value", "steps"),
        ({"guidance_scale": "abc"}, "invalid_type", "guidance_scale"),
        ({"guidance_scale": "nan"}, "invalid_value", "guidance_scale"),
        ({"guidance_scale": "-Infinity"}, "invalid_value", "guidance_scale"),
        ({"guidance_scale": "1e999"}, "invalid_value", "guidance_scale"),
        ({"guidance_scale": "-0.1"}, "decimal_below_min_value", "guidance_scale"),
        ({"guidance_scale": "100.5"}, "decimal_above_max_value", "guidance_scale"),
        ({"strength": "1.01"}, "decimal_above_max_value", "strength"),
        ({"hires_scale": "1"}, "decimal_below_min_value", "hires_scale"),
        ({"hires_scale": "4.5"}, "decimal_above_max_value", "hires_scale"),
        ({"hires_scale": "nan"}, "invalid_value", "hires_scale"),
        ({"hires_strength": "-0.1"}, "decimal_below_min_value", "hires_strength"),
        ({"seed": "-2"}, "integer_below_min_value", "seed"),
        ({"seed": str(2**63)}, "integer_above_max_value", "seed"),
        ({"seed": str(2**63 - 1), "n": "2"}, "integer_above_max_value", "seed"),
        ({"timeout": "0"}, "decimal_below_min_value", "timeout"),
        ({"max_sequence_length": "0"}, "integer_below_min_value", "max_sequence_length"),
        ({"mask_margin": "-1"}, "integer_below_min_value", "mask_margin"),
        ({"padding_mask_crop": "-1"}, "integer_below_min_value", "padding_mask_crop"),
        ({"padding_mask_crop": "65536"}, "integer_above_max_value", "padding_mask_crop"),
        ({"padding_mask_crop": "1.5"}, "invalid_type", "padding_mask_crop"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"mask_aware": "1"}, "invalid_type", "mask_aware"),
        ({"size": "big"}, "invalid_value", "size"),
        ({"size": ""}, "invalid_value", "size"),
        ({"size": "0x64"}, "invalid_value", "size"),
        ({"size": "99999x64"}, "invalid_value", "size"),
        ({"output_format": "gif"}, "invalid_value", "output_format"),
        ({"quality": "best"}, "invalid_value", "quality"),
        ({"background": "red"}, "invalid_value", "background"),
        ({"background": "transparent"}, "unsupported_value", "background"),
        ({"response_format": "url"}, "unsupported_value", "response_format"),
        ({"response_format": "bytes"}, "invalid_value", "response_format"),
        ({"input_fidelity": "medium"}, "invalid_value", "input_fidelity"),
        ({"frame_count": "1"}, "integer_below_min_value", "frame_count"),
        ({"mask": "aGVsbG8="}, "invalid_type", "mask"),
        ({"mask_image": "not base64!"}, "invalid_value", "mask_image"),
        ({"mask_image": "data:image/png,hello"}, "invalid_value", "mask_image"),
        ({"markup": "x"}, "unsupported_parameter", "markup"),
    ],
)
async def test_bad_field(client: httpx.AsyncClient, fields: dict[str, str], code: str, param: str) -> None:
    response = await post_edit(client, **fields)
    assert_refused(response, 400, code, param)
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_error_wording(client: httpx.AsyncClient) -> None:
    message = assert_refused(await post_edit(client, n="11"), 400, "integer_above_max_value", "n")
    assert message == "Invalid 'n': integer above maximum value. Expected a value <= 10, but got 11 instead."
    message = assert_refused(await post_edit(client, output_format="gif"), 400, "invalid_value", "output_format")
    assert message == "Invalid value: 'gif'. Supported values are: 'png', 'webp', 'jpeg'."


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    assert_refused(await post_edit(client, model="dall-e-2"), 404, "model_not_found", "model")


# --------------------------------------------------------------------------------------------------------- files


async def test_missing_prompt_and_image(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/images/edits", files=[IMAGE])
    assert assert_refused(response, 400, "missing_required_parameter", "prompt") == (
        "Missing required parameter: 'prompt'."
    )
    assert_refused(await post_edit(client, []), 400, "missing_required_parameter", "image")


async def test_file_input_left_empty_in_a_browser(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    parts = [(b"prompt", b"", b"p"), (b"image", b'; filename="a.png"', b"i"), (b"mask", b'; filename=""', b"")]
    body = b"".join(part % values for values in parts) + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert (await client.post("/v1/images/edits", content=body, headers=headers)).status_code == 200
    assert engine.last.mask is None


@pytest.mark.parametrize("name", ["image", "image[]", "image[0]"])
async def test_image_lists(client: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    images = [(name, (f"{i}.png", b"%d" % i, "image/png")) for i in range(3)]
    response = await post_edit(client, images)
    assert engine.files["image"] == b"0"
    assert response.json()["stencil"]["ignored"] == ["image[1]", "image[2]"]


def let_see(engine: FakeEngine) -> None:
    """Have the engine's model see references."""
    rule = ReferencePictures(most=3, pixels=64**2, multiple=16, grows=False)
    engine.models = {name: msgspec.structs.replace(model, references=rule) for name, model in engine.models.items()}


async def test_further_images_are_references_of_models_that_see_them(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    let_see(engine)
    files = [(name, ("a.png", name.encode())) for name in ("reference_image[]", "image[]", "image", "reference_image")]
    response = await post_edit(client, files)
    assert response.status_code == 200, response.text
    shown = {"reference 0": b"reference_image[]", "reference 1": b"image", "reference 2": b"reference_image"}
    assert engine.files == {"image": b"image[]"} | shown
    assert response.json()["stencil"]["ignored"] == []


async def test_references_in_json(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    let_see(engine)
    one, two, three = map(data_url, (b"one", b"two", b"three"))
    body = {"images": [one, {"image_url": two}], "reference_images": [three], "prompt": "p"}
    response = await post_json(client, body)
    assert response.status_code == 200, response.text
    assert engine.files == {"image": b"one", "reference 0": b"two", "reference 1": b"three"}


async def test_references_that_the_model_does_not_see_are_named(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    files = [IMAGE, ("reference_image[]", ("a.png", b"x")), ("nonsense", ("b.png", b"y"))]
    response = await post_edit(client, files)
    assert response.json()["stencil"]["ignored"] == ["reference_image[0]", "nonsense"]
    assert "reference 0" not in engine.files


async def test_references_are_files_and_counted_with_the_images(client: httpx.AsyncClient) -> None:
    message = assert_refused(
        await post_edit(client, [IMAGE], reference_image="text"), 400, "invalid_type", "reference_image"
    )
    assert message == "Invalid type for 'reference_image[0]': expected a file, but got a string instead."
    files = [IMAGE, *[("reference_image[]", ("a.png", b"x"))] * 16]
    assert_refused(await post_edit(client, files), 400, "array_above_max_length", "reference_image")
    body = {"image": data_url(b"one"), "reference_images": [data_url(b"x")] * 16, "prompt": "p"}
    assert_refused(await post_json(client, body), 400, "array_above_max_length", "reference_images")
    body["reference_images"] = "no array"
    assert_refused(await post_json(client, body), 400, "invalid_type", "reference_images")


async def test_too_many_images(client: httpx.AsyncClient) -> None:
    images = [("image[]", (f"{i}.png", b"x", "image/png")) for i in range(17)]
    assert_refused(await post_edit(client, images), 400, "array_above_max_length", "image")


async def test_image_as_text(client: httpx.AsyncClient) -> None:
    message = assert_refused(await post_edit(client, [], image="aGVsbG8="), 400, "invalid_type", "image")
    assert message == "Invalid type for 'image[0]': expected a file, but got a string instead."


async def test_mask_list_and_file_for_a_scalar(client: httpx.AsyncClient) -> None:
    masks = [("mask[]", ("m.png", b"m", "image/png"))]
    assert_refused(await post_edit(client, [IMAGE, *masks]), 400, "invalid_type", "mask")
    assert_refused(await post_edit(client, [IMAGE, ("seed", ("s", b"1"))]), 400, "invalid_type", "seed")


async def test_given_twice(client: httpx.AsyncClient) -> None:
    assert_refused(
        await post_edit(client, [IMAGE, ("seed", (None, "1")), ("seed", (None, "2"))]), 400, "invalid_value", "seed"
    )
    assert_refused(await post_edit(client, [IMAGE, MASK, MASK]), 400, "invalid_value", "mask")


async def test_both_masks(client: httpx.AsyncClient) -> None:
    files = [IMAGE, MASK, ("mask_image", ("w.png", b"w", "image/png"))]
    assert_refused(await post_edit(client, files), 400, "invalid_value", "mask_image")


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,", "DATA:image/png;name=x;Base64,"])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 200, 400_000])
async def test_mask_image_as_text(client: httpx.AsyncClient, engine: FakeEngine, prefix: str, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    text = base64.encodebytes(data).decode() if size % 2 else base64.b64encode(data).decode()
    response = await post_edit(client, mask_image=prefix + text)
    assert response.status_code == 200
    assert engine.files["mask"] == data
    assert engine.last.mask_kind == "luminance"


async def test_mask_image_as_file(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post_edit(client, [IMAGE, ("mask_image", ("w.png", b"white", "image/png"))])
    assert engine.files["mask"] == b"white"
    assert engine.last.mask_kind == "luminance"


async def test_any_order_and_spooled_file(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    big = bytes(range(256)) * 7000  # 1.8 MB: beyond what is held in memory
    files = [("image", ("big.bin", big, "application/octet-stream")), ("prompt", (None, 'last\r\nname="x"'))]
    response = await client.post("/v1/images/edits", files=files)
    assert response.status_code == 200
    assert engine.files["image"] == big
    assert engine.last.prompt == 'last\nname="x"'


async def test_a_forms_prompts_have_the_newlines_of_a_json_body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Browsers send CR LF in forms; what a JSON body has is left as it is."""
    texts = {"prompt": "a hat\n\nof wool", "negative_prompt": "\nred"}
    await post_edit(client, **{name: text.replace("\n", "\r\n") for name, text in texts.items()})
    assert (engine.last.prompt, engine.last.sampling.negative_prompt) == tuple(texts.values())
    await post_json(client, {"images": [{"image_url": data_url(b"image")}], "prompt": "a\r\nb"})
    assert engine.last.prompt == "a\r\nb"


# --------------------------------------------------------------------------------------------------------- JSON


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


async def test_json_edit(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "images": [{"image_url": data_url(b"one")}, {"image_url": data_url(b"two")}],
        "mask": {"image_url": data_url(b"mask")},
        "prompt": "p",
        "n": None,
        "seed": 3,
        "strength": 1,
        "nonsense": {"a": [1]},
    }
    response = await post_json(client, body)
    assert response.status_code == 200, response.text
    assert engine.files == {"image": b"one", "mask": b"mask"}
    assert engine.last.sampling.seed == 3
    assert response.json()["stencil"]["ignored"] == ["image[1]", "nonsense"]


@pytest.mark.parametrize("name", ["image", "images"])
async def test_json_takes_plain_data_urls_too(client: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    one, two, mask = map(data_url, (b"one", b"two", b"mask"))
    response = await post_json(client, {name: [one, {"image_url": two}], "mask": mask, "prompt": "p"})
    assert response.status_code == 200, response.text
    assert engine.files == {"image": b"one", "mask": b"mask"}
    assert response.json()["stencil"]["ignored"] == ["image[1]"]


@pytest.mark.parametrize("data", [b"one", bytes(range(256)) * 4000])
async def test_json_takes_one_image_without_a_list(client: httpx.AsyncClient, engine: FakeEngine, data: bytes) -> None:
    for image in (data_url(data), {"image_url": data_url(data)}):
        response = await post_json(client, {"image": image, "mask": {"image_url": data_url(b"m")}, "prompt": "p"})
        assert response.status_code == 200, response.text
        assert engine.files == {"image": data, "mask": b"m"}


async def test_json_with_long_strings(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Strings above the parser's limit: pictures are stored, text fields are refused, unknown fields are ignored."""
    image, mask = bytes(range(256)) * 4000, bytes(range(255, -1, -1)) * 3000
    body = {
        "unknown": "x" * 600_000,
        "images": [{"image_url": data_url(image)}],
        "mask_image": base64.b64encode(mask).decode(),
        "prompt": "p",
    }
    response = await post_json(client, body)
    assert response.status_code == 200, response.text
    assert engine.files == {"image": image, "mask": mask}
    assert response.json()["stencil"]["ignored"] == ["unknown"]
    for name in ("prompt", "user", "size"):
        response = await post_json(client, body | {name: "x" * 600_000})
        assert_refused(response, 400, "string_above_max_length", name)


async def test_json_escaped_slashes_and_unicode(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    data = bytes(255 for _ in range(99))  # all '/' in base64
    text = data_url(data).replace("/", "\\/")
    body = '{"prompt":"\\u00e9\\ud83d\\ude00","images":[{"image_url":"' + text + '"}]}'
    response = await client.post("/v1/images/edits", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert engine.files["image"] == data
    assert engine.last.prompt == "é😀"


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"images": [{"image_url": "https://example.com/a.png"}]}, "unsupported_value", "image"),
        ({"images": [{"file_id": "file-1"}]}, "unsupported_value", "image"),
        ({"images": []}, "missing_required_parameter", "image"),
        ({"images": "x"}, "invalid_type", "image"),
        ({"images": ["https://example.com/a.png"]}, "unsupported_value", "image"),
        ({"image": data_url(b"two")}, "invalid_value", "image"),
        ({"image": 3}, "invalid_type", "image"),
        ({"images": None, "image": [3]}, "invalid_type", "image"),
        ({"images": None, "image": ""}, "missing_required_parameter", "image"),
        ({"mask": 3}, "invalid_type", "mask"),
        ({"mask": ["x"]}, "invalid_type", "mask"),
        ({"images": [{"image_url": 3}]}, "invalid_type", "image"),
        ({"images": [{"image_url": "data:image/png;base64,@@@@"}]}, "invalid_value", "image"),
        ({"mask": "aGVsbG8="}, "unsupported_value", "mask"),
        ({"mask_image": 3}, "invalid_type", "mask_image"),
        ({"n": "2"}, "invalid_type", "n"),
        ({"n": 2.0}, "invalid_type", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"n": 10**30}, "integer_above_max_value", "n"),
        ({"strength": "1"}, "invalid_type", "strength"),
        ({"strength": True}, "invalid_type", "strength"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"prompt": ["p"]}, "invalid_type", "prompt"),
        ({"prompt": None}, "missing_required_parameter", "prompt"),
        ({"size": "nope"}, "invalid_value", "size"),
        ({"markup": {"image_url": "x"}}, "unsupported_parameter", "markup"),
    ],
)
async def test_bad_json_field(client: httpx.AsyncClient, change: dict[str, Any], code: str, param: str) -> None:
    body = {"prompt": "p", "images": [{"image_url": data_url(b"one")}]} | change
    assert_refused(await post_json(client, body), 400, code, param)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 400, "-" + "1" * 400, "1" * 5000])
@pytest.mark.parametrize("field", ["strength", "timeout", "seed"])
@pytest.mark.parametrize("path", ["edits", "generations"])
async def test_json_numbers_beyond_what_a_float_holds(
    client: httpx.AsyncClient, number: str, field: str, path: str
) -> None:
    body = '{"prompt":"p","' + field + '":' + number + "}"
    response = await client.post(f"/v1/images/{path}", content=body, headers={"content-type": "application/json"})
    code = "invalid_value"
    if field == "seed" and len(number) < 1000 and "e" not in number:  # read, and compared with the field's range
        code = "integer_below_min_value" if number[0] == "-" else "integer_above_max_value"
    assert_refused(response, 400, code, field)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"null", b'{"a":1}x'])
async def test_malformed_json(client: httpx.AsyncClient, body: bytes) -> None:
    for path in ("edits", "generations"):
        response = await client.post(
            f"/v1/images/{path}", content=body, headers={"content-type": "application/json; charset=utf-8"}
        )
        assert_refused(response, 400, "invalid_json", None)


async def test_too_many_json_members(client: httpx.AsyncClient) -> None:
    """A body of 1 MB can have 100000 members; comparing their names would take minutes."""
    body = {"prompt": "p", "images": [{"image_url": data_url(b"one")}]} | {f"a{i}": 1 for i in range(90_000)}
    assert_refused(await post_json(client, body), 400, "invalid_json", None)


@pytest.mark.parametrize("padding", [0, 32])
async def test_padding_mask_crop(client: httpx.AsyncClient, engine: FakeEngine, padding: int) -> None:
    """0 is valid too: a crop of exactly the mask's box."""
    engine.report = replace(engine.report, crop=(10, 20, 30, 40))
    answer = (await post_edit(client, padding_mask_crop=str(padding))).json()
    assert engine.last.padding_mask_crop == padding
    assert (answer["stencil"]["ignored"], answer["stencil"]["crop"]) == ([], [10, 20, 30, 40])
    answer = (await post_edit(client)).json()
    assert engine.last.padding_mask_crop is None
    body = {"prompt": "a hat", "padding_mask_crop": padding}
    answer = (await client.post("/v1/images/generations", json=body)).json()
    assert engine.last.padding_mask_crop is None
    assert answer["stencil"]["ignored"] == ["padding_mask_crop"]


async def test_generation(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "p", "n": None, "size": "64x128", "background": "opaque", "style": "vivid", "quality": "hd"}
    response = await post_json(client, body, "generations")
    assert response.status_code == 200
    assert engine.last.image is None
    assert engine.last.canvas_size == (64, 128)
    assert engine.last.output_size is None
    assert response.json()["background"] == "opaque"
    assert response.json()["quality"] == "high"
    assert response.json()["stencil"]["ignored"] == ["style"]
    assert response.json()["usage"]["input_tokens_details"] == {"text_tokens": 7, "image_tokens": 0, "cached_tokens": 0}


async def test_generation_of_native_size_and_bad_aspect(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post_json(client, {"prompt": "p", "size": "auto"}, "generations")
    assert engine.last.canvas_size is None
    assert_refused(
        await post_json(client, {"prompt": "p", "size": "64x256"}, "generations"), 400, "invalid_value", "size"
    )


# --------------------------------------------------------------------------------------------------------- bodies


async def test_content_types(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/images/edits", data={"prompt": "p"})  # application/x-www-form-urlencoded
    assert_refused(response, 415, "unsupported_content_type", None)
    assert_refused(await client.post("/v1/images/edits"), 415, "unsupported_content_type", None)
    response = await client.post("/v1/images/generations", data={"prompt": "p"})
    assert_refused(response, 415, "unsupported_content_type", None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\n",
        b"no boundary at all",
        b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhello',  # cut off
        b"--b\r\nContent-Type: text/plain\r\n\r\nhello\r\n--b--\r\n",  # no name
        b'--b\r\nContent-Disposition form-data; name="prompt"\r\n\r\nhello\r\n--b--\r\n',
        b"".join(b'--b\r\nContent-Disposition: form-data; name="x%d"\r\n\r\n\r\n' % i for i in range(300))
        + b"--b--\r\n",
    ],
)
async def test_malformed_multipart(client: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = await client.post("/v1/images/edits", content=body, headers=headers)
    assert_refused(response, 400, "invalid_multipart", None)


async def test_multipart_without_boundary(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/images/edits", content=b"x", headers={"content-type": "multipart/form-data"})
    assert_refused(response, 400, "invalid_multipart", None)


async def test_not_utf8(client: httpx.AsyncClient) -> None:
    assert_refused(await post_edit(client, [IMAGE, ("user", (None, b"\xff\xfe"))]), 400, "invalid_value", "user")


def outcome(parse: Callable[[Any], Any], value: Any) -> Any:
    """The parsed value, or the InvalidRequestError."""
    try:
        return parse(value)
    except InvalidRequestError as error:
        return error


JSON_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.sampled_from(sorted(EDIT_FIELDS)), st.text())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_is_parsed_or_refused(name: str, text: str) -> None:
    """No text makes a field raise anything but its own error, naming the field."""
    value = outcome(EDIT_FIELDS[name].from_text, text)
    if isinstance(value, InvalidRequestError):
        assert value.param == name
    else:
        kinds = {"string": (str,), "integer": (int,), "number": (float,), "boolean": (bool,)}
        unions = {
            "lora": (tuple,),
            "class_label": (int, str),
            "mask_points": (tuple, NoneType),
            "mask_box": (tuple, NoneType),
            **dict.fromkeys(OF_CONTROLS, (tuple,)),
        }
        assert type(value) in unions.get(name, kinds[EDIT_FIELDS[name].kind])


def as_tuples(value: Any) -> Any:
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


@given(
    st.sampled_from(sorted(EDIT_FIELDS)),
    st.recursive(JSON_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5),
)
@settings(max_examples=300, deadline=None)
def test_any_json_is_parsed_or_refused(name: str, value: Any) -> None:
    parsed = outcome(EDIT_FIELDS[name].from_json, msgspec.Raw(msgspec.json.encode(value)))
    if isinstance(parsed, InvalidRequestError):
        assert parsed.param == name
    else:
        if name == "class_label" and isinstance(value, str):
            value = EDIT_FIELDS[name].from_text(value)
        expected = as_tuples(value) if name in ("mask_points", "mask_box") else value
        if name in OF_CONTROLS and value is not None:
            expected = tuple(value) if isinstance(value, list) else (value,)
        assert parsed == (named_loras(value) if name == "lora" else expected)
