"""The built-in ops, one per file. Importing this package registers them."""

from core.graph.op import OPS
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

BUILT_IN = (
    SEGMENT,
    TEXT_ENCODE,
    EMBED,
    IMAGE_ENCODE,
    RECALL,
    CONTROL_ENCODE,
    CONTROLNET,
    DENOISE,
    UPSCALE,
    DECODE,
    PRIME,
    TEMPLATE_ENCODE,
    RUN,
)

for op in BUILT_IN:
    OPS.register(op)
