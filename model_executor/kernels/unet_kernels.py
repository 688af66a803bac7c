"""A UNet's GPU kernels in Triton, all but products, convolutions and attention; `unet_operators.py` calls them.

As in `triton_kernels.py`: each makes one pass over memory, in float32, rounded once at the end, and arguments that
differ between masks are not specialised on. Maps are [images, rows, columns, channels] in memory, which convolutions
prefer too, so that a map's pixels are a transformer's tokens without a copy.

Pages are found at run time: `table`, int64 [2], has the addresses of the near and the far entry, `weights`, float32
[2], their weights. What has weight 0 is not read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from model_executor.kernels.triton_kernels import first_not_below

ROOT_HALF = tl.constexpr(0.7071067811865476)

VALUES = {"int8": tl.int8, "bfloat16": tl.bfloat16, "float32": tl.float32}
MOMENTS = {"int8": tl.float16, "bfloat16": tl.float16, "float32": tl.float32}
"""Types of the values and moments of pages, by the pages' dtype."""


# ------------------------------------------------------------------------------------------------------------- tokens


@triton.jit(do_not_specialize=["number", "rounds", "tokens"])
def find_places(active, places, number, rounds, tokens, TOKENS: tl.constexpr):
    """For each token its first index in `active`, int64 [number], ascending, possibly with repetitions; -1 where it is
    not among them. places: int32 [tokens]. rounds: 2^rounds is more than `number`."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    low = tl.zeros([TOKENS], tl.int32)
    low = first_not_below(active, token, low, low + number, rounds)
    found = tl.load(active + low, mask=low < number, other=-1)
    tl.store(places + token, tl.where(found == token, low, -1), mask=token < tokens)


@triton.jit
def _layer_norm(x, weight, bias, column, width, eps):
    """Layer norm of rows x, float32 [rows, columns], zero beyond `width`."""
    inside = (column < width)[None, :]
    centred = tl.where(inside, x - (tl.sum(x, axis=1) / width)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    return centred * scale[:, None] * factor[None, :] + shift[None, :]


@triton.jit(do_not_specialize=["tokens", "number", "grid_columns"])
def norm_and_gather(
    x,
    weight,
    bias,
    active,
    normed,
    some,
    some_normed,
    tokens,
    number,
    grid_columns,
    width,
    eps,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Layer norm of ROWS tokens of x, [images, tokens, width], to `normed`, of the same shape. After the last one come
    the active ones again: they and their norms go to `some` and `some_normed`, [images, number, width].

    active: int64, tokens of the picture, whose SIDE * SIDE pixels each are tokens of x, in rows of grid_columns * SIDE.
    BLOCK: a power of two, >= width.
    """
    token, image = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    index = token - tokens
    is_some = (index >= 0) & (index < number)
    chosen = tl.load(active + index // (SIDE * SIDE), mask=is_some, other=0).to(tl.int32)
    within = index % (SIDE * SIDE)
    line, place = chosen // grid_columns * SIDE + within // SIDE, chosen % grid_columns * SIDE + within % SIDE
    row = tl.where(is_some, line * (grid_columns * SIDE) + place, token)
    column = tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    is_token = is_some | (index < 0)
    source = (image * tokens + row)[:, None] * width + column[None, :]
    own = tl.load(x + source, mask=is_token[:, None] & inside, other=0.0)
    result = _layer_norm(own.to(tl.float32), weight, bias, column, width, eps).to(normed.dtype.element_ty)
    tl.store(normed + source, result, mask=(index < 0)[:, None] & inside)
    target = (image * number + index)[:, None] * width + column[None, :]
    tl.store(some + target, own, mask=is_some[:, None] & inside)
    tl.store(some_normed + target, result, mask=is_some[:, None] & inside)


@triton.jit(do_not_specialize=["rows"])
def add_and_norm(x, y, weight, bias, normed, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x += y for ROWS rows of width numbers, then layer norm of these rows of x to `normed`. All [rows, width]. BLOCK:
    a power of two, >= width."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(x.dtype.element_ty)
    tl.store(x + place, rounded, mask=inside)
    result = _layer_norm(rounded.to(tl.float32), weight, bias, column, width, eps)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def geglu(x, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The first half of x, [rows, 2 * width], times GELU of its second half, for a part of ROWS rows. out: [rows,
    width]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (column < width)
    value = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = value * (0.5 * gate * (1.0 + tl.erf(gate * ROOT_HALF)))
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------- group norm
#
# A program has GROUPS groups of SIZE channels each, side by side in GROUPS * WIDTH columns. WIDTH: a power of two, >=
# SIZE; columns beyond a group's size are empty. GROUPS is a power of two.


@triton.jit
def _of_groups(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums over all pixels and a group's columns, [GROUPS]. x: [pixels, columns]."""
    return tl.sum(tl.reshape(tl.sum(x, axis=0), [GROUPS, WIDTH]), axis=1)


@triton.jit
def _to_columns(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Each group's number in all its columns. x: [GROUPS]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [GROUPS, WIDTH]), [GROUPS * WIDTH])


@triton.jit
def _channels(block, groups, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """(each column's channel, channels of a map, whether the column has one) in the program of this block of groups."""
    column = tl.arange(0, GROUPS * WIDTH)
    group, d = block * GROUPS + column // WIDTH, column % WIDTH
    return group * SIZE + d, groups * SIZE, (d < SIZE) & (group < groups)


@triton.jit
def _page_moments(near, far, near_weight, far_weight, first, token, tokens, inside, MOMENT: tl.constexpr):
    """A page's moments at some tokens, interpolated: [groups, tokens]. first: of each group, where its numbers begin.
    near, far: where the page's moments begin, as integers."""
    place = first[:, None] * tokens + token[None, :]
    is_near = inside & (tl.zeros_like(place) + near_weight != 0.0)
    is_far = inside & (tl.zeros_like(place) + far_weight != 0.0)
    result = near_weight * tl.load(near.to(tl.pointer_type(MOMENT)) + place, mask=is_near, other=0.0).to(tl.float32)
    result += far_weight * tl.load(far.to(tl.pointer_type(MOMENT)) + place, mask=is_far, other=0.0).to(tl.float32)
    return result


@triton.jit
def _outside_box(token, tokens, grid_columns, left, top, right, bottom):
    """Which tokens lie outside a box of the picture."""
    row, column = token // grid_columns, token % grid_columns
    is_within = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    return (token < tokens) & (is_within == 0)


@triton.jit
def _pool_outside(
    outside,
    table,
    weights,
    page_byte,
    groups,
    each,
    tokens,
    grid_columns,
    left,
    top,
    right,
    bottom,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    MOMENT: tl.constexpr,
):
    """Writes mean and variance of some groups over all tokens outside the box to `outside`, float32 [2, groups]."""
    near, far = tl.load(table) + page_byte, tl.load(table + 1) + page_byte
    near_weight, far_weight = tl.load(weights), tl.load(weights + 1)
    is_group = (each < groups)[:, None]
    share = 1.0 / tl.maximum(tokens - (right - left) * (bottom - top), 1)
    mean = tl.zeros([GROUPS], tl.float32)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = is_group & _outside_box(token, tokens, grid_columns, left, top, right, bottom)[None, :]
        means = _page_moments(near, far, near_weight, far_weight, each, token, tokens, inside, MOMENT)
        mean += tl.sum(means, axis=1) * share
    variance = tl.zeros([GROUPS], tl.float32)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = is_group & _outside_box(token, tokens, grid_columns, left, top, right, bottom)[None, :]
        means = _page_moments(near, far, near_weight, far_weight, each, token, tokens, inside, MOMENT)
        deviations = _page_moments(near, far, near_weight, far_weight, each + groups, token, tokens, inside, MOMENT)
        apart = means - mean[:, None]
        variance += tl.sum(tl.where(inside, deviations * deviations + apart * apart, 0.0), axis=1) * share
    tl.store(outside + each, mean, mask=each < groups)
    tl.store(outside + groups + each, variance, mask=each < groups)


@triton.jit(
    do_not_specialize=[
        *("time_step", "image_pixels", "source_width", "box_left", "box_top", "box_columns", "pixels", "tiles"),
        *("chunks", "page_byte", "tokens", "grid_columns", "left", "top", "right", "bottom"),
    ]
)
def group_moments(
    x,
    bias,
    time,
    moments,
    outside,
    table,
    weights,
    groups,
    time_step,
    image_pixels,
    source_width,
    box_left,
    box_top,
    box_columns,
    pixels,
    tiles,
    chunks,
    page_byte,
    tokens,
    grid_columns,
    left,
    top,
    right,
    bottom,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TIME: tl.constexpr,
    HAS_OUTSIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    MOMENT: tl.constexpr,
):
    """Mean, and sum of squared deviations, of each group in a chunk of `tiles` * PIXELS pixels of a box of each map.

    x: maps of image_pixels pixels, in rows of source_width; the box is of `pixels`, in rows of box_columns. bias:
    [channels], HAS_BIAS, and time: [images, channels], time_step apart, HAS_TIME, are added to x first. moments:
    float32 [images, groups, chunks, 2].

    HAS_OUTSIDE: programs of the chunk after the last pool a page's moments, of type MOMENT, [2 * groups, tokens], that
    begin at page_byte of an entry, over the tokens outside the box left, top, right, bottom of a picture with
    grid_columns tokens per row.
    """
    chunk, block, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    each = block * GROUPS + tl.arange(0, GROUPS)
    if chunk < chunks:
        channel, channels, inside = _channels(block, groups, GROUPS, SIZE, WIDTH)
        added = tl.zeros([GROUPS * WIDTH], tl.float32)
        if HAS_BIAS:
            added += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        if HAS_TIME:
            added += tl.load(time + image * time_step + channel, mask=inside, other=0.0).to(tl.float32)
        mean, spread = tl.zeros([GROUPS], tl.float32), tl.zeros([GROUPS], tl.float32)
        count = 0.0
        for tile in range(tiles):
            pixel = (chunk * tiles + tile) * PIXELS + tl.arange(0, PIXELS)
            is_pixel = pixel < pixels
            row, place = pixel // box_columns, pixel % box_columns
            source = (image * image_pixels + (box_top + row) * source_width + box_left + place)[:, None] * channels
            mask = is_pixel[:, None] & inside[None, :]
            value = tl.load(x + source + channel[None, :], mask=mask, other=0.0).to(tl.float32) + added[None, :]
            number = tl.sum(is_pixel.to(tl.float32), axis=0) * SIZE
            of_tile = _of_groups(tl.where(mask, value, 0.0), GROUPS, WIDTH) / tl.maximum(number, 1.0)
            centred = tl.where(mask, value - _to_columns(of_tile, GROUPS, WIDTH)[None, :], 0.0)
            apart, total = of_tile - mean, tl.maximum(count + number, 1.0)
            spread += _of_groups(centred * centred, GROUPS, WIDTH) + apart * apart * (count * number / total)
            mean += apart * (number / total)
            count += number
        target = moments + ((image * groups + each) * chunks + chunk) * 2
        tl.store(target, mean, mask=each < groups)
        tl.store(target + 1, spread, mask=each < groups)
    elif HAS_OUTSIDE:
        is_first = image == 0
        if is_first:
            _pool_outside(
                outside,
                table,
                weights,
                page_byte,
                groups,
                each,
                tokens,
                grid_columns,
                left,
                top,
                right,
                bottom,
                GROUPS,
                TOKENS,
                MOMENT,
            )


@triton.jit(
    do_not_specialize=[
        *("time_step", "image_pixels", "source_width", "source_left", "source_top", "chunks", "chunk_pixels"),
        *("pixels", "share", "out_columns", "out_pixels", "left", "top", "right", "bottom"),
    ]
)
def normalise_groups(
    x,
    bias,
    time,
    moments,
    outside,
    weight,
    shift,
    out,
    raw,
    groups,
    eps,
    time_step,
    image_pixels,
    source_width,
    source_left,
    source_top,
    chunks,
    chunk_pixels,
    pixels,
    share,
    out_columns,
    out_pixels,
    left,
    top,
    right,
    bottom,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TIME: tl.constexpr,
    HAS_OUTSIDE: tl.constexpr,
    SILU: tl.constexpr,
    RAW: tl.constexpr,
):
    """Group norm, and SILU, of some pixels of maps: out, [images, out_pixels, channels] in rows of out_columns, begins
    at source_left, source_top of x. Pixels outside the box left, top, right, bottom of x become zero.

    x, bias, time: as for `group_moments`, which made `moments` of `pixels` pixels, chunk_pixels to a chunk. CHUNKS: a
    power of two, >= chunks. HAS_OUTSIDE: those are the moments of a box that covers `share` of a map, and outside,
    float32 [2, groups], has mean and variance of its rest. RAW: pixels from this many on, on every side, are also
    written to `raw` as they were; 0 for none.
    """
    block, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, channels, inside = _channels(block, groups, GROUPS, SIZE, WIDTH)

    each = block * GROUPS + tl.arange(0, GROUPS)
    is_group, chunk = each < groups, tl.arange(0, CHUNKS)
    left_over = tl.minimum(tl.maximum(pixels - chunk * chunk_pixels, 0), chunk_pixels)
    portion = (left_over.to(tl.float32) / pixels)[:, None]
    known = ((image * groups + each)[None, :] * chunks + chunk[:, None]) * 2
    is_known = (chunk < chunks)[:, None] & is_group[None, :]
    means = tl.load(moments + known, mask=is_known, other=0.0)
    spreads = tl.load(moments + known + 1, mask=is_known, other=0.0)
    of_group = tl.sum(means * portion, axis=0)
    apart = means - of_group[None, :]
    variance = tl.sum(spreads / (pixels * SIZE).to(tl.float32) + apart * apart * portion, axis=0)
    if HAS_OUTSIDE:
        other = tl.load(outside + each, mask=is_group, other=0.0)
        other_variance = tl.load(outside + groups + each, mask=is_group, other=0.0)
        between = of_group - other
        variance = other_variance + share * (variance - other_variance) + share * (1.0 - share) * between * between
        of_group = other + share * between
    factor = _to_columns(tl.rsqrt(variance + eps), GROUPS, WIDTH)
    factor *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    mean = _to_columns(of_group, GROUPS, WIDTH)
    move = tl.load(shift + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        mean -= tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_TIME:
        mean -= tl.load(time + image * time_step + channel, mask=inside, other=0.0).to(tl.float32)

    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, place = pixel // out_columns, pixel % out_columns
    source_row, source_column = source_top + row, source_left + place
    is_there = (source_row >= top) & (source_row < bottom) & (source_column >= left) & (source_column < right)
    is_there = (is_there & (pixel < out_pixels))[:, None]
    source = (image * image_pixels + source_row * source_width + source_column)[:, None] * channels + channel[None, :]
    own = tl.load(x + source, mask=is_there & inside[None, :], other=0.0)
    result = (own.to(tl.float32) - mean[None, :]) * factor[None, :] + move[None, :]
    if SILU:
        result = result / (1.0 + tl.exp(-result))
    mask = (pixel < out_pixels)[:, None] & inside[None, :]
    target = (image * out_pixels + pixel)[:, None] * channels + channel[None, :]
    tl.store(out + target, tl.where(is_there, result, 0.0).to(out.dtype.element_ty), mask=mask)
    if RAW > 0:
        inner_row, inner_column, inner_columns = row - RAW, place - RAW, out_columns - 2 * RAW
        inner_rows = out_pixels // out_columns - 2 * RAW
        is_inner = (inner_row >= 0) & (inner_row < inner_rows) & (inner_column >= 0) & (inner_column < inner_columns)
        inner = (image * inner_rows * inner_columns + inner_row * inner_columns + inner_column)[:, None] * channels
        tl.store(raw + inner + channel[None, :], own, mask=is_inner[:, None] & inside[None, :])


# --------------------------------------------------------------------------------------------------------------- maps


@triton.jit(do_not_specialize=["pixels"])
def add_biased(
    own, change, bias, out, pixels, channels, scale, HAS_BIAS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr
):
    """A part of PIXELS pixels of (own + change + bias) * scale. All [pixels, channels], bias [channels]."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    place = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    result = tl.load(own + place, mask=inside, other=0.0).to(tl.float32)
    result += tl.load(change + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, (result * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("rows", "columns", "left", "top", "out_columns", "out_pixels", "large_rows", "large_columns"),
    ]
)
def cut_twice_as_large(
    x,
    out,
    rows,
    columns,
    channels,
    left,
    top,
    out_columns,
    out_pixels,
    large_rows,
    large_columns,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A box of a map that is enlarged by repetition: out, [images, out_pixels, channels] in rows of out_columns, begins
    at left, top of the map of large_rows, large_columns; zero beyond it. x: [images, rows, columns, channels]."""
    image = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row, column = top + pixel // out_columns, left + pixel % out_columns
    is_there = (row >= 0) & (row < large_rows) & (column >= 0) & (column < large_columns) & (pixel < out_pixels)
    source = (image * rows * columns + row // 2 * columns + column // 2)[:, None] * channels
    value = tl.load(x + source + channel, mask=is_there[:, None] & (channel < channels), other=0.0)
    target = (image * out_pixels + pixel)[:, None] * channels
    tl.store(out + target + channel, value, mask=(pixel < out_pixels)[:, None] & (channel < channels))


@triton.jit
def _page_values(
    base,
    page,
    first,
    d,
    weight,
    mask,
    block_bytes,
    value_bytes,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Numbers of an entry times `weight`, float32 [rows, SIZE]. base: the entry's block, an integer; page: int64, each
    row's page from there on; first: of each row, where its SIZE numbers begin in the page."""
    start = base + page * block_bytes
    pointer = start.to(tl.pointer_type(VALUE)) + first
    if ALIGNED:
        pointer = tl.multiple_of(pointer, [16])
    factor = tl.where(mask, weight, 0.0)
    is_row = factor != 0.0
    value = tl.load(pointer[:, None] + d[None, :], mask=is_row[:, None] & (d < SIZE)[None, :], other=0.0)
    if HAS_SCALES:
        scales = (start + value_bytes).to(tl.pointer_type(tl.float32))
        factor *= tl.load(scales + first // SIZE, mask=is_row, other=0.0)
    return value.to(tl.float32) * factor[:, None]


@triton.jit(
    do_not_specialize=[
        *("block_byte", "block_bytes", "value_bytes", "page_numbers", "pixels", "images", "fresh_rows"),
        *("grid_columns", "left", "top", "right", "bottom"),
    ]
)
def fill(
    table,
    weights,
    places,
    own,
    change,
    bias,
    out,
    scale,
    block_byte,
    block_bytes,
    value_bytes,
    page_numbers,
    pixels,
    channels,
    images,
    fresh_rows,
    grid_columns,
    left,
    top,
    right,
    bottom,
    VALUE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BOX: tl.constexpr,
    SIDE: tl.constexpr,
    OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block's whole output of all images: its pages, read once, and on top of them what each image has computed.

    out: [images, pixels, channels]; a token of the picture is SIDE * SIDE pixels, of rows of grid_columns * SIDE.
    Pages: values of type VALUE, [pages, page_numbers], the output one number after the other, value_bytes long, then
    for every SIZE of them a scale, HAS_SCALES; the first page begins at block_byte of an entry, the others block_bytes
    apart. ALIGNED: every SIZE numbers begin at a multiple of 16 bytes. BLOCK: a power of two, >= SIZE.

    What was computed is (own + change + bias) * scale. change: [images, fresh_rows, channels]. Its rows are, with BOX,
    the pixels of the box left, top, right, bottom; else those of the active tokens, each of which has its index among
    them in places, int32 [tokens], where other tokens have -1. OWN: 0 for none, 1 if it is of the shape of `change`, 2
    of that of `out`. bias: [channels], HAS_BIAS.
    """
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_pixel = pixel < pixels
    d = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * SIZE + d
    inside = (d < SIZE)[None, :]
    row, column = pixel // (grid_columns * SIDE), pixel % (grid_columns * SIDE)
    if BOX:
        is_fresh = is_pixel & (row >= top) & (row < bottom) & (column >= left) & (column < right)
        fresh = (row - top) * (right - left) + column - left
    else:
        place = tl.load(places + row // SIDE * grid_columns + column // SIDE, mask=is_pixel, other=-1)
        is_fresh = is_pixel & (place >= 0)
        fresh = place * (SIDE * SIDE) + row % SIDE * SIDE + column % SIDE

    is_read = is_pixel & (is_fresh == 0)
    number = pixel.to(tl.int64) * channels + tl.program_id(1) * SIZE
    page, first = number // page_numbers, number % page_numbers
    result = tl.zeros([ROWS, BLOCK], tl.float32)
    for entry in tl.static_range(2):
        base, weight = tl.load(table + entry) + block_byte, tl.load(weights + entry)
        result += _page_values(
            base, page, first, d, weight, is_read, block_bytes, value_bytes, SIZE, VALUE, HAS_SCALES, ALIGNED
        )

    added = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + channel, mask=d < SIZE, other=0.0).to(tl.float32)
    is_computed = is_fresh[:, None] & inside
    for image in range(images):
        target = (image * pixels.to(tl.int64) + pixel)[:, None] * channels + channel[None, :]
        source = (image * fresh_rows.to(tl.int64) + fresh)[:, None] * channels + channel[None, :]
        computed = tl.load(change + source, mask=is_computed, other=0.0).to(tl.float32) + added[None, :]
        if OWN == 1:
            computed += tl.load(own + source, mask=is_computed, other=0.0).to(tl.float32)
        if OWN == 2:
            computed += tl.load(own + target, mask=is_computed, other=0.0).to(tl.float32)
        both = tl.where(is_computed, computed * scale, result)
        tl.store(out + target, both.to(out.dtype.element_ty), mask=is_pixel[:, None] & inside)
