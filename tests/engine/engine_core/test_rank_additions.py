"""What ranks of one engine take in use as it serves: answered once, when all have answered; kept by all or by none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_workflows import CLASSES, DIAMOND

from core.failure import Failure
from core.messages.engine import AdapterAdded, Failed, WorkflowAdded
from core.messages.worker import (
    AdapterLoaded,
    Addition,
    DropAdapter,
    DropWorkflow,
    LoadAdapter,
    LoadWorkflow,
    Removal,
    WorkflowLoaded,
)
from core.sampler_defaults import SamplerDefaults
from engine.engine_core.rank_additions import RankAdditions

Told = list[tuple[int, Addition | Removal]]
BAD = Failure("invalid_request", "no such file", param="lora_path")
LOAD = LoadAdapter("load", "m", "hat", "hat.safetensors")


def make(num_ranks: int, *configured: tuple[str, str]) -> tuple[RankAdditions, Told]:
    told: Told = []
    return RankAdditions(num_ranks, lambda rank, message: told.append((rank, message)), configured), told


@given(st.lists(st.sampled_from(["p", "q", ""]), min_size=1, max_size=4), st.data())
def test_a_load_is_answered_once_and_kept_by_all_ranks_or_none(patches: list[str], data: st.DataObject) -> None:
    """ "": the rank could not load it. Ranks answer in any order."""
    adapters, told = make(len(patches))
    adapters.load(LOAD)
    assert told == [(rank, LOAD) for rank in range(len(patches))]
    told.clear()
    order = data.draw(st.permutations(range(len(patches))))
    answers = [
        adapters.note(AdapterLoaded(rank, "load", patches[rank], None if patches[rank] else BAD)) for rank in order
    ]
    assert answers[:-1] == [None] * (len(patches) - 1)
    dropped = {message.patch for _, message in told if isinstance(message, DropAdapter)}
    if set(patches) in ({"p"}, {"q"}):
        assert answers[-1] == AdapterAdded("load", patches[0])
        assert not told
    else:
        assert isinstance(answers[-1], Failed)
        assert dropped == set(patches) - {""}
        assert len(told) == len(dropped) * len(patches)


def test_a_failed_load_drops_no_adapter_that_has_another_name() -> None:
    """Neither a configured one nor one loaded before."""
    adapters, told = make(2, ("m", "configured"))
    adapters.load(LOAD)
    for rank in range(2):
        adapters.note(AdapterLoaded(rank, "load", "before"))
    for number, patch in enumerate(("configured", "before", "new")):
        again = LoadAdapter(f"again-{number}", "m", "cap", "cap.safetensors")
        adapters.load(again)
        adapters.note(AdapterLoaded(0, again.request_id, patch))
        assert isinstance(adapters.note(AdapterLoaded(1, again.request_id, failure=BAD)), Failed)
    assert {message.patch for _, message in told if isinstance(message, DropAdapter)} == {"new"}


def test_a_dropped_adapter_is_dropped_by_all() -> None:
    adapters, told = make(3, ("m", "p"))
    adapters.drop(DropAdapter("m", "p"))
    assert told == [(rank, DropAdapter("m", "p")) for rank in range(3)]


def test_a_rank_that_dies_fails_what_it_was_loading_and_is_asked_no_more() -> None:
    adapters, told = make(2)
    adapters.load(LOAD)
    assert adapters.note(AdapterLoaded(0, "load", "p")) is None
    (failed,) = adapters.lose(1, "it died")
    assert isinstance(failed, Failed)
    assert failed.failure.kind == "engine_dead"
    assert told[2:] == [(0, DropAdapter("m", "p"))]
    adapters.load(LOAD)
    brought = SamplerDefaults(num_inference_steps=4)
    assert adapters.note(AdapterLoaded(0, "load", "p", defaults=brought)) == AdapterAdded("load", "p", brought)
    assert told[3:] == [(0, LOAD)]


def test_no_rank_is_up_to_load_an_adapter() -> None:
    """The first one that joins loads it: other engines may have it by then, and requests with it come here too."""
    adapters, told = make(1)
    assert adapters.lose(0, "it died") == []
    adapters.load(LOAD)
    assert not told
    adapters.join(0)
    assert told == [(0, LOAD)]
    assert adapters.note(AdapterLoaded(0, "load", "p")) == AdapterAdded("load", "p")


def test_a_rank_that_joins_loads_what_the_others_have() -> None:
    """By the patch that they have: its file may have changed. What is being loaded is loaded there too."""
    adapters, told = make(2, ("m", "configured"))
    for number, patch in enumerate(("p", "q")):
        adapters.load(LoadAdapter(str(number), "m", patch, patch))
        for rank in range(2):
            adapters.note(AdapterLoaded(rank, str(number), patch))
    adapters.drop(DropAdapter("m", "p"))
    adapters.lose(1, "it died")
    adapters.load(LOAD)
    told.clear()
    adapters.join(1)
    assert told == [(1, LoadAdapter("1", "m", "q", "q", "q")), (1, LOAD)]
    assert adapters.note(AdapterLoaded(1, "1", "q")) is None
    assert adapters.note(AdapterLoaded(0, "load", "r")) is None
    assert adapters.note(AdapterLoaded(1, "load", "r")) == AdapterAdded("load", "r")


def test_a_rank_that_joins_and_cannot_read_a_file_again_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    adapters, _ = make(1)
    adapters.load(LOAD)
    adapters.note(AdapterLoaded(0, "load", "p"))
    adapters.lose(0, "it died")
    adapters.join(0)
    assert adapters.note(AdapterLoaded(0, "load", failure=BAD)) is None
    assert "requests with an adapter will fail: no such file" in caplog.text


WORKFLOW = LoadWorkflow("load", replace(DIAMOND, name="diamond@1"), CLASSES)


def test_a_workflow_is_answered_when_all_ranks_have_its_classes_and_told_to_those_that_join() -> None:
    additions, told = make(2)
    additions.load(WORKFLOW)
    assert additions.note(WorkflowLoaded(1, "load")) is None
    assert additions.note(WorkflowLoaded(0, "load")) == WorkflowAdded("load", "diamond@1")
    additions.lose(1, "it died")
    additions.join(1)
    assert told == [(0, WORKFLOW), (1, WORKFLOW), (1, WORKFLOW)]
    assert additions.note(WorkflowLoaded(1, "load", BAD)) is None
    additions.drop(DropWorkflow("diamond@1"))
    assert told[3:] == [(0, DropWorkflow("diamond@1")), (1, DropWorkflow("diamond@1"))]
    additions.lose(0, "it died")
    additions.join(0)
    assert len(told) == 5


@pytest.mark.parametrize("dies", [False, True])
def test_a_workflow_that_one_rank_cannot_import_is_dropped_by_the_others(dies: bool) -> None:
    """Also one whose import ends workers: nothing that a text does is the server's fault."""
    additions, told = make(2)
    additions.load(WORKFLOW)
    assert additions.note(WorkflowLoaded(0, "load")) is None
    (failed,) = additions.lose(1, "exit code 3") if dies else [additions.note(WorkflowLoaded(1, "load", BAD))]
    assert isinstance(failed, Failed)
    assert failed.failure.kind == ("run_failed" if dies else "invalid_request")
    assert {message for _, message in told[2:]} == {DropWorkflow("diamond@1")}
    assert (0, DropWorkflow("diamond@1")) in told


def test_a_rank_that_an_import_has_ended_is_not_told_again_while_others_have_still_to_answer() -> None:
    additions, told = make(2)
    additions.load(WORKFLOW)
    assert additions.lose(1, "exit code 3") == []
    additions.join(1)
    assert told == [(0, WORKFLOW), (1, WORKFLOW)]
    assert isinstance(additions.note(WorkflowLoaded(0, "load")), Failed)
    assert told[2:] == [(rank, DropWorkflow("diamond@1")) for rank in range(2)]


@pytest.mark.parametrize("patch", ["", "p"])
def test_an_adapter_that_is_dropped_while_it_is_loaded_comes_back_on_no_rank(patch: str) -> None:
    """Also where its patch is known by one rank's answer alone. One that is loaded once more afterwards stays."""
    adapters, told = make(2)
    adapters.load(LoadAdapter("load", "m", "hat", "hat.safetensors", patch))
    adapters.note(AdapterLoaded(0, "load", "p"))
    adapters.drop(DropAdapter("m", "p"))
    again = LoadAdapter("again", "m", "hat", "hat.safetensors", "p")
    adapters.load(again)
    assert adapters.note(AdapterLoaded(1, "load", "p")) == AdapterAdded("load", "p")
    adapters.lose(1, "it died")
    told.clear()
    adapters.join(1)
    assert told == [], "the second load has failed with the rank"
    adapters.load(again)
    for rank in range(2):
        adapters.note(AdapterLoaded(rank, "again", "p"))
    adapters.lose(1, "it died")
    told.clear()
    adapters.join(1)
    assert told == [(1, again)]


def test_a_workflow_that_is_dropped_while_it_is_loaded_comes_back_on_no_rank() -> None:
    """A rank that joins before all have answered loads and drops it as they do."""
    additions, told = make(2)
    additions.lose(1, "it died")
    additions.load(WORKFLOW)
    additions.drop(WORKFLOW.removal)
    told.clear()
    additions.join(1)
    assert told == [(1, WORKFLOW), (1, WORKFLOW.removal)]
    told.clear()
    for rank in range(2):
        answer = additions.note(WorkflowLoaded(rank, "load"))
    assert answer == WorkflowAdded("load", "diamond@1")
    additions.lose(0, "it died")
    additions.join(0)
    assert not told
