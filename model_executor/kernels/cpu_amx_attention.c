/* Attention in bfloat16 with AMX's tiles (cpu_amx.h); a part of cpu_kernels.c.
 *
 * As in Dao et al., FlashAttention (2022), 32 queries see 256 keys at a time: their scores never leave the first-level
 * cache. A query's bits depend on that query, and on the keys and values in their order: each tile's rows are computed
 * alike, whatever the others are, and rows and keys that fill up a tile are zeros that no result contains.
 */
#ifdef HAS_TILES

#define TILE_QUERIES (2 * TILE)
#define KEYS 256               /* keys at a time */
#define ROW (KEYS + TILE)      /* from one query's scores to the next one's, so that tiles do not share cache sets */
#define NUMBERS (TILE * TILE_DEPTH)

static inline int filled_up(int number) { return (number + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH; }

static inline __mmask32 first_ones(int number) {
    return number >= TILE_DEPTH ? 0xffffffff : (__mmask32)((1u << (number < 0 ? 0 : number)) - 1);
}

/* tile [16 pairs, 16 keys, 2] = 16 rows of 16 pairs, `step` numbers apart. */
static inline void turn_tile(const half *rows, long step, half *tile) {
    __m512i four[16], x[16];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) { /* 4 pairs, from c * 4 on, of keys i, i + 4, ... */
            const half *part = rows + i * step + c * 8;
            __m512i y = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)part));
            y = _mm512_mask_broadcast_i32x4(y, 0x00f0, _mm_loadu_si128((const __m128i *)(part + 4 * step)));
            y = _mm512_mask_broadcast_i32x4(y, 0x0f00, _mm_loadu_si128((const __m128i *)(part + 8 * step)));
            four[c * 4 + i] = _mm512_mask_broadcast_i32x4(y, 0xf000, _mm_loadu_si128((const __m128i *)(part + 12 * step)));
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

/* Keys as the second operand of scores, and zeros for those that are missing. key: [keys, width]; out: tiles [keys / 16,
 * depth / 32] of [16 pairs of numbers, 16 keys, 2]. */
static void turn_keys(const half *key, int keys, int width, half *out) {
    half some[NUMBERS] __attribute__((aligned(64)));
    for (int k = 0; k < filled_up(keys); k += TILE)
        for (int d = 0; d < width; d += TILE_DEPTH, out += NUMBERS)
            if (k + TILE <= keys && d + TILE_DEPTH <= width)
                turn_tile(key + (long)k * width + d, width, out);
            else {
                for (int i = 0; i < TILE; i++) {
                    __mmask32 there = k + i < keys ? first_ones(width - d) : 0;
                    __m512i row = _mm512_maskz_loadu_epi16(there, key + (long)(k + i) * width + d);
                    _mm512_store_si512(some + i * TILE_DEPTH, row);
                }
                turn_tile(some, TILE_DEPTH, out);
            }
}

/* Values as the second operand of results, and zeros for those that are missing. value: [keys, width]; out: tiles [keys
 * / 32, depth / 16] of [16 pairs of keys, 16 numbers, 2]. Two tiles share 32 numbers, by fours: `put_in_order`. */
static void pair_values(const half *value, int keys, int width, half *out) {
    int depth = filled_up(width);
    for (int k = 0; k < filled_up(keys); k += 2) {
        half *row = out + (long)(k / TILE_DEPTH) * TILE_DEPTH * depth + k % TILE_DEPTH / 2 * TILE_DEPTH;
        for (int d = 0; d < width; d += TILE_DEPTH, row += 2 * NUMBERS) {
            __mmask32 some = first_ones(width - d);
            const half *pair = value + (long)k * width + d;
            __m512i even = _mm512_maskz_loadu_epi16(k < keys ? some : 0, pair);
            __m512i odd = _mm512_maskz_loadu_epi16(k + 1 < keys ? some : 0, pair + width);
            _mm512_store_si512(row, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(row + NUMBERS, _mm512_unpackhi_epi16(even, odd));
        }
    }
}

/* 32 numbers, rounded, of which two tiles have had sums as `pair_values` arranged them. */
static inline __m512i put_in_order(vec low, vec high) {
    const __m512i order = _mm512_set_epi16(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8,
                                           23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return _mm512_permutexvar_epi16(order, both);
}

/* scores [32, ROW] = query [32, depth] times keys, `turn_keys`; without `second` the first 16 rows alone. */
static inline void tile_scores(const half *query, int depth, const half *keys, int number, int second, float *scores) {
    for (int k = 0; k < number; k += 2 * TILE, keys += 2 * TILE * depth, scores += 2 * TILE) {
        { TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3); }
        for (int d = 0; d < depth; d += TILE_DEPTH) {
            TILE_LOAD(4, query + d, depth * sizeof(half));
            TILE_LOAD(6, keys + TILE * d, 64);
            TILE_LOAD(7, keys + TILE * (depth + d), 64);
            TILE_DOT(0, 4, 6);
            TILE_DOT(1, 4, 7);
            if (!second) continue;
            TILE_LOAD(5, query + TILE * depth + d, depth * sizeof(half));
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
        TILE_STORE(0, scores, ROW * sizeof(float));
        TILE_STORE(1, scores + TILE, ROW * sizeof(float));
        if (!second) continue;
        TILE_STORE(2, scores + TILE * ROW, ROW * sizeof(float));
        TILE_STORE(3, scores + TILE * ROW + TILE, ROW * sizeof(float));
    }
}

/* sums [32, depth] += weights [32, 2 * ROW] times values, `pair_values`; the first time the sums count as zeros. */
static inline void tile_sums(const half *weights, int number, const half *values, int depth, int second, int first,
                             float *sums) {
    for (int d = 0; d < depth; d += TILE_DEPTH, values += 2 * NUMBERS, sums += 2 * TILE) {
        if (first)
            { TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3); }
        else {
            TILE_LOAD(0, sums, depth * sizeof(float));
            TILE_LOAD(1, sums + TILE, depth * sizeof(float));
            if (second) TILE_LOAD(2, sums + TILE * depth, depth * sizeof(float));
            if (second) TILE_LOAD(3, sums + TILE * depth + TILE, depth * sizeof(float));
        }
        for (int k = 0; k < number; k += TILE_DEPTH) {
            TILE_LOAD(4, weights + k, ROW * sizeof(float));
            TILE_LOAD(6, values + (long)k * depth, 64);
            TILE_LOAD(7, values + (long)k * depth + NUMBERS, 64);
            TILE_DOT(0, 4, 6);
            TILE_DOT(1, 4, 7);
            if (!second) continue;
            TILE_LOAD(5, weights + 2 * TILE * ROW + k, ROW * sizeof(float));
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
        TILE_STORE(0, sums, depth * sizeof(float));
        TILE_STORE(1, sums + TILE, depth * sizeof(float));
        if (!second) continue;
        TILE_STORE(2, sums + TILE * depth, depth * sizeof(float));
        TILE_STORE(3, sums + TILE * depth + TILE, depth * sizeof(float));
    }
}

/* 2^x for x <= 0 within 2^-13 of its value; 0 for -infinity. */
static inline __m512 power(__m512 x) {
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.0790204f), _mm512_set1_ps(0.22412664f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(0.69673079f));
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(0.99989296f));
    return _mm512_scalef_ps(p, x);
}

/* What the softmax of a query knows of the keys that it has seen. */
typedef struct {
    vec total; /* sums of 2^(exponent - top) */
    float top; /* largest exponent */
} Seen;

/* One query's scores of `number` more keys become weights in place, 2^(factor * score - top) in bfloat16. number: a
 * multiple of 32. sums: [depth], what the query has summed, which shrinks as `top` grows. */
static inline void soften_row(float *scores, int number, float factor, int first, Seen *seen, float *sums, int depth) {
    __m512 top = _mm512_max_ps(_mm512_loadu_ps(scores), _mm512_loadu_ps(scores + LANES));
    for (int k = 2 * LANES; k < number; k += 2 * LANES)
        top = _mm512_max_ps(top, _mm512_max_ps(_mm512_loadu_ps(scores + k), _mm512_loadu_ps(scores + k + LANES)));
    float largest = _mm512_reduce_max_ps(top) * factor;
    __m512 total = _mm512_setzero_ps();
    if (!first) {
        if (largest > seen->top) {
            __m512 shrink = power(_mm512_set1_ps(seen->top - largest));
            for (int d = 0; d < depth; d += LANES) store(sums + d, load(sums + d) * (vec)shrink);
            total = _mm512_mul_ps((__m512)seen->total, shrink);
        } else {
            largest = seen->top;
            total = (__m512)seen->total;
        }
    }
    __m512 scale = _mm512_set1_ps(factor), least = _mm512_set1_ps(largest);
    for (int k = 0; k < number; k += 2 * LANES) {
        __m512 x = power(_mm512_fmsub_ps(_mm512_loadu_ps(scores + k), scale, least));
        __m512 y = power(_mm512_fmsub_ps(_mm512_loadu_ps(scores + k + LANES), scale, least));
        total = _mm512_add_ps(total, _mm512_add_ps(x, y));
        _mm512_storeu_si512((half *)scores + k, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    }
    seen->top = largest, seen->total = (vec)total;
}

/* Scores of keys that are not there, from `number` on, become such that their weights are zeros. */
static void hide_missing(float *scores, int rows, int number) {
    for (int q = 0; q < rows; q++)
        for (int k = number; k < filled_up(number); k++) scores[q * ROW + k] = -INFINITY;
}

/* Bytes that stencil_tile_attend works in. */
long stencil_tile_room(int width, int keys) {
    long depth = filled_up(width), of_queries = TILE_QUERIES * (ROW * sizeof(float) + depth * (sizeof(float) + sizeof(half)));
    return 64 + of_queries + 2 * filled_up(keys) * depth * (long)sizeof(half);
}

/* As stencil_half_attend, of heads of any width; room: bytes, stencil_tile_room(width, keys). */
void stencil_tile_attend(const half *query, long query_step, int queries, int heads, int width, float scale,
                         const half *key, const half *value, int keys, void *room, half *out, long out_step) {
    unsigned before = begin_computing();
    begin_tiles();
    int depth = filled_up(width);
    float *scores = (float *)(((uintptr_t)room + 63) / 64 * 64), *sums = scores + TILE_QUERIES * ROW;
    half *asked = (half *)(sums + TILE_QUERIES * depth), *turned = asked + TILE_QUERIES * depth;
    half *paired = turned + (long)filled_up(keys) * depth;
    Seen seen[TILE_QUERIES];
    for (int h = 0; h < heads; h++, key += (long)keys * width, value += (long)keys * width) {
        turn_keys(key, keys, width, turned);
        pair_values(value, keys, width, paired);
        for (int begin = 0; begin < queries; begin += TILE_QUERIES) {
            int count = queries - begin < TILE_QUERIES ? queries - begin : TILE_QUERIES, second = count > TILE;
            for (int q = 0; q < TILE_QUERIES; q++)
                for (int d = 0; d < depth; d += TILE_DEPTH) {
                    __mmask32 there = q < count ? first_ones(width - d) : 0;
                    const half *numbers = query + (begin + q) * query_step + h * width + d;
                    _mm512_store_si512(asked + q * depth + d, _mm512_maskz_loadu_epi16(there, numbers));
                }
            for (int k = 0; k < keys; k += KEYS) {
                int some = keys - k < KEYS ? keys - k : KEYS, whole = filled_up(some);
                tile_scores(asked, depth, turned + (long)k * depth, whole, second, scores);
                if (some < whole) hide_missing(scores, count, some);
                for (int q = 0; q < count; q++)
                    soften_row(scores + q * ROW, whole, scale * 1.44269504f, k == 0, seen + q, sums + q * depth,
                               depth);
                tile_sums((half *)scores, whole, paired + (long)k * depth, depth, second, k == 0, sums);
            }
            for (int q = 0; q < count; q++) {
                vec total = all(sum_of(seen[q].total));
                for (int d = 0; d < width; d += TILE_DEPTH) {
                    const float *pair = sums + q * depth + d;
                    __m512i result = put_in_order(load(pair) / total, load(pair + TILE) / total);
                    half *to = out + (begin + q) * out_step + h * width + d;
                    _mm512_mask_storeu_epi16(to, first_ones(width - d), result);
                }
            }
        }
    }
    end_tiles();
    end_computing(before);
}
#endif
