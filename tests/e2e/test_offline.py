"""Edits through all real processes equal diffusers' pipeline, alone and in a batch."""

from __future__ import annotations

import asyncio
import io
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import pytest_asyncio
import torch
from diffusers import FluxFillPipeline
from engines import serving_engine
from fault_kit import processes
from PIL import Image

from core.config import EngineConfig, ModelConfig, SchedulerConfig, StencilConfig
from core.errors import ConfigError, EngineError, InvalidImageError, InvalidRequestError
from core.sampling_params import SamplingParams
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.sessions.client_arena import ClientArena
from engine.client.upload import BytesUpload
from engine.router.local_backend import LocalEngine
from entrypoints import Edit, EditResult, ImageEngine
from entrypoints.pictures import encode_picture

Pixels = npt.NDArray[np.uint8]


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    """A smooth random picture, uint8 [height, width, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def box_mask(width: int, height: int) -> Pixels:
    """White = edit: a box off the token grid, uint8 [height, width]."""
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 + 3 : height * 3 // 4, width // 3 : width * 2 // 3 + 5] = 255
    return mask


def make_edit(width: int, height: int, seed: int = 0, prompt: str = "a red shirt") -> Edit:
    return Edit(prompt=prompt, image=picture(width, height, seed), mask_image=box_mask(width, height))


def pixels_of(result: EditResult) -> Pixels:
    if result.error is not None:
        raise result.error
    return np.asarray(result.images[0])


def reference(pipeline: FluxFillPipeline, edit: Edit, steps: int, seed: int, strength: float = 1.0) -> Pixels:
    assert isinstance(edit.image, np.ndarray)
    assert isinstance(edit.mask_image, np.ndarray)
    height, width = edit.mask_image.shape
    image = pipeline(
        prompt=edit.prompt,
        image=Image.fromarray(edit.image),
        mask_image=Image.fromarray(edit.mask_image),
        width=width,
        height=height,
        num_inference_steps=steps,
        strength=strength,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,
        generator=torch.Generator("cpu").manual_seed(seed),
    ).images[0]
    return np.asarray(image)


def worst_difference(ours: Pixels, theirs: Pixels, edit: Edit) -> int:
    """Largest difference inside the mask, in 1/255."""
    assert isinstance(edit.mask_image, np.ndarray)
    return int(np.abs(ours.astype(int) - theirs.astype(int))[edit.mask_image > 0].max())


MIX = [(128, 128, 4, 1), (64, 96, 7, 2), (112, 80, 2, 3), (128, 128, 5, 2**63 - 1), (48, 48, 1, 5)]


def test_edits_equal_the_pipelines_alone_and_in_a_batch(image_engine: ImageEngine, pipeline: FluxFillPipeline) -> None:
    edits = [make_edit(width, height, seed % 97) for width, height, _, seed in MIX]
    params = [SamplingParams(num_inference_steps=steps, seed=seed, mask_aware=False) for _, _, steps, seed in MIX]
    together = image_engine.generate(edits, params, use_tqdm=False)
    for edit, sampling, result in zip(edits, params, together, strict=True):
        assert sampling.num_inference_steps is not None
        assert sampling.seed is not None
        expected = reference(pipeline, edit, sampling.num_inference_steps, sampling.seed)
        (alone,) = image_engine.generate([edit], sampling, use_tqdm=False)
        assert worst_difference(pixels_of(alone), expected, edit) <= 2
        assert worst_difference(pixels_of(result), expected, edit) <= 2


def test_less_strength_starts_from_the_picture_and_runs_fewer_steps(
    image_engine: ImageEngine, pipeline: FluxFillPipeline
) -> None:
    edit, sampling = make_edit(128, 96), SamplingParams(num_inference_steps=5, seed=3, strength=0.5, mask_aware=False)
    (result,) = image_engine.generate([edit], sampling, use_tqdm=False)
    expected = reference(pipeline, edit, steps=5, seed=3, strength=0.5)
    assert worst_difference(pixels_of(result), expected, edit) <= 2
    assert result.reports[0].num_inference_steps == 3
    (nothing,) = image_engine.generate([edit], SamplingParams(strength=0.0), use_tqdm=False)
    assert isinstance(nothing.error, InvalidRequestError)
    assert nothing.error.param == "strength"


@pytest.mark.parametrize("padding", [0, 24])
def test_a_cropped_edit_equals_the_pipelines_pasted_back(
    image_engine: ImageEngine, pipeline: FluxFillPipeline, padding: int
) -> None:
    """FluxFillPipeline has no padding_mask_crop; this does what the pipelines that have it do."""
    whole = make_edit(300, 220)
    assert isinstance(whole.image, np.ndarray)
    assert isinstance(whole.mask_image, np.ndarray)
    photo, mask, processor = Image.fromarray(whole.image), Image.fromarray(whole.mask_image), pipeline.image_processor
    region = processor.get_crop_region(mask, 144, 112, pad=padding)
    seen = replace(
        whole,
        image=np.asarray(processor.resize(photo.crop(region), 112, 144, "fill")),
        mask_image=np.asarray(processor.resize(mask.crop(region), 112, 144, "fill").convert("L")),
    )
    painted = Image.fromarray(reference(pipeline, seen, steps=4, seed=5))
    expected = np.asarray(processor.apply_overlay(mask, photo, painted, region))
    params = SamplingParams(num_inference_steps=4, seed=5, mask_aware=False)
    (result,) = image_engine.generate([replace(whole, padding_mask_crop=padding)], params, use_tqdm=False)
    assert result.reports[0].crop == region
    assert worst_difference(pixels_of(result), expected, whole) <= 2
    assert np.array_equal(pixels_of(result)[whole.mask_image == 0], whole.image[whole.mask_image == 0])


def test_an_invalid_padding_is_refused() -> None:
    for padding in (-1, 65536, 1.5, "8", True):
        with pytest.raises(InvalidRequestError) as caught:
            replace(make_edit(64, 64), padding_mask_crop=padding)  # type: ignore[arg-type]
        assert caught.value.param == "padding_mask_crop"


def test_the_same_request_gives_equal_bytes_alone_and_nearly_equal_ones_in_a_batch(image_engine: ImageEngine) -> None:
    edit, sampling = make_edit(128, 128), SamplingParams(num_inference_steps=6, seed=11)
    first, second = (pixels_of(image_engine.generate([edit], sampling, use_tqdm=False)[0]) for _ in range(2))
    assert np.array_equal(first, second)
    others = [make_edit(128, 96, i) for i in range(6)]
    params = [sampling, *(SamplingParams(num_inference_steps=3 + i, seed=i) for i in range(6))]
    shared = pixels_of(image_engine.generate([edit, *others], params, use_tqdm=False)[0])
    difference = np.abs(shared.astype(int) - first.astype(int)).max(axis=-1)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 0.001


def test_pixels_outside_the_mask_are_unchanged(image_engine: ImageEngine) -> None:
    edit = make_edit(101, 67)
    assert isinstance(edit.image, np.ndarray)
    assert isinstance(edit.mask_image, np.ndarray)
    out = pixels_of(image_engine.generate([edit], SamplingParams(seed=1), use_tqdm=False)[0])
    outside = edit.mask_image == 0
    assert np.array_equal(out[outside], edit.image[outside])
    assert not np.array_equal(out[~outside], edit.image[~outside])


def test_n_images_use_successive_seeds(image_engine: ImageEngine) -> None:
    edit = make_edit(64, 64)
    (several,) = image_engine.generate([edit], SamplingParams(seed=7, n=3), use_tqdm=False)
    assert several.seeds == [7, 8, 9]
    (one,) = image_engine.generate([edit], SamplingParams(seed=8), use_tqdm=False)
    assert np.array_equal(np.asarray(several.images[1]), pixels_of(one))


def test_errors_stay_with_their_item(image_engine: ImageEngine) -> None:
    good = make_edit(64, 64)
    bad = [
        Edit(prompt="x", image=b"not an image"),
        Edit(prompt="x", image="/does/not/exist.png"),
        Edit(prompt="x", image=picture(64, 64), mask_image=np.zeros((64, 64), np.uint8)),
    ]
    results = image_engine.generate([bad[0], good, bad[1], bad[2]], SamplingParams(seed=0), use_tqdm=False)
    assert isinstance(results[0].error, InvalidImageError)
    assert results[1].error is None
    assert isinstance(results[2].error, InvalidRequestError)
    assert isinstance(results[3].error, InvalidRequestError)


UNUSABLE = [
    picture(32, 32).astype(np.float32),
    picture(32, 32).astype(np.int64),
    np.zeros((2, 32, 32, 3), np.uint8),
    np.zeros((32, 32, 5), np.uint8),
    Image.new("CMYK", (32, 32)),
    Image.new("F", (32, 32)),
    np.zeros((0, 32, 3), np.uint8),
]


def test_invalid_pictures_fail_alone(image_engine: ImageEngine) -> None:
    edits = [Edit(prompt="x", image=image) for image in UNUSABLE]
    masks = [Edit(prompt="x", image=picture(32, 32), mask_image=mask) for mask in UNUSABLE]
    *results, good = image_engine.generate([*edits, *masks, make_edit(32, 32)], use_tqdm=False)
    assert good.error is None
    for result, name in zip(results, ["image"] * 7 + ["mask_image"] * 7, strict=True):
        assert isinstance(result.error, InvalidImageError)
        assert result.error.param == name


@pytest.mark.parametrize("path", ["a\0b.png", "half \ud83d.png", "/", "", "x" * 5000])
def test_impossible_paths_fail_alone(image_engine: ImageEngine, path: str) -> None:
    bad, good = image_engine.generate([Edit(prompt="x", image=path), make_edit(32, 32)], use_tqdm=False)
    assert isinstance(bad.error, InvalidRequestError)
    assert bad.error.param == "image"
    assert good.error is None


def test_an_invalid_prompt_is_refused() -> None:
    for prompt in (None, 3, b"x", "", "half \ud83d", "x" * 32001):
        with pytest.raises(InvalidRequestError) as caught:
            replace(make_edit(32, 32), prompt=prompt)  # type: ignore[arg-type]
        assert caught.value.param == "prompt"


def test_an_array_of_one_channel_is_grey(image_engine: ImageEngine) -> None:
    edit, sampling = make_edit(64, 64), SamplingParams(seed=1)
    assert isinstance(edit.mask_image, np.ndarray)
    flat, deep = image_engine.generate(
        [edit, replace(edit, mask_image=edit.mask_image[..., None])], sampling, use_tqdm=False
    )
    assert np.array_equal(pixels_of(flat) == edit.image, pixels_of(deep) == edit.image)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send Ctrl-C while the block waits for something."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def left_since(before: set[psutil.Process]) -> list[psutil.Process]:
    """Children that were not there before and do not end by themselves."""
    _, alive = psutil.wait_procs(children() - before, timeout=5)
    return alive


def test_ctrl_c_while_the_model_loads_leaves_no_process(tiny_checkpoint: Path) -> None:
    before = children()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.2):
        ImageEngine(str(tiny_checkpoint))
    assert not left_since(before)


def test_ctrl_c_aborts_the_edits(image_engine: ImageEngine) -> None:
    edits, sampling = [make_edit(128, 128)] * 30, SamplingParams(num_inference_steps=200, n=10, seed=1)
    with pytest.raises(KeyboardInterrupt), interrupted_after(1.0):
        image_engine.generate(edits, sampling, use_tqdm=False)
    deadline = time.monotonic() + 3
    while image_engine._engine.num_admitted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert image_engine.generate([make_edit(64, 64)], use_tqdm=False)[0].error is None


def test_generation_without_an_image(image_engine: ImageEngine) -> None:
    (result,) = image_engine.generate([Edit(prompt="a room", size=(96, 64))], SamplingParams(seed=0), use_tqdm=False)
    assert result.error is None
    assert result.images[0].size == (96, 64)
    assert result.reports[0].mask_ratio == 1.0


def test_a_long_prompt_is_cut_and_reported(image_engine: ImageEngine) -> None:
    edits = [make_edit(64, 64), make_edit(64, 64, prompt="a red shirt " * 30)]
    short, long = image_engine.generate(edits, SamplingParams(seed=0), use_tqdm=False)
    assert not short.reports[0].prompt_truncated
    assert long.reports[0].prompt_truncated


def test_a_model_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoSuchPipeline"}')
    before = children()
    with pytest.raises(ConfigError, match="NoSuchPipeline"):
        ImageEngine(str(tmp_path), data_parallel_size=2)
    with pytest.raises(ConfigError, match="--offload host: on a CPU"):
        ImageEngine(device="cpu", offload="host")
    assert not left_since(before)


# ------------------------------------------------------------------------------------------------ the async engine

in_module = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def start(tiny_checkpoint: Path, workers: int, max_retries: int = 2) -> AsyncIterator[AsyncEngine]:
    model = ModelConfig(model=str(tiny_checkpoint), threads=1)
    scheduler = SchedulerConfig(max_retries=max_retries)
    config = EngineConfig(models=(model,), workers_per_engine=workers, scheduler=scheduler)
    async with serving_engine(StencilConfig(engine=config)) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_worker(tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    async with start(tiny_checkpoint, workers=1, max_retries=0) as engine:
        yield engine


def to_input(edit: Edit, sampling: SamplingParams, partial_images: int = 0) -> EditInput:
    assert edit.image is not None
    assert edit.mask_image is not None
    return EditInput(
        prompt=edit.prompt,
        sampling=sampling,
        image=BytesUpload(encode_picture(edit.image, "image")),
        mask=BytesUpload(encode_picture(edit.mask_image, "mask")),
        mask_kind="luminance",
        partial_images=partial_images,
    )


async def run(engine: AsyncEngine, name: str, edit: EditInput) -> list[tuple[ImageOutput, bytes]]:
    async with engine.edit(name, edit, engine.choose_model()) as outputs:
        return [(output, bytes(output.data)) async for output in outputs]


def open_image(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)))


@in_module
async def test_decoding_on_a_second_worker_gives_the_same_bytes(tiny_checkpoint: Path, one_worker: AsyncEngine) -> None:
    edits = [
        to_input(make_edit(128, 128, i), SamplingParams(num_inference_steps=9 + i, seed=i), partial_images=1)
        for i in range(4)
    ]
    # One at a time: the batch, which may change the last bit, is the same.
    async with start(tiny_checkpoint, workers=2) as two_workers:
        for i, edit in enumerate(edits):
            one = await run(one_worker, f"one-{i}", edit)
            two = await run(two_workers, f"two-{i}", edit)
            assert [output.partial_index for output, _ in two] == [output.partial_index for output, _ in one]
            for (_, expected), (_, data) in zip(one, two, strict=True):
                assert np.array_equal(open_image(data), open_image(expected))
                assert data == expected
        crowd = await asyncio.gather(*(run(two_workers, f"crowd-{i}", edit) for i, edit in enumerate(edits)))
        assert all(outputs[-1][0].report is not None for outputs in crowd)


@in_module
async def test_partial_images_approach_the_final_one(one_worker: AsyncEngine) -> None:
    edit = to_input(make_edit(128, 128), SamplingParams(num_inference_steps=12, seed=3), partial_images=3)
    outputs = await run(one_worker, "a", edit)
    assert [output.partial_index for output, _ in outputs] == [0, 1, 2, None]
    *partials, final = (open_image(data).astype(float) for _, data in outputs)
    errors = [((partial - final) ** 2).mean() for partial in partials]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[-1]


def num_steps(engine: AsyncEngine) -> int:
    """Steps done so far, as of the last request that ended."""
    (stats,) = engine.stats
    return stats.steps if stats else 0


@in_module
async def test_leaving_the_edit_early_frees_its_slot(one_worker: AsyncEngine) -> None:
    edit = to_input(make_edit(128, 128), SamplingParams(num_inference_steps=200, seed=3), partial_images=1)
    async with one_worker.edit("a", edit, one_worker.choose_model()):
        before = num_steps(one_worker)
        while not one_worker.num_requests_running:
            await asyncio.sleep(0.01)
    while one_worker.services.arena.used_bytes:
        await asyncio.sleep(0.001)
    assert one_worker.num_requests_running == 0
    assert num_steps(one_worker) - before < 150, "of 200, and of what was done before but not told"
    one_worker.services.arena.check_integrity()


@in_module
async def test_nothing_stays_allocated_after_failures(one_worker: AsyncEngine) -> None:
    with pytest.raises(InvalidImageError):
        await run(one_worker, "bad", EditInput(prompt="x", image=BytesUpload(b"nonsense")))
    task = asyncio.create_task(run(one_worker, "gone", to_input(make_edit(128, 128), SamplingParams(seed=1))))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while one_worker.services.arena.used_bytes:
            await asyncio.sleep(0.01)


@in_module
async def test_the_longest_prompts_of_a_full_batch_reach_the_worker(one_worker: AsyncEngine) -> None:
    edit = to_input(make_edit(48, 48, prompt="\N{SNOWMAN}" * 32000), SamplingParams(num_inference_steps=1, n=10))
    results = await asyncio.gather(*(run(one_worker, f"long-{i}", edit) for i in range(3)))
    assert [len(outputs) for outputs in results] == [10, 10, 10]
    with pytest.raises(InvalidRequestError, match="too long"):
        await run(one_worker, "longer", to_input(make_edit(48, 48, prompt="x" * 32001), SamplingParams()))


@in_module
async def test_the_sockets_folder_is_gone_once_connected(one_worker: AsyncEngine) -> None:
    assert one_worker.is_ready
    engine = one_worker.services.engines.replicas[0]._client._engine
    assert isinstance(engine, LocalEngine)
    assert not engine._folder.exists()


async def test_a_socket_that_cannot_be_made_is_a_config_error(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    engine = AsyncEngine(StencilConfig(engine=EngineConfig(models=(ModelConfig(model=str(tiny_checkpoint)),))))
    with pytest.raises(ConfigError, match="TMPDIR"):
        await engine.start()
    assert list(deep.iterdir()) == []


# ------------------------------------------------------------------------------------- last: they end the shared engine


@in_module
async def test_a_killed_worker_fails_the_edit_where_no_retries_are_allowed(one_worker: AsyncEngine) -> None:
    edit = to_input(make_edit(128, 128), SamplingParams(num_inference_steps=200, seed=3))
    async with one_worker.edit("a", edit, one_worker.choose_model()) as outputs:
        async with asyncio.timeout(60):
            while not one_worker.num_requests_running:
                await asyncio.sleep(0.01)
        max(processes("worker"), key=psutil.Process.create_time).kill()  # that of the module's other engine is older
        with pytest.raises(EngineError, match=r"worker 0 died.*SIGKILL"):
            await anext(outputs)


@in_module
async def test_a_bug_in_the_client_side_ends_the_engine_instead_of_hanging_it(
    one_worker: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: ClientArena, region: object) -> None:
        raise RuntimeError("a bug")

    async with asyncio.timeout(60):
        while not one_worker.is_ready:  # a worker was killed before
            await asyncio.sleep(0.01)
    monkeypatch.setattr(ClientArena, "release", broken)
    edit = to_input(make_edit(64, 64), SamplingParams(num_inference_steps=1))
    with suppress(EngineError):  # whether its caller has taken the picture before the engine ends is a race
        await run(one_worker, "first", edit)
    assert isinstance(await asyncio.wait_for(one_worker.failed(), 10), EngineError)
    assert not one_worker.is_ready
    with pytest.raises(EngineError):
        await asyncio.wait_for(run(one_worker, "second", edit), 10)
