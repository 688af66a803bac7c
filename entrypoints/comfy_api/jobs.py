"""Jobs: executes prompts on the engine, and tells their clients."""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from core.errors import AbortedError, InvalidRequestError, OverloadedError
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import ImageOutput
from engine.client.upload import KeptUpload
from entrypoints.comfy_api.files import FileName, Files, Folder, StoredFile
from entrypoints.comfy_api.graph_edits import MOST_PREVIEWS, GraphEdit, GraphEdits, at_fault
from entrypoints.comfy_api.history import History
from entrypoints.comfy_api.job import Job
from entrypoints.comfy_api.sockets import Sockets
from entrypoints.openai.answer.errors import describe, log_internal

PREVIEW_IMAGE, PNG = 1, 2
"""Kinds of a binary message, and of the picture in it."""

MAX_QUEUED_BYTES, MAX_QUEUED_BYTES_OF_OWNER = 128 * 2**20, 32 * 2**20
"""Of prompts that are not over: /queue shows each of them, with its graph."""

ROOM_SECONDS = 10.0
"""When a client that the queue has no room for may try again."""

_FOLDERS: dict[str, Folder] = {"SaveImage": "output", "PreviewImage": "temp"}
"""Class of nodes that keep pictures -> where. Those of SaveImageWebsocket send them instead."""


class Jobs:
    """The prompts that are not over, of all owners. Each is a task, which admits, executes and ends it."""

    def __init__(
        self,
        engine: AsyncEngine,
        files: Files,
        history: History,
        sockets: Sockets,
        note_owner: Callable[[str, str], None],
    ) -> None:
        """note_owner: is told of each edit that is admitted (request id, owner)."""
        self._engine, self._files, self._history, self._sockets = engine, files, history, sockets
        self._note_owner = note_owner
        self._edits = GraphEdits(engine)
        self._tasks: dict[Job, asyncio.Task[None]] = {}

    # ---------------------------------------------------------------------------------- the queue

    async def admit(self, job: Job) -> None:
        """Queue a prompt. Raises what its edits are refused for: WorkflowError that names node and input,
        InvalidRequestError, OverloadedError, ModelUnavailableError. Raises OverloadedError, too, where the prompts that
        are not over would have too many bytes.
        """
        self._check_room(job)
        admitted: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        task = self._tasks[job] = asyncio.create_task(self._run(job, admitted), name=f"prompt-{job.id}")
        task.add_done_callback(lambda _: self._forget(job, admitted))
        self._tell_status(job.owner)
        if (refusal := await asyncio.shield(admitted)) is not None:
            raise refusal

    def _check_room(self, job: Job) -> None:
        in_all, of_owner = job.prompt.nbytes, job.prompt.nbytes
        for other in self._tasks:
            in_all += other.prompt.nbytes
            of_owner += other.prompt.nbytes if other.owner == job.owner else 0
        if in_all > MAX_QUEUED_BYTES or of_owner > MAX_QUEUED_BYTES_OF_OWNER:
            raise OverloadedError("The prompts that are queued are too large.", retry_after=ROOM_SECONDS)

    def _forget(self, job: Job, admitted: asyncio.Future[Exception | None]) -> None:
        del self._tasks[job]
        if not admitted.done():
            admitted.set_result(AbortedError("the prompt was deleted while it was queued"))
        self._tell_status(job.owner)

    def of(self, owner: str) -> tuple[list[Job], list[Job]]:
        """(those of an owner that run, those that wait), in the order of arrival."""
        begun, running, waiting = self._engine.begun_edits, list[Job](), list[Job]()
        for job in self._tasks:
            if job.owner == owner:
                (running if not begun.isdisjoint(job.request_ids) else waiting).append(job)
        return running, waiting

    def num_left(self, owner: str) -> int:
        """Prompts of an owner that are not over."""
        return sum(job.owner == owner for job in self._tasks)

    async def delete(self, jobs: Sequence[Job]) -> None:
        """Take prompts that wait out of the queue."""
        tasks = [self._tasks[job] for job in jobs]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def interrupt(self, jobs: Sequence[Job]) -> None:
        """End prompts that run; the history tells of them."""
        for job in jobs:
            job.is_interrupted = True
        await self.delete(jobs)

    # ---------------------------------------------------------------------------------- execution

    async def _run(self, job: Job, admitted: asyncio.Future[Exception | None]) -> None:
        """Admit and execute a prompt. admitted: gets None, or why it is not admitted."""
        node = next(iter(job.read.saved))
        try:
            async with AsyncExitStack() as stack:
                making = [(edit, await stack.enter_async_context(self._begun(job, edit))) for edit in job.read.edits]
                admitted.set_result(None)
                self._tell(job, "execution_start")
                self._tell(job, "execution_cached", nodes=[])
                for edit, outputs in making:
                    node = edit.composition.passes[-1].node.id
                    await self._make(job, edit, outputs)
            await self._show_loaded(job)
        except asyncio.CancelledError:
            if admitted.done():
                told = {"node_id": node, "node_type": job.read.nodes[node].kind, "executed": job.executed}
                self._end(job, "execution_interrupted", is_kept=job.is_interrupted, **told)
            raise
        except Exception as error:  # the actor's edge: its caller, or its client, is told
            if not admitted.done():
                admitted.set_result(error)
                return
            log_internal(error)
            self._end(job, "execution_error", **job.failure(type(error).__name__, describe(error).message, node))
        else:
            self._end(job, "execution_success")

    @asynccontextmanager
    async def _begun(self, job: Job, edit: GraphEdit) -> AsyncIterator[AsyncIterator[ImageOutput]]:
        """An edit that is admitted. Raises as `admit`."""
        request_id = f"req_{uuid.uuid4().hex}"
        job.request_ids.append(request_id)
        async with AsyncExitStack() as stack:
            try:
                choice, asked = self._edits.call(edit, job.loaded, job.owner, shows_previews=job.prompt.shows_previews)
                choice = await stack.enter_async_context(self._engine.bring_workflow(choice, edit.workflow))
                outputs = await stack.enter_async_context(self._engine.edit(request_id, asked, choice))
            except InvalidRequestError as error:
                raise at_fault(edit, error) from error
            self._note_owner(request_id, job.owner)
            yield outputs

    async def _make(self, job: Job, edit: GraphEdit, outputs: AsyncIterator[ImageOutput]) -> None:
        """Execute what makes one picture, and save or show it."""
        passes, composition = edit.composition.passes, edit.composition
        *first, last = [each.node.id for each in passes]
        for node in first:
            self._tell_executing(job, node)
        self._tell_executing(job, last)
        pictures = dict[int, StoredFile]()
        async for output in outputs:
            content = await KeptUpload.of_output(output.data, is_base64=False)
            if output.partial_index is None:
                pictures[output.image_index] = StoredFile(content)
            else:
                most, shown = passes[-1].steps, output.partial_index + 1
                self._tell_progress(job, last, max(1, most * shown // (MOST_PREVIEWS + 1)), most)
                if self._sockets.listens(job.owner, job.prompt.client_id):
                    message = await _message_of(content)
                    self._sockets.send_picture(job.owner, job.prompt.client_id, message, is_preview=True)
        for each in passes:
            self._tell_progress(job, each.node.id, each.steps, each.steps)
        assert len(pictures) == composition.number, "a picture of each number is made"
        self._tell_executing(job, edit.decoder.id)
        await self._show(job, edit.decoder.id, [pictures[number] for number in sorted(pictures)])

    async def _show(self, job: Job, maker: str, pictures: list[StoredFile]) -> None:
        """Save, show or send pictures by all nodes that read them. maker: the node that makes them."""
        messages = list[bytes]()
        for node in (job.read.nodes[id_] for id_, made in job.read.saved.items() if made.id == maker):
            self._tell_executing(job, node.id)
            if (folder := _FOLDERS.get(node.kind)) is None:
                if self._sockets.listens(job.owner, job.prompt.client_id):
                    messages = messages or [await _message_of(picture.content) for picture in pictures]
                    for message in messages:
                        self._sockets.send_picture(job.owner, job.prompt.client_id, message, is_preview=False)
                continue
            prefix = str(node.values.get("filename_prefix", "ComfyUI")) if folder == "output" else "ComfyUI_temp"
            names = list[FileName]()
            for picture in pictures:
                names.append(self._files.new_name(job.owner, prefix, folder))
                self._files.put(job.owner, names[-1], picture)
            shown = {"images": [name.shown for name in names]}
            job.outputs[node.id] = shown
            told = {"node": node.id, "display_node": node.id, "output": shown, "prompt_id": job.id}
            self._sockets.send(job.owner, job.prompt.client_id, "executed", told)

    async def _show_loaded(self, job: Job) -> None:
        """Save, show or send the uploads that nodes read without any sampler."""
        for id_ in dict.fromkeys(made.id for made in job.read.saved.values() if made.kind != "VAEDecode"):
            self._tell_executing(job, id_)
            await self._show(job, id_, [job.loaded[id_]])

    # ---------------------------------------------------------------------------------- messages

    def _tell(self, job: Job, event: str, **data: object) -> None:
        self._sockets.send(job.owner, job.prompt.client_id, event, job.note(event, **data))

    def _tell_executing(self, job: Job, node: str) -> None:
        told = {"node": node, "display_node": node, "prompt_id": job.id}
        self._sockets.send(job.owner, job.prompt.client_id, "executing", told)
        job.executed.append(node)

    def _tell_progress(self, job: Job, node: str, value: int, most: int) -> None:
        told = {"value": value, "max": most, "prompt_id": job.id, "node": node}
        self._sockets.send(job.owner, job.prompt.client_id, "progress", told)

    def _tell_status(self, owner: str) -> None:
        self._sockets.send_all(owner, "status", self.status(owner))

    def status(self, owner: str) -> dict[str, object]:
        """How many prompts of an owner are not over."""
        return {"status": {"exec_info": {"queue_remaining": self.num_left(owner)}}}

    def _end(self, job: Job, event: str, *, is_kept: bool = True, **data: object) -> None:
        """Note the end of a prompt in the history, and tell its client, which then reads the history. is_kept: not for
        one that was taken out of the queue.
        """
        told = job.note(event, **data)
        if is_kept:
            self._history.put(job.owner, job.id, job.entry(succeeded=event == "execution_success"))
        self._sockets.send(job.owner, job.prompt.client_id, event, told)
        over = {"node": None, "prompt_id": job.id}
        self._sockets.send(job.owner, job.prompt.client_id, "executing", over)


async def _message_of(picture: KeptUpload) -> bytes:
    """A picture as it is sent. Other work has a turn before: it may be large, and there may be many."""
    await asyncio.sleep(0)
    pieces = [piece async for piece in picture.chunks()]
    return b"".join([struct.pack(">II", PREVIEW_IMAGE, PNG), *pieces])
