"""Edits whose pictures pass through a user's class: on real workers, beside edits of other workflows."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from engines import serving_engine
from fault_kit import make_input, processes, until
from PIL import Image
from run_workflows import CLASSES, GUARDED, JUDGED, REPAINTED, UNSHOWN

from core.config import EngineConfig, ModelConfig, SchedulerConfig, StencilConfig
from core.errors import InvalidRequestError, RunError
from core.sampling_params import SamplingParams
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput, EditReport
from engine.client.upload import BytesUpload
from entrypoints.openai.app import ServerSettings, create_app

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIDE = 96
MODELS = {"plain": "", **{name: name for name in ("guarded", "judged", "unshown", "repainted")}}
"""Model -> its workflow. All have the same components."""


@pytest_asyncio.fixture(params=[1, 2], scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    models = tuple(
        ModelConfig(
            model=str(tiny_checkpoint),
            served_model_name=name,
            workflow=workflow,
            dtype="float32",
            device="cpu",
            threads=1,
        )
        for name, workflow in MODELS.items()
    )
    engine = EngineConfig(
        models=models,
        scheduler=SchedulerConfig(max_retries=100),
        workers_per_engine=request.param,
        classes=CLASSES,
        workflows=(GUARDED, JUDGED, UNSHOWN, REPAINTED),
    )
    async with serving_engine(StencilConfig(engine=engine, arena_bytes=2**27)) as serving:
        yield serving


async def edited(engine: AsyncEngine, model: str, edit: EditInput) -> tuple[bytes, EditReport]:
    """The file of the final picture, and its report."""
    files, report = await told(engine, model, edit)
    return files[-1], report


async def told(engine: AsyncEngine, model: str, edit: EditInput) -> tuple[list[bytes], EditReport]:
    """The files of partial images and of the final picture, and its report."""
    async with engine.edit(f"{model}-{id(edit)}", edit, engine.choose_model(model)) as outputs:
        files = [(bytes(output.data), output.report) async for output in outputs]
    report = files[-1][1]
    assert report is not None
    assert len(files) == 1 + edit.partial_images
    return [data for data, _ in files], report


def pixels_of(file: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def asked(seed: int, prompt: str = "a red shirt", steps: int = 4, **changes: Any) -> EditInput:
    return replace(make_input(seed, steps, prompt, side=SIDE), **changes)


def inside(file: bytes) -> npt.NDArray[np.uint8]:
    """What was made: the middle third."""
    return pixels_of(file)[SIDE // 3 : 2 * SIDE // 3, SIDE // 3 : 2 * SIDE // 3]


ALIKE = ("plain", "guarded", "judged")
"""They make the same pictures."""

BAD = "a bad shirt"

SEEN_BYTES = 2**22
"""Of the memory that the API server shares: all that these edits take."""


@pytest.mark.parametrize("exact", [False, True], ids=["mask-aware", "exact"])
async def test_a_picture_that_is_blacked_out_never_comes_to_where_the_caller_sees_it(
    engine: AsyncEngine, exact: bool
) -> None:
    edit = asked(50 + exact, f"{BAD}, slow", partial_images=2)
    edit = replace(edit, sampling=msgspec.structs.replace(edit.sampling, mask_aware=not exact))
    task, seen = asyncio.create_task(told(engine, "guarded", edit)), set[bytes]()
    while not task.done():
        seen.add(engine.services.arena.shared._bytes[:SEEN_BYTES].tobytes())
        assert engine.services.arena.used_bytes <= SEEN_BYTES
        await asyncio.sleep(0.03)
    black, report = await task
    assert not any(inside(file).any() for file in black)
    assert report.values["is_bad"] is True
    assert report.exact_reason == ("asked" if exact else None)
    for shown, file in zip(black, plain := (await told(engine, "plain", edit))[0], strict=True):
        np.testing.assert_array_equal(outside(shown), outside(file))
    rows = {row.tobytes() for file in plain for row in inside(file)}
    assert len(rows) == 3 * SIDE // 3, "of all three pictures"
    assert not any(row in memory for memory in seen for row in rows)


def outside(file: bytes) -> npt.NDArray[np.uint8]:
    picture = pixels_of(file).copy()
    picture[SIDE // 3 : 2 * SIDE // 3, SIDE // 3 : 2 * SIDE // 3] = 0
    return picture


async def test_pictures_that_pass_are_those_of_the_plain_edit(engine: AsyncEngine) -> None:
    for seed in range(2):
        edit = asked(seed, partial_images=2)
        (plain, _), (guarded, report), (judged, other) = [await told(engine, name, edit) for name in ALIKE]
        assert plain == guarded == judged
        assert report.values == other.values
        assert report.values["is_bad"] is False


async def test_edits_through_a_class_have_the_same_bits_in_company(engine: AsyncEngine) -> None:
    before = mixed_steps(engine)
    edits = {name: asked(7, prompt, steps=60) for name, prompt in zip(ALIKE, ("a hat", BAD, "a hat"), strict=True)}
    files = await asyncio.gather(*(edited(engine, name, edit) for name, edit in edits.items()))
    (plain, _), (black, report), (judged, other) = files
    assert mixed_steps(engine) > before or len(processes("worker")) > 1, "of several ranks, each may have its own"
    assert not inside(black).any()
    assert (report.values["is_bad"], other.values["is_bad"]) == (True, False)
    alone, _ = await edited(engine, "plain", edits["plain"])
    assert plain == judged == alone


def mixed_steps(engine: AsyncEngine) -> int:
    (stats,) = engine.stats
    return 0 if stats is None else int(stats.mixed_steps)  # None: before the engine's first report


async def test_crops_sizes_and_formats_are_made_of_what_the_class_has_returned(engine: AsyncEngine) -> None:
    wanted: list[dict[str, Any]] = [
        {"padding_mask_crop": 8},
        {"output_size": (64, 80)},
        {"output_format": "jpeg"},
        {"output_format": "webp", "base64": False},
        {"mask_feather": 2.0},
    ]
    for changes in wanted:
        black, _ = await edited(engine, "guarded", asked(9, BAD, **changes))
        plain, _ = await edited(engine, "plain", asked(9, BAD, **changes))
        height, width, _ = pixels_of(black).shape
        part = slice(height // 2 - 8, height // 2 + 8), slice(width // 2 - 8, width // 2 + 8)
        assert pixels_of(black)[part].max() <= 2, changes
        assert pixels_of(plain)[part].max() > 50, changes
    generated, _ = await edited(engine, "guarded", EditInput(prompt=BAD, canvas_size=(64, 64)))
    assert not pixels_of(generated).any()


async def test_what_would_slip_past_the_class_is_refused_by_name(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="workflow 'unshown' has pictures pass through 'guard'") as refused:
        await edited(engine, "unshown", asked(1, partial_images=1))
    assert refused.value.param == "partial_images"


@pytest.mark.parametrize(
    ("inputs", "param"),
    [({"strictness": "much"}, "strictness"), ({"strictness": float("nan")}, "strictness"), ({"other": 1}, "other")],
)
async def test_an_input_that_is_not_as_declared_is_refused(
    engine: AsyncEngine, inputs: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await edited(engine, "guarded", asked(1, inputs=inputs))
    assert refused.value.param == param


async def test_a_class_gets_what_the_request_gives(engine: AsyncEngine) -> None:
    lenient, report = await edited(engine, "guarded", asked(3, BAD, inputs={"strictness": 0}))
    plain, _ = await edited(engine, "plain", asked(3, BAD))
    assert lenient == plain
    assert report.values["is_bad"] is False
    with pytest.raises(InvalidRequestError, match="there are none"):
        await edited(engine, "plain", asked(3, inputs={"strictness": 0}))


async def test_a_picture_of_another_size_fails_its_edit_alone(engine: AsyncEngine) -> None:
    wrong, right = asked(4, "a large shirt"), asked(4)
    results = await asyncio.gather(
        edited(engine, "guarded", wrong), edited(engine, "guarded", right), return_exceptions=True
    )
    assert isinstance(results[0], RunError)
    assert "output image of class guard: it is 96 x 104 px, and the request's picture 96 x 96 px" in str(results[0])
    assert not isinstance(results[1], BaseException)
    with pytest.raises(RunError, match="node again_encode: its picture is 96 x 104 px, and 96 x 96 px are encoded"):
        await edited(engine, "repainted", wrong)


@pytest.mark.parametrize("prompt", ["a shirt", BAD])
async def test_a_second_pass_paints_over_what_the_class_has_returned(engine: AsyncEngine, prompt: str) -> None:
    sampling = SamplingParams(num_inference_steps=4, seed=5)
    first = EditInput(prompt=prompt, canvas_size=(64, 64), sampling=sampling)
    passed, _ = await edited(engine, "guarded", first)
    half = msgspec.structs.replace(sampling, strength=0.5, mask_aware=False)
    expected, _ = await edited(engine, "plain", EditInput(prompt=prompt, image=BytesUpload(passed), sampling=half))
    twice, report = await edited(engine, "repainted", first)
    np.testing.assert_array_equal(pixels_of(twice), pixels_of(expected))
    assert report.values == {"is_bad": prompt == BAD}


async def test_an_edit_passes_the_class_again_when_its_ranks_die_meanwhile(engine: AsyncEngine, tmp_path: Path) -> None:
    """While it looks at a partial image, of whose decoded picture nothing is left then. Once: a model whose batches end
    ranks twice is not run for a while.
    """
    waits = tmp_path / "waits"
    edit = asked(8, f"{BAD}, wait {waits}", partial_images=1)
    task = asyncio.create_task(told(engine, "guarded", edit))
    await until(waits.exists)
    for worker in (workers := processes("worker")):
        worker.kill()
    black, report = await task
    assert not set(workers) & set(processes("worker"))
    assert not any(inside(file).any() for file in black)
    assert report.values["is_bad"] is True
    lenient = replace(edit, inputs={"strictness": 0.0})
    assert (await told(engine, "guarded", lenient))[0] == (await told(engine, "plain", edit))[0]


async def test_the_api_takes_inputs_of_a_models_workflow_and_gives_its_values(engine: AsyncEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerSettings((), max_upload_bytes=10**6)))
    async with httpx.AsyncClient(transport=transport, base_url="http://stencil/v1", timeout=60) as client:

        async def made(**fields: Any) -> httpx.Response:
            body = {"model": "guarded", "prompt": BAD, "size": "64x64", "num_inference_steps": 2, "seed": 1} | fields
            return await client.post("/images/generations", json=body)

        black, lenient = (await made()).json(), (await made(strictness=0)).json()
        assert (black["values"]["is_bad"], lenient["values"]["is_bad"]) == (True, False)
        assert black["values"].keys() == {"is_bad", "mean"}
        assert not pixels_of(base64.b64decode(black["data"][0]["b64_json"])).any()
        assert pixels_of(base64.b64decode(lenient["data"][0]["b64_json"])).any()
        two = (await made(n=2, strictness=0)).json()
        assert "values" not in two
        assert two["data"][0]["values"] == lenient["values"] != two["data"][1]["values"]
        text = (await made(stream=True, partial_images=1)).text
        partial, event = (json.loads(part.partition("\n")[0]) for part in text.split("data: ")[1:])
        assert not any(pixels_of(base64.b64decode(each["b64_json"])).any() for each in (partial, event))
        assert event["values"] == black["values"]
        form = {"model": "guarded", "prompt": BAD, "num_inference_steps": "2", "strictness": "0"}
        photo = png(np.zeros((64, 64, 3), np.uint8))
        edited_one = await client.post("/images/edits", data=form, files={"image": photo})
        assert edited_one.json()["values"]["is_bad"] is False
        refused = (await made(strictness="much")).json()["error"]
        assert (refused["param"], refused["code"]) == ("strictness", "invalid_type")
        assert "strictness" in (await made(model="plain", strictness=1)).json()["stencil"]["ignored"]
        listed = {model["id"]: model for model in (await client.get("/models")).json()["data"]}
        assert listed["guarded"]["inputs"] == [
            {"name": "strictness", "type": "number", "required": False},
            {"name": "stamp", "type": "picture", "max_width": 16, "max_height": 16, "required": False},
        ]
        assert [each["name"] for each in listed["guarded"]["outputs"]] == ["is_bad", "mean"]
        assert [listed[name]["partial_images"] for name in ("guarded", "judged", "repainted")] == [True, True, False]
        assert "inputs" not in listed["plain"]


async def test_a_picture_for_a_models_workflow_is_a_file_or_base64(engine: AsyncEngine) -> None:
    rng = np.random.default_rng(1)
    stamp, photo, large = (rng.integers(0, 256, (*sides, 3), np.uint8) for sides in ((8, 16), (64, 64), (17, 16)))
    files = {name: png(pixels) for name, pixels in (("stamp", stamp), ("image", photo), ("large", large))}
    transport = httpx.ASGITransport(create_app(engine, ServerSettings((), max_upload_bytes=10**5)))
    async with httpx.AsyncClient(transport=transport, base_url="http://stencil/v1", timeout=60) as client:

        async def sent(path: str, **content: Any) -> httpx.Response:
            return await client.post(f"/images/{path}", **content)

        def stamped(answer: httpx.Response) -> npt.NDArray[np.uint8]:
            return pixels_of(base64.b64decode(answer.json()["data"][0]["b64_json"]))[28:36, 24:40]

        form = {"model": "guarded", "prompt": "a hat", "num_inference_steps": "2", "seed": "1"}
        text = base64.b64encode(files["stamp"]).decode()
        members = {**form, "num_inference_steps": 2, "seed": 1, "stamp": f"data:image/png;base64,{text}"}
        for path, content in (
            ("edits", {"data": form, "files": {"image": files["image"], "stamp": files["stamp"]}}),
            ("edits", {"data": {**form, "stamp": text}, "files": {"image": files["image"]}}),
            ("generations", {"data": {**form, "size": "64x64"}, "files": {"stamp": files["stamp"]}}),
            ("generations", {"json": {**members, "size": "64x64"}}),
        ):
            np.testing.assert_array_equal(stamped(await sent(path, **content)), stamp)
        for file, refusal in (
            (b"none", (400, "stamp", "invalid_image_file")),
            (files["large"], (400, "stamp", "image_too_large")),
            (bytes(10**5 + 1), (413, "stamp", "request_too_large")),
        ):
            answer = await sent("edits", data=form, files={"image": files["image"], "stamp": file})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == refusal
        plain = await sent("edits", data={**form, "model": "plain"}, files={"image": files["image"], "stamp": b"x"})
        assert plain.json()["stencil"]["ignored"] == ["stamp"]
    await until(lambda: engine.services.arena.used_bytes == 0, 10)
