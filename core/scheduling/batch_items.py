"""Makes the items of batches: for a node of a request, and for a job of the activation cache."""

from __future__ import annotations

from core.cache.page_reservations import PageReservations
from core.cache.priming import Chunk, PrimingJob
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.handles import ArrayRef
from core.messages.worker import Item
from core.scheduling.inputs import Ranks, input_refs
from core.scheduling.ops.prime import PRIME, Prime
from core.scheduling.ops.request_op import request_op
from core.scheduling.ops.template_encode import TEMPLATE_ENCODE, TemplateEncode
from core.scheduling.request import Request
from core.scheduling.values import ValueTable


def make_item(request: Request, node: Node, ranks: Ranks, pages: PageReservations, values: ValueTable) -> Item:
    """The request's item in a batch that runs `node` next, on these ranks."""
    work = request_op(node).make(request, node, pages)
    version = request.progress.scheduled[node.name] + 1 if node.region else 0
    return Item(request.id, node.name, work, input_refs(request, node, ranks, values), version)


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


def node_work(request: Request, node: Node) -> Work:
    """Tokens that running `node` once computes, and those they attend to."""
    return op_of(node).size(request.sizes(node))


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
