"""Control pictures of edits and generations: what reaches the engine, and what is refused at the door."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from api_calls import IMAGE, assert_refused, post_edit, post_json
from fake_engine import MODEL, FakeEngine

from core.control import Control
from core.control_type import ControlType
from core.errors import InvalidRequestError
from core.model_info import ModelInfo
from engine.client.control_input import control_inputs
from engine.client.edit_types import EditInput
from engine.client.resolve.chosen_controls import chosen_controls
from engine.client.upload import BytesUpload

CONTROLLED = msgspec.structs.replace(
    MODEL, controls={"edges": ControlType("edges"), "depth": ControlType("union", 2)}, edit_control_scale=0.5
)
JOINT = msgspec.structs.replace(
    CONTROLLED, controls=CONTROLLED.controls | {"depth": ControlType("union", 2, is_joint=True)}
)
PICTURE = "data:image/png;base64,eA=="


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.models = {name: msgspec.structs.replace(CONTROLLED, name=name) for name in engine.models}
    return engine


def control(content: bytes) -> Any:
    return "control_image[]", ("c.png", content)


async def test_a_form_has_control_pictures_and_what_is_said_of_each(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    said = {"control_type": '["edges", "depth"]', "control_scale": "0.7", "control_end": "[0.5, 1]"}
    response = await post_edit(client, [IMAGE, control(b"one"), control(b"two")], **said)
    assert response.status_code == 200, response.text
    assert engine.files == {"image": b"image bytes", "control 0": b"one", "control 1": b"two"}
    first, second = (each.control for each in engine.last.controls)
    assert first == Control(type="edges", scale=0.7, end=0.5)
    assert second == Control(type="depth", scale=0.7)
    assert response.json()["stencil"]["ignored"] == []


@pytest.mark.parametrize("path", ["edits", "generations"])
async def test_json_has_them_as_data_urls(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    body: dict[str, Any] = {"prompt": "p", "control_image": {"image_url": PICTURE}, "control_type": "depth"}
    picture = {"image": PICTURE} if path == "edits" else {}
    response = await post_json(client, body | picture | {"control_start": 0.25}, path)
    assert response.status_code == 200, response.text
    assert engine.files["control 0"] == b"x"
    assert [each.control for each in engine.last.controls] == [Control(type="depth", start=0.25)]


async def test_a_generation_takes_a_form(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    files = [("prompt", (None, "p")), control(b"one"), ("image", ("i.png", b"two"))]
    response = await client.post("/v1/images/generations", files=files)
    assert response.status_code == 200, response.text
    assert engine.files == {"control 0": b"one"}
    assert response.json()["stencil"]["ignored"] == ["image"]


async def test_models_list_their_control_types(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    (model, *_) = (await client.get("/v1/models")).json()["data"]
    assert model["control_types"] == ["edges", "depth"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"control_scale": "11"}, "control_scale", "decimal_above_max_value"),
        ({"control_scale": "[0.5, 0.5, 0.5]"}, "control_scale", "invalid_value"),
        ({"control_scale": "[]"}, "control_scale", "array_above_max_length"),
        ({"control_scale": "[0.5"}, "control_scale", "invalid_value"),
        ({"control_scale": "[null]"}, "control_scale", "invalid_type"),
        ({"control_start": "0.5", "control_end": "0.5"}, "control_start", "invalid_value"),
    ],
)
async def test_a_bad_value_is_refused(client: httpx.AsyncClient, fields: dict[str, str], param: str, code: str) -> None:
    assert_refused(await post_edit(client, [IMAGE, control(b"c")], **fields), 400, code, param)


async def test_what_is_said_of_no_control_picture_is_refused(client: httpx.AsyncClient) -> None:
    assert_refused(await post_edit(client, control_type="edges"), 400, "invalid_value", "control_type")


async def test_control_pictures_count_with_the_others(client: httpx.AsyncClient) -> None:
    files = [IMAGE, *[control(b"c")] * 16]
    assert_refused(await post_edit(client, files), 400, "array_above_max_length", "control_image")
    large = ("control_image[]", ("c.png", b"c" * (2 * 1024 * 1024 + 1)))
    assert_refused(await post_edit(client, [IMAGE, large]), 413, "request_too_large", "control_image")
    url = "data:image/png;base64," + "AAAA" * (2 * 1024 * 1024 // 3 + 1)
    body = {"prompt": "p", "control_image": [PICTURE, {"image_url": url}], "control_type": "edges"}
    assert_refused(await post_json(client, body, "generations"), 413, "request_too_large", "control_image")


# ------------------------------------------------------------------------------------------------------ the model's


def asked(*controls: Control, **options: Any) -> EditInput:
    upload = BytesUpload(b"x")
    given = control_inputs([upload] * len(controls), {})
    inputs = tuple(type(each)(each.picture, own) for each, own in zip(given, controls, strict=True))
    return EditInput(prompt="p", controls=inputs, **options)


def test_the_default_scale_is_that_of_the_pipelines() -> None:
    control = Control(type="edges")
    edit = asked(control, image=BytesUpload(b"i"))
    assert [each.scale for each in chosen_controls(edit, CONTROLLED).controls] == [0.5]
    assert [each.scale for each in chosen_controls(asked(control), CONTROLLED).controls] == [1.0]
    assert [each.scale for each in chosen_controls(asked(Control(type="edges", scale=0)), CONTROLLED).controls] == [0.0]


def test_the_only_type_need_not_be_named() -> None:
    only = msgspec.structs.replace(CONTROLLED, controls={"edges": ControlType("edges")})
    assert chosen_controls(asked(Control()), only).types == (ControlType("edges"),)


@pytest.mark.parametrize(
    ("edit", "model", "param", "said"),
    [
        (asked(Control(type="pose")), CONTROLLED, "control_type", "Supported values are: 'edges', 'depth'"),
        (asked(Control()), CONTROLLED, "control_type", "Missing required parameter"),
        (asked(Control()), MODEL, "control_image", "has no ControlNet"),
        (asked(Control(type="edges"), Control(type="depth")), JOINT, "control_type", "goes with no other"),
        (asked(*[Control(type="edges")] * 5), CONTROLLED, "control_image", "there are 5 pictures"),
        (asked(Control(type="edges"), references=(BytesUpload(b"r"),)), CONTROLLED, "control_image", "reference"),
    ],
)
def test_what_the_model_cannot_do_is_refused(edit: EditInput, model: ModelInfo, param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        chosen_controls(edit, model)
    assert caught.value.param == param
