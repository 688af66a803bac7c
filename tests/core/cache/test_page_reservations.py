"""Page reservations: which keyframes a noise level needs, and that mask-aware edits read only filled pages."""

from __future__ import annotations

import msgspec
import pytest
from cache_kit import (
    AHEAD,
    GRID,
    LAYOUT,
    ROOMY,
    SCHEME,
    SEEING,
    TEMPLATE_BYTES,
    Engine,
    make_masked,
    make_registration,
)
from fakes import MODEL, PIXELS, make_edit, with_spec
from hypothesis import given
from hypothesis import strategies as st

from core.cache.activation_cache_manager import ActivationCacheManager, TierBudget
from core.cache.page_reservations import Bracket, PageReservations, bracket, keyframes_needed
from core.cache.priming import TemplateInfo
from core.cache.reservation import Reservation
from core.config import CacheConfig
from core.failure import Failure
from core.graph.work import Work
from core.handles import ArrayRef, Artefact
from core.messages.engine import (
    Aborted,
    DropTemplate,
    Failed,
    Finished,
    PartialImage,
    TemplatePrimed,
)
from core.messages.worker import BatchResult, ItemResult, PageCopied
from core.model_info import ModelInfo
from core.reference_pictures import ReferencePictures
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.prime import Prime
from core.scheduling.ops.text_encode import TextEncode

# ---------------------------------------------------------------------------------------------------------- brackets


@given(st.lists(st.floats(0, 1), min_size=2, unique=True), st.floats(0, 1))
def test_a_noise_level_lies_between_its_keyframes(levels: list[float], sigma: float) -> None:
    grid = tuple(sorted(levels, reverse=True))
    around = bracket(grid, sigma)
    clamped = min(max(sigma, grid[-1]), grid[0])
    far = around.near if around.far is None else around.far
    assert (1 - around.weight) * around.near + around.weight * far == pytest.approx(clamped)
    assert around.near >= clamped >= far
    assert around.far is None or grid.index(around.far) == grid.index(around.near) + 1
    assert 0 <= around.weight <= 1


def test_at_a_keyframe_its_pages_are_taken_as_they_are() -> None:
    assert all(bracket(GRID, sigma) == Bracket(sigma, None, 0.0) for sigma in GRID)
    assert bracket((), 0.3) == Bracket(0.3, None, 0.0), "per-step pages"
    assert bracket((0.9, 0.1), 1.0) == Bracket(0.9, None, 0.0)
    assert bracket((0.9, 0.1), 0.0) == Bracket(0.1, None, 0.0)


def test_only_keyframes_that_steps_read_are_needed() -> None:
    assert keyframes_needed(GRID, [1.0, 0.5]) == (1.0, 0.5)
    assert keyframes_needed(GRID, [0.3, 0.1]) == (0.5, 0.25, 0.0)
    assert keyframes_needed((), [0.3, 0.1]) == (0.3, 0.1)


# ------------------------------------------------------------------------------------------------------- reservations


def test_a_template_with_references_takes_no_more_than_is_checked_for() -> None:
    """Else an edit would wait for room that there never is, and others behind it."""
    seen = ReferencePictures(most=2, pixels=256**2, multiple=16, grows=False)
    info = msgspec.structs.replace(MODEL, page_scheme=SCHEME, references=seen)
    spec, pixels = make_masked("a").spec, ArrayRef(0, 0, (1,), "uint8")
    template = TemplateInfo.of(spec, info, ((64, 128), (256, 256)))
    beside = info.num_reference_tokens(template.reference_sizes)
    assert template.num_latent_tokens == spec.num_tokens + beside
    wants = Reservation("a", template, (pixels,) * 3, GRID).wants()
    most = template.scheme.template_bytes(spec.num_tokens, len(GRID), beside)
    assert sum(want.nbytes for want in wants) <= most < most + SCHEME.latent_entry_bytes(beside)
    assert wants[0].nbytes == SCHEME.latent_entry_bytes(template.num_latent_tokens)
    assert wants[1].nbytes == SCHEME.layout.with_conditions(template.num_condition_tokens).entry_bytes(spec.num_tokens)


def test_a_reservation_made_again_is_complete_only_once_its_evicted_entries_are_filled_again() -> None:
    info = msgspec.structs.replace(MODEL, page_scheme=SCHEME)
    budget = TierBudget("host", TEMPLATE_BYTES)  # room for one template
    manager = ActivationCacheManager([budget], has_disk=False, page_arena_id=0, keep_all=True)
    pages = PageReservations(manager, lambda template, tier, nbytes: True)
    mine, other = (
        Reservation(
            name, TemplateInfo.of(make_masked(name, content=name).spec, info), (ArrayRef(0, 0, (1,), "uint8"),), GRID
        )
        for name in ("mine", "other")
    )
    for reservation in (mine, other, mine):
        assert pages.reserve(reservation)
        assert not reservation.is_complete, "its entries are empty"
        assert reservation.template.key in {job.template.key for job in pages.jobs()}
        for key in reservation.entry_keys():
            manager.fill(key)
        pages.refresh(reservation)
        assert reservation.is_complete
        pages.release(reservation)


def reservations(**sigmas: tuple[float, ...]) -> list[Reservation]:
    """Of one template. sigmas: owner -> keyframes."""
    info = msgspec.structs.replace(MODEL, page_scheme=SCHEME)
    template = TemplateInfo.of(make_masked("a").spec, info)
    return [Reservation(owner, template, (ArrayRef(0, 0, (1,), "uint8"),), each) for owner, each in sigmas.items()]


def test_no_job_is_left_for_pages_that_nobody_waits_for() -> None:
    """An aborted edit wanted them, and a waiting one that has them loaded ahead still holds their places."""
    manager = ActivationCacheManager(
        [TierBudget("host", 4 * TEMPLATE_BYTES)], has_disk=True, page_arena_id=0, keep_all=True
    )
    pages = PageReservations(manager, lambda template, tier, nbytes: True)
    ahead, aborted, waiting = reservations(ahead=GRID, aborted=GRID[:2], waiting=GRID[:1])
    ahead.is_prefetch = True
    for each in (ahead, aborted, waiting):
        assert pages.reserve(each)
    loads = {copy.key: copy for copy in manager.take_orders().copies}

    def end(key: str, *, ok: bool) -> None:
        copy = loads[key]
        pages.finish_copy(PageCopied(copy.rank, key, copy.nbytes, copy.source, copy.target, ok, 0.0))

    _, _, missing = aborted.entry_keys()
    end(missing, ok=False)
    assert [list(job.wanted.values()) for job in pages.jobs()] == [[missing]]
    pages.release(aborted)
    for key in waiting.entry_keys():
        end(key, ok=True)
    assert waiting.is_complete
    assert not pages.jobs()
    pages.check_integrity()


def test_the_time_of_a_pass_counts_once_for_a_reservation_made_again_meanwhile() -> None:
    manager = ActivationCacheManager(
        [TierBudget("host", TEMPLATE_BYTES)], has_disk=False, page_arena_id=0, keep_all=True
    )
    pages = PageReservations(manager, lambda template, tier, nbytes: True)
    (mine,) = reservations(mine=GRID)
    assert pages.reserve(mine)
    (job,) = pages.jobs()
    pages.start_latents(job)
    pages.release(mine)
    assert pages.reserve(mine)
    pages.finish_latents(job, 1.5)
    assert mine.prime_seconds == 1.5


# --------------------------------------------------------------------------------------------------------- scheduling


def test_priming_respects_the_step_limit_that_was_learnt() -> None:
    engine = Engine()
    for i in range(4):
        engine.scheduler.add(make_edit(f"r{i}", steps=2))
    while engine.scheduler.num_requests:
        plan = engine.scheduler.schedule(now=0.0)
        assert plan is not None
        engine.workers.submit(plan)
        for result in engine.workers.run_one(0):
            assert isinstance(result, BatchResult)
            engine.scheduler.apply(msgspec.structs.replace(result, num_parts=2 if len(result.items) == 4 else 1))
        engine.run_until_idle()
    engine.scheduler.add_template(make_registration("t"))
    passes = []
    while engine.scheduler.num_requests:
        plan = engine.step()
        passes += [len(batch.items) for batch in plan.batches if batch.op == "prime"] if plan else []
    assert passes == [2, 2, 1], "of 280 tokens each, where the last steps had 560"


def test_a_cold_edit_primes_what_its_steps_read_and_a_second_one_nothing() -> None:
    engine = Engine()
    engine.scheduler.add(make_masked("a", steps=4))
    engine.run()
    assert engine.finished("a").cache == "miss"
    assert engine.finished("a").ms["prime"] > 0
    assert {sigma for sigma, _, _ in engine.workers.primed} == {1.0, 0.75, 0.5, 0.25}, "no step reads 0.0"
    before = list(engine.workers.primed)
    engine.scheduler.add(make_masked("b", steps=4))
    engine.run()
    assert engine.workers.primed == before
    assert (engine.finished("b").cache, engine.finished("b").tier) == ("hit", "host")
    assert engine.finished("b").ms["prime"] == 0
    assert engine.workers.encoded_templates == 1


def test_first_edits_of_one_template_prime_it_once() -> None:
    engine = Engine()
    for name in "abc":
        engine.scheduler.add(make_masked(name))
    engine.run()
    assert len(engine.workers.primed) == len(set(engine.workers.primed)) == 5
    assert engine.workers.encoded_templates == 1


def test_another_step_count_primes_only_the_keyframes_that_are_missing() -> None:
    engine = Engine()
    engine.scheduler.add(make_masked("a", steps=2))
    engine.run()
    assert sorted(sigma for sigma, _, _ in engine.workers.primed) == [0.5, 1.0]
    engine.scheduler.add(make_masked("b", steps=8))
    engine.run()
    blocks = [(sigma, block) for sigma, start, stop in engine.workers.primed for block in range(start, stop)]
    assert sorted(blocks) == [(sigma, block) for sigma in sorted(GRID) for block in range(7)]


def test_full_steps_need_no_pages() -> None:
    engine = Engine()
    engine.scheduler.add(make_masked("a", steps=2, full_steps=1))
    engine.run()
    assert [sigma for sigma, _, _ in engine.workers.primed] == [0.5]


def test_a_running_step_takes_at_most_a_fifth_of_its_tokens_of_priming_along() -> None:
    engine = Engine()
    for i in range(6):
        engine.scheduler.add(make_edit(f"running-{i}", steps=200))
    engine.run(until=lambda: engine.workers.steps_done("running-5") > 1)
    engine.scheduler.add(make_masked("cold"))
    engine.run(until=lambda: any(output.request_id == "cold" for output in engine.outputs))  # type: ignore[attr-defined]
    chunks = [stop - start for _, start, stop in engine.workers.primed]
    assert max(chunks) * 280 / 7 <= 0.2 * 6 * 280
    assert sum(chunks) == 5 * 7


def test_an_edit_waits_for_room_and_holds_nothing_meanwhile() -> None:
    engine = Engine(cache=CacheConfig(host_bytes=TEMPLATE_BYTES))
    engine.scheduler.add(make_masked("a", content="c0"))
    engine.scheduler.add(make_masked("b", content="c1", arrival=1.0))
    engine.run()
    assert engine.finished("a")
    assert engine.finished("b").cache == "miss"


def test_a_failed_priming_fails_only_the_requests_that_wait_for_it() -> None:
    engine = Engine()
    engine.workers.fail = {"prime-0"}
    engine.scheduler.add(make_edit("exact"))
    engine.scheduler.add(make_masked("a"))
    engine.scheduler.add(make_masked("b"))
    engine.run()
    assert isinstance(engine.result("a"), Failed)
    assert isinstance(engine.result("b"), Failed)
    assert isinstance(engine.result("exact"), Finished)
    engine.workers.fail = set()
    engine.scheduler.add(make_masked("c"))
    engine.run()
    assert isinstance(engine.result("c"), Finished), "the next one primes again"


def test_an_abort_while_a_worker_reads_its_template_is_answered_afterwards() -> None:
    engine = Engine()
    engine.scheduler.add(make_masked("a"))
    while engine.workers.encoded_templates == 0:
        plan = engine.scheduler.schedule(now=0.0)
        assert plan is not None
        engine.workers.submit(plan)
        if any(item.node == "template_encode" for batch in plan.batches for item in batch.items):
            engine.scheduler.abort(["a"])
            assert engine.scheduler.take_outputs() == ()
        engine.finish_plan()
    assert isinstance(engine.result("a"), Aborted)
    assert engine.scheduler.num_requests == 0


def test_an_edit_that_finishes_while_a_worker_reads_its_template_is_answered_afterwards() -> None:
    engine = Engine(model=SEEING, max_num_batched_tokens=400)
    for name, steps in (("a", 2), ("b", 8)):
        engine.scheduler.add(make_masked(name, steps=steps))
    engine.run(lambda: not engine.scheduler._requests["a"].progress.steps_left)
    plan = engine.scheduler.schedule(now=0.0)
    assert plan is not None
    assert [batch.op for batch in plan.batches] == ["decode", "denoise", "prime"]
    # As if it had lent them for this chunk, and its own pages had been loaded from the disk since.
    engine.pages_of("a").reservation.is_read = True
    engine.workers.submit(plan)
    *others, primed = (each for each in engine.workers.run_one(0) if isinstance(each, BatchResult))
    for each in others:
        engine.scheduler.apply(each)
    assert engine.scheduler.take_outputs() == ()
    engine.scheduler.apply(primed)
    engine.run_until_idle()
    assert isinstance(engine.result("a"), Finished)


@pytest.mark.parametrize("model", [MODEL, SEEING])
def test_priming_reads_a_template_that_the_text_encoder_sees(model: ModelInfo) -> None:
    """A waiting edit lends them for as long as the chunk takes, even if its own pages are loaded meanwhile."""
    engine = Engine(model=model)
    engine.scheduler.add(make_masked("a"))
    works: list[Prime] = []
    while not works:
        engine.step()
        plan = engine.scheduler.schedule(now=0.0)
        assert plan is not None
        engine.workers.submit(plan)
        works = [item.work for batch in plan.batches for item in batch.items if isinstance(item.work, Prime)]
    reservation = engine.pages_of("a").reservation
    assert {work.seen for work in works} == {reservation.pictures if model is SEEING else ()}
    assert reservation.is_read == (model is SEEING)
    reservation.is_complete = True
    engine.finish_plan()
    assert not reservation.is_read


def test_registration_primes_the_whole_grid_and_answers_once() -> None:
    engine = Engine(cache=CacheConfig(host_bytes=8 * TEMPLATE_BYTES, admission="manual"))
    engine.scheduler.add_template(make_registration("t"))
    engine.run()
    primed = engine.result("t")
    assert isinstance(primed, TemplatePrimed)
    assert primed.nbytes == 256 * SCHEME.latent_bytes + 5 * LAYOUT.entry_bytes(256)
    engine.scheduler.add(make_masked("a"))
    engine.scheduler.add(make_masked("other", content="c1"))
    engine.run()
    assert engine.finished("a").cache == "hit"
    num_primed = len(engine.workers.primed)
    engine.scheduler.add(make_masked("b"))
    engine.run()
    assert len(engine.workers.primed) == num_primed, "a registered template stays"
    engine.scheduler.add(make_masked("other-2", content="c1"))
    engine.run()
    assert engine.finished("other-2").cache == "miss", "admission is manual"


def test_a_dropped_template_is_primed_again() -> None:
    engine = Engine()
    engine.scheduler.add_template(make_registration("t"))
    engine.run()
    engine.scheduler.drop_template(DropTemplate("m", "c0"))
    engine.scheduler.add(make_masked("a"))
    engine.run()
    assert engine.finished("a").cache == "miss"


def test_owners_have_pages_of_their_own() -> None:
    """Not even a job in flight is shared, and each drops only its own pages."""
    engine = Engine()
    edits = [with_spec(make_masked(f"{salt}-0"), cache_salt=salt) for salt in ("mine", "yours", "")]
    for edit in edits:
        engine.scheduler.add(edit)
    engine.run()
    assert [engine.finished(edit.request_id).cache for edit in edits] == ["miss"] * 3
    assert sum(stop - start for _, start, stop in engine.workers.primed) == 3 * len(GRID) * LAYOUT.num_blocks
    engine.scheduler.drop_template(DropTemplate("m", "c0", "mine"))
    for edit in edits:
        engine.scheduler.add(msgspec.structs.replace(edit, request_id=edit.spec.cache_salt + "-1"))
    engine.run()
    assert [engine.finished(f"{edit.spec.cache_salt}-1").cache for edit in edits] == ["miss", "hit", "hit"]


def test_a_registration_primes_its_owners_pages() -> None:
    engine = Engine()
    engine.scheduler.add_template(msgspec.structs.replace(make_registration("t"), cache_salt="mine"))
    engine.run()
    for salt in ("yours", "mine"):
        engine.scheduler.add(with_spec(make_masked(salt), cache_salt=salt))
    engine.run()
    assert [engine.finished(salt).cache for salt in ("yours", "mine")] == ["miss", "hit"]


def test_workers_get_the_owners_of_prompts_and_templates() -> None:
    engine = Engine(cache=msgspec.structs.replace(ROOMY, block_plan="auto"))
    engine.scheduler.add(with_spec(make_masked("a"), cache_salt="mine"))
    seen = set()
    while plan := engine.step():
        works = [item.work for batch in plan.batches for item in batch.items]
        kept = [work for work in works if isinstance(work, TextEncode | Prime | Denoise)]
        seen |= {(type(work), work.cache_salt) for work in kept}
    assert seen == {(TextEncode, "mine"), (Prime, "mine"), (Denoise, "mine")}


def test_idle_work_waits_until_nothing_else_wants_to_compute() -> None:
    engine = Engine()
    engine.scheduler.add_template(make_registration("idle", is_idle_work=True))
    engine.scheduler.add(make_edit("a", steps=5))
    engine.run(until=lambda: engine.workers.steps_done("a") == 5)
    assert engine.workers.primed == []
    engine.run()
    assert isinstance(engine.result("idle"), TemplatePrimed)
    assert all(stop == start + 1 for _, start, stop in engine.workers.primed), "block by block"


def test_pages_used_twice_come_back_from_disk() -> None:
    cache = CacheConfig(host_bytes=TEMPLATE_BYTES, disk_bytes=1 << 40)
    engine = Engine(cache=cache)
    for name, content in [("a1", "a"), ("a2", "a"), ("b", "b"), ("a3", "a")]:
        engine.scheduler.add(make_masked(name, content=content))
        engine.run()
    assert (engine.finished("a3").cache, engine.finished("a3").tier) == ("hit", "disk")
    assert engine.finished("b").cache == "miss"


def make_auto_engine() -> Engine:
    """With one template on disk, another in memory, and loads that take longer than computing."""
    cache = CacheConfig(host_bytes=TEMPLATE_BYTES, disk_bytes=1 << 40, block_plan="auto")
    engine = Engine(cache=cache)
    for name, content in [("a1", "a"), ("a2", "a"), ("b", "b")]:
        engine.scheduler.add(make_masked(name, content=content))
        engine.run()
    prime = engine.scheduler.cost_key("m", "prime")
    for _ in range(50):
        engine.scheduler.cost.observe_copy("disk", "host", LAYOUT.entry_bytes(256), 0.04)
        engine.scheduler.cost.observe(prime, Work.of([280]), 1.0)
    return engine


def begin_loading(engine: Engine, full_steps: int = 0) -> None:
    """Add an edit of the template on disk and let its clean latents arrive, but no page yet."""
    engine.scheduler.add(make_masked("a3", content="a", full_steps=full_steps))
    pages = engine.workers.pages
    while not pages.copies:
        engine.step()
    (latents,) = (i for i, copy in enumerate(pages.copies) if copy.key.endswith("latents"))
    engine.scheduler.apply_copy(pages.finish_copy(latents))


def test_blocks_are_computed_in_full_while_their_pages_come_up() -> None:
    engine = make_auto_engine()
    begin_loading(engine)
    engine.step()
    assert engine.workers.steps_done("a3") == 1, "the first step is done while its pages come up"
    engine.run()
    assert engine.finished("a3").full_blocks == engine.workers.full_blocks > 0
    assert (engine.finished("a3").cache, engine.finished("a3").tier) == ("hit", "disk")


def test_a_step_whose_pages_get_lost_is_repeated() -> None:
    engine = make_auto_engine()
    begin_loading(engine)
    engine.workers.pages.files.clear()
    for _ in range(3):
        engine.step()
    assert engine.workers.steps_done("a3") == 0, "it was tried, and changed nothing"
    engine.run()
    assert engine.workers.steps_done("a3") == 8
    assert engine.finished("a3").cache == "miss"


def lose(engine: Engine, ends: str) -> None:
    """Fail the loads of pages with this key suffix: their files are missing."""
    pages = engine.workers.pages
    for key in [copy.key for copy in pages.copies if copy.key.endswith(ends)]:
        pages.files.discard(key)
        (index,) = (i for i, copy in enumerate(pages.copies) if copy.key == key)
        engine.scheduler.apply_copy(pages.finish_copy(index))


@pytest.mark.parametrize("full_steps", [0, 1])
@pytest.mark.parametrize("steps_before", [1, 3, 8])
def test_an_edit_that_must_prime_after_all_restarts_over_whole_pages(full_steps: int, steps_before: int) -> None:
    engine = make_auto_engine()
    begin_loading(engine, full_steps=full_steps)
    while engine.workers.steps_done("a3") < steps_before:
        engine.step()
    assert engine.workers.full_blocks or steps_before <= full_steps, "steps were done while the pages came up"
    plan = engine.scheduler.schedule(now=0.0)  # the next step, or decoding, is out when a file turns out to be gone
    assert plan is not None
    engine.workers.submit(plan)
    results = engine.workers.run_one(0)
    lose(engine, engine.workers.pages.copies[-1].key)
    for result in results:
        assert isinstance(result, BatchResult)
        engine.scheduler.apply(result)
    engine.workers.full_blocks = 0
    engine.workers.denoised.clear()
    engine.run()
    finished = engine.finished("a3")
    assert (finished.cache, finished.tier, finished.full_blocks) == ("miss", None, 0)
    assert engine.workers.full_blocks == 0, "nor in any step of what was painted in the end"
    assert steps_before <= full_steps or engine.workers.denoised["a3"] == list(range(8))


def test_a_cold_edit_waits_for_its_pages_however_late_missing_files_are_noticed() -> None:
    """Its latents are known to be missing and are computed; its pages are still being loaded."""
    engine = make_auto_engine()
    engine.scheduler.add(make_masked("cold", content="new"))
    while not engine.workers.pages.copies:
        engine.step()
    lose(engine, "latents")
    for _ in range(5):
        engine.step()
    assert engine.workers.steps_done("cold") == 0
    engine.run()
    assert (engine.finished("cold").cache, engine.finished("cold").full_blocks) == ("miss", 0)


def test_blocks_that_no_step_computed_in_full_are_not_reported() -> None:
    engine = make_auto_engine()
    begin_loading(engine)
    plan = engine.scheduler.schedule(now=0.0)
    assert plan is not None
    (item,) = (item for batch in plan.batches for item in batch.items)
    assert isinstance(item.work, Denoise)
    assert item.work.full_blocks
    lost = ItemResult("a3", item.node, failure=Failure("pages_lost", "gone"))
    engine.scheduler.apply(BatchResult(plan.batches[0].id, 0, 1.0, 0.01, (lost,)))
    assert engine.pages_of("a3").most_full_blocks == 0


def test_per_step_pages_are_kept_at_every_noise_level() -> None:
    engine = Engine(msgspec.structs.replace(SCHEME, keyframes=()))
    engine.scheduler.add(make_masked("a", steps=3))
    engine.run()
    assert [sigma for sigma, _, _ in engine.workers.primed] == [1.0, 1 - 1 / 3, 1 - 2 / 3]


def test_dead_workers_end_edits_and_registrations() -> None:
    engine = Engine()
    engine.scheduler.add(make_masked("a"))
    engine.scheduler.add_template(make_registration("t", "c1"))
    for _ in range(2):
        plan = engine.scheduler.schedule(now=0.0)
        assert plan is not None
        engine.workers.submit(plan)
        if engine.workers.encoded_templates == 0:
            engine.finish_plan()
    engine.scheduler.fail_all(Failure("engine", "dead"))
    engine.run_until_idle()
    assert isinstance(engine.result("a"), Failed)
    assert isinstance(engine.result("t"), Failed)


def keep_busy(engine: Engine, running: int, number: int) -> int:
    """Add exact edits up to this number; returns the number of the next one."""
    here = sum(f"x{i}" in engine.scheduler._requests for i in range(number))
    for i in range(number, number + running - here):
        engine.scheduler.add(make_edit(f"x{i}", arrival=1.0 + i))
    return number + running - here


def test_idle_work_that_is_done_already_is_answered_without_another_event() -> None:
    """Idle work comes one by one; with nothing else to do no message would wake the engine for the second."""
    engine = Engine()
    engine.scheduler.add_template(make_registration("first", is_idle_work=True))
    engine.run()
    for name in ("second", "third"):
        engine.scheduler.add_template(make_registration(name, is_idle_work=True))
    engine.scheduler.take_outputs()
    engine.scheduler.schedule(0.0)
    assert {output.request_id for output in engine.scheduler.take_outputs()} == {"second", "third"}


def test_idle_work_is_not_sent_behind_a_step() -> None:
    engine = Engine(**AHEAD)
    engine.scheduler.add_template(make_registration("idle", "c9", is_idle_work=True))
    engine.step()  # its template is encoded
    engine.scheduler.add(make_edit("a", steps=2))
    engine.step()
    plans = [engine.scheduler.schedule(now=0.0) for _ in range(2)]
    assert [batch.op for plan in plans if plan for batch in plan.batches] == ["denoise", "denoise"]
    for plan in plans:
        assert plan is not None
        engine.workers.submit(plan)
    engine.finish_plan()
    assert engine.scheduler.schedule(now=0.0) is None, "the last step still runs"
    engine.run()
    assert isinstance(engine.result("idle"), TemplatePrimed)


def has_ended(engine: Engine, request_id: str) -> bool:
    return any(output.request_id == request_id for output in engine.outputs)  # type: ignore[attr-defined]


def test_idle_work_gives_its_room_to_an_edit() -> None:
    engine = Engine(cache=CacheConfig(host_bytes=TEMPLATE_BYTES * 3 // 2))
    engine.scheduler.add_template(make_registration("idle", "c9", is_idle_work=True))
    engine.step()
    number = keep_busy(engine, 3, 0)
    engine.step()
    engine.scheduler.add(make_masked("victim", arrival=0.1))
    for _ in range(100):
        number = keep_busy(engine, 3, number)
        engine.step()
    assert has_ended(engine, "victim")
    engine.run()
    assert isinstance(engine.result("idle"), TemplatePrimed), "and takes it up again"


def test_newcomers_do_not_keep_a_template_from_being_encoded() -> None:
    engine = Engine(max_stage_ms=5)
    number = 0
    for i in range(400):
        number = keep_busy(engine, 20, number)
        if i == 200:
            engine.scheduler.add(make_masked("victim", arrival=0.1))
        engine.step()
    assert has_ended(engine, "victim")


def test_a_failed_pass_leaves_nothing_behind_that_is_scheduled_again() -> None:
    engine = Engine(msgspec.structs.replace(SCHEME, keyframes=()), CacheConfig(host_bytes=1 << 34), **AHEAD)
    number = keep_busy(engine, 4, 0)
    engine.scheduler.add(make_masked("b", steps=40, full_steps=30, arrival=1.0))
    engine.scheduler.add(make_masked("a", steps=4, full_steps=3, arrival=1.0))
    while not engine.cache._pages._jobs:
        engine.step()
    engine.workers.fail = {"prime-0"}
    engine.scheduler.abort(["a"])
    for _ in range(60):
        number = keep_busy(engine, 4, number)
        plan = engine.scheduler.schedule(now=0.0)
        if plan is not None:
            engine.workers.submit(plan)
        if len(engine.workers.queues[0]) > 1 or plan is None:
            engine.finish_plan()
    engine.run()
    assert isinstance(engine.result("a"), Aborted)
    assert isinstance(engine.result("b"), Failed)
    assert not any(sigma == 0.25 for sigma, _, _ in engine.workers.primed), "nothing is primed for those who failed"


def test_a_preview_waits_for_latents_that_are_held() -> None:
    engine = Engine(cache=CacheConfig(host_bytes=TEMPLATE_BYTES * 3 // 2))
    engine.scheduler.add(make_masked("warm"))
    engine.run()
    engine.scheduler.add(make_masked("big", content="c9", steps=60))
    for _ in range(6):
        engine.step()
    waiting = make_masked("v", full_steps=3, arrival=1.0)
    engine.scheduler.add(with_spec(waiting, previews=(Artefact(PIXELS),) * 3))
    for _ in range(30):
        plan = engine.step()
        mine = engine.cache._prefetcher.records.get("v")
        decoded = (
            [item.node for batch in plan.batches for item in batch.items if item.request_id == "v"] if plan else []
        )
        assert "preview" not in decoded or (mine is not None and mine.reservation.is_reserved)
    engine.run()
    engine.outputs = [output for output in engine.outputs if not isinstance(output, PartialImage)]
    assert engine.finished("v")


def test_pages_come_up_from_disk_while_an_edit_waits_for_a_place() -> None:
    engine = Engine(cache=CacheConfig(host_bytes=2 * TEMPLATE_BYTES, disk_bytes=1 << 40), max_num_seqs=1)
    engine.scheduler.add(make_edit("running", steps=20))
    engine.step()
    engine.scheduler.add(make_masked("waiting", arrival=1.0))
    engine.step()
    assert len(engine.workers.pages.copies) == 6, "clean latents and all keyframes"
    engine.finish_copies()
    assert engine.workers.primed == [], "loading costs no computing, priming would"
    engine.run()
    assert engine.finished("waiting").cache == "miss"


def test_pages_loaded_ahead_give_way_to_requests_that_run() -> None:
    """A more urgent request takes the slot that the pages were loaded for: both need room for a whole template, and the
    waiting one would get its slot only after the other.
    """
    room = 3 * TEMPLATE_BYTES // 2
    engine = Engine(cache=CacheConfig(host_bytes=room, disk_bytes=1 << 40), max_num_seqs=1)
    engine.scheduler.add(make_edit("first", steps=3))
    engine.step()
    engine.scheduler.add(make_masked("waits", content="c0", arrival=1.0))
    engine.step()
    assert engine.pages_of("waits").reservation.is_reserved, "its pages are loaded ahead"
    urgent = make_masked("urgent", content="c1", arrival=2.0)
    engine.scheduler.add(msgspec.structs.replace(urgent, priority=-1))
    engine.run()
    ended = [output.request_id for output in engine.outputs]  # type: ignore[attr-defined]
    assert ended == ["first", "urgent", "waits"]
