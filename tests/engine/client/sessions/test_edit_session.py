"""What admission learns from an edit's duration: only the server's own time, not that of a slow client or a dead
engine.

Session, admission and router are real; the engine's process, the image processors and the clock are replaced.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import msgspec
import pytest
from fakes import MODEL
from load_reports import COSTS, make_report

from core.config import EngineConfig, StencilConfig
from core.costs import prediction_margin
from core.costs.image_costs import ImageWork
from core.costs.prediction_margin import START_RATIOS
from core.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError, OverloadedError, StencilError
from core.failure import NEVER_BEGUN, Failure
from core.handles import ArrayRef
from core.ipc.shared_array import Arena
from core.lora import Lora
from core.messages.engine import Aborted, EngineRequest, Failed, Finished
from core.messages.image_processor import CanvasScale, ComposedImage, ComposeImage, PreparedImages, PrepareImages
from core.model_choice import ModelChoice
from core.routing.request_shape import Loop, RequestShape
from core.sampling_params import SamplingParams
from core.scheduling.requests.deadlines import TOO_LATE
from engine.client.admission import admission_ticket
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.services import Services
from engine.client.sessions import edit_delivery, edit_images, edit_preparation, edit_session, session
from engine.client.sessions.edit_session import EditSession
from engine.client.sessions.upload_place import UploadPlace
from engine.client.templates.result_templates import ResultTemplates
from engine.client.upload import BytesUpload
from engine.images.image_jobs import Caller, Room
from engine.router import engines, router
from engine.router.engine_client import Waiter
from engine.router.router import Router
from entrypoints.openai.answer.errors import describe
from entrypoints.openai.body.upload_slots import UploadSlots

COMPOSE_SECONDS = 0.5
CHOICE = ModelChoice(MODEL)


class Replica:
    """Stands for an EngineReplica."""

    def __init__(self, config: EngineConfig, arena: Arena, watcher: Router) -> None:
        self.error: StencilError | None = None
        self.rank, self.is_alive, self.model_names = config.data_parallel_rank, True, (MODEL.name,)
        self.is_draining, self.is_leaving, self.link = False, False, None
        self.sent: list[tuple[EngineRequest, Waiter]] = []
        self.aborted: tuple[str, ...] = ()

    def submit(self, request: EngineRequest, waiter: Waiter) -> None:
        self.sent.append((request, waiter))

    def finish_first(self, way: float = 0.0) -> None:
        """way: seconds that the message has taken."""
        request, waiter = self.sent.pop(0)
        stages, made = ("queue", "encode", "prime", "denoise", "decode"), edit_images.time.monotonic() - way
        waiter(Finished(request.request_id, dict.fromkeys(stages, 0.0), 3, False, "off", None, False, 0, made))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        self.aborted += request_ids

    def end_aborted(self) -> list[str]:
        ended = [sent for sent in self.sent if sent[0].request_id in self.aborted]
        self.sent = [sent for sent in self.sent if sent not in ended]
        for request, waiter in ended:
            waiter(Aborted(request_id=request.request_id))
        return [request.request_id for request, _ in ended]

    def fail_first(self, failure: Failure) -> None:
        request, waiter = self.sent.pop(0)
        waiter(Failed(request.request_id, failure))


class Images:
    """Image processors that take no time but that of `advance`, and report that they took COMPOSE_SECONDS."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance  # called while a file is made
        self.gate = asyncio.Event()  # preparations wait for it
        self.gate.set()
        self.compose_gate = asyncio.Event()  # files wait for it
        self.compose_gate.set()
        self.error: StencilError | None = None  # of files
        self.costs = SimpleNamespace(predict=lambda work: 0.0 if work.kind == "prepare" else COMPOSE_SECONDS)

    async def prepare(self, job: PrepareImages, caller: Caller) -> PreparedImages:
        await self.gate.wait()
        pixels, tokens = ArrayRef(0, 0, (256, 256, 3), "uint8"), ArrayRef(0, 0, (256,), "int32")
        return PreparedImages(0, 256, 256, 256, 256, pixels, ArrayRef(0, 0, (256, 256), "uint8"), tokens, "c", True)

    async def compose(self, job: ComposeImage, work: ImageWork, caller: Caller, room: Room) -> ComposedImage:
        await self.compose_gate.wait()
        if self.error is not None:
            raise self.error
        out = room.take()
        self._advance()
        return ComposedImage(0, ArrayRef(out.arena, out.offset, (1,), "uint8"), 256, 256)

    def forget(self, edit_id: str) -> None:
        pass


class Server:
    """An AsyncEngine with two engines and an objective."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        engine = EngineConfig(data_parallel_size=2)
        config = StencilConfig(engine=engine, slo_seconds=10.0, arena_bytes=1024**3, max_queue=4)
        self.engine = AsyncEngine(config)
        self.engine._served.set({"m": MODEL}, engine)
        services = Services.create(
            config, self.engine.metrics, self.engine._served, self.engine._sessions, self.engine.templates
        )
        self.compose_seconds = 0.0
        self.images = Images(self._compose)
        self.services = replace(services, images=self.images)  # type: ignore[arg-type]
        self.results = ResultTemplates(self.services)
        self.engine.services, self.engine._results = self.services, self.results
        self.admission, self.router = services.admission, services.router
        self.router.engines.models = {"m": MODEL}
        for rank in range(2):
            self.router.engines.on_report(rank, make_report(costs=COSTS), None)
        self.engine.metrics.expect({"m": MODEL}, 2)

    async def begin(
        self, *, n: int = 1, seconds: float | None = None, name: str = "edit", owner: str = "", priority: int = 0
    ) -> EditSession:
        sampling = SamplingParams(n=n, timeout=seconds, priority=priority)
        edit = EditInput(prompt="a cat", sampling=sampling, owner=owner)
        session = EditSession(self.services, self.results, name, edit, CHOICE)
        await session.begin()
        return session

    def _compose(self) -> None:
        self.clock.now += self.compose_seconds

    def learnt(self) -> list[float]:
        """Ratios that the prediction margin has observed."""
        ratios = list(self.admission._margin._ratios)
        return ratios[len(START_RATIOS) :]

    @property
    def replicas(self) -> list[Replica]:
        return [replica for replica in self.router.engines.replicas.values() if isinstance(replica, Replica)]

    @property
    def busy(self) -> Replica:
        (replica,) = [replica for replica in self.replicas if replica.sent]
        return replica

    def end_aborted(self) -> list[str]:
        """Let the engines report the end of the requests that they were asked to abort; returns these, sorted."""
        return sorted(name for replica in self.replicas for name in replica.end_aborted())


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    clock = SimpleNamespace(now=1e9)  # no timeout passes on the event loop's own
    for module in (
        session,
        edit_session,
        admission_ticket,
        edit_preparation,
        edit_delivery,
        edit_images,
        engines,
        router,
    ):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(engines, "EngineReplica", Replica)
    served = Server(clock)
    yield served
    served.services.arena.close()


async def take_all(session: EditSession, server: Server, reader_seconds: float) -> list[ImageOutput]:
    """Read every picture, with this many seconds for each."""
    images = []
    async for image in session.outputs():
        images.append(image)
        server.clock.now += reader_seconds
    return images


async def test_a_slow_client_does_not_count_as_server_time(server: Server) -> None:
    session = await server.begin(n=2)
    outlook = session._ticket._prediction
    assert outlook is not None
    replicas = [replica for replica in server.router.engines.replicas.values() if isinstance(replica, Replica)]
    for replica in replicas:
        server.clock.now += 2.0
        replica.finish_first()
    await take_all(session, server, reader_seconds=60.0)
    assert server.learnt() == [pytest.approx((4.0 + COMPOSE_SECONDS) / outlook[1])]
    rendered = server.engine.metrics.exposition().decode()
    assert 'stencil:request_slo_total{result="met"} 2.0' in rendered, "both were done within 10 s"


async def test_what_is_finished_is_delivered_when_a_shutdown_is_over(server: Server) -> None:
    """A caller that takes its time to read holds no shutdown up, and may yet have what was made."""
    session = await server.begin(n=3)
    outputs = session.outputs()
    server.clock.now += 2.0
    first, second = server.replicas
    first.finish_first()
    await anext(outputs)
    assert not session.waits_for_caller, "others are computed"
    second.finish_first()
    await server.services.sessions.drain(0.0)
    assert isinstance(await anext(outputs), ImageOutput)
    with pytest.raises(OverloadedError, match="shut down"):
        await anext(outputs)


async def test_an_edit_waits_for_its_caller_when_all_is_computed(server: Server) -> None:
    session = await server.begin(n=2)
    outputs = session.outputs()
    server.clock.now += 2.0
    for replica in server.replicas:
        replica.finish_first()
    assert session.waits_for_caller, "for it to ask"
    server.images.compose_gate.clear()
    asking = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0.01)
    assert not session.waits_for_caller, "its file is made"
    server.images.compose_gate.set()
    await asking
    assert session.waits_for_caller


async def test_files_that_a_shutdown_leaves_no_time_for_are_refused(server: Server) -> None:
    session = await server.begin()
    server.clock.now += 2.0
    server.busy.finish_first()
    await server.services.sessions.drain(0.0)
    server.images.error = EngineDeadError("the image processors have ended")
    with pytest.raises(OverloadedError, match="shut down"):
        await anext(session.outputs())


async def test_workers_are_to_finish_so_early_that_files_are_delivered_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most files take as long as predicted; then most take longer, and at last so long that no time would be left. All
    pictures are on their way for a while.
    """
    monkeypatch.setattr(prediction_margin, "FORGET_SECONDS", inf)  # the edits come minutes apart
    delays = [0.0, 90.0, 90.0, *[0.3] * 24, *[90.0] * 32]
    left, until_objective = list[float](), list[float]()
    for delay in delays:
        server.compose_seconds = COMPOSE_SECONDS + delay
        arrival = server.clock.now
        edit = await server.begin(seconds=100.0)
        (request, _), *_ = server.busy.sent
        assert request.deadline is not None
        assert request.objective is not None
        left.append(request.deadline - arrival)
        until_objective.append(request.objective - arrival)
        server.clock.now += 5.0
        server.busy.finish_first(way=0.1)
        await take_all(edit, server, reader_seconds=50.0)
    assert left[:4] == pytest.approx([100.0 - COMPOSE_SECONDS] * 4), "some that are late change nothing"
    assert left[27] == pytest.approx(100.0 - COMPOSE_SECONDS - 0.4)
    assert left[-1] == pytest.approx(100.0 - COMPOSE_SECONDS - 25.0)
    assert until_objective[27] == pytest.approx(10.0 - COMPOSE_SECONDS - 0.4)
    assert until_objective[-1] == pytest.approx(10.0 - COMPOSE_SECONDS - 2.5)


@pytest.mark.parametrize("code", [None, NEVER_BEGUN])
async def test_nothing_is_learnt_from_an_edit_whose_engine_died(server: Server, code: str | None) -> None:
    session = await server.begin()
    server.clock.now += 60.0
    server.busy.fail_first(Failure("engine_dead", "gone", code=code))
    server.clock.now += 2.0
    server.busy.finish_first()
    assert len(await take_all(session, server, 0.0)) == 1
    assert server.learnt() == []


async def test_nothing_is_learnt_from_a_late_edit_whose_engine_died(server: Server) -> None:
    session = await server.begin()
    server.clock.now += 60.0
    server.busy.fail_first(Failure("engine_dead", "gone"))
    server.busy.fail_first(Failure("overloaded", "The server fell behind."))
    with pytest.raises(StencilError, match="fell behind"):
        await take_all(session, server, 0.0)
    assert server.learnt() == []


async def test_nothing_is_learnt_from_a_failed_edit_that_was_admitted_despite_doubt(server: Server) -> None:
    """Other such edits were refused, so it is unknown whether they would have been faster than predicted."""
    first = await server.begin()
    outlook = server.router.outlook(_shape_of(first))
    assert outlook is not None
    server.clock.now += 1.0
    server.busy.finish_first()
    first.give_up()
    for rank in range(2):
        server.router.engines.on_report(rank, make_report(num_received=1), None)
    session = await server.begin(seconds=0.8 * (outlook.alone + COMPOSE_SECONDS))
    server.busy.fail_first(TOO_LATE)
    with pytest.raises(DeadlineExceededError):
        await take_all(session, server, 0.0)
    assert server.learnt() == []


@pytest.mark.parametrize("adapters", [(), ("hat",), ("hat", "shirt")])
async def test_a_picture_that_is_none_is_the_adapters_fault_if_there_are_any(
    server: Server, adapters: tuple[str, ...]
) -> None:
    choice = ModelChoice(MODEL, tuple(map(Lora, adapters)))
    edit = EditInput(prompt="a cat")
    session = EditSession(server.services, server.results, "edit", edit, choice)
    await session.begin()
    server.busy.fail_first(Failure("not_finite", "the picture's numbers are not finite"))
    with pytest.raises(StencilError) as caught:
        await take_all(session, server, 0.0)
    reply = describe(caught.value)
    if adapters:
        assert (reply.status, reply.code, reply.param) == (422, "adapter_not_finite", "lora")
        assert all(repr(name) in reply.message for name in adapters)
    else:
        assert (reply.status, reply.code) == (500, "internal_error")


def _shape_of(session: EditSession) -> RequestShape:
    (picture,) = session._images._by_id.values()
    return RequestShape.of_request(picture.request, MODEL)


async def test_more_images_than_the_whole_queue_are_an_invalid_request(server: Server) -> None:
    edit = EditInput(prompt="a cat", sampling=SamplingParams(n=5))
    with pytest.raises(InvalidRequestError, match=r"at most 4, .*--max-queue") as caught:
        async with server.engine.edit("edit", edit, CHOICE):
            pass
    assert caught.value.param == "n"


async def test_an_adapter_that_is_unloaded_between_choice_and_session_is_refused(server: Server) -> None:
    """Its weights may be freed by then, also if another model serves the same file."""
    hat = msgspec.structs.replace(MODEL, name="hat", parent="m", patch="h")
    server.engine._served.add(hat)
    server.engine._served.add(msgspec.structs.replace(hat, name="other hat", parent="other"))
    choice = server.engine.choose_model("hat")
    server.engine._served.remove("hat")
    with pytest.raises(InvalidRequestError, match="unloaded") as caught:
        async with server.engine.edit("edit", EditInput(prompt="a cat"), choice):
            pass
    assert caught.value.param == "lora"
    assert not list(server.engine._sessions)


async def test_an_edit_that_was_dropped_late_counts_as_late(server: Server) -> None:
    session = await server.begin()
    outlook = session._ticket._prediction
    assert outlook is not None
    server.clock.now += 9.0
    server.busy.fail_first(Failure("overloaded", "The server fell behind."))
    with pytest.raises(StencilError, match="fell behind"):
        await take_all(session, server, 0.0)
    assert server.learnt() == [pytest.approx(10.0 / outlook[1])]
    await asyncio.wait_for(session.close(), 5)


# ------------------------------------------------------------------------------------------- places in the queue


def make_input(n: int = 1, priority: int = 0, owner: str = "") -> EditInput:
    return EditInput(prompt="a cat", sampling=SamplingParams(n=n, priority=priority), owner=owner)


def uploads(count: int, owner: str = "") -> list[UploadPlace]:
    return [UploadPlace(owner) for _ in range(count)]


@pytest.fixture
async def tracking(server: Server) -> AsyncIterator[Server]:
    """A server that cleans up after sessions as `AsyncEngine.edit` does."""
    async with asyncio.TaskGroup() as tasks:
        server.engine._sessions.start(tasks)
        yield server
        server.end_aborted()
    assert server.engine.num_admitted == 0
    assert server.services.arena.used_bytes == 0
    server.services.arena.check_integrity()


async def test_a_full_queue_reads_no_more_uploads_than_would_make_room_for_a_higher_class(tracking: Server) -> None:
    """Waiting requests of lower classes count as room only once a request of a higher class has come."""
    engine = tracking.engine
    async with engine.edit("normal", make_input(n=2), CHOICE):
        engine.check_upload("", uploads(1))
        with pytest.raises(OverloadedError, match="queue is full"):
            engine.check_upload("", uploads(2))
        async with engine.edit("urgent", make_input(priority=-1), CHOICE):
            engine.check_upload("", uploads(2))
            with pytest.raises(OverloadedError, match="queue is full"):
                engine.check_upload("", uploads(3))
    assert 'reason="queue_full"} 2.0' in engine.metrics.exposition().decode()


async def test_waiting_edits_of_a_lower_class_leave_a_full_queue_for_a_higher_one(tracking: Server) -> None:
    engine = tracking.engine
    async with engine.edit("low", make_input(n=4, priority=1), CHOICE) as outputs:
        with pytest.raises(OverloadedError, match="queue is full"):
            async with engine.edit("as low", make_input(priority=1), CHOICE):
                pass
        async with engine.edit("high", make_input(n=2), CHOICE):
            assert engine.num_admitted == 2
            assert tracking.end_aborted() == [f"low-{index}" for index in range(4)]
            with pytest.raises(OverloadedError, match="has taken this one's place"):
                await anext(outputs)


async def test_the_latest_waiting_edit_of_a_key_that_fills_the_queue_leaves_to_another_key(tracking: Server) -> None:
    engine = tracking.engine
    async with AsyncExitStack() as edits:
        floods = []
        for index in range(4):
            tracking.clock.now += 1.0
            floods.append(await edits.enter_async_context(engine.edit(f"h{index}", make_input(owner="heavy"), CHOICE)))
        async with engine.edit("light", make_input(owner="light"), CHOICE):
            assert engine.num_admitted == 4
            assert tracking.end_aborted() == ["h3-0"]
            with pytest.raises(OverloadedError, match="another API key, which holds fewer places") as caught:
                await anext(floods[3])
            assert caught.value.retry_after >= 1.0
            for owner in ("heavy", "light"):
                with pytest.raises(OverloadedError, match="queue is full"):
                    async with engine.edit("too many", make_input(owner=owner, n=2), CHOICE):
                        pass
            assert tracking.end_aborted() == []
    assert 'reason="displaced"} 1.0' in engine.metrics.exposition().decode()


async def test_an_edit_waits_for_a_bounded_time_for_an_adapter(
    tracking: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system that it is on may hang. All of its images end with one error."""
    monkeypatch.setattr(edit_session, "MOST_LOAD_SECONDS", 0.01)
    tracking.engine._served.loading.begin("hat", "m")
    late = replace(CHOICE, loras=(Lora("hat"),), steps_without=3)
    async with tracking.engine.edit("late", make_input(n=2), late) as outputs:
        await asyncio.sleep(0.05)
        assert tracking.end_aborted() == ["late-0", "late-1"]
        with pytest.raises(DeadlineExceededError, match=r"not loaded within 0\.01 s"):
            await anext(outputs)


async def test_an_edit_that_is_displaced_while_it_is_prepared_ends_at_once(tracking: Server) -> None:
    """Image work that waits for nothing would pile up beyond the queue's places."""
    engine, gate = tracking.engine, tracking.images.gate
    gate.clear()

    async def submit(owner: str, n: int) -> None:
        async with engine.edit(owner, replace(make_input(n=n, owner=owner), image=BytesUpload(b"a picture")), CHOICE):
            pass

    heavy = [asyncio.create_task(submit("heavy", 2)) for _ in range(2)]
    while engine.num_admitted < 4:
        await asyncio.sleep(0)
    light = asyncio.create_task(submit("light", 1))
    done, waiting = await asyncio.wait(heavy, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert [type(task.exception()) for task in done] == [OverloadedError]
    assert len(waiting) == 1
    gate.set()
    await asyncio.gather(*waiting, light)
    assert 'reason="displaced"} 1.0' in engine.metrics.exposition().decode()


async def test_an_edit_that_a_worker_has_begun_stays_whoever_comes(tracking: Server) -> None:
    engine = tracking.engine
    async with (
        engine.edit("heavy", make_input(n=2, owner="heavy"), CHOICE),
        engine.edit("late", make_input(n=2, owner="heavy"), CHOICE),
    ):
        for request_id in ("heavy-0", "late-0"):
            tracking.router._placements[request_id].has_begun = True
        with pytest.raises(OverloadedError, match="queue is full"):
            async with engine.edit("light", make_input(owner="light"), CHOICE):
                pass
        with pytest.raises(OverloadedError, match="queue is full"):
            engine.check_upload("light", [])


async def test_a_full_queue_reads_a_body_of_a_key_that_holds_fewer_places(tracking: Server) -> None:
    engine = tracking.engine
    async with (
        engine.edit("a", make_input(n=2, owner="heavy"), CHOICE),
        engine.edit("b", make_input(n=2, owner="heavy"), CHOICE),
    ):
        engine.check_upload("light", [])
        with pytest.raises(OverloadedError, match="queue is full"):
            engine.check_upload("heavy", [])
        assert engine.num_admitted == 4, "none leaves before the body is there"


# ------------------------------------------------------------------------------------------- how images are counted


def counted(server: Server) -> dict[str, float]:
    """Why images ended -> how many."""
    found = re.findall(
        r'^stencil:request_success_total\{finished_reason="(\w+)",.*\} (.*)$',
        server.engine.metrics.exposition().decode(),
        re.MULTILINE,
    )
    return {reason: float(number) for reason, number in found if float(number)}


async def read_failing(server: Server, n: int, fail: Callable[[], None]) -> None:
    """Read an edit's images. fail: called once it is submitted."""
    async with server.engine.edit("edit", make_input(n=n), CHOICE) as outputs:
        server.clock.now += 1.0
        fail()
        async for _ in outputs:
            server.images.error = EngineDeadError("two image processors died")


async def test_every_image_of_an_edit_that_fails_is_counted(tracking: Server) -> None:
    """All are failed at once, and only the first one's failure is raised."""

    def fail_all() -> None:
        for replica in tracking.replicas:
            while replica.sent:
                replica.fail_first(TOO_LATE)

    with pytest.raises(DeadlineExceededError):
        await read_failing(tracking, 3, fail_all)
    assert counted(tracking) == {"error": 3.0}


async def test_an_image_whose_file_cannot_be_made_counts_as_a_failure(tracking: Server) -> None:
    def finish_both() -> None:
        for replica in tracking.replicas:
            replica.finish_first()

    with pytest.raises(EngineDeadError):
        await read_failing(tracking, 2, finish_both)
    assert counted(tracking) == {"stop": 1.0, "error": 1.0}


async def test_an_image_whose_client_leaves_before_its_file_is_made_counts_as_aborted(tracking: Server) -> None:
    async with tracking.engine.edit("edit", make_input(n=3), CHOICE) as outputs:
        tracking.clock.now += 1.0
        tracking.replicas[0].finish_first()
        await anext(outputs)
        tracking.replicas[1].finish_first()
    assert counted(tracking) == {"stop": 1.0, "abort": 2.0}


# --------------------------------------------------------------------------------------------------- bodies being read


async def read(slots: UploadSlots, owner: str, is_sent: asyncio.Event) -> str:
    """What becomes of a request whose body comes when its client likes."""
    async with slots.take(owner):
        await is_sent.wait()
    return "read"


async def outcomes(tasks: list[asyncio.Task[str]]) -> list[str]:
    return [str(answer) for answer in await asyncio.gather(*tasks, return_exceptions=True)]


async def test_slow_bodies_of_one_key_do_not_keep_anothers_out(tracking: Server) -> None:
    engine, is_sent = tracking.engine, asyncio.Event()
    slots = UploadSlots(engine.check_upload, engine.metrics)
    async with engine.edit("begun", make_input(owner="heavy"), CHOICE):
        tracking.router._placements["begun-0"].has_begun = True
        heavy = [asyncio.create_task(read(slots, "heavy", is_sent)) for _ in range(4)]
        await asyncio.sleep(0)
        light = [asyncio.create_task(read(slots, "light", is_sent)) for _ in range(3)]
        while sum(task.done() for task in heavy + light) < 4:
            await asyncio.sleep(0)
        is_sent.set()
        first, second, third, late = await outcomes(heavy)
        assert late == "The queue is full.", "the fifth place"
        assert first == "read"
        for refusal in (second, third):
            assert "another API key, which holds fewer places" in refusal
        assert await outcomes(light) == ["read", "read", "The queue is full."]
    assert not slots._taken
    assert 'reason="queue_full"} 4.0' in engine.metrics.exposition().decode()


async def test_bodies_of_one_owner_are_refused_at_the_door_alone(tracking: Server) -> None:
    engine, is_sent = tracking.engine, asyncio.Event()
    slots = UploadSlots(engine.check_upload, engine.metrics)
    tasks = [asyncio.create_task(read(slots, "", is_sent)) for _ in range(8)]
    await asyncio.sleep(0)
    is_sent.set()
    assert await outcomes(tasks) == ["read"] * 4 + ["The queue is full."] * 4


# ------------------------------------------------------------------------------------------------------- image work


async def finish_all(server: Server) -> None:
    server.clock.now += 1.0
    for replica in server.router.engines.replicas.values():
        assert isinstance(replica, Replica)
        while replica.sent:
            replica.finish_first()


async def test_only_an_edit_whose_own_image_work_takes_too_long_is_refused_at_once(server: Server) -> None:
    """60 files at 0.5 s each, two at a time, come first, but that may change."""
    server.admission.slo_seconds = 0.0
    for index in range(6):
        await server.begin(n=10, name=f"a{index}", owner="a", seconds=300.0)
    await finish_all(server)
    for rank in range(2):
        server.router.engines.on_report(rank, make_report(num_received=30), None)
    await server.begin(name="a6", owner="a", priority=1, seconds=10.0)
    with pytest.raises(DeadlineExceededError, match="when the server is idle"):
        await server.begin(n=10, name="a7", owner="a", seconds=2.0)
    await server.begin(name="b", owner="b", seconds=10.0)
    assert server.admission.retry_after() == pytest.approx((60 + 2) * COMPOSE_SECONDS / 2)


async def test_image_work_that_is_done_or_dropped_or_waits_for_its_client_delays_no_other(server: Server) -> None:
    backlog = server.admission._image_backlog
    read, unread, left = [await server.begin(n=2, name=name) for name in ("read", "unread", "left")]
    assert backlog.seconds == 6 * COMPOSE_SECONDS
    await finish_all(server)
    await take_all(read, server, 0.0)
    assert backlog.seconds == 4 * COMPOSE_SECONDS
    await anext(aiter(unread.outputs()))
    assert backlog.seconds == 2 * COMPOSE_SECONDS
    left.give_up()
    assert not backlog


async def test_two_passes_have_memory_and_a_least_work_of_their_own(server: Server) -> None:
    def session_of(**fields: object) -> EditSession:
        sampling = SamplingParams(num_inference_steps=5, **fields)  # type: ignore[arg-type]
        edit = EditInput(prompt="a cat", sampling=sampling)
        return EditSession(server.services, server.results, "edit", edit, CHOICE)

    one, two = session_of(hires_strength=0.6)._preparation, session_of(hires_scale=2.0, hires_strength=0.6)._preparation
    assert (one.smallest_shape.num_steps, one.smallest_shape.loops) == (5, ())
    least = two.smallest_shape
    assert (least.num_steps, least.full_steps, least.loops) == (8, 8, (Loop(MODEL.name, 5, 1),))
    seconds = [server.router.work_seconds(shape) for shape in (one.smallest_shape, least)]
    assert seconds[0] < seconds[1]
    jobs = [await preparation.store() for preparation in (one, two)]
    assert [job.scales for job in jobs] == [(), (CanvasScale("first", 2.0, "hires_scale"),)]
    assert jobs[1].scratch.size == 2 * jobs[0].scratch.size
    for preparation in (one, two):
        await preparation._memory.release()
