"""The image work of one edit: its upload before the engine sees it, and a file for each picture after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.costs.image_costs import ImageWork
from core.handles import ArrayRef
from core.messages.image_processor import ComposedImage, ComposeImage, PreparedImages, PrepareImages
from core.model_info import ModelInfo
from engine.client.edit_types import EditInput
from engine.client.image_seconds import ImageSeconds
from engine.client.mask_aware import resolve_margin
from engine.client.session_memory import SessionMemory
from engine.client.upload import Upload
from engine.images import image_ops
from engine.images.image_jobs import Caller, Room

if TYPE_CHECKING:
    from engine.client.async_engine import AsyncEngine

NOWHERE = ArrayRef(0, 0, (0,), "uint8")
"""Where a result goes whose room is taken when its turn comes."""


class SessionImages:
    """prepare, then compose as often as there are pictures; one caller, one job at a time."""

    def __init__(
        self,
        engine: AsyncEngine,
        caller: Caller,
        edit: EditInput,
        upload: Upload | None,
        model: ModelInfo,
        memory: SessionMemory,
    ) -> None:
        """upload: the picture to edit, None for an empty canvas. memory: where everything lies."""
        self._engine = engine
        self._caller = caller
        self._edit = edit
        self._upload = upload
        self._model = model
        self._memory = memory
        self._image: ArrayRef | None = None
        self._mask: ArrayRef | None = None
        self._upload_size: tuple[int, int] | None = None  # once it is prepared
        self._num_files_left = edit.sampling.n * (1 + edit.partial_images)

    async def prepare(self) -> PreparedImages:
        """Copy the uploads to shared memory and have them checked and turned into template, mask and tokens. Raises
        InvalidRequestError, OverloadedError, EngineError.
        """
        edit, model = self._edit, self._model
        self._image = await self._memory.store(self._upload)
        self._mask = await self._memory.store(edit.mask)
        message = PrepareImages(
            job_id=0,
            image=self._image,
            mask=self._mask,
            mask_kind=edit.mask_kind,
            canvas_size=self._canvas_size,
            mask_margin=resolve_margin(edit.sampling, model),
            native_size=model.native_size,
            token_size=model.token_size,
            max_pixels=self._engine.config.image.max_pixels,
            scratch=self._memory.alloc(image_ops.scratch_bytes(model.native_size, model.token_size)),
            max_side=model.max_side,
            padding_mask_crop=edit.padding_mask_crop,
        )
        prepared = await self._engine.images.prepare(message, self._caller)
        self._upload_size = prepared.upload_width, prepared.upload_height
        return prepared

    async def compose(self, pixels: ArrayRef, prepared: PreparedImages) -> ComposedImage:
        """The file of one picture, uint8 [height, width, 3]. Raises OverloadedError, EngineError."""
        edit = self._edit
        width, height = edit.output_size or (prepared.upload_width, prepared.upload_height)
        nbytes = image_ops.encoded_bytes(width, height, 4, edit.base64, edit.output_format)
        out = NOWHERE

        def take() -> ArrayRef:
            nonlocal out
            out = self._memory.alloc(nbytes)
            return out

        message = ComposeImage(
            job_id=0,
            pixels=pixels,
            image=self._image,
            mask=self._mask,
            mask_kind=edit.mask_kind,
            canvas_size=self._canvas_size,
            output_size=edit.output_size,
            output_format=edit.output_format,
            compression=edit.compression,
            base64=edit.base64,
            max_pixels=self._engine.config.image.max_pixels,
            out=NOWHERE,
            crop=prepared.crop,
        )
        composed = await self._engine.images.compose(message, self._compose_work, self._caller, Room(nbytes, take))
        # The room for the worst case is many times what most pictures take, and all outputs stay until the end.
        self._memory.trim(out, composed.encoded.size)
        self._num_files_left -= 1
        return composed

    @property
    def seconds(self) -> ImageSeconds:
        """What is predicted of the work that is left. Of an upload that is not prepared yet only the size that was
        asked for is known: it counts as small.
        """
        costs = self._engine.images.costs
        compose = costs.predict(self._compose_work)
        prepare = 0.0 if self._upload_size else costs.predict(self._prepare_work)
        return ImageSeconds(prepare, compose, self._num_files_left * compose)

    @property
    def _canvas_size(self) -> tuple[int, int] | None:
        if self._upload is not None:
            return None
        return self._edit.canvas_size or (self._model.native_size, self._model.native_size)

    @property
    def _prepare_work(self) -> ImageWork:
        nbytes = sum(upload.size for upload in (self._upload, self._edit.mask) if upload is not None)
        return ImageWork("prepare", nbytes / 1e6, _megapixels(self._canvas_size))

    @property
    def _compose_work(self) -> ImageWork:
        upload_size = self._upload_size or self._canvas_size
        output = _megapixels(self._edit.output_size or upload_size)
        return ImageWork(self._edit.output_format, _megapixels(upload_size), output)


def _megapixels(size: tuple[int, int] | None) -> float:
    return size[0] * size[1] / 1e6 if size else 0.0
