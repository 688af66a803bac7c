"""What an answer says of approximate caching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from fake_engine import MODEL, REPORT

from core.model_choice import ModelChoice
from engine.client.edit_types import ImageOutput
from engine.client.recall.recalled import Recalled
from entrypoints.openai.answer.responses import images_response
from entrypoints.openai.body.submission import Submission
from entrypoints.openai.edit_request import build_call

FOUND = Recalled(can_recall=True, source="req_1", source_index=0, similarity=0.98, steps_skipped=3)


def answer(*recalled: Recalled | None) -> dict[str, Any]:
    """The `stencil` object of an answer with these pictures."""
    call = build_call("image_generation", Submission(values={"prompt": "a hat"}), ModelChoice(MODEL))
    images = [
        ImageOutput(
            image_index=number,
            partial_index=None,
            data=memoryview(b"x"),
            width=8,
            height=8,
            seed=number,
            report=replace(REPORT, recalled=each),
        )
        for number, each in enumerate(recalled)
    ]
    told: dict[str, Any] = msgspec.json.decode(b"".join(images_response(call, images)))["stencil"]
    return told


def test_who_does_not_ask_gets_the_answer_as_before() -> None:
    assert "approximate_caching" not in answer(None)


def test_the_answer_names_the_source_and_the_skipped_steps_of_each_picture() -> None:
    told = answer(FOUND)["approximate_caching"]
    assert {name: told[name] for name in ("source", "source_index", "similarity", "steps_skipped")} == {
        "source": "req_1",
        "source_index": 0,
        "similarity": 0.98,
        "steps_skipped": 3,
    }
    both = answer(FOUND, Recalled(can_recall=True, is_kept=True))
    assert [(each["source"], each["is_kept"], each["seed"]) for each in both["approximate_caching"]] == [
        ("req_1", False, 0),
        (None, True, 1),
    ], "seeds need not follow each other"
    assert both["notes"] == []


def test_a_note_says_where_it_has_no_effect() -> None:
    assert [note.partition(":")[0] for note in answer(Recalled())["notes"]] == ["approximate_caching had no effect"]
