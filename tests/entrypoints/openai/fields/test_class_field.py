"""The field `class_label`, and prompts of models with classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from api_calls import assert_refused, post_edit, post_json
from fake_engine import MODEL, FakeEngine

OF_CLASSES = msgspec.structs.replace(MODEL, name="classes", num_classes=10, class_names={"tench": 0})


@pytest_asyncio.fixture
async def classes(client: httpx.AsyncClient, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose first model makes pictures of classes."""
    engine.models = {"classes": OF_CLASSES, MODEL.name: MODEL}
    yield client


@pytest.mark.parametrize(
    ("given", "label"), [(0, 0), (7, 7), ("7", 7), ("tench", "tench"), ("", None), (None, None), (10**6, 10**6)]
)
async def test_a_number_or_a_name_is_passed_on(
    classes: httpx.AsyncClient, engine: FakeEngine, given: Any, label: Any
) -> None:
    response = await post_json(classes, {"class_label": given}, "generations")
    assert response.status_code == 200, response.text
    assert (engine.last.class_label, engine.last.prompt) == (label, "")


@pytest.mark.parametrize("given", [1.5, True, [1], {"label": 1}])
async def test_other_types_are_refused(classes: httpx.AsyncClient, given: Any) -> None:
    assert_refused(await post_json(classes, {"class_label": given}, "generations"), 400, "invalid_type", "class_label")


async def test_a_negative_number_and_a_long_name_are_refused(classes: httpx.AsyncClient) -> None:
    low, long = [await post_json(classes, {"class_label": given}, "generations") for given in (-1, 513 * "a")]
    assert_refused(low, 400, "integer_below_min_value", "class_label")
    assert_refused(long, 400, "string_above_max_length", "class_label")


async def test_a_form_has_it_as_text(classes: httpx.AsyncClient, engine: FakeEngine) -> None:
    for given, label in (("3", 3), ("tench", "tench")):
        assert (await post_edit(classes, class_label=given)).status_code == 200
        assert engine.last.class_label == label


async def test_a_prompt_is_required_where_there_are_no_classes(classes: httpx.AsyncClient) -> None:
    body = {"class_label": 1, "model": MODEL.name}
    assert_refused(await post_json(classes, body, "generations"), 400, "missing_required_parameter", "prompt")


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"class_label": 1, "prompt": "a hat"}, ["prompt"]),
        ({"class_label": 1, "prompt": ""}, []),
        ({"prompt": "tench", "class_label": ""}, []),
        ({"class_label": 1, "negative_prompt": "a hat", "strength": 0.5}, ["negative_prompt", "strength"]),
        ({"class_label": 1, "max_sequence_length": 4, "seed": 3}, ["max_sequence_length"]),
    ],
)
async def test_fields_of_prompts_and_pictures_are_listed_as_ignored(
    classes: httpx.AsyncClient, body: dict[str, Any], ignored: list[str]
) -> None:
    answer = (await post_json(classes, body, "generations")).json()
    assert answer["stencil"]["ignored"] == ignored


async def test_models_tell_their_classes(classes: httpx.AsyncClient) -> None:
    with_classes, without = (await classes.get("/v1/models")).json()["data"]
    assert (with_classes["num_classes"], with_classes["class_names"]) == (10, {"tench": 0})
    assert (without["num_classes"], without["class_names"]) == (0, {})
