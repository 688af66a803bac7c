"""Approximate caching on a real engine: who may begin in whose state, and that a death repeats exactly that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from adapters import make_lora
from engines import serving_engine
from fault_kit import file_of, make_input, processes, until

from core.config import AdapterConfig, CacheConfig, EngineConfig, ModelConfig, StencilConfig
from core.errors import InvalidRequestError
from core.lora import Lora
from core.sampling_params import SamplingParams
from core.skip_level import SkipLevel
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.recall.kept_states import KeptStates
from engine.client.recall.recalled import Recalled
from engine.client.resolve import approximate
from engine.client.sessions import edit_preparation
from engine.client.upload import BytesUpload
from engine.router import engine_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS, SKIPPED = 10, 4
SIDE = 64
STATE_BYTES = 2 * 4 * (SIDE // 16) ** 2 * 64
"""Of a run's two states, after two and after four steps."""

LEVELS = tuple(
    SkipLevel(share=share, similarity=0.99995, ssim_mean=1.0, ssim_p10=1.0, num_pairs=8) for share in (0.2, 0.4)
)
ANY = tuple(SkipLevel(share=level.share, similarity=-1.0, ssim_mean=0.0, ssim_p10=0.0, num_pairs=8) for level in LEVELS)
"""With these, all prompts are similar enough."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    """Serves one checkpoint under two names, one of which has an adapter. At the end all that is left in its arena is
    what its states take.
    """
    lora = make_lora(tmp_path_factory.mktemp("lora") / "hat.safetensors", tiny_checkpoint)
    models = (
        ModelConfig(
            model=str(tiny_checkpoint), served_model_name="one", threads=1, adapters=(AdapterConfig("hat", str(lora)),)
        ),
        ModelConfig(model=str(tiny_checkpoint), served_model_name="two", threads=1),
    )
    config = StencilConfig(
        engine=EngineConfig(models=models, cache=CacheConfig(scope="server")),  # which states are never shared by
        approximate_cache_bytes=64 * STATE_BYTES,
        skip_levels=LEVELS,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        async with serving_engine(config) as engine:
            yield engine
            states = engine.services.states
            await until(lambda: engine.services.arena.used_bytes == len(states) * STATE_BYTES)
            states.check_integrity()
            assert all(not run.num_readers for run in states._runs)
            engine.services.arena.check_integrity()


@pytest.fixture(autouse=True)
def _empty(engine: AsyncEngine) -> Iterator[None]:
    """Each test begins and ends without states."""
    yield
    for run in list(engine.services.states._runs):
        engine.services.states._drop(run)


def asked(prompt: str = "a red shirt", owner: str = "me", on: bool | None = True, **sampling: object) -> EditInput:
    params = SamplingParams(**{"num_inference_steps": STEPS, "seed": 7, "approximate_caching": on} | sampling)  # type: ignore[arg-type]
    return EditInput(prompt=prompt, owner=owner, sampling=params, canvas_size=(SIDE, SIDE))


def plain(edit: EditInput) -> EditInput:
    """The same without approximate caching."""
    sampling = {name: getattr(edit.sampling, name) for name in edit.sampling.__struct_fields__}
    return replace(edit, sampling=SamplingParams(**sampling | {"approximate_caching": None}))


async def run(
    engine: AsyncEngine, name: str, edit: EditInput, model: str = "one", lora: str = ""
) -> list[tuple[bytes, ImageOutput]]:
    choice = engine.choose_model(model, [Lora(lora)] if lora else [])
    async with engine.edit(name, edit, choice) as outputs:
        return [(bytes(output.data), output) async for output in outputs]


async def one(engine: AsyncEngine, name: str, edit: EditInput, **how: str) -> tuple[bytes, Recalled | None]:
    ((file, output),) = await run(engine, name, edit, **how)
    assert output.report is not None
    skipped = output.report.recalled.steps_skipped if output.report.recalled else 0
    assert output.report.steps_computed == STEPS - skipped
    return file, output.report.recalled


async def test_an_equal_prompt_of_the_same_owner_begins_in_the_state_and_ends_in_the_same_picture(
    engine: AsyncEngine,
) -> None:
    expected, report = await one(engine, "plain", plain(asked()))
    assert report is None
    assert not len(engine.services.states), "who does not ask leaves nothing"
    first, report = await one(engine, "first", asked())
    assert (first, report) == (expected, Recalled(can_recall=True, is_kept=True))
    again, report = await one(engine, "again", asked())
    assert again == expected, "the state is a copy of the run's own latents, to the last bit"
    assert report == Recalled(can_recall=True, source="first", source_index=0, similarity=1.0, steps_skipped=SKIPPED)
    assert len(engine.services.states) == 1, "what is approximate is no source"
    exported = engine.metrics.exposition().decode()
    assert f"stencil:approximate_cache_hits_total {engine.services.states.num_recalled:.1f}" in exported
    assert f"stencil:approximate_cache_used_bytes {engine.services.states.used_bytes:.1f}" in exported


@pytest.mark.parametrize(
    ("other", "how"),
    [
        (asked(owner="you"), {}),
        (asked("twelve green trees by a lake in the morning"), {}),
        (asked(seed=8), {}),
        (asked(num_inference_steps=STEPS, guidance_scale=2.0), {}),
        (replace(asked(), canvas_size=(SIDE, 2 * SIDE)), {}),
        (asked(), {"model": "two"}),
        (asked(), {"lora": "hat"}),
    ],
    ids=["owner", "prompt", "seed", "guidance", "size", "model", "adapter"],
)
async def test_another_begins_with_noise_and_ends_in_the_same_picture_as_without(
    engine: AsyncEngine, other: EditInput, how: dict[str, str]
) -> None:
    expected, _ = await one(engine, "plain", plain(other), **how)
    await one(engine, "first", asked())
    assert await one(engine, "other", other, **how) == (expected, Recalled(can_recall=True, is_kept=True))


@pytest.mark.parametrize("kind", ["worker", "engine"])
async def test_after_a_death_it_begins_in_the_same_state_again(
    engine: AsyncEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another prompt, so that a picture from another state, or from none, would be another one. Meanwhile the source
    is forgotten, and would be found no more.
    """
    monkeypatch.setattr(edit_preparation, "levels_of", lambda model, config: ANY)
    steps = {"num_inference_steps": 80}
    await run(engine, "source", asked(**steps))
    edit = asked("a blue coat", **steps)
    ((expected, undisturbed),) = await run(engine, "undisturbed", edit)
    task = asyncio.create_task(run(engine, "disturbed", edit))
    (source,) = engine.services.states._runs
    await until(lambda: source.num_readers == 1)
    engine.services.states._drop(source)
    await until(lambda: engine.num_requests_running == 1)
    await asyncio.sleep(0.1)
    assert not len(engine.services.states)
    processes(kind)[0].kill()
    ((disturbed, output),) = await asyncio.wait_for(task, 120)
    assert disturbed == expected
    assert output.report is not None
    assert undisturbed.report is not None
    assert output.report.recalled == undisturbed.report.recalled
    assert output.report.recalled is not None
    assert (output.report.recalled.source, output.report.recalled.steps_skipped) == ("source", 32)
    await until(lambda: engine.services.states.used_bytes == 0)
    await until(lambda: engine.is_ready)


async def test_without_a_seed_a_picture_has_that_of_its_source_and_no_prompt_has_the_same_picture_twice(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_preparation, "levels_of", lambda model, config: ANY)
    pictures = await run(engine, "two", asked(seed=None, n=2))
    again = await run(engine, "again", asked(seed=None))
    assert not any(output.report.recalled.source for _, output in pictures + again)  # type: ignore[union-attr]
    others = await run(engine, "others", asked("a blue coat", seed=None, n=4))
    others += await run(engine, "more", asked("a blue coat", seed=None))
    found = sorted(
        (output.report.recalled.source or "", output.report.recalled.source_index or 0, output.seed)  # type: ignore[union-attr]
        for _, output in others
    )
    assert [each[:2] for each in found[2:]] == [("again", 0), ("two", 0), ("two", 1)], "each serves a prompt once"
    assert {seed for *_, seed in found[2:]} == {output.seed for _, output in pictures + again}
    assert len({data for data, _ in pictures + again + others}) == 8


async def test_a_whole_picture_that_is_edited_begins_in_the_state_of_that_picture_alone(engine: AsyncEngine) -> None:
    pixels = [make_pixels(number) for number in range(2)]
    edits = [replace(asked(strength=0.8), canvas_size=None, image=BytesUpload(file_of(each))) for each in pixels]
    expected = [(await run(engine, "plain", plain(edit)))[0][0] for edit in edits]
    made = [(await run(engine, name, edit))[0] for name, edit in zip("aba", (*edits, edits[0]), strict=True)]
    assert [data for data, _ in made] == [*expected, expected[0]]
    recalled = [output.report.recalled for _, output in made if output.report is not None]
    assert [each and each.source for each in recalled] == [None, None, "a"]
    assert [each and each.steps_skipped for each in recalled] == [0, 0, 3], "of eight"


def make_pixels(seed: int) -> object:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


async def test_what_has_a_mask_takes_no_part(engine: AsyncEngine) -> None:
    edit = make_input(steps=STEPS)
    masked = replace(edit, sampling=SamplingParams(num_inference_steps=STEPS, seed=7, approximate_caching=True))
    ((data, output),) = await run(engine, "masked", masked)
    ((expected, _),) = await run(engine, "plain", edit)
    assert data == expected
    assert output.report is not None
    assert output.report.recalled == Recalled()
    assert not len(engine.services.states)


async def test_little_memory_keeps_what_is_used_most(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2 * (STATE_BYTES + 2 * (4 * 64 + 8)) + 1
    states = KeptStates(room, engine.services.arena)
    monkeypatch.setattr(engine, "services", replace(engine.services, states=states))
    for name in ("a", "b"):
        await run(engine, name, asked(seed=ord(name)))
    await run(engine, "a again", asked(seed=ord("a")))
    await run(engine, "c", asked(seed=ord("c")))
    assert [run.request_id for run in states._runs] == ["a", "c"]
    assert states.used_bytes <= room
    states.check_integrity()
    for each in list(states._runs):
        states._drop(each)
    assert states.used_bytes == 0


async def test_who_leaves_early_leaves_nothing(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(run(engine, f"r{n}", asked(seed=n, num_inference_steps=150))) for n in range(4)]
    for number, task in enumerate(tasks):
        await asyncio.sleep(0.004 * number)  # some while their prompt is embedded
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: engine.services.arena.used_bytes == 0)
    assert engine.services.states.used_bytes == 0


async def test_what_the_server_cannot_do_is_refused_with_the_remedy(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approximate, "levels_of", lambda model, config: ())
    with pytest.raises(InvalidRequestError, match="no calibrated skip levels; run python") as refusal:
        await run(engine, "r", asked())
    assert refusal.value.param == "approximate_caching"
