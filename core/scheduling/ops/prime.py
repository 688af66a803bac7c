"""The op prime: a chunk of the passes that make a template's pages. It runs for the activation cache."""

from __future__ import annotations

from core.graph.op import Op, OpWork, Sizes
from core.graph.work import Work
from core.handles import ArrayRef, EntryRef
from core.messages.message import Message
from core.page_scheme import PageDtype
from core.patches import PatchSet


class Prime(Message, OpWork, frozen=True, omit_defaults=True):
    """One chunk of a keyframe's pass: all image tokens of a template at noise level `sigma` through a range of blocks;
    their keys and values are written to the pages of `out`. Between chunks the hidden state is in the tensor store.
    """

    # The noisy template.
    latents: EntryRef  # its clean latents, and those of its references
    content_id: str  # seeds the noise
    sigma: float
    width: int  # px
    height: int  # px
    # The conditioning, from the PageScheme.
    prompt: str
    max_sequence_length: int
    guidance_scale: float
    # The work.
    blocks: tuple[int, int]  # [start, stop)
    dtype: PageDtype  # dtype of the pages
    out: EntryRef
    seen: tuple[ArrayRef, ...] = ()  # pixels of template and references, for text encoders that see them
    reference_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) in px
    cache_salt: str = ""  # embeddings are cached, and reused only with the same salt
    patches: PatchSet = ()


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_all_tokens])


PRIME = Op(
    name="prime",
    component="transformer",
    beside="text_encoder",  # it embeds its prompt itself
    message=Prime,
    size=_size,
    part="prime",
    sharing="together",
)
