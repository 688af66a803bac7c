"""Templates with real processes: registered, edited by id, owned, displaced, deleted; and pictures that become
templates.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from engines import serving_engine
from pictures import decode, encode, photo
from server_process import ServerProcess

from core.config import CacheConfig, EngineConfig, ModelConfig, StencilConfig
from core.errors import InvalidRequestError, TemplateNotFoundError
from core.sampling_params import SamplingParams
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.templates.template_store import RegisteredTemplate
from engine.client.upload import BytesUpload

API_KEY = "sk-local"
SIDE = 128  # 64 tokens
PHOTO = encode(photo(SIDE, SIDE))


def corner_mask() -> bytes:
    """White = edit: a part of the square of the first four tokens."""
    pixels = np.zeros((SIDE, SIDE), np.uint8)
    pixels[4:28, 4:28] = 255
    return encode(pixels)


MASK = corner_mask()
MASK_TEXT = base64.b64encode(MASK).decode()


# --------------------------------------------------------------------------------------------------- over the wire


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=0) as client:
        yield client


def register(client: openai.OpenAI, image: bytes) -> dict[str, Any]:
    answer = client.post(
        "/templates",
        cast_to=httpx.Response,
        files=[("image", ("photo.png", image, "image/png"))],
        options={"headers": {"content-type": "multipart/form-data"}},
    )
    return dict(answer.json())


def edit(client: openai.OpenAI, image: Any, **fields: Any) -> tuple[bytes, dict[str, Any]]:
    """Run an edit; returns the picture's file and the `stencil` object."""
    extra = {"seed": 3, "mask_image": MASK_TEXT, "mask_margin": 0, **fields}
    result = client.images.edit(image=image, prompt="a red striped shirt", extra_body=extra)
    assert result.data is not None
    assert result.data[0].b64_json is not None
    return base64.b64decode(result.data[0].b64_json), result.stencil  # type: ignore[attr-defined]


def test_an_edit_by_id_is_the_edit_of_the_image(client: openai.OpenAI) -> None:
    template = register(client, PHOTO)
    assert (template["object"], template["bytes"]) == ("template", len(PHOTO))
    assert (template["image_tokens"], template["primed"]) == (64, True)
    assert template["page_bytes"] > 0
    by_id, facts = edit(client, [], template_id=template["id"])
    assert (facts["cache"], facts["tier"], facts["primed"], facts["ignored"]) == ("hit", "host", False, [])
    by_image, _ = edit(client, PHOTO)
    assert by_id == by_image
    full_by_id, _ = edit(client, [], template_id=template["id"], mask_aware=False)
    full_by_image, _ = edit(client, PHOTO, mask_aware=False)
    assert full_by_id == full_by_image


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    template = register(client, PHOTO)
    path = f"/templates/{template['id']}"
    assert client.get(path, cast_to=httpx.Response).json() == template
    deleted = client.delete(path, cast_to=httpx.Response).json()
    assert deleted == {"id": template["id"], "object": "template.deleted", "deleted": True}
    with pytest.raises(openai.NotFoundError) as caught:
        client.get(path, cast_to=httpx.Response)
    assert (caught.value.code, caught.value.param) == ("template_not_found", None)
    with pytest.raises(openai.NotFoundError) as caught:
        edit(client, [], template_id=template["id"])
    assert (caught.value.code, caught.value.param) == ("template_not_found", "template_id")


def test_image_and_template_at_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        edit(client, PHOTO, template_id=register(client, PHOTO)["id"])
    assert caught.value.param == "template_id"


def test_files_that_are_no_image_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        register(client, b"nonsense")
    assert (caught.value.code, caught.value.param) == ("invalid_image_file", "image")


def test_a_generation_can_be_edited_at_once(client: openai.OpenAI) -> None:
    made = client.images.generate(prompt="a blue coat", n=2, extra_body={"seed": 1})
    first, second = made.stencil["template_ids"]  # type: ignore[attr-defined]
    assert first != second
    assert made.data is not None
    assert made.data[0].b64_json is not None
    by_id, _ = edit(client, [], template_id=first)
    by_image, _ = edit(client, base64.b64decode(made.data[0].b64_json))
    assert by_id == by_image


def test_a_result_that_no_edit_could_upload_becomes_no_template(client: openai.OpenAI) -> None:
    """The server takes 4 megapixels and 4 MB. A JPEG of noise is small, its edit as a PNG is not."""
    noise = np.random.default_rng(1).integers(0, 256, (1280, 1280, 3), np.uint8)
    mask = np.zeros((1280, 1280), np.uint8)
    mask[:64, :64] = 255
    jpeg = {"image": encode(noise, "jpeg"), "mask_image": base64.b64encode(encode(mask)).decode()}
    cases: list[dict[str, Any]] = [{"image": PHOTO}, {"image": PHOTO, "size": "2048x2048"}, jpeg]
    ids = [edit(client, mask_aware=False, **case)[1]["template_id"] for case in cases]
    assert [template_id is None for template_id in ids] == [False, True, True]


def test_engine_stats_and_metrics(client: openai.OpenAI, server: ServerProcess) -> None:
    template = register(client, PHOTO)
    edit(client, [], template_id=template["id"])
    stats = client.get("/engine/stats", cast_to=httpx.Response).json()
    assert stats["templates"]["count"] >= 1
    assert stats["models"][0]["page_scheme"]["keyframes"][0] == 1.0
    cache = stats["cache"]
    assert 0 < cache["used_bytes"]["host"] <= cache["budget_bytes"]["host"]
    assert 0 < cache["hit_ratio"] <= 1
    assert stats["totals"]["prime_chunks"] > 0
    assert stats["totals"]["tokens_skipped"] > 0
    lines = [line.rsplit(" ", 1) for line in httpx.get(f"{server.url}/metrics").text.splitlines()]
    metrics = {name: float(value) for name, value in lines if name.startswith("stencil:")}
    # Engines tell how they do once a second: the metrics, asked for later, may be of a later report.
    assert metrics['stencil:cache_hits_total{tier="host"}'] >= cache["hits"]["host"] > 0
    assert metrics['stencil:cache_used_bytes{tier="host"}'] > 0
    assert metrics["stencil:tokens_skipped_total"] >= stats["totals"]["tokens_skipped"]
    assert metrics['stencil:request_cache_result_total{model_name="tiny/fill",result="hit"}'] >= 1


# --------------------------------------------------------------------------------------------------- in this process


@asynccontextmanager
async def started(checkpoint: Path, cache: CacheConfig | None = None, **settings: Any) -> AsyncIterator[AsyncEngine]:
    """An engine that must end with nothing allocated."""
    mask_aware = settings.pop("mask_aware", True)
    model = ModelConfig(model=str(checkpoint), threads=1, dtype="float32", mask_aware=mask_aware)
    config = EngineConfig(models=(model,), cache=cache or CacheConfig(host_bytes=2**28))
    async with serving_engine(StencilConfig(engine=config, **settings)) as engine:
        yield engine
        if not engine.is_closing:
            await all_is_given_back(engine)
        engine.templates.check_integrity()


async def all_is_given_back(engine: AsyncEngine) -> None:
    async with asyncio.timeout(30):
        while engine.services.arena.used_bytes:
            await asyncio.sleep(0.01)


async def paint(engine: AsyncEngine, name: str, edit: EditInput) -> tuple[ImageOutput, bytes]:
    async with engine.edit(name, edit, engine.choose_model()) as outputs:
        return [(output, bytes(output.data)) async for output in outputs][-1]


def small_edit(image: bytes | None = None, **fields: Any) -> EditInput:
    return EditInput(
        prompt="a red shirt",
        image=None if image is None else BytesUpload(image),
        mask=BytesUpload(MASK),
        mask_kind="luminance",
        sampling=SamplingParams(seed=3, mask_margin=0),
        **fields,
    )


def photo_file(seed: int) -> bytes:
    return encode(photo(SIDE, SIDE, seed))


async def cache_result(engine: AsyncEngine, name: str, edit: EditInput) -> str:
    output, _ = await paint(engine, name, edit)
    assert output.report is not None
    assert output.report.exact_reason is None
    return output.report.cache


async def register_file(engine: AsyncEngine, name: str, image: bytes, owner: str = "") -> RegisteredTemplate:
    return await engine.prime_template(name, BytesUpload(image), owner=owner)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    """An engine with default flags."""
    async with started(tiny_checkpoint) as engine:
        yield engine


def noise(seed: int, side: int = SIDE) -> bytes:
    """A picture whose file is much larger than a smooth one's, and of nearly constant size for one side length."""
    return encode(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def little_room(tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    """An engine with room for two and a half uploads."""
    async with started(tiny_checkpoint, template_bytes=len(noise(0)) * 5 // 2) as engine:
        yield engine


@pytest.mark.asyncio(loop_scope="module")
async def test_templates_have_owners_and_are_displaced_with_their_pages(little_room: AsyncEngine) -> None:
    a, b, c = (noise(seed) for seed in range(3))
    first = await register_file(little_room, "a", a, owner="me")
    with pytest.raises(TemplateNotFoundError):
        await paint(little_room, "theirs", small_edit(template_id=first.id, owner="you"))
    second = await register_file(little_room, "b", b, owner="you")
    assert await cache_result(little_room, "use", small_edit(template_id=first.id, owner="me")) == "hit"
    await register_file(little_room, "c", c, owner="you")
    assert first.id in little_room.templates
    assert second.id not in little_room.templates
    assert await cache_result(little_room, "a2", small_edit(a, owner="me")) == "hit"
    assert await cache_result(little_room, "b2", small_edit(b, owner="you")) == "miss"
    with pytest.raises(InvalidRequestError, match="--template-bytes"):
        await register_file(little_room, "large", noise(9, 2 * SIDE))


@pytest.mark.asyncio(loop_scope="module")
async def test_captured_results_displace_no_registered_template(little_room: AsyncEngine) -> None:
    """A generated picture would fit only in place of a registered one."""
    templates = [await register_file(little_room, f"asked-{seed}", noise(seed)) for seed in (3, 4)]
    generation = EditInput(prompt="p", sampling=SamplingParams(num_inference_steps=1))
    output, data = await paint(little_room, "g", generation)
    assert len(noise(0)) // 2 < len(data) < little_room.templates.budget
    assert output.report is not None
    assert output.report.template_id is None
    for template in templates:
        assert await cache_result(little_room, f"hit-{template.id}", small_edit(template_id=template.id)) == "hit"


@pytest.mark.asyncio(loop_scope="module")
async def test_deletion_drops_pages_unless_another_template_has_them(engine: AsyncEngine) -> None:
    first = await register_file(engine, "a", PHOTO, owner="me")
    again = await register_file(engine, "b", PHOTO, owner="me")
    theirs = await register_file(engine, "c", PHOTO, owner="you")
    assert all(template.primed for template in (again, theirs))
    engine.delete_template(first.id, "me")
    assert await cache_result(engine, "d", small_edit(PHOTO, owner="me")) == "hit"
    engine.delete_template(again.id, "me")
    assert await cache_result(engine, "e", small_edit(PHOTO, owner="me")) == "miss"
    assert await cache_result(engine, "f", small_edit(PHOTO, owner="you")) == "hit"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_crop_is_a_template_of_its_own_that_is_deleted_with_its_picture(engine: AsyncEngine) -> None:
    image = photo_file(70)
    by_image, by_other = small_edit(image, padding_mask_crop=8), small_edit(image, padding_mask_crop=30)
    _, expected = await paint(engine, "crop-0", by_image)
    assert await cache_result(engine, "crop-1", by_image) == "hit"
    assert await cache_result(engine, "crop-2", by_other) == "miss"
    template = await register_file(engine, "crop-3", image)
    by_id = small_edit(template_id=template.id, padding_mask_crop=8)
    output, data = await paint(engine, "crop-4", by_id)
    assert output.report is not None
    assert (output.report.cache, data) == ("hit", expected)
    assert engine.templates.get(template.id, "").content_id == template.content_id
    assert await cache_result(engine, "crop-5", small_edit(template_id=template.id)) == "hit"
    engine.delete_template(template.id, "")
    assert await cache_result(engine, "crop-6", by_image) == "miss", "pages of the deleted picture's crop"
    assert await cache_result(engine, "crop-7", by_other) == "hit", "which no edit of the template had made"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("is_base64", [False, True])
async def test_an_exact_edit_leaves_a_primed_template_of_its_result(engine: AsyncEngine, is_base64: bool) -> None:
    """Uploading the result's file finds the same pages as its id does."""
    sampling = SamplingParams(mask_aware=False, seed=1)
    exact = EditInput(prompt="a red shirt", image=BytesUpload(PHOTO), sampling=sampling, owner="me", base64=is_base64)
    output, data = await paint(engine, f"exact-{is_base64}", exact)
    assert output.report is not None
    template_id = output.report.template_id
    assert template_id is not None
    async with asyncio.timeout(30):
        while not engine.templates.get(template_id, "me").primed:
            await asyncio.sleep(0.01)
    file = base64.b64decode(data) if is_base64 else data
    assert engine.templates.get(template_id, "me").upload.size == len(file)
    assert await cache_result(engine, f"file-{is_base64}", small_edit(file, owner="me")) == "hit"
    by_id = small_edit(template_id=template_id, owner="me")
    assert await cache_result(engine, f"id-{is_base64}", by_id) == "hit"
    engine.delete_template(template_id, "me")
    assert await cache_result(engine, f"gone-{is_base64}", small_edit(file, owner="me")) == "miss"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_registration_cancelled_at_any_moment_leaves_nothing(engine: AsyncEngine) -> None:
    image = photo_file(50)
    for index, delay in enumerate((0.0, 0.005, 0.02, 0.05)):
        task = asyncio.create_task(register_file(engine, f"given-up-{index}", image, owner="nobody"))
        await asyncio.sleep(delay)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            engine.delete_template(task.result().id, "nobody")
        await all_is_given_back(engine)
    assert (await register_file(engine, "kept", image)).primed
    assert await cache_result(engine, "edit", small_edit(image)) == "hit"


async def primed(engine: AsyncEngine) -> None:
    """Wait until the pages of a registration are there, and stop before it can record that."""
    async with asyncio.timeout(30):
        while not any(session.done.is_set() for session in engine.services.sessions):
            await asyncio.sleep(0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_registration_cancelled_after_priming_leaves_no_pages(engine: AsyncEngine) -> None:
    image = photo_file(60)
    task = asyncio.create_task(register_file(engine, "too-late", image))
    await primed(engine)
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await all_is_given_back(engine)
    assert await cache_result(engine, "edit-60", small_edit(image)) == "miss"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_deletion_takes_no_pages_from_a_registration_about_to_be_kept(engine: AsyncEngine) -> None:
    image = photo_file(61)
    first = await register_file(engine, "first-61", image)
    await all_is_given_back(engine)
    task = asyncio.create_task(register_file(engine, "second-61", image))
    await primed(engine)
    engine.delete_template(first.id, "")
    assert (await task).primed
    assert await cache_result(engine, "edit-61", small_edit(image)) == "hit"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_mask_aware_edit_is_not_captured(engine: AsyncEngine) -> None:
    output, _ = await paint(engine, "aware", small_edit(PHOTO))
    assert output.report is not None
    assert output.report.template_id is None


async def test_without_mask_aware_execution_a_template_is_an_upload(tiny_checkpoint: Path) -> None:
    async with started(tiny_checkpoint, mask_aware=False) as engine:
        template = await register_file(engine, "a", PHOTO)
        assert (template.primed, template.page_bytes, template.image_tokens) == (False, 0, 64)
        output, data = await paint(engine, "by-id", small_edit(template_id=template.id))
        assert output.report is not None
        assert (output.report.exact_reason, output.report.cache) == ("disabled", "off")
        assert output.report.template_id is None
        _, by_image = await paint(engine, "by-image", small_edit(PHOTO))
        assert data == by_image


@pytest.mark.parametrize("short", ["all", "one"])
async def test_a_picture_whose_pages_do_not_fit_is_an_upload(
    tiny_checkpoint: Path, engine: AsyncEngine, short: str
) -> None:
    """Down to the last byte, whatever is admitted."""
    scheme = next(iter(engine.models.values())).page_scheme
    assert scheme is not None
    needed = scheme.template_bytes(64, len(scheme.keyframes))
    host_bytes = 0 if short == "all" else needed - 1
    async with started(tiny_checkpoint, CacheConfig(host_bytes=host_bytes, admission="manual")) as small:
        template = await register_file(small, "a", PHOTO)
        assert (template.primed, template.page_bytes, template.image_tokens) == (False, 0, 64)
        output, _ = await paint(small, "by-id", small_edit(template_id=template.id))
        assert output.report is not None
        assert (output.report.exact_reason, output.report.cache) == ("too_large", "off")
        small.delete_template(template.id, "")
        if short == "one":  # by the flags alone: a smaller picture is mask-aware in the same cache
            mask = BytesUpload(encode(decode(MASK)[: SIDE // 2, : SIDE // 2]))
            edit = replace(small_edit(encode(photo(SIDE // 2, SIDE // 2))), mask=mask)
            output, _ = await paint(small, "small", edit)
            assert output.report is not None
            assert output.report.exact_reason is None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def just_enough(tiny_checkpoint: Path, engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    """An engine with room for one template's pages, which caches only registered templates."""
    scheme = next(iter(engine.models.values())).page_scheme
    assert scheme is not None
    cache = CacheConfig(host_bytes=scheme.template_bytes(64, len(scheme.keyframes)), admission="manual")
    async with started(tiny_checkpoint, cache) as small:
        yield small


@pytest.mark.asyncio(loop_scope="module")
async def test_pages_that_just_fit_are_made_for_one_template_after_another(just_enough: AsyncEngine) -> None:
    async with asyncio.timeout(30):
        registered = await asyncio.gather(
            *(register_file(just_enough, f"fits-{seed}", photo_file(seed)) for seed in range(3))
        )
        assert all(template.primed for template in registered)
        results = await asyncio.gather(
            *(paint(just_enough, f"edit-{each.id}", small_edit(template_id=each.id)) for each in registered)
        )
        assert all(output.report and output.report.exact_reason is None for output, _ in results)


@pytest.mark.asyncio(loop_scope="module")
async def test_manual_admission_primes_registered_templates_only(just_enough: AsyncEngine) -> None:
    exact = EditInput(prompt="p", image=BytesUpload(PHOTO), sampling=SamplingParams(mask_aware=False, seed=1))
    output, _ = await paint(just_enough, "manual", exact)
    assert output.report is not None
    assert output.report.template_id is None
    assert (await register_file(just_enough, "asked", PHOTO)).primed
    assert await cache_result(just_enough, "hit", small_edit(PHOTO)) == "hit"


@pytest.mark.asyncio(loop_scope="module")
async def test_shutdown_ends_waiting_captures_of_results(engine: AsyncEngine) -> None:
    """The last test, because it ends the shared engine."""
    before = len(engine.templates)
    for index in range(6):
        generation = EditInput(prompt="p", sampling=SamplingParams(seed=index, num_inference_steps=1))
        output, data = await paint(engine, f"g{index}", generation)
        assert decode(data).shape == (SIDE, SIDE, 3)
        assert output.report is not None
        assert output.report.template_id is not None
    assert len(engine.templates) == before + 6
    async with asyncio.timeout(10):
        await engine.shutdown(drain_seconds=5)
