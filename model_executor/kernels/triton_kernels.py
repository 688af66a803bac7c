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
FLOAT16_MAX = tl.constexpr(65504.0)

ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a float32 below 2^22 rounds that to an integer, halves to even."""


@triton.jit
def _clipped(x):
    """x in the range of float16; NaN stays."""
    return tl.where(x > FLOAT16_MAX, FLOAT16_MAX, tl.where(x < -FLOAT16_MAX, -FLOAT16_MAX, x))


@triton.jit
def _rms_scale(x, width, eps):
    """What the root-mean-square norm multiplies a row of `width` numbers by; beyond them x is 0."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)


@triton.jit(do_not_specialize=["number_of_rows", "number_of_first"])
def add_norm(
    x,
    rows,
    sums,
    gate,
    second_sums,
    second_gate,
    factor,
    shift,
    second_factor,
    second_shift,
    out,
    number_of_rows,
    number_of_first,
    x_step,
    sum_step,
    second_sum_step,
    gate_step,
    factor_step,
    width,
    eps,
    sum_eps,
    BLOCK: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    NORMS_SUMS: tl.constexpr,
    IS_CLIPPED: tl.constexpr,
    IS_RMS: tl.constexpr,
):
    """One row of x += gate * sums, then of layer norm, times factor, plus shift; with IS_RMS of root-mean-square norm,
    times factor.

    x: rows x_step numbers apart. rows: int32 [3, number_of_rows], for each row of `out`, [number_of_rows, width], its
    row in x, its request, and its row in `sums`, or -1 - its row in `second_sums`; HAS_SUMS. Gates, factors and shifts:
    one row per request; the first `number_of_first` rows of `out` have `factor` and `shift`, the others the second
    ones. NORMS_SUMS: of `sums` the root-mean-square norm is added, with `sum_eps`. IS_CLIPPED: sums are clipped to the
    range of float16. BLOCK: a power of two, >= width.
    """
    number = tl.program_id(0)
    row, request = tl.load(rows + number).to(tl.int64), tl.load(rows + number_of_rows + number).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = x + row * x_step + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_SUMS:
        source = tl.load(rows + 2 * number_of_rows + number).to(tl.int64)
        of_first = inside & (source >= 0)
        of_second = inside & (source < 0)
        added = tl.load(sums + source * sum_step + column, mask=of_first, other=0.0).to(tl.float32)
        added += tl.load(second_sums - (1 + source) * second_sum_step + column, mask=of_second, other=0.0).to(
            tl.float32
        )
        if NORMS_SUMS:
            added *= _rms_scale(added, width, sum_eps)
        weight = tl.load(gate + request * gate_step + column, mask=of_first, other=0.0).to(tl.float32)
        weight += tl.load(second_gate + request * gate_step + column, mask=of_second, other=0.0).to(tl.float32)
        value += weight * added
        if IS_CLIPPED:
            value = _clipped(value)
        rounded = value.to(x.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if IS_RMS:
        normed = value * _rms_scale(value, width, eps)
    else:
        centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
        normed = centred * _rms_scale(centred, width, eps)
    by_first = inside & (number < number_of_first)
    by_second = inside & (number >= number_of_first)
    scale = tl.load(factor + request * factor_step + column, mask=by_first, other=0.0).to(tl.float32)
    scale += tl.load(second_factor + request * factor_step + column, mask=by_second, other=0.0).to(tl.float32)
    result = normed * scale
    if not IS_RMS:
        bias = tl.load(shift + request * factor_step + column, mask=by_first, other=0.0).to(tl.float32)
        bias += tl.load(second_shift + request * factor_step + column, mask=by_second, other=0.0).to(tl.float32)
        result += bias
    tl.store(out + number.to(tl.int64) * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_gated(
    x, rows, requests, y, gate, x_step, y_step, gate_step, width, BLOCK: tl.constexpr, IS_CLIPPED: tl.constexpr
):
    """x += gate * y for a part of one row of y. rows, requests: int32, for each row of y, its row in x and its request.
    IS_CLIPPED: sums are clipped to the range of float16."""
    number = tl.program_id(0)
    row, request = tl.load(rows + number).to(tl.int64), tl.load(requests + number).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = x + row * x_step + column
    change = tl.load(y + number.to(tl.int64) * y_step + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + request * gate_step + column, mask=inside, other=0.0).to(tl.float32)
    result = tl.load(place, mask=inside, other=0.0).to(tl.float32) + factor * change
    if IS_CLIPPED:
        result = _clipped(result)
    tl.store(place, result.to(x.dtype.element_ty), mask=inside)


@triton.jit
def add_normed(
    x, rows, requests, y, gate, x_step, y_step, gate_step, width, eps, BLOCK: tl.constexpr, IS_CLIPPED: tl.constexpr
):
    """x += gate * the root-mean-square norm of y, for one row of y. rows, requests, IS_CLIPPED: as for `add_gated`.
    BLOCK: a power of two, >= width."""
    number = tl.program_id(0)
    row, request = tl.load(rows + number).to(tl.int64), tl.load(requests + number).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = x + row * x_step + column
    change = tl.load(y + number.to(tl.int64) * y_step + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + request * gate_step + column, mask=inside, other=0.0).to(tl.float32)
    change *= _rms_scale(change, width, eps)
    result = tl.load(place, mask=inside, other=0.0).to(tl.float32) + factor * change
    if IS_CLIPPED:
        result = _clipped(result)
    tl.store(place, result.to(x.dtype.element_ty), mask=inside)


@triton.jit
def swiglu(x, out, x_step, out_step, width, BLOCK: tl.constexpr):
    """A part of one row of out = silu(gate) * up. x: rows x_step numbers apart, gate and up side by side, `width`
    numbers each; out: rows of `width` numbers, out_step apart."""
    number, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = x + number * x_step + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + number * out_step + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(even, odd, turn, ROWS: tl.constexpr, TURNS: tl.constexpr, WIDTH: tl.constexpr):
    """Rotary embedding of interleaved pairs, float32 [ROWS, WIDTH]. even, odd: their numbers, [ROWS, WIDTH / 2]. turn:
    [TURNS, WIDTH], cosine and sine in turn, for each row, or one for all."""
    cosine, sine = tl.split(tl.reshape(turn, [TURNS, WIDTH // 2, 2]))
    return tl.reshape(tl.join(even * cosine - odd * sine, even * sine + odd * cosine), [ROWS, WIDTH])


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
    turned = _rotated(even, odd, turn, HEADS, 1, WIDTH)
    tl.store(place, turned.to(x.dtype.element_ty), mask=inside)


@triton.jit
def interpolated(
    addresses, shares, start, scales, row, of_page, d, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr
):
    """Rows of a page, dequantised and interpolated: float32 [rows, BLOCK], zeros where `of_page` is not set.

    addresses: int64 [2], of near and far entry, aligned to 16 bytes; shares: float32 [2], the weight of each; what has
    weight 0 is not read. start, scales: bytes of an entry before the page's values, and before its scales. PAGE: dtype
    of the entries.
    """
    value = tl.zeros([of_page.shape[0], BLOCK], tl.float32)
    for number in tl.static_range(2):
        address = tl.load(addresses + number)
        weight = tl.where(of_page, tl.load(shares + number), 0.0)
        is_read = weight != 0.0
        if PAGE == "int8":
            entry = (address + start).to(tl.pointer_type(tl.int8))
        elif PAGE == "bfloat16":
            entry = (address + start).to(tl.pointer_type(tl.bfloat16))
        else:
            entry = (address + start).to(tl.pointer_type(tl.float32))
        source = tl.multiple_of(entry, 16) + row[:, None] * WIDTH + d
        content = tl.load(source, mask=is_read[:, None] & (d < WIDTH), other=0.0)
        if PAGE == "int8":
            entry_scales = (address + scales).to(tl.pointer_type(tl.float32))
            weight *= tl.load(entry_scales + row, mask=is_read, other=0.0)
        value += weight[:, None] * content.to(tl.float32)
    return value


@triton.jit(do_not_specialize=["page", "block_bytes", "value_bytes", "tokens", "page_tokens", "first"])
def read_page(
    addresses,
    shares,
    fresh,
    places,
    out,
    page,
    block_bytes,
    value_bytes,
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
    PAGE: tl.constexpr,
    HAS_FRESH: tl.constexpr,
):
    """Keys or values of one head at some tokens: from a page, dequantised and interpolated, or from what was computed.

    addresses, shares, PAGE: as for `interpolated`. page: its number in the entries, block_bytes from one to the next,
    with value_bytes of values, [2, heads, page_tokens, WIDTH], and then scales. fresh: [computed tokens, 2, heads,
    WIDTH], fresh_step from token to token and fresh_kind_step from keys to values; places: int32 [tokens], which of
    them a token's is, -1 for the page's; HAS_FRESH. out: [2, heads, tokens, WIDTH] by its steps; the page's tokens
    begin at `first`. BLOCK: a power of two, >= WIDTH.
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
    start = page.to(tl.int64) * block_bytes
    result += interpolated(addresses, shares, start, start + value_bytes, row, of_page, d, WIDTH, BLOCK, PAGE)
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


@triton.jit
def take_rows(x, rows, out, x_step, width, BLOCK: tl.constexpr):
    """A part of one row of out = x[rows]. rows: int32, for each row of `out`, [rows, width], its row in x."""
    number, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + number).to(tl.int64)
    value = tl.load(x + row * x_step + column, mask=column < width, other=0.0)
    tl.store(out + number.to(tl.int64) * width + column, value, mask=column < width)


@triton.jit
def first_not_below(numbers, wanted, low, high, rounds):
    """Of ascending numbers in memory, the index of the first that is not below each wanted one, in low .. high; `high`
    if all are. rounds: 2^rounds is more than the numbers between."""
    for _ in range(rounds):
        is_open = low < high
        middle = (low + high) // 2
        is_below = tl.load(numbers + middle, mask=is_open, other=0) < wanted
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["rounds"])
def find_places(requests, active, places, rounds, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """For some tokens of one request, their places among those that a block computes, -1 where it does not.

    requests: as for `attention_inputs`. active: int64, the active image tokens of all requests, in ascending order per
    request; of equal ones the first counts. places: int32 [keys of all requests]. rounds: 2^rounds is more than the
    active tokens of any request.
    """
    request = requests + tl.program_id(0) * COLUMNS
    first_key, keys, text = tl.load(request), tl.load(request + 1), tl.load(request + 2)
    first, number = tl.load(request + 11), tl.load(request + 12)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    image = token - text
    low = tl.zeros([BLOCK], tl.int64)
    low = first_not_below(active + first, image, low, low + number, rounds)
    found = tl.load(active + first + low, mask=low < number, other=-1)
    place = tl.where((low < number) & (found == image), text + low, -1)
    place = tl.where((token < text) | (number < 0), token, place)
    tl.store(places + first_key + token, place.to(tl.int32), mask=token < keys)


@triton.jit(do_not_specialize=["page"])
def attention_inputs(
    tiles,
    requests,
    places,
    first,
    second,
    first_weight,
    second_weight,
    rotary,
    addresses,
    shares,
    joint,
    queries,
    page,
    first_step,
    second_step,
    heads,
    eps,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Queries, keys or values of one head at some tokens of one request, as attention reads them: of tokens that the
    block computes with norm and rotary embedding, of others from pages, dequantised and interpolated.

    tiles: int32 [tiles, 3], for each program along the first axis 0 (queries), 1 (keys) or 2 (values), the request and
    the first token: among those that the block computes, for queries, else among all. The second axis are heads.
    requests: int64 [requests, COLUMNS], for each request
        0  row of `joint` of its first token
        1  number of its tokens
        2  of them text tokens, which come first and are all computed
        3  row of `first` of the first text token
        4  row of `second` of the first computed image token; without HAS_SECOND, row of `first`
        5  row of `rotary` of the first computed token
        6  row of `queries` of the first computed token
        7  number of computed tokens
        8  rows of its pages
        9  bytes from one page to the next
        10 bytes of a page's values, which its scales follow
        11, 12 first of its tokens in `active`, and their number, -1 if all are computed; see `find_places`
    PAGE: dtype of the entries, "" if all tokens are computed. places: int32 [keys], for each row of `joint` its token's
    number among the computed ones, -1 for one of the pages. first, second: [rows, 3, heads, WIDTH], first_step and
    second_step from row to row; HAS_SECOND. Their weights: float32 [2, heads, WIDTH]; rotary: float32 [rows, WIDTH],
    cosine and sine in turn; HAS_NORM, and then WIDTH is a power of two. addresses: int64 [requests, 2], of near and far
    entry, aligned to 16 bytes; shares: float32 [requests, 2], the weight of each; what has weight 0 is not read. page:
    its number in the entries. joint: [keys, 2, heads, WIDTH], and queries: [queries, heads, WIDTH], contiguous, are
    written. BLOCK: a power of two, >= WIDTH.
    """
    tile = tiles + 3 * tl.program_id(0)
    kind, number, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    request = requests + number * COLUMNS
    head = tl.program_id(1).to(tl.int64)
    first_key, text, computed = tl.load(request), tl.load(request + 2), tl.load(request + 7)
    limit = tl.where(kind == 0, computed, tl.load(request + 1))
    token = start + tl.arange(0, TOKENS)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (token < limit)[:, None] & (d < WIDTH)

    place = token.to(tl.int64)
    if PAGE != "":
        is_key = (kind != 0) & (token < limit)
        place = tl.where(kind == 0, place, tl.load(places + first_key + token, mask=is_key, other=-1).to(tl.int64))
    is_text = place < text
    from_first = (place >= 0)[:, None] & inside
    column = (kind.to(tl.int64) * heads + head) * WIDTH + d
    if HAS_SECOND:
        row = tl.load(request + 4) + place - text
        value = tl.load(
            second + row[:, None] * second_step + column, mask=from_first & (is_text == 0)[:, None], other=0.0
        ).to(tl.float32)
        from_first = from_first & is_text[:, None]
        row = tl.load(request + 3) + place
        value += tl.load(first + row[:, None] * first_step + column, mask=from_first, other=0.0).to(tl.float32)
    else:
        row = tl.load(request + 3) + place
        value = tl.load(first + row[:, None] * first_step + column, mask=from_first, other=0.0).to(tl.float32)

    if HAS_NORM:  # noqa: SIM102 (decided when it is compiled; what follows, when it runs)
        if kind < 2:
            scale = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
            factor = tl.load(first_weight + column)
            if HAS_SECOND:
                factor = tl.where(is_text[:, None], factor, tl.load(second_weight + column))
            turn_row = (tl.load(request + 5) + place)[:, None] * WIDTH + d
            turn = tl.load(rotary + turn_row, mask=(place >= 0)[:, None] & inside, other=0.0)
            even, odd = tl.split(tl.reshape(value * scale[:, None] * factor, [TOKENS, WIDTH // 2, 2]))
            value = _rotated(even, odd, turn, TOKENS, TOKENS, WIDTH)

    if PAGE != "":  # noqa: SIM102
        if kind > 0:
            is_page = (place < 0) & (token < limit)
            group = (kind - 1).to(tl.int64) * heads + head
            page_row = group * tl.load(request + 8) + token - text
            block = page.to(tl.int64) * tl.load(request + 9)
            scales = block + tl.load(request + 10)
            pair = 2 * number
            value += interpolated(
                addresses + pair, shares + pair, block, scales, page_row, is_page, d, WIDTH, BLOCK, PAGE
            )

    result = value.to(joint.dtype.element_ty)
    if kind == 0:
        target = tl.load(request + 6) + token
        tl.store(queries + target[:, None] * heads * WIDTH + head * WIDTH + d, result, mask=inside)
    else:
        target = 2 * (first_key + token) + kind - 1
        tl.store(joint + target[:, None] * heads * WIDTH + head * WIDTH + d, result, mask=inside)
