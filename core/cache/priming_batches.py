"""Makes the batches of priming jobs."""

from __future__ import annotations

from core.cache.page_reservations import PageReservations
from core.cache.priming import Chunk, PrimingJob
from core.graph.work import Work
from core.handles import ArrayRef
from core.messages.worker import Item
from core.scheduling.node_cache import CacheBatch
from core.scheduling.ops.prime import PRIME, Prime
from core.scheduling.ops.template_encode import TEMPLATE_ENCODE, TemplateEncode


def encode_batch(job: PrimingJob, pages: PageReservations) -> CacheBatch:
    """The batch that encodes a job's template."""
    template = job.template
    pixels, *references = pages.start_latents(job)
    work = TemplateEncode(
        template=pixels,
        references=tuple(references),
        width=template.width,
        height=template.height,
        out=pages.latents(template),
        cache_salt=template.cache_salt,
    )
    item = Item(job.id, TEMPLATE_ENCODE.name, template.model, work, ())
    return CacheBatch(TEMPLATE_ENCODE, (item,), encode_size(job))


def encode_size(job: PrimingJob) -> Work:
    """The size of encoding a job's template."""
    return Work.of([job.template.num_latent_tokens])


def chunk_batch(job: PrimingJob, chunk: Chunk, pages: PageReservations, rank: int) -> CacheBatch:
    """The batch of a job's chunk on this rank, of one item per keyframe."""
    pages.start_chunk(job, chunk, rank)
    seen = pages.lend_pictures(job) if job.template.is_seen_by_text else ()
    works = [_prime(job, chunk, sigma, pages, seen) for sigma in chunk.sigmas]
    items = tuple(Item(job.id, PRIME.name, job.template.model, work, ()) for work in works)
    return CacheBatch(PRIME, items, _chunk_size(job, chunk))


def _chunk_size(job: PrimingJob, chunk: Chunk) -> Work:
    """Its share of the blocks counts as the same share of the tokens."""
    tokens = job.template.pass_tokens
    start, stop = chunk.blocks
    share = tokens * (stop - start) // job.template.scheme.layout.num_blocks
    return Work((share,) * len(chunk.sigmas), (tokens,) * len(chunk.sigmas))


def _prime(job: PrimingJob, chunk: Chunk, sigma: float, pages: PageReservations, seen: tuple[ArrayRef, ...]) -> Prime:
    """seen: the pictures that the text encoder sees."""
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
        seen=seen,
        reference_sizes=template.reference_sizes,
        cache_salt=template.cache_salt,
        patches=template.patches,
    )
