"""EditRequests: makes the requests to the engines of an edit that is prepared, with the memory for what they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from core.handles import ArrayRef, Artefact
from core.ipc.shared_array import carve
from core.late_adapters import LateAdapters
from core.mask_request import SOFT_REACH
from core.messages.canvas import Canvas
from core.messages.engine import EngineRequest
from core.messages.image_processor import PreparedCanvas, PreparedImages
from core.messages.specs import EditSpec, GenerationSpec, MaskSpec, Spec
from core.messages.specs.mask_search import MaskedRun, MaskSearch
from engine.client.resolve.mask_aware import resolve_margin
from engine.client.sessions.prepared_edit import PreparedEdit
from engine.images.image_ops import ALIGNMENT


@dataclass(frozen=True, slots=True)
class EditRequests:
    """alloc: allocates bytes of shared memory, which the requests' arrays stay in. given, make_places: inputs for nodes
    of users' classes, and memory for what they make for one request, see ClassValues."""

    prepared: PreparedEdit
    alloc: Callable[[int], ArrayRef]
    given: Mapping[str, ArrayRef] = field(default_factory=dict)
    make_places: Callable[[], Mapping[str, ArrayRef]] = dict

    def make(self, index: int, request_id: str, *, arrival: float, call_id: str, trace_context: str) -> EngineRequest:
        """The request for image `index`; the rest as in EngineRequest. Raises InvalidRequestError for a mask that is
        asked for outside of the picture, and what `alloc` raises."""
        edit = self.prepared
        return EngineRequest(
            request_id=request_id,
            model=edit.model.name,
            workflow=edit.graph.name,
            spec=self._spec(index),
            rounds=edit.rounds,
            arrival=arrival,
            priority=edit.sampling.priority,
            owner=edit.edit.owner,
            call_id=call_id,
            trace_context=trace_context,
        )

    def _spec(self, index: int) -> Spec:
        edit, images, is_batch = self.prepared, self.prepared.prepared, self.prepared.edit.is_batch
        assert edit.sampling.seed is not None
        common: dict[str, Any] = {
            **msgspec.structs.asdict(self._canvas(images)),
            "prompt": edit.edit.prompt,
            "index": index if is_batch else 0,
            "number": edit.sampling.n if is_batch else 1,
            "sampling": msgspec.structs.replace(
                edit.sampling, seed=edit.sampling.seed + (0 if is_batch else index), n=1
            ),
            "class_label": edit.class_label,
            "patches": edit.choice.patches,
            "late": self._late,
            "controls": edit.controls.controls,
            "control_types": edit.controls.types,
            "content_id": images.content_id,
            "references": images.references,
            "canvases": {name: self._canvas(picture) for name, picture in images.canvases.items()},
            "cache_salt": edit.config.cache.salt(edit.edit.owner),
            "inputs": dict(self.given),
        }
        if edit.edit.mask_request is not None:
            common |= self._sought()
        if edit.edit.makes_mask:
            return MaskSpec(**common, outputs={"mask": Artefact(common["mask"], "mask")})
        common |= self._pictures()
        if images.template is None:
            return GenerationSpec(**common)
        return EditSpec(**common, is_mask_aware=edit.exact_reason is None)

    @property
    def _late(self) -> LateAdapters | None:
        """A mask is found without adapters."""
        steps = self.prepared.choice.steps_without
        return LateAdapters(steps) if steps and not self.prepared.edit.makes_mask else None

    def _pictures(self) -> dict[str, Any]:
        """Memory for results and previews."""
        edit, shape = self.prepared, (self.prepared.prepared.height, self.prepared.prepared.width, 3)
        num_bytes, num_pictures = math.prod(shape), edit.num_partial_images + 1
        pixels = self.alloc(num_pictures * num_bytes)
        *previews, picture = (
            Artefact(carve(pixels, number * num_bytes, shape, "uint8")) for number in range(num_pictures)
        )
        values = {name: Artefact(place, "value") for name, place in self.make_places().items()}
        return {"outputs": {"picture": picture, **values}, "previews": tuple(previews)}

    def _canvas(self, picture: PreparedImages | PreparedCanvas) -> Canvas:
        """The canvas of one size. The prompt is encoded once for all, with the final template where the text encoder
        sees it."""
        edit, final, references = self.prepared, self.prepared.prepared, self.prepared.reference_sizes
        model, beside = edit.model, edit.num_reference_tokens
        num_tokens = model.num_image_tokens(picture.width, picture.height)
        conditions = model.num_condition_tokens(
            num_tokens, has_template=picture.template is not None, reference_tokens=beside
        )
        return Canvas(
            width=picture.width,
            height=picture.height,
            template=picture.template,
            mask=picture.mask,
            active=picture.active,
            control_pictures=picture.control_pictures,
            num_tokens=num_tokens,
            num_condition_tokens=conditions,
            num_reference_tokens=beside,
            max_text_tokens=edit.sampling.max_sequence_length or model.max_text_tokens,
            extra_text_tokens=model.text_tokens_beside(final.width, final.height, references),
        )

    # ------------------------------------------------------------------------------------- masks that are found

    def _sought(self) -> dict[str, Any]:
        """The search for a mask, and memory for the mask and its active tokens, whose number is predicted."""
        edit, images = self.prepared, self.prepared.prepared
        width, height = images.width, images.height
        start = -(-width * height // ALIGNMENT) * ALIGNMENT
        memory = self.alloc(start + 4 * edit.num_tokens)
        return {
            "mask": carve(memory, 0, (height, width), "uint8"),
            "active": carve(memory, start, (edit.num_active_tokens,), "int32"),
            "search": self._search(),
        }

    def _search(self) -> MaskSearch:
        edit, images = self.prepared, self.prepared.prepared
        request = edit.edit.mask_request
        assert request is not None
        scale = min(images.width / images.upload_width, images.height / images.upload_height)
        softened = math.ceil(SOFT_REACH * edit.edit.mask_feather * scale)
        return MaskSearch(
            selection=request.within(images.upload_width, images.upload_height),
            grow=round(edit.edit.mask_grow * scale),
            margin=resolve_margin(edit.edit.sampling, edit.model, edit.graph) + softened,
            runs=() if edit.edit.makes_mask else self._runs(),
        )

    def _runs(self) -> tuple[MaskedRun, ...]:
        """How the edit runs, by the size of its mask, as it would with a mask of this size that is given."""
        runs = list[MaskedRun]()
        for least in self.prepared.decisive_sizes:
            edit = self.prepared.with_mask(least)
            sampling = edit.sampling
            run = MaskedRun(least, edit.exact_reason is None, sampling.full_steps or 0, sampling.own_page_steps or ())
            if not runs or run != msgspec.structs.replace(runs[-1], least_active=least):
                runs.append(run)
        return tuple(runs)
