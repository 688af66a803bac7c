"""What all steps of a run use is made once, of the values that the step names, and gone after the last one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxFillPipeline
from edits import Edit
from pipeline_rig import Rig

from core.ipc.shared_array import Arena
from core.scheduling.ops.denoise import Denoise
from model_executor.models.base import Row
from model_executor.worker.ops.step_inputs import StepInputs


@pytest.fixture(scope="module")
def rig(tiny_checkpoint: Path) -> Iterator[Rig]:
    arena = Arena.create(0, 1 << 25)
    yield Rig(tiny_checkpoint, arena, FluxFillPipeline)
    arena.close()


def row_of(rig: Rig, edit: Edit, step: int) -> Row:
    (item,) = edit.denoise_plan(step).batches[0].items
    assert isinstance(item.work, Denoise)
    (row,) = StepInputs(rig.runner._context, item, item.work).rows()
    return row


def end(rig: Rig, edit: Edit) -> None:
    for free in edit.decode_plan().free:
        rig.store.free(free.key)


def test_what_all_steps_use_is_made_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()

    def counted(name: str) -> Any:
        make = getattr(rig.family, name)

        def made(*args: Any) -> Any:
            calls[name] += 1
            return make(*args)

        return made

    for name in ("modulation", "prompt_state"):
        monkeypatch.setattr(rig.family, name, counted(name))
    edit = rig.edit("once", seed=1, steps=3, size=(64, 64))
    rig.run(edit)
    assert calls == {"modulation": 1, "prompt_state": 1}
    assert len(rig.store) == len(rig.store._kept) == 0


def test_the_last_step_drops_what_was_kept(rig: Rig) -> None:
    edit = rig.edit("dropped", seed=1, steps=2, size=(64, 64))
    rig.do(edit.encode_plan())
    before = len(rig.store)
    rig.do(edit.denoise_plan(0))
    first = len(rig.store)
    assert first > before
    rig.do(edit.denoise_plan(1))
    kept = {"denoise": 0} | {node: len(names) for node, names in rig.store._kept.get(edit.request_id, {}).items()}
    assert kept == {"denoise": 0}
    end(rig, edit)
    assert len(rig.store) == 0


@pytest.mark.parametrize(("node", "name"), [("text_encode", "prompt_embeds"), ("image_encode", "sigmas")])
def test_a_value_that_was_made_again_is_the_one_that_is_read(rig: Rig, node: str, name: str) -> None:
    edit = rig.edit("again", seed=1, steps=2, size=(64, 64))
    rig.do(edit.encode_plan())
    with torch.inference_mode():
        before = row_of(rig, edit, 0)
        again = row_of(rig, edit, 0)
        for field in fields(Row):  # nothing has changed
            old, new = getattr(before, field.name), getattr(again, field.name)
            assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new
        key = edit.key(node, name)
        rig.store.put(key, rig.store.get(key) + 1)
        changed = row_of(rig, edit, 0)
    field = {"prompt_embeds": "prompt_embeds", "sigmas": "sigma"}[name]
    assert torch.equal(getattr(changed, field), getattr(before, field) + 1)
    end(rig, edit)
