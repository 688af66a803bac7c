"""The cost probe: every stage is timed within the budget, and measurements are kept for the next start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from core.config import ModelConfig
from core.control_type import ControlType
from core.costs.cost_model import CostKey, CostModel
from core.graph.work import Work
from core.handles import ModelKey
from core.ipc.small_files import MAX_BYTES
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from core.scheduling.requests.bindings import Bindings
from model_executor.models.base import Family
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.probes import cost_probe
from model_executor.worker.probes.cost_probe import Batches, known_or_probed, probe
from model_executor.worker.probes.profiler import keep
from tools.random_checkpoints import (
    make_flux_kontext,
    make_klein,
    make_qwen,
    make_qwen_edit,
    make_qwen_edit_plus,
    make_sd3,
    make_z_image,
)

PLENTY = 60.0  # seconds


def test_every_stage_is_measured(family: Family, info: ModelInfo) -> None:
    samples = probe(family, info, PLENTY)
    assert {sample.op for sample in samples} == {"text_encode", "image_encode", "decode", "prime", "denoise"}
    assert all(sample.seconds > 0 for sample in samples)
    denoising = [sample.work for sample in samples if sample.op == "denoise"]
    assert any(work.queries == work.keys for work in denoising), "an exact step"
    assert any(max(work.queries) < min(work.keys) for work in denoising), "a mask-aware one"
    assert max(len(work.queries) for work in denoising) == 8


def opened(checkpoint: Path) -> Batches:
    """The batches of a checkpoint, which is loaded."""
    config = ModelConfig(model=str(checkpoint), served_model_name="tiny", dtype="float32", device="cpu")
    models = ResidentModels.open([config])
    models.load_all()
    (info,) = models.ready(0).models
    return Batches(models.families["tiny"], info)


@pytest.mark.parametrize("make", [make_qwen, make_qwen_edit, make_qwen_edit_plus, make_z_image, make_klein])
def test_the_timed_prompt_is_as_long_as_one_can_be(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Also where prompts are not filled up: their batches, and what requests keep, would be measured too small."""
    batches = opened(make(tmp_path / "model"))
    info = batches.info
    _, encoding, encode = next(iter(batches.all()))
    text = len(encode().prompt_embeds)  # type: ignore[attr-defined]
    fillers = 0
    if info.family == "z-image":  # counts most fillers of prompt and picture, which need not be there
        fillers = info.extra_text_tokens
    assert encoding.queries == (text + fillers,)
    assert text >= info.max_text_tokens
    row = batches._row(1.0)
    assert len(row.prompt_embeds) == text
    if row.prompt_state is not None:
        assert len(row.prompt_state) == text


def test_the_timed_work_is_the_counted_work(tmp_path: Path) -> None:
    """With SD3, some of whose text tokens are not in a prompt: rows have as many tokens as the samples say."""
    batches = opened(make_sd3(tmp_path / "sd3"))
    info = batches.info
    _, encoding, encode = next(iter(batches.all()))
    _, step, _ = batches.denoise([1.0, 0.5])
    _, priming, _ = batches.prime(1, 1.0)
    text, image = len(encode().prompt_embeds), 64  # type: ignore[attr-defined]
    assert text == info.max_text_tokens + info.extra_text_tokens > info.max_text_tokens
    assert encoding.queries == (text,)
    assert (step.queries, step.keys) == ((text + image, text + image // 2), (text + image,) * 2)
    assert priming.queries == priming.keys == (text + image,)


def test_a_model_without_pages_has_exact_steps_alone(family: Family, info: ModelInfo) -> None:
    samples = probe(family, msgspec.structs.replace(info, page_scheme=None), PLENTY)
    assert "prime" not in {sample.op for sample in samples}
    denoising = [sample.work for sample in samples if sample.op == "denoise"]
    assert denoising
    assert all(work.queries == work.keys for work in denoising)


def test_no_time_no_samples(family: Family, info: ModelInfo) -> None:
    assert probe(family, info, 0.0) == []


def test_the_cost_model_starts_from_them(family: Family, info: ModelInfo) -> None:
    model, key = CostModel(), CostKey("flux-fill", (), "denoise", "cpu", 1)
    for sample in probe(family, info, PLENTY):
        model.observe(CostKey("flux-fill", (), sample.op, "cpu", 1), sample.work, sample.seconds)
    one, eight = (model.predict(key, Work.of([24] * number)) for number in (1, 8))
    assert 0.0 < one <= eight < 10.0, "equal where other work hides the difference of tiny steps"


def test_measurements_are_kept(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    first = known_or_probed(models.families, [info], tmp_path)
    assert first == known_or_probed(models.families, [info], tmp_path)
    (path,) = (tmp_path / "costs").iterdir()
    assert tuple(msgspec.json.decode(path.read_bytes(), type=list[CostSample])) == first


def test_a_profile_counts_for_a_model_that_was_never_probed(
    models: ResidentModels, info: ModelInfo, tmp_path: Path
) -> None:
    """A worker probes what it has loaded, and starts with the first model alone."""
    sample = CostSample(info.name, "denoise", Work.of([64]), 0.5, is_profile=True)
    keep([sample], info, ModelConfig(), tmp_path)
    assert known_or_probed({}, [info], tmp_path) == (sample,)
    assert len(list((tmp_path / "costs").iterdir())) == 1, "nothing was probed"


def test_another_page_dtype_is_another_measurement(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    assert info.page_scheme is not None
    layout = msgspec.structs.replace(info.page_scheme.layout, dtype="float32")
    scheme = msgspec.structs.replace(info.page_scheme, layout=layout)
    known_or_probed(models.families, [info], tmp_path)
    known_or_probed(models.families, [msgspec.structs.replace(info, page_scheme=scheme)], tmp_path)
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_what_works_for_a_model_makes_no_other_measurement(
    models: ResidentModels, info: ModelInfo, tmp_path: Path
) -> None:
    """A profile is made of the model alone."""
    alone = known_or_probed(models.families, [info], tmp_path)
    nets = {"controlnets": {"edges": ModelKey("1", "controlnet")}, "controls": {"edges": ControlType("edges")}}
    others = {"segmenter": (ModelKey("2", "segmenter"),), "roles": {"refiner": "n"}, "workflow": "refined"}
    helped = msgspec.structs.replace(info, **nets, **others)
    assert known_or_probed({}, [helped], tmp_path) == alone != ()


def test_other_kernels_are_another_measurement(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    known_or_probed(models.families, [info], tmp_path)
    known_or_probed(models.families, [info], tmp_path, {"tiny": ModelConfig(kernels="auto", batch_invariant=True)})
    assert len(list((tmp_path / "costs").iterdir())) == 1
    known_or_probed(models.families, [info], tmp_path, {"tiny": ModelConfig(kernels="torch")})
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_a_damaged_file_is_measured_again(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    known_or_probed(models.families, [info], tmp_path)
    (path,) = (tmp_path / "costs").iterdir()
    path.write_bytes(path.read_bytes()[:20])
    samples = known_or_probed(models.families, [info], tmp_path)
    assert tuple(msgspec.json.decode(path.read_bytes(), type=list[CostSample])) == samples


def test_a_folder_that_cannot_be_written_is_no_error(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert known_or_probed(models.families, [info], blocked)


def test_an_adapter_has_the_costs_of_its_model(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    adapter = msgspec.structs.replace(info, name="shirt", parent="tiny")
    samples = known_or_probed(models.families, [info, adapter], tmp_path)
    assert {sample.model for sample in samples} == {"tiny"}
    bindings = Bindings({"tiny": info, "shirt": adapter})
    assert bindings.keys("shirt", "transformer") is bindings.keys("tiny", "transformer")
    assert len(list((tmp_path / "costs").iterdir())) == 1


@pytest.mark.parametrize("content", [b"[" * 100_000, b"1" * (MAX_BYTES + 1), b"{}"])
def test_a_cost_file_that_is_none_is_measured_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "costs.json").write_bytes(content)
    assert cost_probe._read(tmp_path / "costs.json") is None


@pytest.mark.parametrize("make", [make_flux_kontext, make_klein, make_qwen_edit_plus])
@torch.inference_mode()
def test_batches_of_requests_with_references(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Their tokens are beside the picture's, or in place of them, in steps, prompts and pages."""
    plain = opened(make(tmp_path / "model"))
    rule = plain.info.references
    assert rule is not None
    batches = replace(plain, references=rule.most)
    of_reference = plain.info.num_reference_tokens([rule.size(2048, 2048)])
    beside = rule.most * of_reference - (plain._num_tokens if rule.replaces_template else 0)
    seen = [len(each._encode_text().prompt_embeds) for each in (plain, batches)]
    beside += seen[1] - seen[0]
    assert batches.num_row_tokens - plain.num_row_tokens == beside
    rows, width = batches._condition.shape
    more = rows - len(plain._condition)
    assert batches.kept_bytes() - plain.kept_bytes() >= more * width * batches._condition.element_size()
    for _, work, run in (batches.denoise((1.0,)), batches.denoise((0.1,)), batches.prime(1, 1.0)):
        assert work.keys == (batches.num_row_tokens,)
        run()
