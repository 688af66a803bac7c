"""EngineQueue: a router's copy of an engine's queue. That it follows a real scheduler is tested in test_reports.py."""

from __future__ import annotations

from msgspec.structs import replace

from core.costs.load_report import Begun, Dequeued, Ended, LoadReport, QueueChange, Queued, RequestLoad
from core.routing.engine_queue import EngineQueue


def load(owner: str = "", priority: int = 0) -> RequestLoad:
    return RequestLoad(10, 0.1, 0.5, priority, owner=owner)


def queued(name: str, due: float, owner: str = "", priority: int = 0) -> Queued:
    return Queued(name, load(owner, priority), due)


def report(*changes: QueueChange, is_first: bool = False, **running: RequestLoad) -> LoadReport:
    return LoadReport(
        num_received=0, num_running=len(running), num_waiting=1, running=running, is_first=is_first, queue=changes
    )


def test_a_running_edits_load_is_that_of_the_last_report() -> None:
    copy, later = EngineQueue(), RequestLoad(9, 0.1, 0.2, is_running=True)
    copy.update(report(queued("a", 1.0), queued("b", 2.0)))
    copy.update(report(Begun("a", 1.5), a=later))
    assert copy.loads() == [later, load()]
    last = replace(later, steps_left=2)
    copy.update(report(a=last))
    assert copy.loads() == [last, load()]


def test_an_edit_that_has_ended_has_no_load_while_it_keeps_its_place() -> None:
    copy = EngineQueue()
    copy.update(report(queued("a", 1.0), queued("b", 2.0), queued("c", 3.0), Begun("a", 1.5), a=load()))
    copy.update(report(Ended("b")))
    assert copy.loads() == [load()]
    assert len(copy) == 1
    assert copy.step_seconds == 0.1
    copy.update(report(Dequeued("a"), Dequeued("b")))
    assert copy.loads() == [load()]


def test_changes_of_edits_that_are_not_here_are_ignored() -> None:
    copy = EngineQueue()
    copy.update(report(Begun("x", 1.0), Ended("x"), Dequeued("x"), queued("a", 1.0), x=load()))
    assert copy.loads() == [load()]


def test_an_edit_may_be_overtaken_by_a_higher_class_or_another_owner_while_it_waits() -> None:
    copy = EngineQueue()
    copy.update(report(queued("a", 1.0, "me", 1)))
    found = {kind: copy.may_be_overtaken(*kind) for kind in [("me", 0), ("me", 1), ("me", 2), ("you", 1), ("you", 9)]}
    assert found == {("me", 0): True, ("me", 1): False, ("me", 2): False, ("you", 1): True, ("you", 9): True}
    copy.update(report(Begun("a", 1.5), a=load("me", 1)))
    assert not copy.may_be_overtaken("you", 0)


def test_the_first_report_of_a_restarted_engine_empties_the_copy() -> None:
    copy = EngineQueue()
    copy.update(report(queued("a", 1.0), queued("b", 2.0), Begun("a", 1.5), a=load()))
    copy.update(report(queued("a", 1.0), is_first=True))
    assert copy.loads() == [load()]
    assert copy.step_seconds == 0.1
