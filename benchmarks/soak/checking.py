"""Ledger: counts of what happened to all requests. References: pictures of undisturbed edits.

A picture must equal its reference except for rounding: batches of other sizes add floats in another order, which moves
a few values by one level. Outside the mask nothing may differ.
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
"""Most that rounding may change: levels of 255, and share of the picture's values that differ."""
ROUNDED_LEVELS_LOSSY, ROUNDED_SHARE_LOSSY = 12, 0.05
"""The same after JPEG, which turns one level into several."""

Key = tuple[str, str, int]  # the edit's name; png, jpeg or partial; index of the image or of the partial image


Fault = Literal["lost", "wrong"]


class Ledger:
    """Counters by name, and incidents. folder: for incidents and the pictures of wrong answers."""

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.folder = folder
        self._started = time.monotonic()
        self._request_ids: set[str] = set()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    @property
    def incidents_file(self) -> Path:
        return self.folder / "incidents.jsonl"

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def blame(self, fault: Fault, what: str, **details: object) -> None:
        """Count a lost or wrong request, and note it as an incident."""
        self.counts[fault] += 1
        self.note(fault, what, **details)

    def note(self, kind: str, what: str, **details: object) -> None:
        """Add a line to the incidents."""
        line = {"seconds": round(self.seconds, 1), "kind": kind, "what": what, **details}
        with self.incidents_file.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def keep_pictures(self, name: str, expected: Pixels, came: Pixels) -> list[str]:
        """Save both pictures; returns the files' names."""
        stem = f"{self.counts['wrong']:03d}-{name}"
        files = []
        for suffix, pixels in (("expected", expected), ("came", came)):
            files.append(f"{stem}-{suffix}.png")
            Image.fromarray(pixels).save(self.folder / files[-1])
        return files

    def saw_request_id(self, request_id: str) -> None:
        """An answer must have an id that no other answer has."""
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
        """Of two pictures; those of different sizes differ completely."""
        if ours.shape != theirs.shape:
            return cls(255, 1.0)
        difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16))
        return cls(int(difference.max()), float((difference > 0).mean()))

    def is_rounding(self, is_lossy: bool) -> bool:
        """Whether the order of additions can explain it."""
        if is_lossy:
            return self.levels <= ROUNDED_LEVELS_LOSSY and self.share <= ROUNDED_SHARE_LOSSY
        return self.levels <= ROUNDED_LEVELS and self.share <= ROUNDED_SHARE


class References:
    """Pictures by edit, learnt from undisturbed answers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._pictures: dict[Key, Pixels] = {}

    def learn(self, edit: Edit, delivery: Delivery, answer: Answer) -> None:
        """Take these pictures as the edit's reference, where it has none."""
        for key, picture in _finals_of(edit, delivery, answer):
            self._pictures.setdefault(key, _pixels(picture))
        if _has_telling_partials(edit, delivery):
            for index, picture in answer.partials:
                self._pictures.setdefault((edit.name, "partial", index), _pixels(picture))

    def forget(self, edit: Edit) -> None:
        """Free its references."""
        for key in [key for key in self._pictures if key[0] == edit.name]:
            del self._pictures[key]

    def judge(self, edit: Edit, delivery: Delivery, answer: Answer) -> None:
        """Count a finished request as right, lost or wrong."""
        problem = _incomplete(edit, delivery, answer)
        if problem:
            self.ledger.blame("lost", problem, edit=edit, delivery=delivery)
            return
        if answer.seeds != list(range(edit.seed, edit.seed + edit.n)):
            self.ledger.blame("wrong", f"the answer of seeds {answer.seeds}", edit=edit, delivery=delivery)
        for key, picture in _finals_of(edit, delivery, answer):
            self._judge_final(edit, delivery, key, _pixels(picture), answer)
        if _has_telling_partials(edit, delivery):
            self._judge_partials(edit, delivery, answer)

    def _judge_final(self, edit: Edit, delivery: Delivery, key: Key, came: Pixels, answer: Answer) -> None:
        if delivery.output_format not in LOSSY and not _is_outside_untouched(edit, came):
            self.ledger.blame("wrong", "changed outside its mask", edit=edit, delivery=delivery, key=key)
        if key in self._pictures:
            self._compare(edit, delivery, key, came, answer)

    def _judge_partials(self, edit: Edit, delivery: Delivery, answer: Answer) -> None:
        for index, picture in answer.partials:
            key = (edit.name, "partial", index)
            if key in self._pictures:
                self._compare(edit, delivery, key, _pixels(picture), answer)

    def _compare(self, edit: Edit, delivery: Delivery, key: Key, came: Pixels, answer: Answer) -> None:
        self.ledger.count("compared")
        expected, is_lossy = self._pictures[key], delivery.output_format in LOSSY
        difference = Difference.between(came, expected)
        if not difference.levels:
            return
        details = {"edit": edit, "delivery": delivery, "key": key, "difference": difference, "facts": answer.facts}
        if difference.is_rounding(is_lossy):
            self.ledger.count("rounded")
            self.ledger.note("rounded", "not bit-identical", **details)
        else:
            files = self.ledger.keep_pictures("-".join(map(str, key)), expected, came)
            self.ledger.blame("wrong", "another picture", files=files, **details)


def _pixels(picture: str) -> Pixels:
    """Of a file in base64."""
    return decode(base64.b64decode(picture, validate=True))


def _incomplete(edit: Edit, delivery: Delivery, answer: Answer) -> str:
    """What an answer lacks; "" for a complete one."""
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
    """Whether its partial images can be compared; those of several images come in any order."""
    return delivery.way == "stream" and edit.n == 1 and delivery.output_format not in LOSSY


def _is_outside_untouched(edit: Edit, came: Pixels) -> bool:
    inside = edit.inside
    if edit.template is None or inside is None or "size" in edit.fields:
        return True
    return came.shape == template(edit.template).shape and np.array_equal(
        came[~inside], template(edit.template)[~inside]
    )
