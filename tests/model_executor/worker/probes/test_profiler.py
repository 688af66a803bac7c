"""Profiles: every op is measured by size, and a server's next start predicts from the tables."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from forked_processes import ForkedContext

from core.config import ModelConfig
from core.costs.cost_model import CostModel
from core.graph.work import Work
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from core.scheduling.ops.decode import DECODE
from core.scheduling.ops.denoise import DENOISE
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.bindings import Bindings, ModelKeys
from model_executor.models.base import Family
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.probes import joint_profiler
from model_executor.worker.probes.cost_probe import SHARES, SIDES, known_or_probed
from model_executor.worker.probes.joint_profiler import ROWS, joint_samples
from model_executor.worker.probes.profiler import config_of, keep, parse, profile
from model_executor.worker.probes.timing import median_seconds
from tools.random_dit_checkpoints import make_dit

LARGEST = 3


def predicting(info: ModelInfo) -> tuple[Predictor, ModelKeys, ModelKeys]:
    """(that knows nothing, the model's denoiser, its VAE)"""
    bindings = Bindings({info.name: info})
    return Predictor(CostModel(), bindings), *(bindings.keys(info.name, op.component) for op in (DENOISE, DECODE))


@pytest.fixture
def config(tiny_checkpoint: Path) -> ModelConfig:
    return ModelConfig(model=str(tiny_checkpoint), served_model_name="tiny", dtype="float32", device="cpu")


def is_step(sample: CostSample) -> bool:
    return sample.op == "denoise"


def test_steps_are_measured_by_batch_size_and_tokens(family: Family, info: ModelInfo) -> None:
    samples = profile(family, info, LARGEST)
    steps = {(len(each.work.queries), each.work.queries[0], each.work.keys[0]) for each in samples if is_step(each)}
    sizes = {(queries, keys) for _, queries, keys in steps}
    assert steps == {(number, *size) for number in range(1, LARGEST + 1) for size in sizes}
    exact = {queries for queries, keys in sizes if queries == keys}
    assert len(exact) == len(SIDES)
    assert {keys for queries, keys in sizes if queries < keys} == {max(exact)}, "masks are those of native pictures"
    assert 2 <= len(sizes) - len(exact) <= len(SHARES)
    assert {sample.op for sample in samples} == {"text_encode", "image_encode", "decode", "denoise"}
    assert all(sample.seconds > 0 and sample.is_profile for sample in samples)


def test_the_next_start_predicts_from_the_tables(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    samples = profile(models.families[info.name], info, LARGEST)
    path = keep(samples, info, ModelConfig(), tmp_path)
    assert path.stat().st_size < 1e6
    found = known_or_probed(models.families, [info], tmp_path)
    predictor, denoiser, vae = predicting(info)
    predictor.learn(found)
    measured = next(each for each in samples if each.op == "denoise" and len(each.work.queries) == LARGEST)
    assert predictor.op_seconds(denoiser, DENOISE, measured.work) == measured.seconds
    assert predictor.largest_batch(denoiser, DENOISE) == LARGEST
    assert predictor.largest_batch(vae, DECODE) == 1, "its items are done one after the other"
    assert predictor.op_seconds(denoiser, DENOISE, Work.of([1] * 50)) > 0.0, "outside of the table the line predicts"


def test_a_profile_is_found_by_servers_with_the_settings_it_was_measured_with(
    models: ResidentModels, info: ModelInfo, tmp_path: Path
) -> None:
    measured = ModelConfig(kernels="torch")
    keep([CostSample(info.name, "denoise", Work.of([8]), 1.0, is_profile=True)], info, measured, tmp_path)
    for config, is_found in ((measured, True), (ModelConfig(), False)):
        samples = known_or_probed(models.families, [info], tmp_path, {info.name: config})
        assert any(sample.is_profile for sample in samples) == is_found


def test_flags_of_graphs_and_invariance_are_the_servers() -> None:
    assert config_of(parse([])) == ModelConfig()
    chosen = config_of(parse(["--cuda-graphs", "off", "--offload", "host", "--batch-invariant"]))
    assert chosen == ModelConfig(cuda_graphs="off", offload="host", batch_invariant=True)


def test_a_model_without_pages_is_measured_with_exact_steps_alone(family: Family, info: ModelInfo) -> None:
    samples = profile(family, msgspec.structs.replace(info, page_scheme=None), 2)
    assert all(sample.work.queries == sample.work.keys for sample in samples if is_step(sample))


def test_a_model_of_classes_is_measured_at_its_size_without_prompts(tmp_path: Path) -> None:
    path = make_dit(tmp_path / "dit")
    models = ResidentModels.open([ModelConfig(model=str(path), dtype="float32", device="cpu")])
    models.load_all()
    (info,) = models.ready(0).models
    samples = profile(models.families[info.name], info, LARGEST)
    tokens = info.num_image_tokens(info.native_size, info.native_size)
    assert [each.work for each in samples if is_step(each)] == [
        Work.of([tokens] * number) for number in range(1, LARGEST + 1)
    ]
    assert {sample.op for sample in samples} == {"image_encode", "decode", "denoise"}
    probed = known_or_probed(models.families, [info], tmp_path)
    assert {sample.op for sample in probed} == {"image_encode", "decode", "denoise"}


@pytest.fixture
def _forked_ranks(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_profiler, "get_context", lambda _: ForkedContext(launcher))


@pytest.mark.usefixtures("_forked_ranks")
def test_joint_steps_are_measured_by_degree(config: ModelConfig, info: ModelInfo) -> None:
    """By two processes that are a group."""
    samples = joint_samples(config, [2], threads=1)
    assert {(sample.op, sample.degree, sample.is_profile) for sample in samples} == {("denoise", 2, True)}
    assert {len(sample.work.queries) for sample in samples} == {*ROWS}
    predictor, denoiser, _ = predicting(info)
    predictor.learn(samples)
    measured, key = samples[-1], predictor.key(denoiser, DENOISE, degree=2)
    assert predictor.cost.predict(key, measured.work) == measured.seconds
    assert predictor.op_seconds(denoiser, DENOISE, measured.work) == 0.0, "nothing is known of one rank"


@pytest.mark.usefixtures("_forked_ranks")
def test_a_rank_that_ends_early_is_reported(config: ModelConfig) -> None:
    missing = msgspec.structs.replace(config, model=config.model + "-gone")
    with pytest.raises(RuntimeError, match="a rank has ended"):
        joint_samples(missing, [2], threads=1)


def test_a_cpus_worker_asks_no_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is forked, where CUDA cannot begin."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
    assert median_seconds(lambda: None) < 1.0
