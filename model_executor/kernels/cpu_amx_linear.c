/* Linear layers in bfloat16 by AMX's tiles; a part of cpu_kernels.c.
 *
 * A number of a result is a sum over the inputs in steps of TILE_DEPTH, in their order; see cpu_amx.h for what a step
 * adds. However many rows there are, each is computed so, if need be among rows of zeros. A row's bits therefore depend
 * on that row and the number of inputs alone.
 */
#ifdef HAS_TILES

#define SQUARE (2 * TILE)       /* rows and outputs at a time: 2 x 2 tiles of sums, for which four others are loaded */
#define BLOCK_BYTES (1280 << 10) /* of x in a block of rows: it stays in the second-level cache */
#define BLOCK_DEPTH 4096        /* inputs at a time, for the same reason */
#define FURTHER 2048            /* 4 KiB: a few lines prefetched from further on have the CPU fetch those between, too */

/* Sums of a square of outputs, [SQUARE, step], that lack bias and activation and are to be written. */
typedef struct {
    const float *sums;
    long step;
    const half *bias;
    half *out;
    long out_step;
    int rows;
    __mmask16 some[2]; /* the columns that there are */
} Pending;

static inline __mmask16 first_of(int count) {
    return count >= LANES ? 0xffff : (__mmask16)(count > 0 ? (1u << count) - 1 : 0);
}

static inline __attribute__((always_inline)) void finish_row(const Pending *p, int row, int gelu) {
    for (int v = 0; v < 2; v++) {
        vec y = load(p->sums + row * p->step + v * LANES) + widen_some(p->bias + v * LANES, p->some[v]);
        half *out = p->out + row * p->out_step + v * LANES;
        _mm256_mask_storeu_epi16(out, p->some[v], (__m256i)rounded(gelu ? gelu_of(y) : y));
    }
}

/* Sums of a square over `depth` inputs, added to those in `sums` unless they are the first. upper, lower: its rows, x_step
 * numbers apart. next: weights needed soon, of which `lines` cache lines are prefetched per step, and a few of those
 * after them. pending: the square before, which is finished meanwhile: tiles leave a core's other units idle. */
static inline __attribute__((always_inline)) void square(const half *upper, long x_step, int depth, const half *weight,
                                                         const half *next, int lines, int first, float *sums, long step,
                                                         const Pending *pending, int gelu) {
    const half *lower = upper + TILE * x_step;
    int row = 0, rows = pending->rows, each = (rows * TILE_DEPTH + depth - 1) / depth;
    if (first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, sums, step * 4);
        TILE_LOAD(1, sums + TILE, step * 4);
        TILE_LOAD(2, sums + TILE * step, step * 4);
        TILE_LOAD(3, sums + TILE * step + TILE, step * 4);
    }
    for (int k = 0; k < depth; k += TILE_DEPTH, weight += SQUARE * TILE_DEPTH) {
        TILE_LOAD(6, weight, 64);
        TILE_LOAD(4, upper + k, x_step * 2);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, weight + TILE * TILE_DEPTH, 64);
        TILE_DOT(1, 4, 7);
        TILE_LOAD(5, lower + k, x_step * 2);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        for (int i = 0; i < lines; i++, next += TILE_DEPTH) {
            __builtin_prefetch(next, 0, 2);
            if (i % 4 == 0) __builtin_prefetch(next + FURTHER, 0, 2);
        }
        for (int stop = row + each < rows ? row + each : rows; row < stop; row++) finish_row(pending, row, gelu);
    }
    for (; row < rows; row++) finish_row(pending, row, gelu);
    TILE_STORE(0, sums, step * 4);
    TILE_STORE(1, sums + TILE, step * 4);
    TILE_STORE(2, sums + TILE * step, step * 4);
    TILE_STORE(3, sums + TILE * step + TILE, step * 4);
}

/* Adds the pieces' additions to the sums of `count` rows, from `row` on, and the SQUARE outputs from n on. */
static void add_to_square(long row, int count, int n, const Piece *pieces, int num_pieces, const Addition *additions,
                          float *sums, long step) {
    for (const Piece *p = pieces; p < pieces + num_pieces; p++) {
        long start = p->start > row ? p->start : row, stop = p->stop < row + count ? p->stop : row + count;
        for (const Addition *it = additions + p->first; it < additions + p->first + p->count; it++) {
            int column = it->columns[n / PANEL];
            if (column < 0) continue;
            const float *up = it->up + (long)(n / PANEL) * it->depth * PANEL + n % PANEL;
            for (long r = start; r < stop; r++) {
                const float *low = it->low + (r - p->start) * it->low_step + column;
                float *its = sums + (r - row) * step;
                vec left = load(its), right = load(its + LANES);
                for (long d = 0; d < it->depth; d++) {
                    left += low[d] * load(up + d * PANEL);
                    right += low[d] * load(up + d * PANEL + LANES);
                }
                store(its, left);
                store(its + LANES, right);
            }
        }
    }
}

typedef struct {
    const half *x; /* rows for whole squares */
    long x_step;
    const half *last; /* the other rows, filled up with zeros */
    long whole;       /* rows that are not among them */
    long rows;
} TileRows;

static inline __attribute__((always_inline)) void tile_linear(TileRows x, int inputs, const half *weight,
                                                              const half *bias, int outputs, int gelu,
                                                              const Piece *pieces, int num_pieces,
                                                              const Addition *additions, float *room, half *out,
                                                              long out_step) {
    long total = 0;
    for (int p = 0; p < num_pieces; p++) total += pieces[p].count;
    float near[2][SQUARE * SQUARE] __attribute__((aligned(64)));
    int most = inputs < BLOCK_DEPTH ? inputs : BLOCK_DEPTH, turn = 0;
    long blocks = x.rows * most * 2 / BLOCK_BYTES + 1, wide = (outputs + SQUARE - 1) / SQUARE * SQUARE;
    long block = (x.rows + blocks * SQUARE - 1) / (blocks * SQUARE) * SQUARE;
    Pending pending = {.rows = 0};
    for (long b = 0; b < x.rows; b += block)
        for (int k = 0; k < inputs; k += BLOCK_DEPTH) {
            int depth = inputs - k < BLOCK_DEPTH ? inputs - k : BLOCK_DEPTH, is_last = k + depth == inputs;
            long end = x.rows - b < block ? x.rows : b + block, lines = SQUARE * SQUARE / (end - b) + 1;
            if (lines > SQUARE) lines = SQUARE;
            for (int n = 0; n < outputs; n += SQUARE) {
                const half *panel = weight + (long)n * inputs + (long)k * SQUARE;
                const half *next = n + SQUARE < outputs ? panel + (long)inputs * SQUARE : panel;
                for (long r = b; r < end; r += SQUARE, turn ^= 1) {
                    const half *rows = r < x.whole ? x.x + r * x.x_step : x.last + (r - x.whole) * inputs;
                    float *sums = inputs > BLOCK_DEPTH ? room + (r - b) * wide + n : near[turn];
                    long step = inputs > BLOCK_DEPTH ? wide : SQUARE, done = (r - b) / SQUARE * lines;
                    square(rows + k, r < x.whole ? x.x_step : inputs, depth, panel, next + done * depth,
                           done < SQUARE ? (int)lines : 0, k == 0, sums, step, &pending, gelu);
                    pending.rows = 0;
                    if (!is_last) continue;
                    int count = end - r < SQUARE ? (int)(end - r) : SQUARE;
                    if (total) add_to_square(r, count, n, pieces, num_pieces, additions, sums, step);
                    pending = (Pending){sums, step, bias + n, out + r * out_step + n, out_step, count,
                                        {first_of(outputs - n), first_of(outputs - n - LANES)}};
                }
            }
        }
    for (int row = 0; row < pending.rows; row++) finish_row(&pending, row, gelu);
}

/* As stencil_half_linear, with tiles, for inputs of any number. weight: [outputs / SQUARE, inputs / TILE_DEPTH, 2, TILE,
 * TILE, 2], filled up with zeros: squares of outputs, steps of inputs, left and right tile, pairs of inputs, outputs.
 * last: bfloat16 [rows that fill no square, or all if inputs is no multiple of TILE_DEPTH; in whole squares, inputs in
 * whole steps] to work in, if inputs is no multiple of TILE_DEPTH or more than BLOCK_DEPTH; room: float32 [rows in whole
 * squares, outputs in whole squares], if there are more than BLOCK_DEPTH inputs. */
void stencil_tile_linear(const half *x, long x_step, int inputs, const half *weight, const half *bias, int outputs,
                         int gelu, const Piece *pieces, int num_pieces, const Addition *additions, half *last,
                         float *room, half *out, long out_step) {
    unsigned before = begin_computing();
    long rows = pieces[num_pieces - 1].stop, whole = inputs % TILE_DEPTH ? 0 : rows / SQUARE * SQUARE;
    int depth = (inputs + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
    half on_stack[last ? 1 : SQUARE * depth] __attribute__((aligned(64)));
    if (!last) last = on_stack;
    memset(last, 0, (rows - whole + SQUARE - 1) / SQUARE * SQUARE * depth * sizeof(half));
    for (long r = whole; r < rows; r++) memcpy(last + (r - whole) * depth, x + r * x_step, inputs * sizeof(half));
    begin_tiles();
    TileRows all_rows = {x, x_step, last, whole, rows};
    if (gelu)
        tile_linear(all_rows, depth, weight, bias, outputs, 1, pieces, num_pieces, additions, room, out, out_step);
    else
        tile_linear(all_rows, depth, weight, bias, outputs, 0, pieces, num_pieces, additions, room, out, out_step);
    end_tiles();
    end_computing(before);
}
#endif
