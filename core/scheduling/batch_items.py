"""Makes the items of batches: for a node of a request, and for a job of the activation cache."""

from __future__ import annotations

import msgspec

from core.cache.page_reservations import PageReservations
from core.cache.priming import Chunk, PrimingJob
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.handles import ArrayRef, TensorKey, TensorRef
from core.messages.worker import Item
from core.scheduling.ops.prime import PRIME, Prime
from core.scheduling.ops.request_op import request_op
from core.scheduling.ops.template_encode import TEMPLATE_ENCODE, TemplateEncode
from core.scheduling.request import Request
from core.scheduling.value_keys import fixed_keys, keys_read, round_keys
from core.scheduling.values import ValueTable


def make_item(request: Request, node: Node, pages: PageReservations, values: ValueTable) -> Item:
    """The request's item in a batch that runs `node` next."""
    work, version = request_op(node).make(request, node, pages), 0
    if node.kind == "loop":
        version = request.progress.steps_scheduled + 1
    return Item(request.id, node.name, work, _inputs(request, node, values), version)


def latents_item(job: PrimingJob, pages: PageReservations) -> Item:
    """The item that encodes a job's template."""
    template = job.template
    pixels = pages.start_latents(job)
    work = TemplateEncode(template=pixels, width=template.width, height=template.height, out=pages.latents(template))
    return Item(job.id, TEMPLATE_ENCODE.name, work, ())


def chunk_items(job: PrimingJob, chunk: Chunk, pages: PageReservations) -> tuple[Item, ...]:
    """The items of a job's chunk, one per keyframe."""
    pixels = pages.lend_pixels(job) if job.template.is_seen_by_text else None
    return tuple(Item(job.id, PRIME.name, _prime(job, chunk, sigma, pages, pixels), ()) for sigma in chunk.sigmas)


def chunk_work(job: PrimingJob, chunk: Chunk) -> Work:
    """The size of a chunk. Its share of the blocks counts as the same share of the tokens."""
    tokens = job.template.pass_tokens
    start, stop = chunk.blocks
    share = tokens * (stop - start) // job.template.scheme.layout.num_blocks
    return Work((share,) * len(chunk.sigmas), (tokens,) * len(chunk.sigmas))


def inputs_elsewhere(request: Request, node: Node, values: ValueTable) -> list[TensorKey]:
    """Inputs of `node` that only another rank has, and that are not in shared memory."""
    if request.is_on_one_rank:
        return []
    rank, rounds = request.placement[node.name], request.progress.rounds_before(node, is_done=False)
    found = ((key, values.get(key)) for key in keys_read(request.id, request.workflow, node, rounds))
    return [key for key, value in found if value is not None and value.ref.rank != rank and value.exported is None]


def node_work(request: Request, node: Node) -> Work:
    """Tokens that running `node` once computes, and those they attend to."""
    return op_of(node).size(request)


def _inputs(request: Request, node: Node, values: ValueTable) -> tuple[TensorRef, ...]:
    fixed = request.fixed_inputs.get(node.name)
    if fixed is None:  # they are the same in every round
        keys = fixed_keys(request.id, request.workflow, node)
        fixed = request.fixed_inputs[node.name] = tuple(_input(request, node, key, values) for key in keys)
    rounds = request.progress.rounds_before(node, is_done=False)
    keys = round_keys(request.id, request.workflow, node, rounds)
    return *fixed, *(_input(request, node, key, values) for key in keys)


def _input(request: Request, node: Node, key: TensorKey, values: ValueTable) -> TensorRef:
    """A value that is there, or that a batch of the same rank will make before."""
    rank = request.placement[node.name]
    if request.is_on_one_rank or (value := values.get(key)) is None or value.ref.rank == rank:
        return TensorRef(key, rank)
    return msgspec.structs.replace(value.ref, handle=value.exported)


def _prime(job: PrimingJob, chunk: Chunk, sigma: float, pages: PageReservations, pixels: ArrayRef | None) -> Prime:
    template = job.template
    return Prime(
        latents=pages.latents(template),
        content_id=template.content_id,
        sigma=sigma,
        width=template.width,
        height=template.height,
        prompt=template.scheme.prompt,
        max_sequence_length=template.max_text_tokens,
        guidance_scale=template.scheme.guidance_scale,
        blocks=chunk.blocks,
        dtype=template.scheme.layout.dtype,
        out=pages.ref(template, sigma),
        template=pixels,
        cache_salt=template.cache_salt,
    )
