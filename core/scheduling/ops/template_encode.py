"""The op template_encode: a template's clean latents. It runs for the activation cache."""

from __future__ import annotations

from core.graph.op import Op, OpWork, Sizes
from core.graph.work import Work
from core.handles import ArrayRef, EntryRef
from core.messages.message import Message


class TemplateEncode(Message, OpWork, frozen=True, omit_defaults=True):
    """template, references -> their clean latents (the posterior's mode), one after the other, [tokens, latent width]
    in the compute dtype, written to `out`.
    """

    template: ArrayRef
    width: int
    height: int
    out: EntryRef
    references: tuple[ArrayRef, ...] = ()
    cache_salt: str = ""  # the encoder's output is kept, and reused for an equal template with the same salt


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens + sizes.num_reference_tokens])


TEMPLATE_ENCODE = Op(
    name="template_encode",
    component="vae",
    message=TemplateEncode,
    size=_size,
    part="prime",
    costs_as="image_encode",  # both run the same encoder, so their times are measured together
)
