"""Workflows of users' classes by OpenAI's client, from a real server."""

from __future__ import annotations

import base64
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_inputs
import httpx
import numpy as np
import openai
import pytest
from pictures import decode, encode, photo
from server_process import ServerProcess, fork

API_KEY = "sk-local"
ROOT = Path(__file__).resolve().parents[2]
FILES = (ROOT / "tests" / "workflow_files", ROOT / "examples" / "workflows" / "safety.py")


@pytest.fixture(scope="module")
def server(server_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("workflows")
    flags = ["--api-key", API_KEY, "--max-upload-bytes", "1000000"]
    for file in FILES:
        flags += ["--workflow", str(file)]
    server = fork(folder / "scratch", *server_flags, *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.base_url, api_key=API_KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def raw(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60) as client:
        yield client


PHOTO, STYLE = encode(photo()), encode(photo(48, 32))


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def pixels_of(item: Any) -> Any:
    text = item["b64_json"] if isinstance(item, dict) else item.b64_json
    return decode(base64.b64decode(text, validate=True))


def inspected(result: Any) -> dict[str, Any]:
    """Its values without the tensor, which is checked."""
    values = dict(result["values"])
    means = values.pop("means")
    assert (means["dtype"], means["shape"]) == ("float32", [3])
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(means["base64"]), "float32"), photo().mean((0, 1)), rtol=1e-5
    )
    return values


def test_a_users_model_answers_openais_client_with_its_picture_and_values(client: openai.OpenAI) -> None:
    result = client.images.edit(model="safety", image=PHOTO, prompt="", extra_body={"seed": 3, "who_knows": 1})
    assert (result.size, result.output_format) == ("96x80", "png")
    assert result.data is not None
    (item,) = result.data
    np.testing.assert_array_equal(pixels_of(item), photo())
    assert result.values == {"is_safe": True}
    assert sorted(result.stencil["ignored"]) == ["prompt", "seed", "who_knows"]
    reddened = photo() // np.array([1, 9, 9], np.uint8) | np.array([192, 0, 0], np.uint8)
    red = client.images.edit(model="safety", image=encode(reddened), prompt="-")
    assert not pixels_of(red.data[0]).any()
    assert red.values == {"is_safe": False}


def test_each_kind_of_input_comes_as_a_field_or_a_file_of_a_form_or_of_json(
    client: openai.OpenAI, raw: httpx.Client
) -> None:
    """`strength` is the workflow's, whose range is not that of edits."""
    given = {"count": 2**62, "strength": 7.5, "flip": True, "words": "schön"}
    wanted = {"count": 2**62 + 1, "strength": 15.0, "flip": False, "words": "schön!"}
    style = base64.b64encode(STYLE).decode()
    by_sdk = client.images.edit(
        model="inspect", image=[PHOTO], prompt="x", extra_body=given | {"style": style}
    ).to_dict()
    fields = {"model": "inspect"} | {name: str(value).lower() for name, value in given.items()}
    by_form = raw.post("/images/edits", data=fields, files={"style": STYLE, "image": PHOTO}).json()
    generated = raw.post("/images/generations", data=fields, files={"image": PHOTO, "style": STYLE}).json()
    members = {"model": "inspect", "images": [{"image_url": data_url(PHOTO)}], "style": data_url(STYLE)} | given
    by_json = [raw.post(path, json=members).json() for path in ("/images/edits", "/images/generations")]
    for result in (by_sdk, by_form, generated, *by_json):
        assert inspected(result) == wanted
        assert [item["name"] for item in result["data"]] == ["picture", "style"]
        np.testing.assert_array_equal(pixels_of(result["data"][0]), photo()[:, ::-1])
        np.testing.assert_array_equal(pixels_of(result["data"][1]), photo(48, 32))


def test_inputs_may_be_left_out_and_pictures_come_in_the_format_that_is_asked_for(client: openai.OpenAI) -> None:
    result = client.images.edit(
        model="inspect",
        image=PHOTO,
        prompt="",
        output_format="webp",
        response_format="b64_json",
        user="someone",
        extra_body={"count": -1, "words": None},
    )
    assert inspected(result.to_dict()) == {"count": 0, "strength": 1.0, "flip": True, "words": "none!"}
    assert base64.b64decode(result.data[0].b64_json)[8:12] == b"WEBP"
    np.testing.assert_array_equal(pixels_of(result.data[0]), photo())
    assert (result.output_format, result.safety_identifier) == ("webp", "someone")


def test_a_workflow_without_a_picture_answers_with_values_alone(client: openai.OpenAI) -> None:
    result = client.images.generate(model="length", prompt="a red coat")
    assert (result.data, result.values) == ([], {"length": 10})
    assert client.images.edit(model="length", image=[], prompt="").values == {"length": 0}


def test_the_list_of_models_says_what_workflows_take_and_make(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny/fill", "inspect", "sum", "length", "count", "safety"]
    inspect = client.models.retrieve("inspect").to_dict()
    assert inspect == models[1].to_dict()
    assert inspect["modality"] == "workflow"
    assert inspect["inputs"] == [
        {"name": "image", "type": "picture", "max_width": 2048, "max_height": 2048, "required": True},
        {"name": "count", "type": "integer", "required": True},
        {"name": "strength", "type": "number", "required": False},
        {"name": "flip", "type": "boolean", "required": False},
        {"name": "words", "type": "string", "max_bytes": 16, "required": False},
        {"name": "style", "type": "picture", "max_width": 48, "max_height": 32, "required": False},
    ]
    assert inspect["outputs"][0] == {"name": "style", "type": "picture", "max_width": 48, "max_height": 32}
    assert inspect["outputs"][-1] == {"name": "means", "type": "tensor", "dtype": "float32", "max_shape": [3]}
    assert "inputs" not in models[0].to_dict()
    assert client.models.retrieve("sum").to_dict()["inputs"][1] == {
        "name": "flags",
        "type": "tensor",
        "dtype": "bool",
        "max_shape": [4],
        "required": False,
    }
    _, rounds = client.models.retrieve("count").to_dict()["inputs"]
    assert rounds == {"name": "rounds", "type": "integer", "minimum": 1, "maximum": 200, "required": True}


def tensor_object(array: Any, **changes: Any) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": data} | changes


def form(**fields: str) -> dict[str, Any]:
    """A multipart form without files."""
    return {"files": {name: (None, text) for name, text in fields.items()}}


NUMBERS = np.arange(3 * 30000, dtype=np.float64).reshape(3, 30000)
"""More than the 512 KiB above which the texts of a body are kept apart."""


def test_a_tensor_comes_as_answers_show_one(client: openai.OpenAI, raw: httpx.Client) -> None:
    whole, flags = tensor_object(NUMBERS), tensor_object(np.array([True, False, True]))
    for body in (
        {"json": {"model": "sum", "numbers": whole, "flags": flags}},
        form(model="sum", numbers=json.dumps(whole), flags=json.dumps(flags)),
        {"data": {"model": "sum"}, "files": {"numbers": json.dumps(whole), "flags": json.dumps(flags)}},
    ):
        assert raw.post("/images/generations", **body).json()["values"] == {"sum": NUMBERS.sum() + 2}
    result = client.images.generate(model="sum", prompt="", extra_body={"numbers": whole, "flags": None})
    assert result.values == {"sum": NUMBERS.sum()}
    edited = client.images.edit(model="sum", image=[], prompt="", extra_body={"numbers": json.dumps(whole)})
    assert edited.values == {"sum": NUMBERS.sum()}
    empty = tensor_object(np.zeros((3, 0)))
    assert raw.post("/images/edits", json={"model": "sum", "numbers": empty}).json()["values"] == {"sum": 0}


SMALL = tensor_object(np.ones((2, 2)))


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ("[1, 2]", "expected an object of JSON with 'dtype', 'shape' and 'base64'"),
        ("{", "expected an object of JSON with 'dtype', 'shape' and 'base64'"),
        ({"dtype": "float64", "shape": [2, 2]}, "expected an object of JSON with 'dtype', 'shape' and 'base64'"),
        (SMALL | {"shape": [2] * 9}, "expected an object of JSON with 'dtype', 'shape' and 'base64'"),
        (SMALL | {"shape": [2**70]}, "expected an object of JSON with 'dtype', 'shape' and 'base64'"),
        (SMALL | {"dtype": "float32"}, "it is float32, and float64 is declared"),
        (SMALL | {"shape": [4]}, r"its shape is \[4\], and tensor float64 up to \[3, 65536\] is declared"),
        (SMALL | {"shape": [-2, -2]}, "expected an object of JSON with 'dtype', 'shape' and 'base64'"),
        (json.dumps(SMALL).replace("2", "9" * 5000), "expected an object of JSON with 'dtype', 'shape' and 'base64'"),
        (SMALL | {"shape": [2, 3]}, r"it has 32 bytes, and float64 \[2, 3\] has 48"),
        (SMALL | {"base64": "%%%"}, "not valid base64"),
        (tensor_object(np.array([[1.0, np.nan]])), "not all of its numbers are finite"),
    ],
)
def test_a_tensor_that_is_not_as_declared_is_refused(raw: httpx.Client, numbers: Any, told: str) -> None:
    text = numbers if isinstance(numbers, str) else json.dumps(numbers)
    for body in (form(model="sum", numbers=text), {"json": {"model": "sum", "numbers": numbers}}):
        answer = raw.post("/images/generations", **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "numbers")
        assert re.search(told, error["message"])


def test_other_refusals_of_tensors(client: openai.OpenAI, raw: httpx.Client) -> None:
    odd = tensor_object(np.array([2], np.uint8), dtype="bool")
    answer = raw.post("/images/generations", json={"model": "sum", "numbers": SMALL, "flags": odd})
    assert "a bool is a byte of 0 or 1" in answer.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="in a form it is one text, JSON, and not spread over several"):
        client.images.edit(model="sum", image=PHOTO, prompt="", extra_body={"numbers": SMALL})
    large = tensor_object(np.ones(130000))
    for body in ({"json": {"model": "sum", "numbers": large}}, form(model="sum", numbers=json.dumps(large))):
        answer = raw.post("/images/edits", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "numbers")
    twice = [("numbers", (None, json.dumps(SMALL)))] * 2
    answer = raw.post("/images/edits", files=[("model", (None, "sum")), *twice])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "numbers")


def test_the_rounds_of_a_loop_have_a_range(raw: httpx.Client) -> None:
    made = raw.post("/images/generations", json={"model": "count", "number": 1, "rounds": 3})
    assert made.json()["values"] == {"number": 7}
    for rounds, code in ((0, "integer_below_min_value"), (201, "integer_above_max_value")):
        answer = raw.post("/images/generations", json={"model": "count", "number": 1, "rounds": rounds})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"count": None}, "count", "missing_required_parameter"),
    ({"count": "2.5"}, "count", "invalid_type"),
    ({"count": 2**63}, "count", "integer_above_max_value"),
    ({"strength": "much"}, "strength", "invalid_type"),
    ({"strength": "nan"}, "strength", "invalid_value"),
    ({"flip": "perhaps"}, "flip", "invalid_type"),
    ({"words": "ü" * 9}, "words", "string_above_max_length"),
    ({"style": "no base64!"}, "style", "invalid_value"),
    ({"style": base64.b64encode(b"no picture").decode()}, "style", "invalid_image_file"),
    ({"style": base64.b64encode(PHOTO).decode()}, "style", "image_too_large"),
    ({"image": PHOTO[:200]}, "image", "invalid_image_file"),
    ({"image": []}, "image", "missing_required_parameter"),
    ({"stream": True}, "stream", "unsupported_value"),
    ({"response_format": "url"}, "response_format", "unsupported_value"),
    ({"output_format": "gif"}, "output_format", "invalid_value"),
    ({"priority": 2**31}, "priority", "integer_above_max_value"),
]


@pytest.mark.parametrize(("changes", "param", "code"), WRONG)
def test_what_is_not_as_declared_is_refused_by_name(
    client: openai.OpenAI, changes: dict[str, Any], param: str, code: str
) -> None:
    given: dict[str, Any] = {"count": 1} | changes
    image = given.pop("image", PHOTO)
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(model="inspect", image=image, prompt="", extra_body=given)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_other_refusals(client: openai.OpenAI, raw: httpx.Client) -> None:
    fields = {"model": "inspect", "count": "1"}
    for files, param in (
        ([("image", PHOTO), ("image", PHOTO)], "image"),
        ([("image", PHOTO), ("count", PHOTO)], "count"),
    ):
        answer = raw.post("/images/edits", data=fields, files=[(name, ("a.png", file)) for name, file in files])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    too_large = raw.post("/images/edits", data=fields, files={"image": bytes(1_000_001)})
    assert (too_large.status_code, too_large.json()["error"]["param"]) == (413, "image")
    for members, param in (
        ({"image": "https://example.com/a.png"}, "image"),
        ({"images": [data_url(PHOTO)] * 2}, "image"),
        ({"image": 3}, "image"),
        ({"image": data_url(PHOTO), "words": ["a"]}, "words"),
        ({"image": data_url(PHOTO), "model": 7}, "model"),
    ):
        answer = raw.post("/images/edits", json={"model": "inspect", "count": 1} | members)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = raw.post("/images/generations", json={"model": "sum"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_required_parameter")
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model="inspects", prompt="")


def test_a_class_that_fails_fails_its_request_alone_and_tells_nothing(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as failed:
        client.images.edit(model="inspect", image=PHOTO, prompt="", extra_body={"count": 1, "words": "fail"})
    assert failed.value.code == "workflow_failed"
    assert "/secret/path" not in str(failed.value.body)
    assert "/secret/path" in server.log.read_text()
    assert client.images.generate(model="length", prompt="four").values == {"length": 4}


def test_none_is_registered_without_the_flags_for_it(raw: httpx.Client) -> None:
    """Also from this machine, with a key of the API."""
    for answer in (raw.post("/workflows", content="text"), raw.delete("/workflows/inspect")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "runtime_workflows_off")


def test_nothing_that_is_sent_is_an_error_of_the_server(raw: httpx.Client) -> None:
    """Random fields and files of random kinds: each is answered or refused."""
    rng = random.Random(5)
    values = ("", "1", "-0.5", "true", "null", "[]", "\x00", "a" * 5000, "1e999", "ü", json.dumps(SMALL))
    names = [
        "image",
        "image[]",
        "count",
        "strength",
        "flip",
        "words",
        "style",
        "numbers",
        "flags",
        "prompt",
        "n",
        "mask",
        "timeout",
        "m[a]",
    ]
    files = (b"", b"x", PHOTO, STYLE, PHOTO[:300])
    seen = set()
    for _ in range(120):
        parts: list[tuple[str, Any]] = [("model", (None, rng.choice(["inspect", "length", "sum", "safety"])))]
        parts += [
            (name, rng.choice([(None, rng.choice(values)), ("a.png", rng.choice(files))]))
            for name in rng.sample(names, rng.randrange(len(names)))
        ]
        members = {
            name: rng.choice([*values, 3, -0.5, True, None, [], {}, 2**70, data_url(PHOTO), SMALL]) for name, _ in parts
        }
        for body in ({"files": parts}, {"json": members | {"model": parts[0][1][1]}}):
            answer = raw.post(rng.choice(["/images/edits", "/images/generations"]), **body)
            assert answer.status_code in (200, 400, 422, 504), (body, answer.text)
            seen.add(answer.status_code)
    assert {200, 400} <= seen
    deadline = time.monotonic() + 5
    while any(raw.get("/engine/stats").json()["queue"][name] for name in ("running", "waiting", "admitted")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_thousand_malformed_requests_are_refused_by_name_and_touch_nothing(raw: httpx.Client) -> None:
    kinds = {"count": "integer", "strength": "number", "flip": "truth", "words": "text"}
    right = {"image": PHOTO, "count": 1, "strength": 0.5, "flip": True, "words": "a", "style": STYLE}
    workflow = hostile_inputs.Workflow(
        "inspect", right, ("image", "count"), kinds | {"image": "picture", "style": "picture"}
    )
    files = [("model", (None, "inspect")), ("count", (None, "1")), ("image", ("a.png", PHOTO))]
    before, received = raw.post("/images/edits", files=files).json(), num_received(raw)
    chance, refused = random.Random(9), Counter[str]()
    for _ in range(2000):
        request = hostile_inputs.malformed(chance, workflow)
        answer = raw.post("/images/edits", **request.body)
        assert answer.status_code in (400, 413), (request, answer.text)
        assert answer.json()["error"]["param"] == request.param, (request, answer.text)
        refused[request.param] += 1
    assert refused.keys() == right.keys()
    assert num_received(raw) == received, "none came as far as an engine"
    assert raw.post("/images/edits", files=files).json()["data"] == before["data"]


def num_received(raw: httpx.Client) -> int:
    """Requests that the engine was sent, once none is under way."""
    deadline = time.monotonic() + 5
    while any((stats := raw.get("/engine/stats").json())["queue"][name] for name in ("running", "waiting", "admitted")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(stats["engines"][0]["load"]["num_received"])
