"""Edits on a GPU that is none (`pretended_gpu.py`): tensors of host and GPU never meet, and a step after the first of
its run makes the host wait for nothing.

A run's first step may wait: it uploads what is kept for all of them, such as rotary tables and noise. So may ops before
it, since the worker waits for each before it runs the next; they must only keep the devices apart. For what decodes see
`KNOWN`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from adapters import make_lora
from control_rig import ControlledEdit, Steered, lines
from edits import SIZE, picture
from pipeline_rig import Rig

pytest.importorskip("triton")  # interpreted: see conftest.py

from pretended_gpu import GPU, PretendedGpu, pretended_gpu

from benchmarks.compare.checkpoints import MAKERS
from benchmarks.gpu.local_engine import LocalEngine
from core.config import AdapterConfig, CacheConfig, ControlNetConfig
from core.ipc.shared_array import Arena
from core.messages.worker import Item, ItemResult
from core.patches import Patch
from core.sampling_params import SamplingParams
from core.scheduling.ops.controlnet import ControlStep
from core.scheduling.ops.denoise import Denoise
from model_executor.kernels.gpu_tables import upload
from model_executor.worker.ops import HANDLERS
from model_executor.worker.ops.context import WorkerContext
from tools.random_controlnets import make_flux_controlnet, make_sdxl_controlnet

STEPS = 3
SIDES = {"flux_fill": 64, "sd3": 64, "qwen_edit_plus": 64, "z_image": 64, "sdxl": 128}
"""Families that edit mask-aware -> side of the picture, px: four tokens."""
BOX = (0, 0, 2, 1)
"""Of the tokens that are edited."""

CONTROLNETS: Mapping[str, tuple[Callable[[Path], Path], list[int | None]]] = {
    "flux": (make_flux_controlnet, [None]),
    "sdxl": (partial(make_sdxl_controlnet, num_modes=4), [1, 3]),
}
"""Family -> a ControlNet for it, and the modes of its pictures."""

KNOWN = {
    "to_pixels": "the picture is copied to the host",
    "vae_region.py": "decoding a region uploads where its tiles are, and solves a small system for their weights",
}
"""Functions and files that make the host wait, none of them in a step -> why."""


class Steps:
    """Denoising steps and those of ControlNets, and what made the host wait in all but the first of a run, and in what
    decodes."""

    def __init__(self, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gpu = gpu
        self.seen: list[tuple[str, int]] = []  # op and number of each step that was watched
        for op in ("denoise", "controlnet", "decode"):
            monkeypatch.setitem(HANDLERS, op, partial(self._run, op, HANDLERS[op]))

    def _run(self, op: str, handle: Any, context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
        works: list[Any] = [each.work.step if isinstance(each.work, ControlStep) else each.work for each in items]
        numbers = [work.step for work in works if isinstance(work, Denoise)]
        if not all(numbers):
            return handle(context, items)  # type: ignore[no-any-return]
        self.seen += [(op, number) for number in numbers]
        with self._gpu.watching():
            return handle(context, items)  # type: ignore[no-any-return]

    def check(self, *ops: str) -> None:
        """That none made the host wait. ops: that there were steps of."""
        waits = map(str, self._gpu.waits)
        assert [wait for wait in waits if not any(known in wait for known in KNOWN)] == []
        assert {op for op, _ in self.seen} == set(ops)


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


@pytest.fixture
def steps(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(gpu, monkeypatch)


class NoPipeline:
    """In place of what a rig compares with."""

    @classmethod
    def from_pretrained(cls, *_: object, **__: object) -> Any:
        return SimpleNamespace(set_progress_bar_config=lambda disable: None)


def rig_of(checkpoint: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(checkpoint, arena, NoPipeline, in_bfloat16=True, **options)


# ---------------------------------------------------------------------------------------------- what the GPU notices


def a_mask_as_index(x: torch.Tensor) -> object:
    return x[x > 0]


def a_number_as_index(x: torch.Tensor) -> object:
    return x[torch.zeros((), dtype=torch.int64, device=GPU)]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x[0].item(),
        lambda x: float(x[0]),
        lambda x: bool(x[0]),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.empty(3).copy_(x),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: torch.tensor([1.0], device=GPU),
        lambda x: torch.zeros(3).to(x),
        lambda x: torch.zeros(3).to(GPU, non_blocking=True),
        lambda x: torch.where(x > 0),
        lambda x: x[[0, 1]],
        lambda x: torch.cuda.current_stream().synchronize(),
        a_mask_as_index,
        a_number_as_index,
    ],
)
def test_waits_are_noticed(gpu: PretendedGpu, wait: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device=GPU)
    with gpu.watching():
        x.mul_(2).add_(upload(torch.ones(3), GPU))
        assert gpu.waits == []
        wait(x)
    assert len(gpu.waits) == 1


def test_devices_are_kept_apart(gpu: PretendedGpu) -> None:
    from model_executor.kernels.triton_kernels import swiglu

    x = torch.ones(3, device=GPU)
    assert x.device == GPU
    with pytest.raises(RuntimeError, match="on cpu and cuda"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="is on cpu"):
        swiglu[(1,)](x, torch.ones(3))
    assert (x + torch.ones(())).tolist() == [2.0, 2.0, 2.0], "a number may be the host's"


# ------------------------------------------------------------------------------------------------------------- edits


@pytest.mark.parametrize("family", SIDES)
def test_exact_and_mask_aware_edits(family: str, gpu: PretendedGpu, steps: Steps, tmp_path: Path) -> None:
    """With a negative prompt where the family takes one. A run's second step is captured as a graph, later ones are
    replays."""
    template = picture(1, (SIDES[family], SIDES[family]))
    sampling = SamplingParams(num_inference_steps=STEPS, seed=7, negative_prompt="blue", true_cfg_scale=4.0)
    cache = CacheConfig(device_bytes=2**26, host_bytes=2**24)
    with closing(LocalEngine(MAKERS[family](tmp_path / family), "cuda:0", "bfloat16", cache)) as engine:
        for is_mask_aware in (False, True):
            engine.edit([template], msgspec.structs.replace(sampling, mask_aware=is_mask_aware), BOX)
            stats, runs = engine.graphs.figures(), 1 + is_mask_aware
            assert (stats["captures"], stats["replays"], stats["failed"]) == (runs, runs * (STEPS - 2), 0)
    steps.check("denoise")
    assert steps.seen == 2 * [("denoise", step) for step in range(1, STEPS)]


@pytest.mark.parametrize(("family", "references"), [("klein", 2), ("flux_kontext", 1)])
def test_edits_with_references_and_an_adapter(
    family: str, references: int, steps: Steps, tmp_path: Path, arena: Arena
) -> None:
    """Beside an edit with neither."""
    checkpoint = MAKERS[family](tmp_path / family)
    adapter = AdapterConfig("lora", str(make_lora(tmp_path / "lora.safetensors", checkpoint, ".*to_[qkv]")))
    rig = rig_of(checkpoint, arena, adapters=[adapter])
    (loaded,) = rig.models.ready(0).models[1:]
    seeing, plain = (rig.edit(name, seed=3, steps=3, size=(64, 64), prompt="a red hat") for name in ("a", "b"))
    seeing.references = tuple(seeing.share(picture(number, (64, 32))) for number in range(references))
    seeing.patches = (Patch(loaded.patch),)
    rig.run_together([seeing, plain])
    steps.check("denoise")


@pytest.mark.parametrize("family", CONTROLNETS)
def test_steps_that_a_controlnet_steers(family: str, steps: Steps, tmp_path: Path, arena: Arena) -> None:
    """That of SDXL is for several kinds of pictures, and sees two of them."""
    make_net, modes = CONTROLNETS[family]
    net = ControlNetConfig("net", str(make_net(tmp_path / "net")), {} if modes == [None] else {"a": 1, "b": 3})
    rig = rig_of(MAKERS[family](tmp_path / family), arena, controlnets=[net])
    edit = rig.edit("steered", seed=3, steps=3, size=SIZE)
    ControlledEdit(edit, [Steered(lines(1, SIZE), "net", mode=mode) for mode in modes]).run(rig)
    steps.check("denoise", "controlnet")


def test_pictures_of_a_class(steps: Steps, tmp_path: Path, arena: Arena) -> None:
    rig = rig_of(MAKERS["dit"](tmp_path / "dit"), arena)
    edit = rig.edit("class", seed=3, steps=3, size=SIZE)
    edit.class_label, edit.true_cfg_scale = 1, 4.0
    rig.run(edit)
    steps.check("denoise")
