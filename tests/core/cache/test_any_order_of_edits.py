"""Edits, template requests, aborts, drops, copies and deaths of ranks in any order, on any ranks and tiers. FakePages
checks every read and write, and the end that every request is answered once.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

import msgspec
import pytest
from cache_kit import AHEAD, SEEING, TEMPLATE_BYTES, Engine, make_masked, make_registration
from cache_ranks import AnyCacheRanks
from fakes import make_edit
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.config import CacheConfig
from core.failure import Failure
from core.messages.engine import DropTemplate


class MaskAwareMachine(RuleBasedStateMachine):
    """The rules; subclasses say which tiers, ranks and policy there are."""

    device_bytes: Sequence[int] = (0,)  # by rank
    block_plan: Literal["off", "auto"] = "off"
    seed: int | None = None  # of AnyCacheRanks; None: the default policy
    num_deaths: int = 0  # of ranks, at most

    def __init__(self) -> None:
        super().__init__()
        cache = CacheConfig(host_bytes=3 * TEMPLATE_BYTES, disk_bytes=1 << 40, block_plan=self.block_plan)
        self.engine = Engine(cache=cache, model=SEEING, device_bytes=self.device_bytes, max_num_seqs=4, **AHEAD)
        num_ranks = len(self.device_bytes)
        if self.seed is not None:
            self.engine.scheduler._policy = AnyCacheRanks(Random(self.seed))
        self.ranks = st.integers(0, num_ranks - 1)
        self.added: list[str] = []
        self.num_deaths_left = self.num_deaths

    @rule(
        content=st.sampled_from("abcd"),
        steps=st.integers(1, 9),
        full=st.integers(0, 3),
        masked=st.booleans(),
        priority=st.integers(-1, 0),
    )
    def add(self, content: str, steps: int, full: int, masked: bool, priority: int) -> None:
        name = f"r{len(self.added)}"
        edit = make_masked(name, content=content, steps=steps, full_steps=full)
        edit = edit if masked and full < steps else make_edit(name, steps=steps)
        self.engine.scheduler.add(msgspec.structs.replace(edit, priority=priority))
        self.added.append(name)

    @rule(content=st.sampled_from("abcd"), idle=st.booleans())
    def register(self, content: str, idle: bool) -> None:
        name = f"r{len(self.added)}"
        self.engine.scheduler.add_template(make_registration(name, content, is_idle_work=idle))
        self.added.append(name)

    @rule(content=st.sampled_from("abcd"))
    def drop(self, content: str) -> None:
        self.engine.scheduler.drop_template(DropTemplate("m", content))

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.scheduler.abort([data.draw(st.sampled_from(self.added))])

    @rule()
    def schedule(self) -> None:
        plan = self.engine.scheduler.schedule(now=0.0)
        if plan is not None:
            self.engine.workers.submit(plan)

    @rule(data=st.data())
    def finish_plan(self, data: st.DataObject) -> None:
        self.engine.finish_plan(data.draw(self.ranks))

    @precondition(lambda self: self.engine.workers.pages.copies)
    @rule(data=st.data())
    def finish_copy(self, data: st.DataObject) -> None:
        pages = self.engine.workers.pages
        index = data.draw(st.integers(0, len(pages.copies) - 1))
        self.engine.scheduler.apply_copy(pages.finish_copy(index))

    @precondition(lambda self: self.num_deaths_left)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        rank = data.draw(self.ranks)
        if rank not in self.engine.workers.dead:
            self.num_deaths_left -= 1
            self.engine.workers.lose(rank)
            self.engine.scheduler.lose_rank(rank, Failure("engine_dead", "it died"))

    @precondition(lambda self: self.engine.workers.dead)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        self.restart(data.draw(st.sampled_from(sorted(self.engine.workers.dead))))

    def restart(self, rank: int) -> None:
        self.engine.workers.join(rank)
        self.engine.scheduler.join_rank(rank, ())

    @rule(fail=st.booleans())
    def toggle_failure(self, fail: bool) -> None:
        self.engine.workers.fail = {f"prime-{i}" for i in range(50)} if fail else set()

    @invariant()
    def books_agree(self) -> None:
        self.engine.run_until_idle()

    def teardown(self) -> None:
        for rank in sorted(self.engine.workers.dead):
            self.restart(rank)
        while any(self.engine.workers.queues):
            for rank in range(len(self.device_bytes)):
                self.engine.finish_plan(rank)
        self.engine.run()
        ended = [output.request_id for output in self.engine.outputs]  # type: ignore[attr-defined]
        assert sorted(ended) == sorted(self.added), "each has exactly one terminal output"


SMALL = TEMPLATE_BYTES * 3 // 2


@pytest.mark.parametrize("block_plan", ["off", "auto"])
@pytest.mark.parametrize(
    ("device_bytes", "seed"),
    [((0,), None), ((SMALL,), None), ((0, 0), None), ((SMALL, 0), None), ((0, 0, 0), 1), ((SMALL, 0, SMALL), 2)],
    ids=["host", "device", "host-2-ranks", "device-2-ranks", "host-any-ranks", "devices-any-ranks"],
)
@pytest.mark.parametrize("num_deaths", [0, 3])
def test_any_order(device_bytes: Sequence[int], seed: int | None, block_plan: str, num_deaths: int) -> None:
    members = {"device_bytes": device_bytes, "seed": seed, "block_plan": block_plan, "num_deaths": num_deaths}
    case = type("Case", (MaskAwareMachine,), members).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    case().runTest()
