"""ClassFiles: has the files that a call gives to nodes of users' classes checked and decoded, into shared memory."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import InvalidRequestError
from core.graph.form import TENSOR_BYTES, Form, FormKind
from core.graph.port_checks import port_of
from core.graph.workflow import Workflow
from core.handles import ArrayRef
from core.ipc.shared_array import carve
from core.messages.image_processor import ReadPicture
from engine.client.input_files import InputFiles, TensorFile
from engine.client.services import Services
from engine.client.sessions.session_memory import PIECE_BYTES, SessionMemory
from engine.client.upload import Upload
from engine.images.image_jobs import Caller


class ClassFiles:
    """The files of one call. memory: that of its session, which frees it. caller: who sends the image jobs."""

    def __init__(self, services: Services, workflow: Workflow, memory: SessionMemory, caller: Caller) -> None:
        self._services = services
        self._workflow = workflow
        self._memory = memory
        self._caller = caller

    async def read(self, files: InputFiles) -> dict[str, ArrayRef]:
        """Input -> its array: of a picture the pixels, uint8 [height, width, 3]. Raises InvalidRequestError that names
        the input, OverloadedError, EngineError.
        """
        found = {name: await self._read_tensor(name, file) for name, file in files.tensors.items()}
        return found | {name: await self._read_picture(name, file) for name, file in files.pictures.items()}

    async def _read_picture(self, name: str, file: Upload) -> ArrayRef:
        height, width, _ = self._form(name, "picture").shape
        out = self._memory.alloc(height * width * 3)
        job = ReadPicture(
            job_id=0,
            file=await self._memory.store_file(file),
            param=name,
            max_pixels=self._services.config.image.max_pixels,
            max_size=(width, height),
            out=out,
        )
        pixels = (await self._services.images.read(job, self._caller)).pixels
        self._memory.trim(out, pixels.size)
        return pixels

    async def _read_tensor(self, name: str, file: TensorFile) -> ArrayRef:
        form = self._form(name, "tensor")
        if problem := _why_no_tensor(form, file):
            raise InvalidRequestError(f"Invalid '{name}': {problem}.", param=name)
        content = await self._memory.store_file(file.content)
        ref = carve(content, 0, file.shape, file.dtype)
        array = self._services.arena.view(ref).reshape(-1)
        step = PIECE_BYTES // array.itemsize
        for start in range(0, array.size, step):
            if problem := _why_no_content(array[start : start + step]):
                raise InvalidRequestError(f"Invalid '{name}': {problem}.", param=name)
            await asyncio.sleep(0)
        return ref

    def _form(self, name: str, kind: FormKind) -> Form:
        port = port_of(self._workflow.own_inputs, name)
        if port is None or port.form is None or port.form.kind != kind:
            message = f"Invalid '{name}': workflow {self._workflow.title} takes no {kind} of this name."
            raise InvalidRequestError(message, param=name)
        return port.form


def _why_no_tensor(form: Form, file: TensorFile) -> str:
    """Why what is said of a tensor cannot be true; "": it can."""
    if problem := form.why_not(file.shape, file.dtype):
        return problem
    nbytes = math.prod(file.shape) * TENSOR_BYTES[file.dtype]
    if file.content.size != nbytes:
        return f"it has {file.content.size} bytes, and {file.dtype} {list(file.shape)} has {nbytes}"
    return ""


def _why_no_content(piece: npt.NDArray[Any]) -> str:
    """Why some elements are no values of their dtype; "": they are."""
    if piece.dtype.kind == "f" and not np.isfinite(piece).all():
        return "not all of its numbers are finite"
    if piece.dtype.kind == "b" and (piece.view(np.uint8) > 1).any():
        return "a bool is a byte of 0 or 1"
    return ""
