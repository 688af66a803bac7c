"""ControlNets that raise, make no numbers or end ranks, and ranks that die beside them: all other edits, of the same
model and with another ControlNet too, end with the bits of an undisturbed run. All tests share one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from control_rig import lines
from diffusers import FluxControlNetModel
from fault_kit import begin, count, ends, file_of, finals, make_input, processes, run, run_each, shim, start, until

from core.config import ControlNetConfig
from core.control import Control
from core.errors import EngineDeadError, EngineError, ModelUnavailableError, NonFiniteError
from engine.client.async_engine import AsyncEngine
from engine.client.control_input import ControlInput
from engine.client.edit_types import EditInput
from engine.client.upload import BytesUpload
from tools.random_checkpoints import make_flux
from tools.random_controlnets import make_flux_controlnet

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULTS = """
import os
import signal

def inject(module, folder):
    from model_executor.models.controlnet.flux_controlnet import FluxControlNet

    residuals = FluxControlNet.residuals

    def residuals_or_fault(self, rows, shown, group=None):
        kind = os.path.basename(self.checkpoint.path)
        if kind == "raises":
            raise RuntimeError("injected")
        if kind == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return residuals(self, rows, shown, group)

    FluxControlNet.residuals = residuals_or_fault
"""
NETS = ("edges", "nan", "raises", "deadly")
LINES = file_of(lines(1, (96, 96)))


def controlled(net: str, edit: EditInput) -> EditInput:
    return replace(edit, controls=(ControlInput(BytesUpload(LINES), Control(type=net)),))


OTHERS = {"plain": make_input(1, steps=40), "edges": controlled("edges", make_input(2, steps=60))}
OTHERS["edges, beside"] = controlled("edges", make_input(3, steps=50))
"""Edits of everybody else."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_flux(folder / "flux", guidance_embeds=True)
    for seed, name in enumerate(NETS):  # equal ones would be one
        make_flux_controlnet(folder / name, seed=seed, guidance_embeds=True)
    broken = FluxControlNetModel.from_pretrained(folder / "nan")
    broken.x_embedder.bias.data.fill_(torch.nan)
    broken.save_pretrained(folder / "nan")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    nets = [ControlNetConfig(name, str(folder / name)) for name in NETS]
    with pytest.MonkeyPatch.context() as patch:
        shim(folder, patch, FAULTS, proven_seconds=1e9)
        async with start(folder / "flux", controlnets=nets, workers_per_engine=2) as engine:
            yield engine
            assert count(engine, "engine_restarts") == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(engine: AsyncEngine) -> dict[str, bytes]:
    return finals(await run_each(engine, OTHERS))


async def test_what_is_cached_is_its_owners_and_has_nothing_of_control_pictures(engine: AsyncEngine) -> None:
    edit, before = make_input(9, steps=4), count(engine, "cache_primed")

    async def run_for(owner: str, asked: EditInput, primed: int) -> bytes:
        """primed: how often its template has been primed since the start, then."""
        made = await run(engine, f"{owner}-{primed}", replace(asked, owner=owner))
        await until(lambda: count(engine, "cache_primed") == before + primed * of_one)
        return made[-1][1]

    plain = await run(engine, "one-0", replace(edit, owner="one"))
    await until(lambda: count(engine, "cache_primed") > before)
    of_one = count(engine, "cache_primed") - before
    steered = await run_for("one", controlled("edges", edit), 1)
    assert await run_for("two", controlled("edges", edit), 2) == steered != plain[-1][1]
    assert await run_for("two", edit, 2) == plain[-1][1], "over pages that were primed for the other"


def busy(engine: AsyncEngine) -> list[float]:
    """Seconds that each rank has computed, as of the last edit that ended."""
    (stats,) = engine.stats
    return [rank.busy_seconds for rank in stats.ranks] if stats else [0.0, 0.0]


def assert_beside(engine: AsyncEngine, before: list[float]) -> None:
    """Each rank has computed much since then. Where one edit ran after the other, its ControlNet had its own."""
    worked = [now - was for now, was in zip(busy(engine), before, strict=True)]
    assert min(worked) >= 0.1 * max(worked), "one rank did all of it"


@pytest.mark.usefixtures("expected")  # what batches take is known then
async def test_partial_images_with_a_controlnet_beside_are_those_of_one_rank(engine: AsyncEngine, folder: Path) -> None:
    edit = controlled("edges", make_input(5, steps=60, partial_images=3))
    before = busy(engine)
    beside = [await run(engine, f"beside-{number}", edit) for number in range(2)]
    assert_beside(engine, before)
    nets = [ControlNetConfig("edges", str(folder / "edges"))]
    async with start(folder / "flux", controlnets=nets) as alone:
        in_sequence = await run(alone, "in-sequence", edit)
    assert [index for index, _ in in_sequence] == [0, 1, 2, None]
    assert beside == [in_sequence] * 2


async def test_clients_that_leave_an_edit_with_a_controlnet_beside_leave_nothing(
    engine: AsyncEngine, expected: dict[str, bytes]
) -> None:
    """An engine that becomes idle checks that nothing of ended edits is left in its arena, and dies if there is."""
    before, deaths, long = busy(engine), count(engine, "rank_restarts"), controlled("edges", make_input(5, steps=200))

    async def leave_after(seconds: float, name: str) -> None:
        leaving = asyncio.create_task(run(engine, name, long))
        await until(lambda: engine.num_requests_running > 0)
        await asyncio.sleep(seconds)
        assert not leaving.done()
        leaving.cancel()

    for seconds in (0.05, 0.15, 0.3):
        await leave_after(seconds, f"leaves-{seconds}")
        again = await run(engine, f"after-{seconds}", OTHERS["edges"])
        assert again[-1][1] == expected["edges"]
    assert_beside(engine, before)
    tasks = await begin(engine, OTHERS)
    await leave_after(0.1, "leaves-others")
    assert finals(await ends(tasks)) == expected
    assert count(engine, "rank_restarts") == deaths


async def test_a_rank_that_dies_during_controlled_edits_changes_no_bit(
    engine: AsyncEngine, expected: dict[str, bytes]
) -> None:
    tasks = await begin(engine, OTHERS)
    await asyncio.sleep(0.05)
    processes("worker")[0].kill()
    assert not tasks["edges"].done()
    assert finals(await ends(tasks)) == expected
    await until(lambda: len(processes("worker")) == 2)
    assert count(engine, "rank_restarts") == 1


@pytest.mark.parametrize(
    ("net", "error", "said"), [("raises", EngineError, "RuntimeError: injected"), ("nan", NonFiniteError, "not finite")]
)
async def test_a_controlnet_that_fails_fails_its_request_alone(
    engine: AsyncEngine, expected: dict[str, bytes], net: str, error: type[Exception], said: str
) -> None:
    tasks = await begin(engine, OTHERS)
    with pytest.raises(error, match=said):
        await run(engine, net, controlled(net, make_input(4)))
    assert finals(await ends(tasks)) == expected
    assert finals({"edges": await run(engine, "again", OTHERS["edges"])}) == {"edges": expected["edges"]}


async def test_a_controlnet_that_ends_ranks_is_refused_and_its_model_is_not(
    engine: AsyncEngine, expected: dict[str, bytes]
) -> None:
    tasks, before = await begin(engine, OTHERS), count(engine, "rank_restarts")
    with pytest.raises(EngineDeadError, match="3 workers died while running this request"):
        await run(engine, "deadly-1", controlled("deadly", make_input(4)))
    assert finals(await ends(tasks)) == expected
    refused = (
        r"the ControlNet deadly of the model .*flux is not run for a while, because its batches ended workers: .*9"
    )
    for number in (2, 3):
        with pytest.raises(ModelUnavailableError, match=refused):
            await run(engine, f"deadly-{number}", controlled("deadly", make_input(4)))
    assert count(engine, "rank_restarts") - before == 3 + 1, "the third one was not even tried"
    (stats,) = engine.stats
    assert stats is not None
    assert [(each.controlnets, each.cause) for each in stats.quarantine] == [(("deadly",), "deaths")]
    assert count(engine, "model_quarantined") == 1
    assert finals(await run_each(engine, OTHERS)) == expected
