"""Requests whose model is not loaded: what is ordered for them, what goes on beside, what fails."""

from __future__ import annotations

import msgspec
from cache_kit import LAYOUT, SCHEME, TEMPLATE_BYTES, make_masked, make_registration
from fakes import MODEL, FakePages, FakeWorkers, make_edit

from core.config import CacheConfig, SchedulerConfig
from core.costs.load_report import Queued
from core.failure import Failure
from core.graph.op import OPS
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import Aborted, EngineRequest, Failed, Finished, PrimeTemplate, TemplatePrimed
from core.messages.worker import BatchResult, ModelFailed, ModelLoaded, StepPlan
from core.model_info import ModelInfo
from core.scheduling.policies.papers.lego import Lego
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.ranks.quarantine import FIRST_WAIT_SECONDS
from core.scheduling.scheduler import StepScheduler

SHARED = tuple(ModelKey("0", kind) for kind in ("text_encoder", "vae"))
BROKEN = Failure("config", "cannot load transformer: cut short")
NBYTES = 1000


def model(name: str, shared: tuple[ModelKey, ...] = SHARED) -> ModelInfo:
    own = (
        ModelKey(name, kind) for kind in ("text_encoder", "transformer") if kind not in {k.component for k in shared}
    )
    return msgspec.structs.replace(MODEL, name=name, components=(*shared, *own))


class Rig:
    """A scheduler with models a and b, of which a is loaded; they share all but the denoiser, and if encoders also the
    text encoder.
    """

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        budget: int = 0,
        encoders: bool = False,
        cache: CacheConfig | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        """cache: with which edits are mask-aware."""
        models = {name: model(name, SHARED[encoders:]) for name in ("a", "b")}
        for name, info in models.items() if cache else ():
            models[name] = msgspec.structs.replace(info, page_scheme=msgspec.structs.replace(SCHEME, fingerprint=name))
        self.models = models
        sizes = {LoadedComponent(key, NBYTES) for info in models.values() for key in info.components}
        config = SchedulerConfig(model_bytes=budget)
        self.scheduler = StepScheduler(config, models, num_ranks, cache, sizes=sizes, policy=policy)
        self.workers = FakeWorkers(num_ranks, pages=FakePages(LAYOUT.num_blocks))
        self.outputs: dict[str, object] = {}
        self.plans: list[StepPlan] = []
        self.now = 0.0
        for rank in range(num_ranks):
            self.workers.loaded[rank] = set(models["a"].components)
        loaded = [LoadedComponent(key, NBYTES) for key in models["a"].components]
        self.scheduler.learn((), [(rank, loaded) for rank in range(num_ranks)])

    def add(self, name: str, of: str, **fields: object) -> None:
        head: EngineRequest = make_edit(name, **fields)  # type: ignore[arg-type]
        self.scheduler.add(msgspec.structs.replace(head, model=of, arrival=self.now))

    def submit(self) -> None:
        """Schedule all that can be."""
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        while plan is not None:
            self.plans.append(plan)
            self.workers.submit(plan)
            plan = self.scheduler.schedule(self.now, again=True)

    def step(self) -> None:
        """Schedule all that can be, and have every rank do one plan."""
        self.submit()
        for rank in self.scheduler.ranks.up:
            plan = self.workers.queues[rank][0] if self.workers.queues[rank] else StepPlan(0)
            for batch in (each for each in plan.batches if rank in each.ranks):
                for model in {item.model for item in batch.items}:
                    keys = self.scheduler.models[model].keys_of(*OPS[batch.op].components)
                    assert self.workers.loaded[rank].issuperset(keys), f"{batch.op} of {model} has no weights"
            for result in self.workers.run_one(rank):
                if isinstance(result, BatchResult):
                    self.scheduler.apply(result)
                else:
                    self.scheduler.apply_transfer(result)
        self.outputs |= {each.request_id: each for each in self.scheduler.take_outputs()}  # type: ignore[union-attr]

    def lose(self, rank: int) -> None:
        self.workers.lose(rank)
        self.scheduler.lose_rank(rank, Failure("engine_dead", "it died"), self.now)

    def restart(self, rank: int, *has: str | ModelKey) -> None:
        """With these models or components."""
        self.lose(rank)
        self.workers.join(rank)
        keys = [key for each in has for key in (self.models[each].components if isinstance(each, str) else [each])]
        self.workers.loaded[rank] = set(keys)
        self.scheduler.join_rank(rank, [LoadedComponent(key, NBYTES) for key in keys])

    def run(self, number: int = 100) -> None:
        for _ in range(number):
            self.step()

    def answer(self, failure: Failure | None = None) -> None:
        """All ranks have loaded what was ordered, or could not."""
        for rank, key in self.workers.loading:
            if failure is None:
                self.workers.loaded[rank].add(key)
                told: ModelLoaded | ModelFailed = ModelLoaded(rank, LoadedComponent(key, NBYTES), 2.0)
            else:
                told = ModelFailed(rank, key, failure)
            self.scheduler.apply_load(told, self.now)
        self.workers.loading.clear()

    @property
    def finished(self) -> set[str]:
        return {name for name, told in self.outputs.items() if isinstance(told, Finished)}


def test_others_go_ahead_of_a_request_whose_model_is_being_loaded() -> None:
    rig = Rig()
    rig.add("1", "b")
    rig.add("2", "a")
    rig.run()
    assert rig.finished == {"2"}
    assert rig.workers.loading == [(0, ModelKey("b", "transformer"))], "what they share is there"
    assert rig.scheduler.counts == (0, 1)
    rig.answer()
    rig.run()
    assert rig.finished == {"1", "2"}
    rig.scheduler.check_integrity()


def test_a_request_waits_for_one_rank() -> None:
    rig = Rig(num_ranks=2)
    rig.add("1", "b")
    rig.step()
    key = ModelKey("b", "transformer")
    assert rig.workers.loading == [(0, key), (1, key)]
    rig.scheduler.apply_load(ModelLoaded(0, LoadedComponent(key, NBYTES), 1.0), rig.now)
    rig.workers.loaded[0].add(key)
    rig.run()
    assert rig.finished == {"1"}
    rig.answer()
    ranks = rig.scheduler.stats().ranks
    everything = {*SHARED, key, ModelKey("a", key.component)}
    assert [{each.key for each in rank.resident_models} for rank in ranks] == [everything] * 2


def test_models_without_requests_are_loaded_while_there_is_room() -> None:
    for budget, is_loaded in ((0, True), (4 * NBYTES, True), (4 * NBYTES - 1, False)):
        rig = Rig(budget=budget)
        rig.run(3)
        assert bool(rig.workers.loading) is is_loaded


def test_a_model_makes_room_for_another_when_its_last_request_has_ended() -> None:
    rig = Rig(budget=3 * NBYTES)
    rig.add("1", "a", steps=8)
    rig.step()
    rig.add("2", "b")
    rig.step()
    assert not rig.workers.loading
    rig.run()
    assert rig.finished == {"1"}
    assert rig.workers.loaded[0] == set(SHARED)
    rig.answer()
    rig.run()
    assert rig.finished == {"1", "2"}
    rig.add("3", "a")
    rig.run()
    rig.answer()
    rig.run()
    assert rig.finished == {"1", "2", "3"}
    loads = [load for plan in rig.plans for load in plan.loads]
    assert sum(len(load.load) for load in loads) == sum(len(load.drop) for load in loads) == 2


def test_a_model_makes_room_when_the_cache_has_ended_its_work_with_it() -> None:
    """No request begins or ends then, and time does not matter."""
    rig = Rig(budget=3 * NBYTES)
    rig.scheduler.models["a"] = msgspec.structs.replace(rig.scheduler.models["a"], page_scheme=SCHEME)
    rig.scheduler.add_template(PrimeTemplate("t", "a", make_edit("x").spec.template, 256, 256, "0", 256, 0.0))
    rig.submit()
    rig.add("1", "b")
    rig.submit()
    rig.scheduler.abort(["t"])
    rig.run(5)
    assert rig.workers.loading == [(0, ModelKey("b", "transformer"))]


def test_a_failed_load_fails_the_requests_of_its_model_with_the_cause() -> None:
    rig = Rig()
    for name, of in (("1", "b"), ("2", "a"), ("3", "b")):
        rig.add(name, of, steps=3)
    rig.step()
    rig.answer(BROKEN)
    rig.run()
    for name in ("1", "3"):
        told = rig.outputs[name]
        assert isinstance(told, Failed)
        assert told.failure.kind == "model_unavailable"
        assert told.failure.message == f"the model b cannot be loaded: {BROKEN.message}"
    assert rig.finished == {"2"}
    rig.add("4", "b")
    rig.step()
    assert isinstance(rig.outputs["4"], Failed), "at once, without another try"
    assert not rig.workers.loading
    rig.now += FIRST_WAIT_SECONDS
    rig.add("5", "b")
    rig.step()
    rig.answer()
    rig.run()
    assert rig.finished == {"2", "5"}
    rig.scheduler.check_integrity()


def test_a_load_that_fails_on_one_of_two_ranks_fails_no_request() -> None:
    rig = Rig(num_ranks=2)
    rig.step()
    assert sorted(rank for rank, _ in rig.workers.loading) == [0, 1]
    rig.add("1", "b", steps=3)
    key = ModelKey("b", "transformer")
    rig.scheduler.apply_load(ModelFailed(0, key, BROKEN), rig.now)
    assert rig.scheduler.load_report().refused == {}
    assert rig.scheduler.take_refused() == []
    rig.add("2", "b", steps=3)
    rig.workers.loading.remove((0, key))
    rig.answer()
    rig.run()
    assert rig.finished == {"1", "2"}
    assert rig.scheduler.stats().models == {"a": "loaded", "b": "loaded"}
    assert not rig.scheduler.stats().quarantine


def test_a_load_that_fails_on_two_ranks_is_told_once() -> None:
    rig = Rig(num_ranks=2)
    rig.step()
    rig.answer(BROKEN)
    assert rig.scheduler.take_refused() == [f"the model b cannot be loaded: {BROKEN.message} (for 10 s)"]
    assert rig.scheduler.load_report().refused == {"b": rig.now + FIRST_WAIT_SECONDS}


def test_a_request_whose_model_is_lost_while_it_is_refused_fails() -> None:
    """It was let in, since another rank had the model; and nothing would tell when to try again."""
    rig, key = Rig(num_ranks=2), ModelKey("b", "transformer")
    rig.step()
    rig.workers.loaded[1].add(key)
    rig.scheduler.apply_load(ModelLoaded(1, LoadedComponent(key, NBYTES), 1.0), rig.now)
    rig.scheduler.apply_load(ModelFailed(0, key, BROKEN), rig.now)
    rig.workers.loading.clear()
    rig.step()
    rig.add("1", "b")
    rig.restart(1, "a")
    rig.run(5)
    told = rig.outputs["1"]
    assert isinstance(told, Failed)
    assert told.failure.kind == "model_unavailable"
    assert 0 < told.failure.retry_after <= FIRST_WAIT_SECONDS
    rig.scheduler.check_integrity()


def test_requests_of_a_model_that_is_larger_than_predicted_fail_when_it_is_gone() -> None:
    rig, key = Rig(budget=3 * NBYTES), ModelKey("b", "transformer")
    rig.add("1", "b", steps=2)
    rig.step()
    rig.workers.loaded[0].add(key)
    rig.workers.loading.clear()
    rig.scheduler.apply_load(ModelLoaded(0, LoadedComponent(key, 9 * NBYTES), 1.0), rig.now)
    rig.add("2", "b")
    rig.run()
    assert rig.finished == {"1", "2"}, "it works where it is"
    rig.add("3", "a")
    rig.step()
    rig.add("4", "b")
    for _ in range(100):
        rig.answer()
        rig.step()
    assert rig.finished == {"1", "2", "3"}
    told = rig.outputs["4"]
    assert isinstance(told, Failed)
    assert "--model-bytes allows" in told.failure.message


def test_requests_that_lost_their_models_with_a_rank_do_not_wait_for_each_other() -> None:
    """Each has a component on the rank that is left, and no room for the other one."""
    rig = Rig(num_ranks=2, budget=3 * NBYTES, encoders=True)
    mine = [ModelKey("0", "vae"), *(ModelKey(name, "text_encoder") for name in "ab")]
    others = [ModelKey("0", "vae"), *(ModelKey(name, "transformer") for name in "ab")]
    rig.restart(0, *mine)
    rig.restart(1, *others)
    rig.add("1", "a", steps=20)
    rig.add("2", "b", steps=20)
    rig.run(8)
    assert rig.scheduler.counts == (2, 0)
    rig.lose(1)
    for _ in range(200):
        rig.answer()
        rig.step()
    assert rig.finished == {"1", "2"}
    rig.scheduler.check_integrity()


def test_a_model_is_loaded_for_a_template_whose_pages_leave_no_room_for_those_of_a_running_request() -> None:
    """There is room for one model and for the pages of one template."""
    rig = Rig(budget=3 * NBYTES, cache=CacheConfig(host_bytes=TEMPLATE_BYTES))
    rig.scheduler.add(msgspec.structs.replace(make_masked("1"), model="a"))
    rig.submit()
    rig.scheduler.add_template(msgspec.structs.replace(make_registration("2", "c1"), model="b"))
    rig.add("3", "a")
    for _ in range(100):
        rig.step()
        rig.answer()
    assert rig.finished == {"1", "3"}
    assert isinstance(rig.outputs["2"], TemplatePrimed)
    rig.scheduler.check_integrity()


def test_pages_are_made_where_the_text_encoder_is_too() -> None:
    """The denoiser is on one rank, and the text encoder on the other."""
    rig = Rig(num_ranks=2, budget=4 * NBYTES, encoders=True, cache=CacheConfig(host_bytes=TEMPLATE_BYTES))
    denoiser, encoder, vae = (
        ModelKey(of, kind) for of, kind in (("a", "transformer"), ("a", "text_encoder"), ("0", "vae"))
    )
    rig.restart(0, denoiser, vae)
    rig.restart(1, encoder, vae)
    rig.scheduler.add(msgspec.structs.replace(make_masked("1"), model="a"))
    rig.step()
    assert rig.workers.loading[0] == (0, encoder)
    for _ in range(100):
        rig.answer()
        rig.step()
    assert rig.finished == {"1"}
    rig.scheduler.check_integrity()


def test_an_edit_of_which_no_page_is_read_needs_no_text_encoder_beside_the_denoiser() -> None:
    rig = Rig(num_ranks=2, budget=3 * NBYTES, encoders=True, cache=CacheConfig(host_bytes=TEMPLATE_BYTES))
    rig.restart(0, ModelKey("a", "transformer"), ModelKey("0", "vae"))
    rig.restart(1, ModelKey("a", "text_encoder"), ModelKey("0", "vae"))
    rig.add("1", "a")
    rig.run()
    assert rig.finished == {"1"}


def test_lego_brings_together_what_pages_are_made_with() -> None:
    """The second edit's latents are there, and the pages of its steps are not."""
    cache = CacheConfig(host_bytes=8 * TEMPLATE_BYTES)
    rig = Rig(num_ranks=2, budget=4 * NBYTES, encoders=True, cache=cache, policy=Lego())
    for number, steps in ((1, 1), (2, 8)):
        rig.scheduler.add(msgspec.structs.replace(make_masked(str(number), steps=steps), model="a"))
        for _ in range(200):
            rig.step()
            rig.answer()
        assert str(number) in rig.finished
        rig.restart(0, ModelKey("a", "transformer"), ModelKey("0", "vae"))
        rig.restart(1, ModelKey("a", "text_encoder"), ModelKey("0", "vae"))
    rig.scheduler.check_integrity()


def test_templates_of_a_model_that_cannot_be_loaded_fail() -> None:
    rig = Rig()
    for name in ("a", "b"):
        rig.scheduler.models[name] = msgspec.structs.replace(rig.scheduler.models[name], page_scheme=SCHEME)
    head = make_edit("x")
    prime = PrimeTemplate("t", "b", head.spec.template, 256, 256, "0", 256, 0.0)
    rig.scheduler.add_template(prime)
    rig.step()
    assert rig.workers.loading
    rig.answer(BROKEN)
    rig.step()
    told = rig.outputs["t"]
    assert isinstance(told, Failed)
    assert told.failure.kind == "model_unavailable"


def test_the_time_to_load_is_predicted_and_reported() -> None:
    rig = Rig()
    rig.scheduler.cost.observe_load(NBYTES, 2.0)
    rig.add("1", "b")
    rig.add("2", "a")
    report = rig.scheduler.load_report()
    waiting, ready = [change.load for change in report.queue if isinstance(change, Queued)]
    assert waiting.other_seconds == ready.other_seconds, "loading is no work of the request"
    told = {load.name: (load.state, load.seconds) for load in report.models}
    assert told["a"] == ("loaded", 0.0)
    assert told["b"][0] == "loading"
    assert told["b"][1] == report.load_seconds == report.drain_seconds > 1.9


def test_an_aborted_edit_is_answered_when_the_rank_dies_that_reads_its_template() -> None:
    """The other rank has its values, so that it has lost nothing itself."""
    rig = Rig(num_ranks=2, encoders=True, cache=CacheConfig(host_bytes=8 * TEMPLATE_BYTES))
    rig.restart(1, "a", "b")
    rig.scheduler.add(msgspec.structs.replace(make_masked("1"), model="b"))
    rig.step()
    rig.submit()
    batches = [batch for batch in rig.plans[-1].batches if batch.op == "template_encode"]
    assert [batch.ranks for batch in batches] == [(0,)]
    rig.scheduler.abort(["1"])
    assert not rig.scheduler.take_outputs()
    rig.lose(0)
    assert [type(each) for each in rig.scheduler.take_outputs()] == [Aborted]


def test_a_request_is_given_up_if_its_model_is_not_loaded_in_time_and_not_for_a_load_that_is_over() -> None:
    for deadline, is_late in ((0.9, True), (2.6, False)):
        rig = Rig()
        rig.scheduler.cost.observe_load(NBYTES, 2.0)
        rig.add("1", "b", deadline=deadline)
        rig.step()
        assert isinstance(rig.outputs.get("1"), Failed) == is_late
        rig.now = 2.0
        rig.answer()
        rig.run(20)
        assert ("1" in rig.finished) != is_late


def test_a_rank_that_joins_again_loads_what_the_others_have() -> None:
    rig = Rig(num_ranks=2)
    rig.step()
    rig.answer()
    rig.scheduler.lose_rank(1, Failure("rank_dead", "gone"))
    rig.workers.lose(1)
    rig.add("1", "b")
    rig.run()
    assert rig.finished == {"1"}, "one rank is enough"
    rig.workers.join(1)
    rig.scheduler.join_rank(1, [LoadedComponent(key, NBYTES) for key in SHARED])
    rig.workers.loaded[1] = set(SHARED)
    rig.step()
    assert {key.content for rank, key in rig.workers.loading if rank == 1} == {"a"}
    rig.answer()
    rig.step()
    rig.answer()
    rig.add("2", "b")
    rig.run()
    assert rig.finished == {"1", "2"}


def test_an_encoding_goes_to_the_rank_that_has_its_model_while_the_home_of_its_steps_is_busy() -> None:
    encoder, vae = SHARED
    denoiser = ModelKey("a", "transformer")
    sizes = {LoadedComponent(encoder, 2), LoadedComponent(vae, 1), LoadedComponent(denoiser, 1)}
    config = SchedulerConfig(model_bytes=2, max_plans_in_flight=1)
    scheduler = StepScheduler(config, {"a": model("a")}, 2, sizes=sizes)
    halves = [(0, [LoadedComponent(vae, 1), LoadedComponent(denoiser, 1)]), (1, [LoadedComponent(encoder, 2)])]
    scheduler.learn((), halves)
    workers = FakeWorkers(2)

    def submit() -> None:
        while (plan := scheduler.schedule(0.0)) is not None:
            workers.submit(plan)

    for name in ("first", "second"):
        scheduler.add(msgspec.structs.replace(make_edit(name), model="a"))
        submit()
    for rank in (0, 1):
        for result in workers.run_one(rank):
            assert isinstance(result, BatchResult)
            scheduler.apply(result)
        submit()
    batches = [batch for plan in workers.queues[1] for batch in plan.batches if batch.ranks == (1,)]
    assert [(batch.op, [item.request_id for item in batch.items]) for batch in batches] == [("text_encode", ["second"])]
