"""Edits that ControlNets steer, as a worker receives them, and diffusers' pipelines for the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from edits import Edit, box_mask, picture
from PIL import Image, ImageDraw
from pipeline_rig import Rig
from thread_groups import ThreadGroups

from core.control import Control
from core.control_type import ControlType
from core.handles import ArrayRef, TensorRef
from core.messages.worker import Batch, Item, StepPlan
from core.scheduling.ops.control_encode import ControlEncode
from core.scheduling.ops.controlnet import ControlStep, ControlUse
from model_executor.models.base import Row
from model_executor.models.boxes import around
from model_executor.models.controlnet.controlnet import Shown
from model_executor.parallel.group import Group
from model_executor.worker.ops.step_inputs import StepInputs
from model_executor.worker.probes.cost_probe import Batches


@dataclass(frozen=True)
class Steered:
    """A control picture of an edit."""

    picture: npt.NDArray[np.uint8]
    net: str
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    mode: int | None = None

    @property
    def control(self) -> Control:
        return Control(type=self.net, scale=self.scale, start=self.start, end=self.end)

    @property
    def type(self) -> ControlType:
        return ControlType(self.net, self.mode)


def lines(seed: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """A picture of white lines on black, uint8 [height, width, 3], as of edges."""
    image = Image.new("RGB", size)
    ends = np.random.default_rng(seed).integers(0, max(size), (6, 4))
    for left, top, right, bottom in ends.tolist():
        ImageDraw.Draw(image).line((left, top, right, bottom), (255, 255, 255), 2)
    return np.asarray(image)


class ControlledEdit:
    """An edit with control pictures: what a scheduler would have a worker do for it."""

    def __init__(self, edit: Edit, controls: Sequence[Steered]) -> None:
        self.edit, self.controls = edit, controls
        self._pictures: tuple[ArrayRef, ...] = tuple(edit.share(each.picture) for each in controls)

    def encode_plan(self) -> StepPlan:
        edit, work = self.edit, ControlEncode(self._pictures, self.edit.seed, is_exact=True)
        item = Item(edit.request_id, "control_encode", edit.model, work, ())
        edit.num_controls = len(self.controls)
        plan = edit.encode_plan()
        return StepPlan(seq=0, batches=(*plan.batches, Batch(0, "control_encode", (0,), (item,))))

    def control_item(self, step: int) -> Item:
        edit = self.edit
        (of_step,) = edit.denoise_plan(step).batches[0].items
        uses = [
            ControlUse(each.net, each.mode, number, each.scale * each.control.steers(step, edit.num_steps))
            for number, each in enumerate(self.controls)
        ]
        steering = {use.net for use in uses if use.scale}
        inputs = (*of_step.inputs, TensorRef(edit.key("control_encode", "controls"), 0))
        return Item(
            edit.request_id,
            "controlnet",
            edit.model,
            ControlStep(of_step.work, tuple(use for use in uses if use.net in steering)),
            inputs,
            step + 1,
        )

    def step_item(self, step: int) -> Item:
        (item,) = self.edit.denoise_plan(step).batches[0].items
        residuals = TensorRef(self.edit.key("controlnet", "residuals", step + 1), 0)
        uses = any(each.scale and each.control.steers(step, self.edit.num_steps) for each in self.controls)
        work = msgspec.structs.replace(item.work, is_steered=uses)
        return Item(item.request_id, item.node, item.model, work, (*item.inputs, residuals), item.version)

    def run(self, rig: Rig) -> npt.NDArray[np.uint8]:
        """The edit alone, from start to end."""
        return run_together(rig, [self])[0]


def run_together(rig: Rig, edits: Sequence[ControlledEdit]) -> list[npt.NDArray[np.uint8]]:
    """The pictures of edits that share each step that they have."""
    for each in edits:
        rig.do(each.encode_plan())
    for step in range(max(each.edit.num_steps for each in edits)):
        now = [each for each in edits if step < each.edit.num_steps]
        for op, items in (
            ("controlnet", [each.control_item(step) for each in now]),
            ("denoise", [each.step_item(step) for each in now]),
        ):
            rig.do(StepPlan(seq=0, batches=(Batch(0, op, (0,), tuple(items)),)))
    for each in edits:
        rig.do(each.edit.decode_plan())
    return [each.edit.result() for each in edits]


def assert_kept_as_predicted(rig: Rig, edited: ControlledEdit) -> None:
    """What a request with most control pictures keeps for its ControlNet takes as many bytes as the memory probe
    reckons. edited: of the model's native size, with most rows."""
    rig.do(edited.encode_plan())
    rig.do(StepPlan(seq=0, batches=(Batch(0, "controlnet", (0,), (edited.control_item(0),)),)))
    series = {key.name: tensors for each in rig.store._series.values() for key, tensors in each.items()}
    kept = rig.store.kept(edited.edit.request_id, "controlnet")
    held = {
        tensor.data_ptr(): tensor.nbytes
        for name, tensors in (series | kept).items()
        if name.startswith(("control", "residuals"))
        for tensor in tensors
        if tensor.is_floating_point()  # others are in host memory
    }
    info = rig.family.info("tiny")
    nets = [rig.models.controlnets.nets["tiny"][each.net] for each in edited.controls]
    more = Batches(rig.family, info, controlnets=nets).kept_bytes() - Batches(rig.family, info).kept_bytes()
    assert sum(held.values()) == more
    for free in edited.edit.decode_plan().free:
        rig.store.free(free.key)


def assert_ranks_share_it_bit_for_bit(rig: Rig, edited: ControlledEdit) -> None:
    """What the edit's ControlNet adds to a step is the same on one rank, two and three: to all rows, to the first
    alone, and where a few tokens are active. edited: its pictures are for one ControlNet.
    """
    rig.do(edited.encode_plan())
    item, controls = edited.control_item(0), edited.controls
    assert isinstance(item.work, ControlStep)
    net = rig.models.controlnets.nets["tiny"][controls[0].net]
    with torch.inference_mode():
        inputs = StepInputs(rig.runner._context, item, item.work.step)
        rows = inputs.bare_rows()
        shown = [
            Shown(net.embed(picture, each.mode), each.mode, each.scale)
            for picture, each in zip(inputs.controls, controls, strict=True)
        ]
        active = torch.tensor([2, 3, 5, 6, 7, 9])
        left, top, right, bottom = around(active, rows[0].grid[1])
        masked = [replace(row, active=active, box=(left, top, right, bottom)) for row in rows]
        groups = ThreadGroups(3)

        def made(rows: Sequence[Row], group: Group | None = None) -> list[torch.Tensor]:
            return [tensor for some in net.residuals(rows, shown, group).series for tensor in some]

        for some in (rows, rows[:1], masked, masked[:1]):
            alone = made(some)
            for degree in (2, 3):
                for shared in groups.run(partial(made, some), range(degree)):
                    assert len(shared) == len(alone)
                    assert all(map(torch.equal, alone, shared))
    for free in edited.edit.decode_plan().free:
        rig.store.free(free.key)


def expected(rig: Rig, pipeline: Any, edited: ControlledEdit, **options: Any) -> npt.NDArray[np.uint8]:
    """The picture of diffusers' pipeline. pipeline: with the ControlNets of the edit, in their order."""
    edit, controls = edited.edit, edited.controls
    several = len(controls) > 1 or controls[0].mode is not None

    def each(values: Sequence[Any]) -> Any:
        return list(values) if several else values[0]

    arguments: dict[str, Any] = {
        "control_image": each([Image.fromarray(control.picture) for control in controls]),
        "controlnet_conditioning_scale": each([control.scale for control in controls]),
        "control_guidance_start": each([control.start for control in controls]),
        "control_guidance_end": each([control.end for control in controls]),
    }
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        prompt=edit.prompt,
        image=Image.fromarray(picture(edit.seed, edit.upload_size)),
        mask_image=Image.fromarray(box_mask(edit.upload_size) * 255),
        width=edit.size[0],
        height=edit.size[1],
        num_inference_steps=edit.steps,
        strength=edit.strength,
        generator=torch.Generator("cpu").manual_seed(edit.seed),
        **(arguments | options),
    ).images[0]
    return np.asarray(made)
