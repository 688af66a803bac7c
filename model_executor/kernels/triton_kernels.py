"""The denoiser's GPU kernels in Triton, all but products and attention; `gpu_operators.py` calls them.

They are bound by memory, so each makes one pass over it where PyTorch's operators would make several. Arithmetic is
float32, rounded once at the end. Offsets are int64, because a batch may have more than 2^31 numbers. Arguments that
differ between masks are not specialised on: otherwise a new mask could trigger a compilation.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

INT8_MAX = tl.constexpr(127.0)

ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a float32 below 2^22 rounds that to an integer, halves to even."""


@triton.jit
def norm_modulate(
    x, rows, requests, factor, shift, out, x_step, factor_step, shift_step, width, eps, BLOCK: tl.constexpr
):
    """One row of layer norm, times factor, plus shift. x: rows x_step numbers apart; rows, requests: int32, for each
    row of `out`, [rows, width], its row in x and its request. BLOCK: a power of two, >= width."""
    number = tl.program_id(0)
    row, request = tl.load(rows + number).to(tl.int64), tl.load(requests + number).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_step + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    weight = tl.load(factor + request * factor_step + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(shift + request * shift_step + column, mask=inside, other=0.0).to(tl.float32)
    result = normed * weight + bias
    tl.store(out + number.to(tl.int64) * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_gated(x, rows, requests, y, gate, x_step, y_step, gate_step, width, BLOCK: tl.constexpr):
    """x += gate * y for a part of one row of y. rows, requests: as for `norm_modulate`, for each row of y."""
    number = tl.program_id(0)
    row, request = tl.load(rows + number).to(tl.int64), tl.load(requests + number).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = x + row * x_step + column
    change = tl.load(y + number.to(tl.int64) * y_step + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + request * gate_step + column, mask=inside, other=0.0).to(tl.float32)
    result = tl.load(place, mask=inside, other=0.0).to(tl.float32) + factor * change
    tl.store(place, result.to(x.dtype.element_ty), mask=inside)


@triton.jit
def normalise_and_rotate(
    x, rows, weight, rotary, x_step, kind_step, heads, eps, WIDTH: tl.constexpr, HEADS: tl.constexpr
):
    """Root-mean-square norm and rotary embedding of interleaved pairs, of one token's queries or keys, in place.

    x: [tokens, n, heads, WIDTH], x_step from token to token and kind_step from queries to keys; rows: int32, tokens;
    weight: float32 [n, heads, WIDTH]; rotary: float32 [tokens, WIDTH], cosine and sine in turn. HEADS: a power of two,
    >= heads; WIDTH is one.
    """
    row, kind = tl.load(rows + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    head, d = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (d < WIDTH)
    place = x + row * x_step + kind * kind_step + head * WIDTH + d
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    factor = tl.load(weight + (kind * heads + head) * WIDTH + d, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(value * scale[:, None] * factor, [HEADS, WIDTH // 2, 2]))
    turn = tl.load(rotary + row * WIDTH + tl.arange(0, WIDTH))
    cosine, sine = tl.split(tl.reshape(turn, [1, WIDTH // 2, 2]))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    tl.store(place, tl.reshape(turned, [HEADS, WIDTH]).to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "page_tokens", "first"])
def read_page(
    near,
    near_scale,
    far,
    far_scale,
    near_weight,
    far_weight,
    fresh,
    places,
    out,
    tokens,
    page_tokens,
    first,
    heads,
    fresh_step,
    fresh_kind_step,
    out_kind_step,
    out_head_step,
    out_step,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_FAR: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_FRESH: tl.constexpr,
):
    """Keys or values of one head at some tokens: from a page, dequantised and interpolated, or from what was computed.

    near, far: [2, heads, page_tokens, WIDTH]; their scales: float32 [2, heads, page_tokens], HAS_SCALES; without
    HAS_FAR there is no far page. fresh: [computed tokens, 2, heads, WIDTH], fresh_step from token to token and
    fresh_kind_step from keys to values; places: int32 [tokens], which of them a token's is, -1 for the page's;
    HAS_FRESH. out: [2, heads, tokens, WIDTH] by its steps; the page's tokens begin at `first`. BLOCK: a power of two,
    >= WIDTH.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    kind, head = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    of_page = (token >= first) & (token < tokens)
    result = tl.zeros([TOKENS, BLOCK], tl.float32)
    if HAS_FRESH:
        place = tl.load(places + token, mask=token < tokens, other=-1).to(tl.int64)
        is_fresh = place >= 0
        of_page = of_page & (place < 0)
        source = fresh + place[:, None] * fresh_step + kind * fresh_kind_step + head * WIDTH + d
        result += tl.load(source, mask=is_fresh[:, None] & (d < WIDTH), other=0.0).to(tl.float32)
    row = group.to(tl.int64) * page_tokens + token - first
    inside = of_page[:, None] & (d < WIDTH)
    weight = tl.where(of_page, near_weight, 0.0)
    if HAS_SCALES:
        weight *= tl.load(near_scale + row, mask=of_page, other=0.0)
    result += weight[:, None] * tl.load(near + row[:, None] * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_FAR:
        weight = tl.where(of_page, far_weight, 0.0)
        if HAS_SCALES:
            weight *= tl.load(far_scale + row, mask=of_page, other=0.0)
        result += weight[:, None] * tl.load(far + row[:, None] * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    target = out + kind * out_kind_step + head * out_head_step + token.to(tl.int64)[:, None] * out_step + d
    tl.store(target, result.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (d < WIDTH))


@triton.jit(do_not_specialize=["tokens"])
def quantise(
    x,
    values,
    scales,
    tokens,
    heads,
    kind_step,
    head_step,
    token_step,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Symmetric int8 of one head's keys or values at some tokens. x: [2, heads, tokens, WIDTH] by its steps; values:
    int8 [2, heads, tokens, WIDTH]; scales: float32 [2, heads, tokens], amax / 127. A row whose scale is 0 or not
    finite gets zeros. BLOCK: a power of two, >= WIDTH."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    kind, head = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (d < WIDTH)
    source = x + kind * kind_step + head * head_step + token.to(tl.int64)[:, None] * token_step + d
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(value), axis=1) / INT8_MAX
    is_scale = (scale > 0.0) & (scale < float("inf"))
    quotient = tl.where(is_scale[:, None], tl.div_rn(value, tl.where(is_scale, scale, 1.0)[:, None]), 0.0)
    whole = (tl.minimum(tl.maximum(quotient, -INT8_MAX), INT8_MAX) + ROUNDER) - ROUNDER
    row = group.to(tl.int64) * tokens + token
    tl.store(scales + row, scale, mask=token < tokens)
    tl.store(values + row[:, None] * WIDTH + d, whole.to(tl.int8), mask=inside)
