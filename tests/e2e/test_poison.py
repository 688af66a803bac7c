"""Requests of one owner that end workers again and again: the engine and its model stay up for everybody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fault_kit import BRIEF, POISON, assert_alike, begin, count, ends, make_input, run, run_each, shim, start

from core.errors import EngineDeadError, ModelUnavailableError

FAULTS = f"""
import os
import signal

def inject(module, folder):
    denoise = module.HANDLERS["denoise"]

    def denoise_or_die(context, items):
        if any(item.request_id.startswith({POISON!r}) for item in items):
            os.kill(os.getpid(), signal.SIGKILL)
        return denoise(context, items)

    module.HANDLERS["denoise"] = denoise_or_die
"""

OURS = {name: replace(edit, owner="ours") for name, edit in list(BRIEF.items())[:2]}
THEIRS = replace(make_input(steps=4), owner="theirs")


async def test_poison_of_one_owner_leaves_the_model_to_everybody_else(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(tmp_path, monkeypatch, FAULTS, proven_seconds=1e9)
    async with start(tiny_checkpoint, workers_per_engine=2) as engine:
        expected = await run_each(engine, OURS)
        tasks = await begin(engine, OURS)
        with pytest.raises(EngineDeadError, match="3 workers died while running this request"):
            await run(engine, f"{POISON}-1", THEIRS)
        assert_alike(await ends(tasks), expected)
        with pytest.raises(ModelUnavailableError, match="killed by signal 9"):
            await run(engine, f"{POISON}-2", THEIRS)
        with pytest.raises(ModelUnavailableError, match="killed by signal 9") as refused:
            await run(engine, "good", THEIRS)
        assert (refused.value.cause, 1 < refused.value.retry_after <= 10) == ("owner_deaths", True)
        assert count(engine, "model_quarantined") == 1
        assert_alike(await run_each(engine, OURS), expected)
        assert count(engine, "engine_restarts") == 0
        assert count(engine, "rank_restarts") == 4
