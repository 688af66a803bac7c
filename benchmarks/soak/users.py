"""The users: coroutines that each repeat one kind of action, with pauses, until `stopping` is set."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from benchmarks.load.client import Answer, Refusal
from benchmarks.soak.checking import Ledger, References
from benchmarks.soak.edits import (
    HASTY_SECONDS,
    NUM_TEMPLATES,
    PLAIN,
    Delivery,
    Edit,
    OutputFormat,
    Way,
    catalogue,
    fresh,
    template_file,
)
from benchmarks.soak.misbehaviour import BAD_REQUESTS, hang_up
from benchmarks.soak.sending import Sender

PAUSE_SECONDS = 0.6  # mean of a user's pauses
JPEG_EVERY = 4  # one edit of the catalogue in this many is also requested as JPEG
LATE_CODES = ("deadline_exceeded", "server_is_overloaded")
"""Error codes of an edit whose timeout passes, or is predicted to."""
AFTER_BEGINNING = ("server_is_overloaded", "model_unavailable")
"""Error codes of an edit whose stream has begun: one of a higher class displaces it, or its weights cannot be read."""
WORKS = ("/health", "/metrics", "/v1/engine/stats", "/v1/models")


class Crowd:
    """State that all users share. stopping: ends them when set."""

    def __init__(
        self, url: str, sender: Sender, references: References, ledger: Ledger, seed: int, models: Sequence[str]
    ) -> None:
        """models: that edits are of, by name; "" for the server's first."""
        self.url = url
        self.edits = catalogue(models)
        self.sender = sender
        self.references = references
        self.ledger = ledger
        self.stopping = asyncio.Event()
        self.random = random.Random(seed)
        self._template_ids: dict[int, str] = {}  # template number -> id
        self._num_fresh = 0

    async def learn(self) -> None:
        """Take the references of all edits, one after the other."""
        for number, edit in enumerate(self.edits):
            way: Way = "stream" if edit.partial_images else "form"
            for delivery in (replace(PLAIN, way=way), *([replace(PLAIN, output_format="jpeg")] * has_jpeg(number))):
                answer = await self.sender.send(edit, delivery)
                self.references.learn(edit, delivery, answer)
                self.references.judge(edit, delivery, answer)

    async def run(self, act: Callable[[], Awaitable[None]], pause: float = PAUSE_SECONDS) -> None:
        """Repeat an action. pause: mean seconds between two."""
        while not self.stopping.is_set():
            await act()
            await self._pause(self.random.expovariate(1 / pause))

    async def ask_again(self) -> None:
        """Request an edit of the catalogue, sent in any way."""
        number = self.random.randrange(len(self.edits))
        await self.ask(self.edits[number], self._any_delivery(number))

    async def ask_fresh(self) -> None:
        """Request an edit of a new template, twice."""
        edit = fresh(self._num_fresh)
        self._num_fresh += 1
        for _ in range(2):
            answer = await self.ask(edit, PLAIN)
            if answer is not None:
                self.references.learn(edit, PLAIN, answer)
        self.references.forget(edit)

    async def ask_hastily(self) -> None:
        """Request an edit with a very short timeout: a picture, 503 or 504."""
        edit = self.random.choice(self.edits)
        await self.ask(edit, replace(PLAIN, timeout=HASTY_SECONDS))

    async def look_around(self) -> None:
        """Read status pages, as monitoring does."""
        path = self.random.choice(WORKS)
        status = await self._plainly("GET", path)
        if status not in (200, None):
            self.ledger.blame("lost", f"status {status} for {path}")

    async def misbehave(self) -> None:
        """Send what must be refused."""
        bad = self.random.choice(BAD_REQUESTS)
        status = await self._plainly(bad.method, bad.path, **bad.call)
        if status is not None:
            self.ledger.count("bad_requests")
            if not 400 <= status < 500:
                self.ledger.blame("wrong", f"status {status} for a bad request", request=bad.name)

    async def walk_away(self) -> None:
        """Disconnect early."""
        self.ledger.count("hang_ups")
        await hang_up(self.url, self.random)

    async def keep_templates(self) -> None:
        """Register a template, read it, or delete it."""
        number = self.random.randrange(NUM_TEMPLATES)
        template_id = self._template_ids.get(number)
        if template_id is None:
            await self._register(number)
        elif self.random.random() < 0.3:
            del self._template_ids[number]
            await self._expect_template("DELETE", template_id)
        else:
            await self._expect_template("GET", template_id)

    async def ask(self, edit: Edit, delivery: Delivery) -> Answer | None:
        """Send an edit and judge its answer; None where there is none."""
        template_id = None
        if delivery.by_id and edit.template is not None and not edit.model:  # templates are of the first model
            template_id = self._template_ids.get(edit.template)
        try:
            answer = await self.sender.send(edit, delivery, template_id)
        except Refusal as error:
            self._take_refusal(edit, delivery, error)
            return None
        self.ledger.count("pictures", len(answer.pictures))
        self.ledger.count(f"cache_{answer.facts.get('cache')}")
        self.references.judge(edit, delivery, answer)
        return answer

    def _take_refusal(self, edit: Edit, delivery: Delivery, error: Refusal) -> None:
        if delivery.timeout is not None and error.code in LATE_CODES:
            self.ledger.count("timeouts")
        elif error.code == "template_not_found":
            self.ledger.count("templates_gone")
        elif error.status == 200 and error.code in AFTER_BEGINNING:
            self.ledger.count("refused")
        elif error.code == "model_unavailable" and delivery.is_hasty:
            self.ledger.count("refused")  # others come again when `retry-after` says
        elif error.status not in (0, 500, 502):  # the sender has counted those
            self.ledger.blame("lost", str(error), edit=edit, delivery=delivery)

    def _any_delivery(self, number: int) -> Delivery:
        pick = self.random
        is_jpeg = has_jpeg(number) and pick.random() < 0.3
        output_format: OutputFormat = "jpeg" if is_jpeg else pick.choice(("png", "png", "webp"))
        return Delivery(
            way=pick.choice(("form", "stream", "json")),
            by_id=pick.random() < 0.4,
            white_mask=pick.random() < 0.5,
            output_format=output_format,
            priority=pick.choice((0, 0, 0, -3, 7)),
            timeout=pick.choice((None, None, 200.0)),
        )

    async def _plainly(self, method: str, path: str, **call: object) -> int | None:
        """The status of a call; None for no answer, which the sender has counted."""
        try:
            return (await self.sender.call(method, path, **call)).status_code
        except Refusal:
            return None

    async def _register(self, number: int) -> None:
        files = {"image": ("image.png", template_file(number), "image/png")}
        try:
            response = await self.sender.call("POST", "/v1/templates", files=files)
        except Refusal:
            return
        if response.status_code != 200:
            self.ledger.blame("lost", f"registration: {response.status_code} {response.text[:200]}")
            return
        self._template_ids[number] = response.json()["id"]

    async def _expect_template(self, method: str, template_id: str) -> None:
        status = await self._plainly(method, f"/v1/templates/{template_id}")
        if status == 404:  # evicted for another template
            self.ledger.count("templates_gone")
            self._template_ids = {n: known for n, known in self._template_ids.items() if known != template_id}
        elif status not in (200, None):
            self.ledger.blame("lost", f"status {status} for {method} of a template")

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()


def has_jpeg(number: int) -> bool:
    """Whether the catalogue's edit of this number is also asked for as JPEG."""
    return number % JPEG_EVERY == 0
