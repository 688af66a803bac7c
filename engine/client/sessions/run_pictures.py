"""RunPictures: has image processors encode the pictures that a run makes."""

from __future__ import annotations

from collections.abc import Mapping

from core.costs.image_costs import ImageWork
from core.handles import NOWHERE, ArrayRef
from core.ipc.shared_array import carve
from core.messages.image_processor import ComposeImage
from engine.client.run_files import PictureFile, RunEncoding
from engine.client.services import Services
from engine.client.sessions.session_memory import SessionMemory
from engine.images import image_ops
from engine.images.image_jobs import Caller, Room


class RunPictures:
    """The pictures of one run. memory: that of its session, which frees it. caller: who sends the image jobs."""

    def __init__(self, services: Services, encoding: RunEncoding, memory: SessionMemory, caller: Caller) -> None:
        self._services = services
        self._encoding = encoding
        self._memory = memory
        self._caller = caller
        self._max_pixels = services.config.image.max_pixels

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
        nbytes = image_ops.encoded_bytes(width, height, 3, True, self._encoding.output_format)
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
            output_format=self._encoding.output_format,
            compression=self._encoding.compression,
            base64=True,
            max_pixels=max(self._max_pixels, width * height),  # what a class may make was declared
            out=NOWHERE,
        )
        megapixels = width * height / 1e6
        work = ImageWork(self._encoding.output_format, megapixels, megapixels)
        composed = await self._services.images.compose(job, work, self._caller, Room(nbytes, take))
        self._memory.trim(out, composed.encoded.size)
        text = self._services.arena.view(composed.encoded).data.toreadonly()
        return PictureFile(name=name, text=text, width=composed.width, height=composed.height)
