"""The Triton kernels of `--batch-invariant`, called by `invariant.py`: products, attention, and a norm.

Each computes a number in the same order whatever else is computed beside it: sizes of tiles are constants of a dtype,
sums run over all of a tile's depth in one program, and nothing is compiled for a particular number of rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(x):
    """GELU's tanh approximation; (1 + tanh(z)) / 2 is the logistic function of 2 z, which is exact at both ends."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row, column) of a tile. Tiles are numbered down the columns of GROUP rows of tiles, so that programs which run
    at the same time read the same few weights and inputs from the second-level cache."""
    group = tile // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return group * GROUP + within % height, within // height


@triton.jit(do_not_specialize=["rows"])
def product(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    depth,
    x_step,
    weight_step,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = x times weight, transposed, plus bias, with HAS_BIAS, then GELU, with HAS_GELU; summed in float32.

    x: [rows, depth], rows x_step numbers apart; weight: [columns, depth], rows weight_step apart; bias: [columns]; out:
    [rows, columns], contiguous. A program computes tiles of [ROWS, COLUMNS], each in steps of DEPTH. IS_WHOLE: depth is
    a multiple of DEPTH. Rows and columns beyond the last are computed as the last, and not written.
    """
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    within = tl.arange(0, DEPTH)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        x_rows = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_step
        weights = weight + tl.minimum(column, columns - 1).to(tl.int64)[None, :] * weight_step
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for number in range(tl.cdiv(depth, DEPTH)):
            k = number * DEPTH + within
            if IS_WHOLE:
                left, right = tl.load(x_rows + k[None, :]), tl.load(weights + k[:, None])
            else:
                left = tl.load(x_rows + k[None, :], mask=k[None, :] < depth, other=0.0)
                right = tl.load(weights + k[:, None], mask=k[:, None] < depth, other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        if HAS_GELU:
            total = gelu(total)
        target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit(
    do_not_specialize=[
        "query_step", "query_head_step", "key_step", "key_head_step", "value_step", "value_head_step", "heads"
    ]
)  # fmt: skip
def attend(
    query,
    key,
    value,
    out,
    query_starts,
    key_starts,
    scale,
    query_step,
    query_head_step,
    key_step,
    key_head_step,
    value_step,
    value_head_step,
    heads,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of QUERIES queries of one head and one request: program (block of queries, head, request).

    query, key, value: [tokens of all requests, heads, HEAD_DIM], by steps in units of HEAD_DIM, so that they are read
    alike wherever they lie; out: [queries, heads, HEAD_DIM], contiguous. query_starts, key_starts: int32 [requests +
    1], the rows of each request. scale: of the scores, times log2(e). WIDTH: a power of two, >= HEAD_DIM and 16. Keys
    are read KEYS at a time with a running maximum (online softmax), in float32; a block's weights are rounded to the
    values' dtype. Dao, FlashAttention-2, 2023.
    """
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2)
    last = tl.load(query_starts + request + 1)
    row = tl.load(query_starts + request) + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    if tl.load(query_starts + request) + tl.program_id(0) * QUERIES >= last:
        return
    first_key, last_key = tl.load(key_starts + request), tl.load(key_starts + request + 1)
    d = tl.arange(0, WIDTH)
    inside = d < HEAD_DIM
    queries = (
        query + ((tl.minimum(row, last - 1).to(tl.int64) * query_step + head * query_head_step) * HEAD_DIM)[:, None]
    )
    q = tl.load(queries + d[None, :], mask=inside[None, :], other=0.0)
    keys, values = key + head * key_head_step * HEAD_DIM, value + head * value_head_step * HEAD_DIM
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(first_key, last_key, KEYS):
        number = start + tl.arange(0, KEYS)
        there = number < last_key
        token = tl.minimum(number, last_key - 1).to(tl.int64)
        k = tl.load(keys + (token * key_step * HEAD_DIM)[None, :] + d[:, None], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fading = tl.exp2(top - higher)
        weight = weight * fading + tl.sum(weights, axis=1)
        v = tl.load(values + (token * value_step * HEAD_DIM)[:, None] + d[None, :], mask=inside[None, :], other=0.0)
        total = tl.dot(weights.to(v.dtype), v, total * fading[:, None], input_precision=PRECISION)
        top = higher
    target = out + ((row.to(tl.int64) * heads + head) * HEAD_DIM)[:, None] + d[None, :]
    result = (total / weight[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=(row < last)[:, None] & inside[None, :])


@triton.jit
def rms_norm(x, weight, out, x_step, width, eps, BLOCK: tl.constexpr):
    """Root-mean-square norm of one row, times weight, [width]. x: rows x_step numbers apart; out: [rows, width],
    contiguous. BLOCK: a power of two, >= width."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    number = tl.load(x + row * x_step + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(number * number, axis=0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (number * scale * factor).to(out.dtype.element_ty), mask=inside)
