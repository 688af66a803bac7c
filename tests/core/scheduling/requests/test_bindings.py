"""Which components play the roles of workflows, and which requests may share a batch because of that."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit

from core.config import SchedulerConfig
from core.graph.workflows.inpaint import INPAINT
from core.handles import LoadedComponent, ModelKey
from core.messages.worker import Batch, BatchResult
from core.model_info import ModelInfo
from core.scheduling.requests.bindings import Bindings
from core.scheduling.scheduler import StepScheduler

TEXT, VAE, DENOISER = (ModelKey("0", kind) for kind in ("text_encoder", "vae", "transformer"))


def model(name: str, *components: ModelKey, **changes: object) -> ModelInfo:
    return msgspec.structs.replace(MODEL, name=name, components=components, **changes)


PLAIN = model("plain", TEXT, VAE, DENOISER)
TWIN = model("twin", TEXT, ModelKey("1", "vae"), DENOISER)
TUNED = model("tuned", TEXT, VAE, ModelKey("1", "transformer"))


def bindings(*infos: ModelInfo) -> Bindings:
    return Bindings({info.name: info for info in infos})


def test_models_with_equal_components_compute_with_the_same() -> None:
    bound = bindings(PLAIN, TWIN, TUNED)
    assert bound.keys("plain", "transformer") is bound.keys("twin", "transformer")
    assert bound.keys("plain", "transformer") is not bound.keys("tuned", "transformer")
    assert bound.keys("plain", "vae") is not bound.keys("twin", "vae")
    assert bound.keys("plain", "vae") is bound.keys("tuned", "vae")


@pytest.mark.parametrize("change", [{"family": "qwen"}, {"device": "cuda"}])
def test_another_family_or_device_computes_apart(change: dict[str, object]) -> None:
    bound = bindings(PLAIN, model("other", TEXT, VAE, DENOISER, **change))
    assert bound.keys("plain", "transformer") is not bound.keys("other", "transformer")


def test_a_role_is_played_by_the_model_that_it_is_bound_to() -> None:
    borrower = model("borrower", TEXT, VAE, DENOISER, roles={"transformer": "tuned"})
    bound = bindings(borrower, TUNED)
    binding = bound.of("borrower", INPAINT)
    assert binding.models["denoise"] == "tuned"
    assert binding.keys["denoise"] is bound.keys("tuned", "transformer")
    assert binding.models["decode"] == "borrower"
    assert bound.of("borrower", INPAINT) is binding


def batches_of(*of: str, models: tuple[ModelInfo, ...] = (PLAIN, TWIN, TUNED)) -> tuple[StepScheduler, list[Batch]]:
    """All batches of requests for these models that arrive together."""
    scheduler, workers = StepScheduler(SchedulerConfig(), {info.name: info for info in models}), FakeWorkers(1)
    loaded = {LoadedComponent(key, 1) for info in models for key in info.components}
    scheduler.learn((), [(0, loaded)])
    batches: list[Batch] = []
    for number, name in enumerate(of):
        scheduler.add(msgspec.structs.replace(make_edit(str(number)), model=name))
    while scheduler.num_requests:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        batches += plan.batches
        workers.submit(plan)
        for result in workers.run_one(0):
            assert isinstance(result, BatchResult)
            scheduler.apply(result)
    return scheduler, batches


def models_of(batches: list[Batch], op: str) -> set[frozenset[str]]:
    return {frozenset(item.model for item in batch.items) for batch in batches if batch.op == op}


def test_requests_of_models_that_share_a_denoiser_share_its_steps_alone() -> None:
    scheduler, batches = batches_of("plain", "twin", "tuned")
    assert models_of(batches, "denoise") == {frozenset({"plain", "twin"}), frozenset({"tuned"})}
    assert models_of(batches, "text_encode") == {frozenset({"plain", "twin", "tuned"})}
    assert models_of(batches, "decode") == {frozenset({"plain", "tuned"}), frozenset({"twin"})}
    stats = scheduler.stats()
    assert (stats.steps, stats.mixed_steps) == (8, 4), "four steps each, and two requests shared theirs"


def test_steps_of_one_model_are_not_mixed() -> None:
    scheduler, _ = batches_of("plain", "plain")
    assert scheduler.stats().mixed_steps == 0
