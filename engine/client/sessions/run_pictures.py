"""RunPictures: has image processors decode the pictures that a run is given, and encode those that it makes."""

from __future__ import annotations

from collections.abc import Mapping

from core.costs.image_costs import ImageWork
from core.errors import InvalidRequestError
from core.graph.form import Form
from core.graph.port_checks import port_of
from core.graph.workflow import Workflow
from core.handles import NOWHERE, ArrayRef
from core.ipc.shared_array import carve
from core.messages.image_processor import ComposeImage, ReadPicture
from engine.client.run_files import PictureFile, RunFiles
from engine.client.services import Services
from engine.client.sessions.session_memory import SessionMemory
from engine.client.upload import Upload
from engine.images import image_ops
from engine.images.image_jobs import Caller, Room


class RunPictures:
    """The pictures of one run. memory: that of its session, which frees it. caller: who sends the image jobs."""

    def __init__(
        self, services: Services, workflow: Workflow, files: RunFiles, memory: SessionMemory, caller: Caller
    ) -> None:
        self._services = services
        self._workflow = workflow
        self._files = files
        self._memory = memory
        self._caller = caller
        self._max_pixels = services.config.image.max_pixels

    async def read(self) -> dict[str, ArrayRef]:
        """Input -> the pixels of its file, uint8 [height, width, 3]. Raises InvalidRequestError that names the input,
        OverloadedError, EngineError.
        """
        return {name: await self._read(name, file) for name, file in self._files.inputs.items()}

    async def _read(self, name: str, file: Upload) -> ArrayRef:
        height, width, _ = self._form(name).shape
        out = self._memory.alloc(height * width * 3)
        job = ReadPicture(
            job_id=0,
            file=await self._memory.store_file(file),
            param=name,
            max_pixels=self._max_pixels,
            max_size=(width, height),
            out=out,
        )
        pixels = (await self._services.images.read(job, self._caller)).pixels
        self._memory.trim(out, pixels.size)
        return pixels

    def _form(self, name: str) -> Form:
        port = port_of(self._workflow.own_inputs, name)
        if port is None or port.form is None or port.form.kind != "picture":
            message = f"Invalid '{name}': workflow {self._workflow.title} takes no picture of this name."
            raise InvalidRequestError(message, param=name)
        return port.form

    async def make(
        self, places: Mapping[str, ArrayRef], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[PictureFile, ...]:
        """The files of the pictures that a run has made. places: result -> where its pixels begin, uint8 [most bytes].
        shapes: result -> (height, width, 3). Raises OverloadedError, EngineError, InvalidRequestError for a picture
        that the format cannot hold.
        """
        in_order = sorted(places, key=lambda name: name != "picture")
        return tuple([await self._make(name, carve(places[name], 0, shapes[name], "uint8")) for name in in_order])

    async def _make(self, name: str, pixels: ArrayRef) -> PictureFile:
        height, width, _ = pixels.shape
        nbytes = image_ops.encoded_bytes(width, height, 3, True, self._files.output_format)
        out = NOWHERE

        def take() -> ArrayRef:
            nonlocal out
            out = self._memory.alloc(nbytes)
            return out

        job = ComposeImage(
            job_id=0,
            pixels=pixels,
            image=None,
            mask=None,
            mask_kind="alpha",
            canvas_size=(width, height),
            output_size=None,
            output_format=self._files.output_format,
            compression=self._files.compression,
            base64=True,
            max_pixels=max(self._max_pixels, width * height),  # what a class may make was declared
            out=NOWHERE,
        )
        megapixels = width * height / 1e6
        work = ImageWork(self._files.output_format, megapixels, megapixels)
        composed = await self._services.images.compose(job, work, self._caller, Room(nbytes, take))
        self._memory.trim(out, composed.encoded.size)
        text = self._services.arena.view(composed.encoded).data.toreadonly()
        return PictureFile(name=name, text=text, width=composed.width, height=composed.height)
