"""What a worker computes for each op, one file per op. The ops themselves are in `core.scheduling.ops`."""

from collections.abc import Callable, Sequence

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.control_encode import CONTROL_ENCODE
from core.scheduling.ops.controlnet import CONTROLNET
from core.scheduling.ops.decode import DECODE
from core.scheduling.ops.denoise import DENOISE
from core.scheduling.ops.embed import EMBED
from core.scheduling.ops.image_encode import IMAGE_ENCODE
from core.scheduling.ops.prime import PRIME
from core.scheduling.ops.recall import RECALL
from core.scheduling.ops.run import RUN
from core.scheduling.ops.segment import SEGMENT
from core.scheduling.ops.template_encode import TEMPLATE_ENCODE
from core.scheduling.ops.text_encode import TEXT_ENCODE
from core.scheduling.ops.upscale import UPSCALE
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.ops.control_encode import encode_controls
from model_executor.worker.ops.controlnet import add_controls
from model_executor.worker.ops.decode import decode
from model_executor.worker.ops.denoise import denoise
from model_executor.worker.ops.embed import embed
from model_executor.worker.ops.image_encode import encode_image
from model_executor.worker.ops.prime import prime
from model_executor.worker.ops.recall import recall
from model_executor.worker.ops.run import run
from model_executor.worker.ops.segment import segment
from model_executor.worker.ops.template_encode import encode_template
from model_executor.worker.ops.text_encode import encode_text
from model_executor.worker.ops.upscale import upscale

Handler = Callable[[WorkerContext, Sequence[Item]], list[ItemResult]]
"""(context, items) -> their results. It gets all items of a batch if the op's items share a pass, else one."""

HANDLERS: dict[str, Handler] = {
    SEGMENT.name: segment,
    TEXT_ENCODE.name: encode_text,
    EMBED.name: embed,
    IMAGE_ENCODE.name: encode_image,
    RECALL.name: recall,
    CONTROL_ENCODE.name: encode_controls,
    CONTROLNET.name: add_controls,
    DENOISE.name: denoise,
    UPSCALE.name: upscale,
    DECODE.name: decode,
    PRIME.name: prime,
    TEMPLATE_ENCODE.name: encode_template,
    RUN.name: run,
}
"""Op name -> its handler."""
