"""Ledger: what happened to all requests. References: pictures of undisturbed edits, and the judgement of later ones.

A picture must be the reference's bit by bit, up to what adding floats in another order may do: batches of other sizes
round differently, so that a value lies one level beside now and then. Outside the mask nothing may differ at all.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from benchmarks.load.client import Answer
from benchmarks.load.pictures import Pixels
from benchmarks.soak.edits import LOSSY, Delivery, Edit, decode, template

ROUNDED_LEVELS, ROUNDED_SHARE = 2, 0.01
"""Most that rounding may change: levels of 255, and share of the picture's values."""
ROUNDED_LEVELS_LOSSY, ROUNDED_SHARE_LOSSY = 12, 0.05
"""The same after JPEG, which turns one level before into several after."""

Key = tuple[str, str, int]  # the edit's name; png, jpeg or partial; index of the image or of the partial image


Fault = Literal["lost", "wrong"]


class Ledger:
    """Counters by name, and incidents. folder: where incidents and the pictures of wrong answers are written."""

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.folder = folder
        self._started = time.monotonic()
        self._request_ids: set[str] = set()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._started

    @property
    def incidents_file(self) -> Path:
        return self.folder / "incidents.jsonl"

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def blame(self, fault: Fault, what: str, **details: object) -> None:
        """Count a lost or wrong request, and write it down."""
        self.counts[fault] += 1
        self.note(fault, what, **details)

    def note(self, kind: str, what: str, **details: object) -> None:
        """Write something down."""
        line = {"seconds": round(self.seconds, 1), "kind": kind, "what": what, **details}
        with self.incidents_file.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def keep_pictures(self, name: str, expected: Pixels, came: Pixels) -> list[str]:
        """Save both for a look at them; the files' names."""
        stem = f"{self.counts['wrong']:03d}-{name}"
        files = []
        for suffix, pixels in (("expected", expected), ("came", came)):
            files.append(f"{stem}-{suffix}.png")
            Image.fromarray(pixels).save(self.folder / files[-1])
        return files

    def saw_request_id(self, request_id: str) -> None:
        """Each answer has an id of its own; one that was there before belongs to another request."""
        if not request_id or request_id in self._request_ids:
            self.blame("wrong", "an answer without an id of its own", request_id=request_id)
        self._request_ids.add(request_id)


@dataclass(frozen=True)
class Difference:
    """levels: the largest, of 255. share: of the values that differ at all."""

    levels: int
    share: float

    @classmethod
    def between(cls, ours: Pixels, theirs: Pixels) -> Difference:
        """Of two pictures; one of another size differs as much as can be."""
        if ours.shape != theirs.shape:
            return cls(255, 1.0)
        difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16))
        return cls(int(difference.max()), float((difference > 0).mean()))

    def is_rounding(self, is_lossy: bool) -> bool:
        """Whether the order of additions may have done it."""
        if is_lossy:
            return self.levels <= ROUNDED_LEVELS_LOSSY and self.share <= ROUNDED_SHARE_LOSSY
        return self.levels <= ROUNDED_LEVELS and self.share <= ROUNDED_SHARE


class References:
    """learn what is right, then judge."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pictures: dict[Key, Pixels] = {}

    def learn(self, edit: Edit, delivery: Delivery, answer: Answer) -> None:
        """Take these pictures as what this edit looks like."""
        for key, picture in _finals_of(edit, delivery, answer):
            self._pictures.setdefault(key, _pixels(picture))
        if _has_telling_partials(edit, delivery):
            for index, picture in answer.partials:
                self._pictures.setdefault((edit.name, "partial", index), _pixels(picture))

    def forget(self, edit: Edit) -> None:
        """It is not asked for again."""
        for key in [key for key in self._pictures if key[0] == edit.name]:
            del self._pictures[key]

    def judge(self, edit: Edit, delivery: Delivery, answer: Answer) -> None:
        """Count a finished request as right, or blame it as lost or wrong."""
        problem = _incomplete(edit, delivery, answer)
        if problem:
            self._ledger.blame("lost", problem, edit=edit, delivery=delivery)
            return
        if answer.seeds != list(range(edit.seed, edit.seed + edit.n)):
            self._ledger.blame("wrong", f"the answer of seeds {answer.seeds}", edit=edit, delivery=delivery)
        for key, picture in _finals_of(edit, delivery, answer):
            self._judge_final(edit, delivery, key, _pixels(picture), answer)
        if _has_telling_partials(edit, delivery):
            self._judge_partials(edit, delivery, answer)

    def _judge_final(self, edit: Edit, delivery: Delivery, key: Key, came: Pixels, answer: Answer) -> None:
        if delivery.output_format not in LOSSY and not _is_outside_untouched(edit, came):
            self._ledger.blame("wrong", "changed outside its mask", edit=edit, delivery=delivery, key=key)
        if key in self._pictures:
            self._compare(edit, delivery, key, came, answer)

    def _judge_partials(self, edit: Edit, delivery: Delivery, answer: Answer) -> None:
        for index, picture in answer.partials:
            key = (edit.name, "partial", index)
            if key in self._pictures:
                self._compare(edit, delivery, key, _pixels(picture), answer)

    def _compare(self, edit: Edit, delivery: Delivery, key: Key, came: Pixels, answer: Answer) -> None:
        self._ledger.count("compared")
        expected, is_lossy = self._pictures[key], delivery.output_format in LOSSY
        difference = Difference.between(came, expected)
        if not difference.levels:
            return
        details = {"edit": edit, "delivery": delivery, "key": key, "difference": difference, "facts": answer.facts}
        if difference.is_rounding(is_lossy):
            self._ledger.count("rounded")
            self._ledger.note("rounded", "not bit-identical", **details)
        else:
            files = self._ledger.keep_pictures("-".join(map(str, key)), expected, came)
            self._ledger.blame("wrong", "another picture", files=files, **details)


def _pixels(picture: str) -> Pixels:
    """Of a file in base64."""
    return decode(base64.b64decode(picture, validate=True))


def _incomplete(edit: Edit, delivery: Delivery, answer: Answer) -> str:
    """What is missing of an answer; "" for a whole one."""
    if len(answer.pictures) != edit.n:
        return f"{len(answer.pictures)} of {edit.n} pictures"
    indices = [index for index, _ in answer.partials]
    if delivery.way == "stream" and sorted(indices) != sorted([*range(edit.num_previews)] * edit.n):
        return f"partial images {indices} of {edit.num_previews} for each of {edit.n}"
    if edit.n == 1 and indices != sorted(indices):
        return f"partial images in the order {indices}"
    return ""


def _finals_of(edit: Edit, delivery: Delivery, answer: Answer) -> list[tuple[Key, str]]:
    kind = delivery.output_format if delivery.output_format in LOSSY else "png"
    return [((edit.name, kind, index), picture) for index, picture in enumerate(answer.pictures)]


def _has_telling_partials(edit: Edit, delivery: Delivery) -> bool:
    """Whether its partial images are comparable; those of several images come in any order."""
    return delivery.way == "stream" and edit.n == 1 and delivery.output_format not in LOSSY


def _is_outside_untouched(edit: Edit, came: Pixels) -> bool:
    inside = edit.inside
    if edit.template is None or inside is None or "size" in edit.fields:
        return True
    return came.shape == template(edit.template).shape and np.array_equal(
        came[~inside], template(edit.template)[~inside]
    )
