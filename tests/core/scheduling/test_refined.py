"""A request of two models: the base makes its first steps, and the refiner goes on with their latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

import msgspec
import pytest
from fakes import MODEL, PIXELS, FakeWorkers, apply, make_edit, with_spec

from core.config import SchedulerConfig
from core.failure import Failure
from core.graph.work import Work
from core.graph.workflows.refined import REFINED
from core.handles import Artefact, LoadedComponent, ModelKey
from core.late_adapters import LateAdapters
from core.messages.engine import EngineRequest, Failed, Finished, PartialImage, UseAdapters
from core.messages.worker import Batch, CostSample, Item
from core.model_info import ModelInfo
from core.patches import Patch
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.image_encode import ImageEncode
from core.scheduling.ops.text_encode import TextEncode
from core.scheduling.scheduler import StepScheduler
from engine.client.resolve.chosen_workflow import rounds_of

ROLES = {"refiner": "fine", "refiner_vae": "fine", "refiner_text_encoder": "fine"}


def components(name: str) -> tuple[ModelKey, ...]:
    return tuple(ModelKey(name, kind) for kind in ("text_encoder", "vae", "transformer"))


def model(name: str, **changes: object) -> ModelInfo:
    return msgspec.structs.replace(MODEL, name=name, components=components(name), **changes)


MODELS = {"base": model("base", roles=ROLES, borrowed=components("fine")), "fine": model("fine")}


def refined(name: str, *, steps: int = 10, previews: int = 0, start: float = 0.8, **spec: object) -> EngineRequest:
    edit = make_edit(name, steps=steps, partial_images=previews)
    sampling = msgspec.structs.replace(edit.spec.sampling, refiner_start=start)
    estimate = MODEL.num_steps_of(sampling, 1.0, 0.0, start), MODEL.num_steps_of(sampling, 1.0, start)
    edit = with_spec(edit, sampling=sampling, **spec)
    return msgspec.structs.replace(edit, model="base", workflow=REFINED.name, rounds=estimate)


class Rig:
    """The sampler gives the base `first` steps and the refiner `last`, whatever was estimated."""

    def __init__(
        self, first: int = 7, last: int = 3, *, loaded: tuple[str, ...] = ("base", "fine"), num_ranks: int = 1
    ) -> None:
        self._levels = {"image_encode": (0.5,) * (first + 1), "refiner_image_encode": (0.2,) * (last + 1)}
        sizes = [LoadedComponent(key, 1) for name in MODELS for key in components(name)]
        self.scheduler = StepScheduler(SchedulerConfig(), MODELS, num_ranks, sizes=sizes)
        self._loaded = [LoadedComponent(key, 1) for name in loaded for key in components(name)]
        self.scheduler.learn((), [(rank, self._loaded) for rank in range(num_ranks)])
        self.workers, self.batches = FakeWorkers(num_ranks, answers=self._answer), list[Batch]()
        self.outputs: list[object] = []
        self.texts: dict[str, int] = {}  # model -> tokens that it says the prompt has

    def _answer(self, item: Item) -> Mapping[str, object]:
        if isinstance(item.work, TextEncode) and item.model in self.texts:
            return {"text_tokens": self.texts[item.model]}
        return {"sigmas": self._levels[item.node]} if item.node in self._levels else {}

    def run(self, happens: Callable[[], object] = lambda: None) -> None:
        """happens: called after every plan."""
        idle = False
        while not idle:
            idle = True
            while (plan := self.scheduler.schedule(0.0)) is not None:
                idle = False
                self.batches += plan.batches
                self.workers.submit(plan)
            for rank in self.scheduler.ranks.up:
                for result in self.workers.run_one(rank):
                    idle = False
                    apply(self.scheduler, result)
            happens()
            self.outputs += self.scheduler.take_outputs()

    def die(self, rank: int) -> None:
        """A rank dies, and is there again at once."""
        self.workers.lose(rank)
        self.scheduler.lose_rank(rank, Failure("engine", "died"))
        self.workers.join(rank)
        self.scheduler.join_rank(rank, self._loaded)

    def items(self, op: str) -> list[Item]:
        return [item for batch in self.batches if batch.op == op for item in batch.items]


def test_the_sampler_says_where_the_refiner_takes_over() -> None:
    rig = Rig(first=7, last=3)
    request = refined("a")
    assert request.rounds == (8, 2)
    rig.scheduler.add(request)
    rig.run()
    steps = [(item.model, item.node, item.work.step) for item in rig.items("denoise") if isinstance(item.work, Denoise)]
    assert steps == [("base", "denoise", step) for step in range(7)] + [("fine", "refine", step) for step in range(3)]
    assert isinstance(rig.outputs[-1], Finished)
    assert rig.outputs[-1].degrees == (1,) * 10
    rig.scheduler.check_integrity()


def test_the_last_step_of_the_base_waits_for_its_late_adapters() -> None:
    """The refiner has none of them."""
    rig, hat = Rig(first=7, last=3), (Patch("hat"),)
    rig.scheduler.add(refined("a", late=LateAdapters(most=9)))
    rig.run()
    assert len(rig.items("denoise")) == 6
    rig.scheduler.use_adapters(UseAdapters(request_id="a", patches=hat))
    rig.run()
    assert [item.work.patches for item in rig.items("denoise") if isinstance(item.work, Denoise)] == [
        *[()] * 6,
        hat,
        *[()] * 3,
    ]
    assert isinstance(rig.outputs[-1], Finished)
    assert rig.outputs[-1].steps_without_lora == 6


def test_each_model_encodes_for_its_own_part_and_the_base_decodes() -> None:
    rig = Rig()
    rig.scheduler.add(refined("a", patches=(Patch("p"),)))
    rig.run()
    images = {item.model: item.work for item in rig.items("image_encode") if isinstance(item.work, ImageEncode)}
    assert {name: (work.begin, work.end) for name, work in images.items()} == {"base": (0.0, 0.8), "fine": (0.8, 1.0)}
    texts = {item.model: item.work.patches for item in rig.items("text_encode") if isinstance(item.work, TextEncode)}
    assert texts == {"base": (Patch("p"),), "fine": ()}, "adapters are the base's"
    assert [item.model for item in rig.items("decode")] == ["base"]


def test_previews_show_the_bases_steps() -> None:
    rig = Rig(first=7, last=3)
    rig.scheduler.add(refined("a", previews=3))
    rig.run()
    shown = [output.step for output in rig.outputs if isinstance(output, PartialImage)]
    assert shown == [2, 4, 5]
    assert isinstance(rig.outputs[-1], Finished)


def test_requests_of_the_refiner_alone_share_its_steps() -> None:
    rig = Rig()
    rig.scheduler.add(refined("a"))
    for number in range(3):
        rig.scheduler.add(msgspec.structs.replace(make_edit(f"b{number}", steps=20), model="fine"))
    rig.run()
    nodes = [{item.node for item in batch.items} for batch in rig.batches if batch.op == "denoise"]
    assert nodes.count({"refine", "denoise"}) == 3
    assert rig.scheduler.stats().mixed_steps == 3


def test_a_request_waits_for_the_refiners_components() -> None:
    rig = Rig(loaded=("base",))
    rig.scheduler.add(refined("a"))
    rig.run()
    assert not rig.batches
    assert {key for _, key in rig.workers.loading} == {*components("fine")}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"outputs": {"film": Artefact(PIXELS)}}, "outputs"),
        ({"class_label": 3}, "prompt"),
        ({"sampling": make_edit("x").spec.sampling}, "refiner_start"),
    ],
)
def test_what_a_request_lacks_is_named(changes: dict[str, object], param: str) -> None:
    rig = Rig()
    rig.scheduler.add(with_spec(refined("a"), **changes))
    (output,) = rig.scheduler.take_outputs()
    assert isinstance(output, Failed)
    assert (output.failure.kind, output.failure.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("steps", "strength", "start", "expected"),
    [
        (10, 1.0, 0.8, (8, 2)),
        (50, 0.4, 0.8, (10, 10)),
        (50, 0.2, 0.8, (1, 9)),
        (50, 0.5, 0.5, (1, 24)),
        (2, 1.0, 0.99, (1, 1)),
    ],
)
def test_steps_of_both_are_estimated_at_their_noise_levels(
    steps: int, strength: float, start: float, expected: tuple[int, int]
) -> None:
    """A run of low strength begins at a low noise level, where little is left for the base."""
    sampling = msgspec.structs.replace(
        make_edit("a", steps=steps).spec.sampling, strength=strength, refiner_start=start
    )
    assert rounds_of(REFINED, MODEL, sampling) == expected


def test_fewer_steps_than_estimated_have_previews_all_the_same() -> None:
    rig = Rig(first=4, last=6)
    rig.scheduler.add(refined("a", previews=3))
    rig.run()
    assert [output.step for output in rig.outputs if isinstance(output, PartialImage)] == [1, 2, 3]


def test_the_constant_part_of_a_step_counts_until_the_request_has_ended() -> None:
    rig = Rig()
    rig.scheduler.learn([CostSample("fine", "denoise", Work.of([256]), 0.25)] * 9)
    rig.scheduler.add(refined("a"))
    bases = []
    while (plan := rig.scheduler.schedule(0.0)) is not None:
        rig.workers.submit(plan)
        if {item.node for batch in plan.batches for item in batch.items} & {"refine", "decode"}:
            bases.append(rig.scheduler.load_report().base_seconds)
        for result in rig.workers.run_one(0):
            apply(rig.scheduler, result)
    assert len(bases) >= 4
    assert min(bases) > 0.0, "also while its last step and the decode are on their way"


def test_the_prompt_is_reported_as_the_requests_own_model_has_read_it() -> None:
    rig = Rig()
    rig.texts = {"base": 7, "fine": 9}
    rig.scheduler.add(refined("a"))
    rig.run()
    assert isinstance(rig.outputs[-1], Finished)
    assert rig.outputs[-1].text_tokens == 7


def made_with_a_death(turn: int, rank: int) -> tuple[int, int]:
    """(digest of what the picture is made from, deaths) of a request on two ranks; one dies after this turn."""
    rig, turns = Rig(num_ranks=2), count()
    rig.scheduler.add(refined("a", previews=2))
    rig.run(lambda: rig.die(rank) if next(turns) == turn else None)
    assert isinstance(rig.outputs[-1], Finished)
    rig.scheduler.check_integrity()
    return rig.workers.made["a", "decode"], rig.workers.num_deaths


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_changes_nothing_that_is_made(rank: int) -> None:
    """At any time: what the base has made is made again for the refiner, in the same number of rounds."""
    whole, _ = made_with_a_death(-1, rank)
    others = [made_with_a_death(turn, rank) for turn in range(14)]
    assert others == [(whole, 1)] * 14
