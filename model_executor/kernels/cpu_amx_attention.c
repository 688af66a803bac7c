/* Attention in bfloat16 with AMX's tiles (cpu_amx.h); a part of cpu_kernels.c.
 *
 * As in Dao et al., FlashAttention (2022), 32 queries see 96 keys at a time: their scores never leave the first-level
 * cache. A query's bits depend on that query, and on the keys and values in their order: each tile's rows are computed
 * alike, whatever the others are, and rows and keys that fill up a tile are zeros that no result contains.
 */
#ifdef HAS_TILES
#include <string.h>

#define TILE_QUERIES (2 * TILE)
#define KEYS 96                /* keys at a time */
#define SLACK 16               /* weights may be as large as 2^SLACK */
#define ROW (KEYS + TILE)      /* from one query's scores to the next one's, so that tiles do not share cache sets */
#define NUMBERS (TILE * TILE_DEPTH)

static inline int filled_up(int number) { return (number + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH; }

static inline __mmask32 first_ones(int number) {
    return number >= TILE_DEPTH ? 0xffffffff : (__mmask32)((1u << (number < 0 ? 0 : number)) - 1);
}

/* Up to 16 numbers. */
static inline __m512 read_bytes(const int8_t *p, int number) {
    __m128i bytes = number >= LANES ? _mm_loadu_si128((const __m128i *)p)
                                    : _mm_maskz_loadu_epi8((__mmask16)first_ones(number), p);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/* Where keys and values come from: rows that were computed, and a page, dequantised as by stencil_half_interpolate. */
typedef struct {
    const half *computed_keys, *computed_values; /* [rows, heads, width] */
    long row_step, head_step;                    /* numbers from one row, and one head, to the next */
    const int64_t *rows;                         /* [num_rows]: their keys; 0: these are all, in order */
    long num_rows;
    const int8_t *near, *far;                    /* [2, heads, tokens, width]; far may be 0 */
    const float *near_scale, *far_scale;         /* [2, heads, tokens] */
    long kind_step, page_head_step, scale_kind_step, scale_head_step;
    float near_weight, far_weight;               /* what the scales are multiplied with */
    int first;                                   /* the key that is the page's first token */
} Keys;

/* where [keys]: each key's row, or -1: the page has it. Of several rows the first one counts. */
static void find_rows(const Keys *keys, int number, int *where) {
    for (int k = 0; k < number; k++) where[k] = keys->rows ? -1 : k;
    for (long i = keys->num_rows - 1; keys->rows && i >= 0; i--) where[keys->rows[i]] = (int)i;
}

/* The numbers [width] of one key (kind 0) or value (kind 1), which may be put into `room`, [depth]. row: as `find_rows`
 * found it. */
static inline const half *row_of(const Keys *keys, int kind, int head, int k, int row, int width, half *room) {
    const half *computed = kind ? keys->computed_values : keys->computed_keys;
    int token = k - keys->first;
    if (row >= 0) return computed + row * keys->row_step + head * keys->head_step;
    long numbers = kind * keys->kind_step + head * keys->page_head_step + (long)token * width;
    long scale = kind * keys->scale_kind_step + head * keys->scale_head_step + token;
    __m512 x = _mm512_set1_ps(keys->near_scale[scale] * keys->near_weight);
    __m512 y = _mm512_set1_ps(keys->far ? keys->far_scale[scale] * keys->far_weight : 0);
    for (int d = 0; d < width; d += TILE_DEPTH) {
        const int8_t *near = keys->near + numbers + d, *far = keys->far + numbers + d;
        int others = width - d - LANES;
        __m512 low = read_bytes(near, width - d), high = read_bytes(near + LANES, others);
        if (keys->far) {
            low = _mm512_fmadd_ps(x, low, _mm512_mul_ps(y, read_bytes(far, width - d)));
            high = _mm512_fmadd_ps(x, high, _mm512_mul_ps(y, read_bytes(far + LANES, others)));
        } else
            low = _mm512_mul_ps(x, low), high = _mm512_mul_ps(x, high);
        _mm512_store_si512(room + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    return room;
}

/* tile [16 pairs, 16 keys, 2] = 16 rows of 16 pairs. */
static inline void turn_tile(const half *const *rows, int d, half *tile) {
    __m512i four[16], x[16];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) { /* 4 pairs, from c * 4 on, of keys i, i + 4, ... */
            int at = d + c * 8;
            __m512i y = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[i] + at)));
            y = _mm512_mask_broadcast_i32x4(y, 0x00f0, _mm_loadu_si128((const __m128i *)(rows[i + 4] + at)));
            y = _mm512_mask_broadcast_i32x4(y, 0x0f00, _mm_loadu_si128((const __m128i *)(rows[i + 8] + at)));
            y = _mm512_mask_broadcast_i32x4(y, 0xf000, _mm_loadu_si128((const __m128i *)(rows[i + 12] + at)));
            four[c * 4 + i] = y;
        }
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
        __m512i *y = four + c * 4;
        __m512i a = _mm512_unpacklo_epi32(y[0], y[1]), b = _mm512_unpackhi_epi32(y[0], y[1]);
        __m512i e = _mm512_unpacklo_epi32(y[2], y[3]), f = _mm512_unpackhi_epi32(y[2], y[3]);
        x[c * 4] = _mm512_unpacklo_epi64(a, e), x[c * 4 + 1] = _mm512_unpackhi_epi64(a, e);
        x[c * 4 + 2] = _mm512_unpacklo_epi64(b, f), x[c * 4 + 3] = _mm512_unpackhi_epi64(b, f);
    }
    _Pragma("GCC unroll 16") for (int p = 0; p < 16; p++) _mm512_store_si512(tile + p * TILE_DEPTH, x[p]);
}

/* Values of a head as the second operand of its results, and zeros for those that are missing: 32 rows of `width` numbers
 * become tiles [depth / 16] of [16 pairs of keys, 16 numbers, 2]. Two tiles share 32 numbers, by fours: `put_in_order`. */
static inline void pair_rows_of_tile(const half *const *rows, int width, half *out) {
    for (int p = 0; p < TILE; p++)
        for (int d = 0; d < width; d += TILE_DEPTH) {
            half *pair = out + TILE_DEPTH * (d + p);
            __m512i even = _mm512_maskz_loadu_epi16(first_ones(width - d), rows[2 * p] + d);
            __m512i odd = _mm512_maskz_loadu_epi16(first_ones(width - d), rows[2 * p + 1] + d);
            _mm512_store_si512(pair, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(pair + NUMBERS, _mm512_unpackhi_epi16(even, odd));
        }
}

/* A head's keys as the second operand of scores, and zeros for those that are missing: tiles [keys / 16, depth / 32] of
 * [16 pairs of numbers, 16 keys, 2]; and its values, tiles [keys / 32, depth / 16]. room: [33, depth]. */
static void read_head(const Keys *source, int head, int keys, const int *where, int width, half *room, half *turned,
                      half *paired) {
    const half *rows[TILE_DEPTH];
    int depth = filled_up(width);
    half *zeros = room + TILE_DEPTH * depth;
    memset(zeros, 0, depth * sizeof(half));
    for (int k = 0; k < keys; k += TILE_DEPTH, turned += TILE_DEPTH * depth, paired += TILE_DEPTH * depth) {
        for (int i = 0; i < TILE_DEPTH; i++)
            rows[i] = k + i < keys ? row_of(source, 1, head, k + i, where[k + i], width, room + i * depth) : zeros;
        pair_rows_of_tile(rows, width, paired);
        for (int i = 0; i < TILE_DEPTH; i++) {
            half *its = room + i * depth;
            rows[i] = k + i < keys ? row_of(source, 0, head, k + i, where[k + i], width, its) : zeros;
            if (width == depth || rows[i] == zeros) continue;
            int last = depth - TILE_DEPTH; /* numbers of another head would follow */
            if (rows[i] != its) memcpy(its, rows[i], last * sizeof(half));
            _mm512_store_si512(its + last, _mm512_maskz_loadu_epi16(first_ones(width - last), rows[i] + last));
            rows[i] = its;
        }
        for (int d = 0; d < depth; d += TILE_DEPTH) {
            turn_tile(rows, d, turned + TILE * d);
            turn_tile(rows + TILE, d, turned + TILE * (depth + d));
        }
    }
}

/* 32 numbers, rounded, of which two tiles have had sums as `pair_rows_of_tile` arranged them. */
static inline __m512i put_in_order(vec low, vec high) {
    const __m512i order = _mm512_set_epi16(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8,
                                           23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return _mm512_permutexvar_epi16(order, both);
}

/* Up to 32 queries of one head, and what is known of them after some of the keys. */
typedef struct {
    int count;                /* of them; 0: nothing is to be done */
    float *scores;            /* [32, ROW], of `KEYS` keys at a time; then their weights, in bfloat16, in each row's half */
    float *sums;              /* [32, depth], weights times values */
    half *query;              /* [32, depth] */
    vec total[TILE_QUERIES];  /* sums of weights, 2^(exponent - top) */
    float top[TILE_QUERIES];  /* no exponent is larger by more than SLACK */
} Block;

/* Sums of 16 more keys, in tile S for the first 16 queries and in tile T for the others. */
#define SCORE(S, T)                                                                                                    \
    TILE_ZERO(S);                                                                                                      \
    TILE_ZERO(T);                                                                                                      \
    for (int d = 0; d < depth; d += TILE_DEPTH, keys += NUMBERS) {                                                     \
        TILE_LOAD(6, keys, 64);                                                                                        \
        TILE_LOAD(4, query + d, depth * sizeof(half));                                                                 \
        TILE_DOT(S, 4, 6);                                                                                             \
        if (!has_others) continue;                                                                                     \
        TILE_LOAD(5, query + TILE * depth + d, depth * sizeof(half));                                                  \
        TILE_DOT(T, 5, 6);                                                                                             \
    }

#define STORE_SCORES(S, T, scores)                                                                                     \
    do {                                                                                                               \
        TILE_STORE(S, scores, ROW * sizeof(float));                                                                    \
        if (has_others) TILE_STORE(T, (scores) + TILE * ROW, ROW * sizeof(float));                                     \
    } while (0)

/* The scores of a block's queries and `number` keys, a multiple of 32. keys: as `read_head` turns them. Sums of 16 keys
 * are stored while those of 16 others are computed: otherwise tiles wait for it, a third of the time. */
static void compute_scores(const Block *block, int number, int depth, const half *keys) {
    const half *query = block->query;
    float *scores = block->scores;
    int has_others = block->count > TILE;
    for (int k = 0; k < number; k += 2 * TILE) {
        SCORE(0, 1)
        if (k) STORE_SCORES(2, 3, scores + k - TILE);
        SCORE(2, 3)
        STORE_SCORES(0, 1, scores + k);
    }
    STORE_SCORES(2, 3, scores + number - TILE);
}

/* Have tile T hold sums that are to be added to: those at `from`, or zeros. */
#define BEGIN_SUMS(T, from)                                                                                            \
    do {                                                                                                               \
        if (first)                                                                                                     \
            TILE_ZERO(T);                                                                                              \
        else                                                                                                           \
            TILE_LOAD(T, from, depth * sizeof(float));                                                                 \
    } while (0)

/* Store them; then tile T is for the next 32 numbers. */
#define END_SUMS(T, to)                                                                                                \
    do {                                                                                                               \
        TILE_STORE(T, to, depth * sizeof(float));                                                                      \
        if (d + TILE_DEPTH < depth) BEGIN_SUMS(T, (to) + TILE_DEPTH);                                                  \
    } while (0)

/* Adds the values of `number` more keys, a multiple of 32, times their weights. values: as `read_head` pairs them. */
static void add_values(const Block *block, int number, int depth, const half *values, int first) {
    const half *weights = (const half *)block->scores;
    float *sums = block->sums, *others = sums + TILE * depth;
    int has_others = block->count > TILE;
    BEGIN_SUMS(0, sums);
    BEGIN_SUMS(1, sums + TILE);
    BEGIN_SUMS(2, others);
    BEGIN_SUMS(3, others + TILE);
    for (int d = 0; d < depth; d += TILE_DEPTH, sums += TILE_DEPTH, others += TILE_DEPTH, values += 2 * NUMBERS) {
        const half *tile = values;
        for (int k = 0; k < number; k += TILE_DEPTH, tile += TILE_DEPTH * depth) {
            TILE_LOAD(4, weights + k, ROW * sizeof(float));
            TILE_LOAD(6, tile, 64);
            TILE_DOT(0, 4, 6);
            TILE_LOAD(7, tile + NUMBERS, 64);
            TILE_DOT(1, 4, 7);
            if (!has_others) continue;
            TILE_LOAD(5, weights + 2 * TILE * ROW + k, ROW * sizeof(float));
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
        END_SUMS(0, sums);
        END_SUMS(1, sums + TILE);
        if (!has_others) continue;
        END_SUMS(2, others);
        END_SUMS(3, others + TILE);
    }
}

/* 2^x for x <= SLACK within 2^-13 of its value; 0 for -infinity. */
static inline __m512 power(__m512 x) {
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.0790204f), _mm512_set1_ps(0.22412664f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(0.69673079f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(0.99989296f));
    return _mm512_scalef_ps(p, x);
}

/* One query's scores of `number` more keys become weights, 2^(factor * score - top) in bfloat16. number: a multiple of
 * 32. `top` becomes the largest exponent if it is less than that by more than SLACK, which is rare after the first keys:
 * then what the query has summed shrinks. */
static inline void soften_row(Block *block, int q, int number, float factor, int depth, int first) {
    float *scores = block->scores + q * ROW;
    __m512 most = _mm512_max_ps(_mm512_loadu_ps(scores), _mm512_loadu_ps(scores + LANES));
    for (int k = 2 * LANES; k < number; k += 2 * LANES)
        most = _mm512_max_ps(most, _mm512_max_ps(_mm512_loadu_ps(scores + k), _mm512_loadu_ps(scores + k + LANES)));
    __m512 scale = _mm512_set1_ps(factor), total = (__m512)block->total[q];
    most = _mm512_mul_ps(most, scale);
    if (first || _mm512_cmp_ps_mask(most, _mm512_set1_ps(block->top[q] + SLACK), _CMP_GT_OQ)) {
        float top = _mm512_reduce_max_ps(most);
        if (first)
            total = _mm512_setzero_ps();
        else {
            __m512 shrink = power(_mm512_set1_ps(block->top[q] - top));
            float *sums = block->sums + q * depth;
            for (int d = 0; d < depth; d += LANES) store(sums + d, load(sums + d) * (vec)shrink);
            total = _mm512_mul_ps(total, shrink);
        }
        block->top[q] = top;
    }
    __m512 top = _mm512_set1_ps(block->top[q]);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int k = 0; k < number; k += 2 * LANES) {
        __m512 x = power(_mm512_fmsub_ps(_mm512_loadu_ps(scores + k), scale, top));
        __m512 y = power(_mm512_fmsub_ps(_mm512_loadu_ps(scores + k + LANES), scale, top));
        __m512bh weights = _mm512_cvtne2ps_pbh(y, x);
        total = _mm512_dpbf16_ps(total, weights, ones);
        _mm512_storeu_si512((half *)scores + k, (__m512i)weights);
    }
    block->total[q] = (vec)total;
}

/* Bytes that stencil_tile_attend works in. */
long stencil_tile_room(int width, int keys) {
    long depth = filled_up(width), numbers = TILE_QUERIES * depth + (TILE_DEPTH + 1) * depth + 2 * filled_up(keys) * depth;
    return 64 + keys * (long)sizeof(int) + TILE_QUERIES * (ROW + depth) * (long)sizeof(float) + numbers * (long)sizeof(half);
}

/* Scores of keys that are not there, from `number` on, become such that their weights are zeros. */
static void hide_missing(float *scores, int rows, int number) {
    for (int q = 0; q < rows; q++)
        for (int k = number; k < filled_up(number); k++) scores[q * ROW + k] = -INFINITY;
}

/* The first `count` queries, of width `width`, and zeros for what is missing. */
static void begin_block(Block *block, const half *query, long query_step, int count, int width) {
    int depth = filled_up(width);
    block->count = count;
    for (int q = 0; q < TILE_QUERIES; q++)
        for (int d = 0; d < depth; d += TILE_DEPTH) {
            __mmask32 there = q < count ? first_ones(width - d) : 0;
            _mm512_store_si512(block->query + q * depth + d, _mm512_maskz_loadu_epi16(there, query + q * query_step + d));
        }
}

static void finish_block(const Block *block, int width, half *out, long out_step) {
    for (int q = 0; q < block->count; q++) {
        vec total = all(1.0f / sum_of(block->total[q]));
        for (int d = 0; d < width; d += TILE_DEPTH) {
            const float *pair = block->sums + q * filled_up(width) + d;
            __m512i result = put_in_order(load(pair) * total, load(pair + TILE) * total);
            _mm512_mask_storeu_epi16(out + q * out_step + d, first_ones(width - d), result);
        }
    }
}

/* As stencil_half_attend, of heads of any width, with keys from several places. room: bytes, stencil_tile_room(width,
 * keys). */
void stencil_tile_attend(const half *query, long query_step, int queries, int heads, int width, float scale,
                         const Keys *source, int keys, void *room, half *out, long out_step) {
    unsigned before = begin_computing();
    begin_tiles();
    int depth = filled_up(width);
    float factor = scale * 1.44269504f; /* 1 / log(2): weights are powers of 2 */
    Block block;
    block.scores = (float *)(((uintptr_t)room + 63) / 64 * 64), block.sums = block.scores + TILE_QUERIES * ROW;
    block.query = (half *)(block.sums + TILE_QUERIES * depth);
    half *rows = block.query + TILE_QUERIES * depth, *turned = rows + (TILE_DEPTH + 1) * depth;
    half *paired = turned + (long)filled_up(keys) * depth;
    int *where = (int *)(paired + (long)filled_up(keys) * depth);
    find_rows(source, keys, where);
    for (int h = 0; h < heads; h++) {
        read_head(source, h, keys, where, width, rows, turned, paired);
        for (int begin = 0; begin < queries; begin += TILE_QUERIES) {
            int count = queries - begin < TILE_QUERIES ? queries - begin : TILE_QUERIES;
            begin_block(&block, query + begin * query_step + h * width, query_step, count, width);
            for (int k = 0; k < keys; k += KEYS) {
                int some = keys - k < KEYS ? keys - k : KEYS, number = filled_up(some);
                compute_scores(&block, number, depth, turned + (long)k * depth);
                if (some < number) hide_missing(block.scores, count, some);
                for (int q = 0; q < count; q++) soften_row(&block, q, number, factor, depth, k == 0);
                add_values(&block, number, depth, paired + (long)k * depth, k == 0);
            }
            finish_block(&block, width, out + begin * out_step + h * width, out_step);
        }
    }
    end_tiles();
    end_computing(before);
}
#endif
