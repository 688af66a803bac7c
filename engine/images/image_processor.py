"""The image processor: a process that decodes and encodes images for the API server, one job at a time.

It keeps no state: uploads and results are in the arena, and decoded pixels are freed with their job. The server's other
processes take precedence: it runs at a lower priority than a worker's step, and is the first to be killed when memory
runs out, since another one can repeat its job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import traceback
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from core.errors import InvalidRequestError, MessageError
from core.failure import Failure
from core.handles import ArrayRef
from core.ipc.heap import return_freed_memory
from core.ipc.logs import of_request
from core.ipc.process import die_with_parent
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena, carve
from core.messages.codec import MessageDecoder, encode, failure_of, read_member
from core.messages.image_processor import (
    ComposedImage,
    ComposeImage,
    FromImageProcessor,
    JobFailed,
    PreparedCanvas,
    PreparedImages,
    PrepareImages,
    ReadPicture,
    ReadPixels,
    ToImageProcessor,
)
from engine.images import image_ops
from engine.images.control_pictures import control_arrays
from engine.images.image_codec import Bytes

logger = logging.getLogger("stencil.images")

NICENESS = 5
"""Added to the server's own niceness. On 2 cores with 6 other busy processes, a step beside two jobs took 3.2 times as
long as alone at equal niceness, 1.7 times at 5 and 1.2 times at 10, while 1.1, 0.9 and 0.25 jobs were done per second:
at 5 an edit of 28 steps is fastest from end to end. An idle core is used in any case."""
OOM_SCORE = "500"
"""When the kernel chooses a process to kill, half of all memory is added to what this one uses."""


class ImageProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a processor. It inherits three file descriptors: the arena's and its channel's two.

    cpu_seconds: CPU time that a job may take for an upload and its mask, and as much again for each further picture;
    beyond it, SIGPROF ends the process. memory_bytes: private memory that a job may take; one that needs more fails
    with OutOfMemoryError.
    """

    arena_id: int
    cpu_seconds: float
    memory_bytes: int


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of the process: answer jobs until the pool closes the channel or the API server ends."""
    # A supervisor signals the whole process group, but images must still be encoded while the server drains.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()  # also when suspended, or stuck in a library
    return_freed_memory()
    settings = msgspec.msgpack.decode(config, type=ImageProcessorConfig)
    _give_way(settings.memory_bytes)
    arena = Arena.attach(settings.arena_id, fds[0])
    serve(arena, Channel.attach(fds[1], fds[2]), settings.cpu_seconds)


def _give_way(memory_bytes: int) -> None:
    os.nice(NICENESS)
    # RLIMIT_DATA counts private memory only, not the arena. What libraries have mapped by now grows with the cores.
    limit = _data_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):  # some sandboxes have no such file
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def _data_bytes() -> int:
    """Bytes of private writable memory that are mapped now."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def serve(arena: Arena, channel: Channel, cpu_seconds: float) -> None:
    """Answer every job on the channel with exactly one message, until its other end closes.

    A job that takes more CPU time than it may ends the process, as decoders cannot be interrupted. cpu_seconds: as in
    `ImageProcessorConfig`.
    """
    decoder: MessageDecoder[ToImageProcessor] = MessageDecoder(ToImageProcessor)
    with contextlib.suppress(PeerClosedError):
        while True:
            payload = channel.recv()
            try:
                job = decoder.decode(payload)
            except MessageError as error:
                _refuse(channel, payload, error)
                continue
            num_files = 1 + (len(job.references) + len(job.controls) if isinstance(job, PrepareImages) else 0)
            signal.setitimer(signal.ITIMER_PROF, num_files * cpu_seconds)  # SIGPROF, which is not caught
            answer = perform(arena, job)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            channel.send(_encoded(answer))


def _refuse(channel: Channel, payload: bytes, error: MessageError) -> None:
    """Answer a job that cannot be decoded, except for its id."""
    job_id = read_member(payload, "job_id", int)
    if job_id is None:
        logger.error("%s", error, extra=of_request(""))
    else:
        channel.send(encode(JobFailed(job_id=job_id, failure=failure_of(error))))


def _encoded(answer: FromImageProcessor) -> bytes:
    try:
        return encode(answer)
    except MessageError as error:
        return encode(JobFailed(job_id=answer.job_id, failure=Failure.of(error)))


def perform(arena: Arena, job: ToImageProcessor) -> FromImageProcessor:
    """Do one job; any error becomes a JobFailed."""
    try:
        match job:
            case PrepareImages():
                return _prepare(arena, job)
            case ReadPicture():
                pixels = image_ops.read_picture(job, arena.view(job.file))
                return ReadPixels(job_id=job.job_id, pixels=_write(arena, job.out, [pixels])[0])
            case ComposeImage():
                return _compose(arena, job)
    except InvalidRequestError as error:
        return JobFailed(job_id=job.job_id, failure=Failure.of(error))
    except Exception as error:  # the actor's edge
        return JobFailed(job_id=job.job_id, failure=Failure.of(error, traceback.format_exc()))


def _prepare(arena: Arena, job: PrepareImages) -> PreparedImages:
    references, controls = ([arena.view(file) for file in files] for files in (job.references, job.controls))
    if job.is_generation:
        return _with_controls(arena, job, image_ops.prepare_nothing(job), controls)
    arrays = image_ops.prepare(job, _bytes(arena, job.image), _bytes(arena, job.mask), references, controls)
    canvases = [arrays, *arrays.canvases.values()]
    parts = [part for each in canvases for part in each.all]
    refs = _write(arena, job.scratch, [*parts, *arrays.references])
    step = 3 + len(job.controls)
    final, *others = (_canvas(refs[start : start + step]) for start in range(0, len(parts), step))
    return PreparedImages(
        job_id=job.job_id,
        upload_width=arrays.upload_size[0],
        upload_height=arrays.upload_size[1],
        **msgspec.structs.asdict(final),
        content_id=arrays.content_id,
        unmasked=arrays.unmasked,
        crop=arrays.crop,
        canvases=dict(zip(arrays.canvases, others, strict=True)),
        references=tuple(refs[len(parts) :]),
    )


def _canvas(refs: Sequence[ArrayRef]) -> PreparedCanvas:
    """refs: template, mask, active tokens, and control pictures."""
    template, mask, active, *controls = refs
    return PreparedCanvas(template.shape[1], template.shape[0], template, mask, active, tuple(controls))


def _with_controls(
    arena: Arena, job: PrepareImages, prepared: PreparedImages, files: Sequence[Bytes]
) -> PreparedImages:
    """A picture that is made from nothing, with control pictures at all of its sizes."""
    names = ["", *prepared.canvases]
    sizes = [(prepared.width, prepared.height), *((each.width, each.height) for each in prepared.canvases.values())]
    arrays = control_arrays(files, job, (prepared.upload_width, prepared.upload_height), None, sizes)
    refs = iter(_write(arena, job.scratch, [array for each in arrays for array in each]))
    pictures = {name: tuple(islice(refs, len(files))) for name in names}
    smaller = {
        name: msgspec.structs.replace(canvas, control_pictures=pictures[name])
        for name, canvas in prepared.canvases.items()
    }
    return msgspec.structs.replace(prepared, control_pictures=pictures[""], canvases=smaller)


def _write(arena: Arena, scratch: ArrayRef, arrays: Sequence[npt.NDArray[np.generic]]) -> list[ArrayRef]:
    """Copy arrays into `scratch`, one after the other; returns where they are."""
    refs = []
    offset = 0
    for array in arrays:
        ref = carve(scratch, offset, array.shape, array.dtype.name)
        np.copyto(arena.view(ref), array)
        refs.append(ref)
        offset += -(-array.nbytes // image_ops.ALIGNMENT) * image_ops.ALIGNMENT
    return refs


def _compose(arena: Arena, job: ComposeImage) -> ComposedImage:
    files = _bytes(arena, job.image), _bytes(arena, job.mask)
    pixels, found = _bytes(arena, job.pixels), _bytes(arena, job.found)
    composed = image_ops.compose(job, pixels, *files, arena.view(job.out), found)
    return ComposedImage(
        job_id=job.job_id,
        encoded=carve(job.out, 0, (composed.nbytes,), "uint8"),
        width=composed.size[0],
        height=composed.size[1],
        colour_lost=composed.colour_lost,
        box=composed.box,
    )


def _bytes(arena: Arena, ref: ArrayRef | None) -> Bytes | None:
    return None if ref is None else arena.view(ref)
