"""What an edit's nodes tell the worker, with one pass and two: each pass has its own canvas and number of steps."""

from __future__ import annotations

import msgspec
import pytest
from cache_kit import make_masked
from fakes import MODEL, PIXELS, make_edit, make_hires_edit, with_spec

from core.graph.catalog import WORKFLOWS
from core.messages.engine import EngineRequest
from core.scheduling.node_cache import NO_PAGES
from core.scheduling.ops.image_encode import IMAGE_ENCODE, ImageEncode
from core.scheduling.ops.request_op import RequestOp
from core.scheduling.ops.upscale import UPSCALE, Upscale
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.request import Request


def message(op: RequestOp, node: str, edit: EngineRequest) -> object:
    """The message that runs the op for a node of this name."""
    workflow = WORKFLOWS[edit.workflow]
    request = Request.of(edit, WORKFLOWS, Bindings({MODEL.name: MODEL}))
    return op.make(request, workflow.node(node), NO_PAGES)


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 4), (0.5, 2)])
def test_each_pass_encodes_its_own_canvas_for_its_own_steps(strength: float, steps: int) -> None:
    edit = make_hires_edit("a", steps=4, strength=strength)
    first, second = (message(IMAGE_ENCODE, node, edit) for node in ("first_encode", "image_encode"))
    assert isinstance(first, ImageEncode)
    assert isinstance(second, ImageEncode)
    canvas = edit.spec.canvas("first")
    assert (first.width, first.height, first.template) == (128, 128, canvas.template)
    assert (second.width, second.height, second.template) == (256, 256, PIXELS)
    assert (first.mask, second.mask) == (canvas.mask, edit.spec.mask)
    assert (first.num_denoising_steps, second.num_denoising_steps) == (4, steps)
    assert first.num_inference_steps == second.num_inference_steps == 4
    assert first.seed == second.seed


def test_both_passes_have_the_requests_noise_levels() -> None:
    edit = make_hires_edit("a", steps=2)
    own = {"shift": 3.0, "sigmas": (1.0, 0.5)}
    edit = with_spec(edit, sampling=msgspec.structs.replace(edit.spec.sampling, **own))
    for node in ("first_encode", "image_encode"):
        work = message(IMAGE_ENCODE, node, edit)
        assert isinstance(work, ImageEncode)
        assert (work.shift, work.sigmas) == (3.0, (1.0, 0.5))


def test_latents_are_enlarged_from_the_first_pass_to_the_second() -> None:
    work = message(UPSCALE, "upscale", make_hires_edit("a"))
    assert work == Upscale(width=128, height=128, to_width=256, to_height=256)


def test_an_edit_of_one_pass_runs_the_steps_of_its_strength() -> None:
    work = message(IMAGE_ENCODE, "image_encode", make_edit("a", steps=3))
    assert isinstance(work, ImageEncode)
    assert (work.num_denoising_steps, work.width) == (3, 256)


def test_the_encoder_is_exact_unless_the_edit_is_mask_aware() -> None:
    exact = [make_edit("a"), make_hires_edit("b"), with_spec(make_masked("c"), is_mask_aware=False)]
    for edit, is_exact in [*((edit, True) for edit in exact), (make_masked("d"), False)]:
        for node in WORKFLOWS[edit.workflow].nodes:
            if node.op == "image_encode":
                work = message(IMAGE_ENCODE, node.name, edit)
                assert isinstance(work, ImageEncode)
                assert work.is_exact is is_exact
