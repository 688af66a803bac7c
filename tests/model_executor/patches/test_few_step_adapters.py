"""Adapters that bring their sampler's settings, in one batch, against diffusers' pipelines with the same adapters and
schedulers; float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import numpy.typing as npt
import pytest
from adapters import make_lora
from diffusers import FluxInpaintPipeline, QwenImageInpaintPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from edits import Edit
from family_rigs import make_sd3_rig
from pipeline_rig import Rig

from core.config import AdapterConfig, ModelConfig, RequestDefaults
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from core.lora import Lora
from core.model_choice import choose_model
from core.sampler_defaults import SamplerDefaults
from core.sampling_params import SamplingParams
from engine.client.resolve.sampling_defaults import resolve
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_flux, make_qwen
from tools.random_unet_checkpoints import make_sd

LIGHTNING = {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None, "use_dynamic_shifting": True}
"""What the scheduler is with the Lightning adapters of Qwen-Image, which were distilled with a shift of 3."""

SIGMAS = (1.0, 0.6, 0.25)

Schedule = tuple[int, dict[str, Any], dict[str, Any]]
"""(steps, options of the scheduler, arguments of the pipeline)"""

STATIC = {"use_dynamic_shifting": False, "shift_terminal": None}


def expected_schedules(lightning: dict[str, Any]) -> dict[str, Schedule]:
    return {
        "": (4, {}, {}),
        "lightning": (2, lightning, {}),
        "hyper": (3, STATIC | {"shift": 1.7}, {}),
        "turbo": (len(SIGMAS), {}, {"sigmas": list(SIGMAS)}),
    }


class FewStepRig(Rig):
    """Three adapters: one says how it is sampled by its metadata, one by a file beside it, one by the catalog."""

    def __init__(self, folder: Path, checkpoint: Path, arena: Arena, pipeline: Any, lightning: dict[str, Any]) -> None:
        own = {"num_inference_steps": "2", "shift": "3", "ss_guidance_scale": "none of ours", "modelspec.title": "x"}
        files = {
            "lightning": make_lora(folder / "lightning.safetensors", checkpoint, seed=1, metadata=own),
            "hyper": make_lora(folder / "hyper.safetensors", checkpoint, seed=2, metadata={"shift": "9"}),
            "turbo": make_lora(folder / "turbo.safetensors", checkpoint, seed=3, metadata={"num_inference_steps": "7"}),
        }
        (folder / "hyper.json").write_text(json.dumps({"num_inference_steps": 3, "shift": 1.7, "notes": ["ours"]}))
        defaults = {"turbo": SamplerDefaults(sigmas=SIGMAS)}
        configs = [
            AdapterConfig(name, str(path), defaults.get(name, SamplerDefaults())) for name, path in files.items()
        ]
        super().__init__(checkpoint, arena, pipeline, configs)
        self.files, self.schedules = files, expected_schedules(lightning)
        self.infos = {info.name: info for info in self.models.ready(0).models}
        self.scheduler = self.pipeline.scheduler

    def make(self, adapter: str, given: SamplingParams) -> Edit:
        """The edit of a request with this adapter, resolved as a server does."""
        choice = choose_model(self.infos, "", [Lora(adapter)] if adapter else [])
        sampling = resolve(given, choice.model)
        assert sampling.num_inference_steps is not None
        assert sampling.guidance_scale is not None
        edit = self.edit(f"by {adapter}", seed=len(adapter), steps=sampling.num_inference_steps, size=(96, 64))
        edit.patches, edit.shift, edit.sigmas = choice.patches, sampling.shift, sampling.sigmas
        edit.guidance_scale, edit.negative_prompt = sampling.guidance_scale, sampling.negative_prompt
        edit.true_cfg_scale = sampling.true_cfg_scale or 1.0
        return edit

    def by_pipeline(self, edit: Edit) -> npt.NDArray[np.uint8]:
        adapter = edit.request_id.removeprefix("by ")
        steps, options, arguments = self.schedules[adapter]
        assert edit.steps == steps
        self.pipeline.scheduler = type(self.scheduler).from_config(self.scheduler.config, **options)
        if not adapter:
            return self.expected(edit)
        with catch_warnings():
            simplefilter("ignore")
            self.pipeline.load_lora_weights(str(self.files[adapter]), adapter_name=adapter)
        picture = self.expected(edit, **arguments)
        self.pipeline.unload_lora_weights()
        return picture


def flux(folder: Path, arena: Arena) -> FewStepRig:
    checkpoint = make_flux(folder / "flux", scheduler={"use_dynamic_shifting": True})
    return FewStepRig(folder, checkpoint, arena, FluxInpaintPipeline, STATIC | {"shift": 3.0})


def qwen(folder: Path, arena: Arena) -> FewStepRig:
    return FewStepRig(folder, make_qwen(folder / "qwen"), arena, QwenImageInpaintPipeline, LIGHTNING)


@pytest.fixture(scope="module", params=[flux, qwen])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[FewStepRig]:
    make: Callable[[Path, Arena], FewStepRig] = request.param
    rig = make(tmp_path_factory.mktemp("few"), arena)
    yield rig
    rig.pages.close()


def test_each_has_its_own_noise_levels_in_a_batch_and_the_pipelines_picture(rig: FewStepRig) -> None:
    edits = [rig.make(name, SamplingParams(num_inference_steps=None if name else 4, seed=1)) for name in rig.schedules]
    assert len({(edit.steps, edit.shift, edit.sigmas) for edit in edits}) == len(edits)
    rig.assert_company_changes_nothing(edits, rig.by_pipeline)


def test_what_a_request_gives_wins(rig: FewStepRig) -> None:
    given = rig.make("lightning", SamplingParams(num_inference_steps=5, shift=2.0, seed=1))
    assert (given.steps, given.shift) == (5, 2.0)
    assert rig.make("turbo", SamplingParams(num_inference_steps=3, seed=1)).sigmas == SIGMAS
    assert rig.make("turbo", SamplingParams(num_inference_steps=4, seed=1)).sigmas is None


def test_a_unet_has_no_shift(tmp_path: Path) -> None:
    checkpoint = make_sd(tmp_path / "sd")
    lora = make_lora(tmp_path / "lightning.safetensors", checkpoint, r".*\.to_q", metadata={"shift": "3"})
    adapted = ModelConfig(model=str(checkpoint), adapters=(AdapterConfig("lightning", str(lora)),))
    with pytest.raises(ConfigError, match=f"{lora}: shift: the model's scheduler takes none; leave it out"):
        ResidentModels.open([adapted])
    models = ResidentModels.open([ModelConfig(model=str(checkpoint), defaults=RequestDefaults(shift=3.0))])
    with pytest.raises(ConfigError, match="sd: defaults: shift: the model's scheduler takes none; leave it out"):
        models.ready(0)


def test_a_shift_of_a_scheduler_that_shifts_by_a_fixed_one(tmp_path: Path, arena: Arena) -> None:
    rig = make_sd3_rig(tmp_path / "sd3", arena)
    edit = rig.edit("sd3", seed=1, steps=3, size=(96, 64))
    edit.shift, edit.guidance_scale = 6.0, 1.0
    theirs = FlowMatchEulerDiscreteScheduler.from_config(rig.pipeline.scheduler.config, shift=6.0)
    rig.pipeline.scheduler = theirs
    rig.assert_company_changes_nothing([edit], rig.expected)
