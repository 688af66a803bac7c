"""References are encoded for an edit only if one of its steps computes their tokens."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL, PIXELS, make_edit, with_spec
from load_reports import make_report

from core.costs.load_report import CostLine, EngineCosts
from core.graph.catalog import WORKFLOWS
from core.messages.engine import EngineRequest
from core.routing.fleet import Fleet
from core.routing.request_shape import RequestShape
from core.scheduling.node_cache import NO_PAGES
from core.scheduling.ops.image_encode import IMAGE_ENCODE, ImageEncode
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.request import Request

TOKENS = 512


def with_references(*, is_mask_aware: bool, **sampling: object) -> EngineRequest:
    """An edit of 256 image tokens with two references."""
    edit = make_edit("a")
    changed = msgspec.structs.replace(edit.spec.sampling, **sampling)
    counts = {"num_condition_tokens": 256 + TOKENS, "num_reference_tokens": TOKENS}
    return with_spec(edit, references=(PIXELS, PIXELS), is_mask_aware=is_mask_aware, sampling=changed, **counts)


@pytest.mark.parametrize(
    ("edit", "is_encoded"),
    [
        (with_references(is_mask_aware=False), True),
        (with_references(is_mask_aware=True), False),
        (with_references(is_mask_aware=True, full_steps=1), True),
        (with_references(is_mask_aware=True, own_page_steps=(0, 2)), True),
    ],
)
def test_who_encodes_references(edit: EngineRequest, is_encoded: bool) -> None:
    request = Request.of(edit, WORKFLOWS, Bindings({MODEL.name: MODEL}))
    node = request.workflow.node("image_encode")
    work = IMAGE_ENCODE.make(request, node, NO_PAGES)
    assert isinstance(work, ImageEncode)
    assert work.references == (edit.spec.references if is_encoded else ())
    assert work.paged_reference_tokens == (0 if is_encoded else TOKENS)
    assert request.work(node).queries == (256 + (TOKENS if is_encoded else 0),)


def test_an_edit_that_encodes_none_costs_less() -> None:
    encoding = CostLine("m", "image_encode", (0.0, 0.0, 1.0, 0.0, 0.0, 0.0))  # a second for 1000 tokens
    fleet = Fleet(1, 8)
    fleet.observe(0, make_report(costs=EngineCosts((encoding,), ())), 0.0)
    edits = with_references(is_mask_aware=True, full_steps=1), with_references(is_mask_aware=True)
    full, paged = (fleet.size_costs(RequestShape.of_request(edit, MODEL)) for edit in edits)
    assert (full.other, paged.other) == pytest.approx(((256 + TOKENS) / 1e3, 256 / 1e3))
    assert full.template == paged.template
