"""ControlNets that raise, make no numbers or end ranks, and ranks that die beside them: all other edits, of the same
model too, end with the bits of an undisturbed run.

All tests share an engine of two ranks, and the order of its faults: a rank that has died five times is given up.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
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

    def residuals_or_fault(self, rows, shown):
        kind = os.path.basename(self.checkpoint.path)
        if kind == "raises":
            raise RuntimeError("injected")
        if kind == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return residuals(self, rows, shown)

    FluxControlNet.residuals = residuals_or_fault
"""
NETS = ("edges", "nan", "raises", "deadly")
LINES = file_of(lines(1, (96, 96)))


def controlled(net: str, edit: EditInput) -> EditInput:
    return replace(edit, controls=(ControlInput(BytesUpload(LINES), Control(type=net)),))


OTHERS = {
    "plain": make_input(1, steps=20),
    "controlled": controlled("edges", make_input(2, steps=20)),
    "controlled, own pages": controlled("edges", make_input(3, steps=20)),
}
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
        shim(folder, patch, FAULTS)
        async with start(folder / "flux", controlnets=nets, workers_per_engine=2) as engine:
            yield engine
            assert count(engine, "engine_restarts") == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(engine: AsyncEngine) -> dict[str, bytes]:
    return finals(await run_each(engine, OTHERS))


async def test_one(engine, expected):
    for kind in ("raises", "nan", "deadly", "deadly"):
        tasks = await begin(engine, OTHERS)
        try:
            await run(engine, f"{kind}-1", controlled(kind, make_input(4, steps=20)))
        except Exception as error:
            print(kind, type(error), error)
        got = finals(await ends(tasks))
        for name in got:
            print(kind, name, got[name] == expected[name])
    for kind in ("deadly", "edges"):
        try:
            await run(engine, "last", controlled(kind, make_input(4, steps=20)))
        except Exception as error:
            print(kind, type(error), error)
    print(count(engine, "model_quarantined"), count(engine, "rank_restarts"))
