/* The denoiser's products, attention, norms and pages in bfloat16; a part of cpu_kernels.c.
 *
 * Numbers are multiplied in pairs: `dot` adds the product of the odd numbers to a float32 sum, then that of the even
 * ones, each with one rounding to nearest. So do AVX512-BF16's instruction and the code for CPUs without it. That
 * instruction takes denormal numbers for zeros, as does the one that rounds; here all computing does, so that bits are
 * the same with and without AVX512-BF16. A number of a result is the sum over pairs in their order, whatever the number
 * of rows, and is rounded to bfloat16 once, after bias, additions and activation.
 */

typedef uint16_t half;
typedef int32_t pair __attribute__((aligned(2), may_alias));
typedef int32_t pairs __attribute__((vector_size(64), aligned(2), may_alias));

#define HALF_DEPTH 1280 /* inputs at a time: a panel's weights fit the second-level cache */
#define TILE_KEYS 192   /* keys at a time: even, so that pairs of keys are of one tile */
#define MOST_KEYS 16    /* keys whose scores are computed together, at most */

static inline vec dot(vec sum, pairs x, pairs y) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    const pairs odd = (pairs){} + (int32_t)0xffff0000;
    sum = (vec)_mm512_fmadd_ps((__m512)(x & odd), (__m512)(y & odd), (__m512)sum);
    return (vec)_mm512_fmadd_ps((__m512)(x << 16), (__m512)(y << 16), (__m512)sum);
#endif
}

static inline pairs load_pairs(const half *p) { return *(const pairs *)p; }
static inline pairs both(const half *p) { return (pairs)_mm512_set1_epi32(*(const pair *)p); }

/* Have denormal numbers, read or computed, taken for zeros until `end_computing` gets the result. */
static inline unsigned begin_computing(void) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
}

static inline void end_computing(unsigned before) { _mm_setcsr(before); }

static inline vec widen_some(const half *p, __mmask16 some) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16);
}

/* x and y side by side in pairs. */
static inline pairs side_by_side(halves x, halves y) {
    __m512i even = _mm512_cvtepu16_epi32((__m256i)x), odd = _mm512_cvtepu16_epi32((__m256i)y);
    return (pairs)_mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

/* ------------------------------------------------------------------------------------------------------- linear */

/* Sums of M x PANEL outputs over `depth` inputs, added to those in `sums`, [M, PANEL], unless they are the first. */
#define DEFINE_HALF_TILE(M)                                                                                            \
    static void half_tile_##M(const half *x, long x_step, int depth, const half *weight, const half *next, int first,  \
                              float *sums) {                                                                           \
        vec sum[M][4];                                                                                                 \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++) sum[i][v] = first ? all(0) : load(sums + i * PANEL + v * LANES);               \
        for (int k = 0; k < depth; k += 2) {                                                                           \
            pairs w[4];                                                                                                \
            _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) w[v] = load_pairs(weight + k * PANEL + v * 2 * LANES); \
            __builtin_prefetch(next + k * PANEL, 0, 2);                                                                \
            _Pragma("GCC unroll 8") for (int i = 0; i < M; i++) {                                                      \
                pairs factor = both(x + i * x_step + k);                                                               \
                _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) sum[i][v] = dot(sum[i][v], factor, w[v]);          \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++) store(sums + i * PANEL + v * LANES, sum[i][v]);                                \
    }
DEFINE_HALF_TILE(1)
DEFINE_HALF_TILE(2)
DEFINE_HALF_TILE(3)
DEFINE_HALF_TILE(4)
DEFINE_HALF_TILE(5)
DEFINE_HALF_TILE(6)

typedef void (*HalfTile)(const half *, long, int, const half *, const half *, int, float *);
static const HalfTile half_tiles[] = {0, half_tile_1, half_tile_2, half_tile_3, half_tile_4, half_tile_5, half_tile_6};

/* Adds the piece's additions to the sums of m rows, from `row` on, of panel `number`: [m, PANEL]. */
static void add_to_sums(int m, int number, long row, const Piece *piece, const Addition *additions, float *sums) {
    for (const Addition *it = additions + piece->first; it < additions + piece->first + piece->count; it++) {
        if (it->columns[number] < 0) continue;
        const float *low = it->low + (row - piece->start) * it->low_step + it->columns[number];
        const float *up = it->up + (long)number * it->depth * PANEL;
        tiles[m](low, it->low_step, (int)it->depth, up, up, 0, 0, 0, 0, sums, PANEL);
    }
}

/* The first `columns` outputs of m rows: their sums, [m, PANEL], plus bias, and activation. */
static void half_finish(int m, const float *sums, const half *bias, int gelu, int columns, half *out, long out_step) {
    for (int i = 0; i < m; i++)
        for (int c = 0; c < columns; c += LANES) {
            __mmask16 some = columns - c < LANES ? (__mmask16)((1u << (columns - c)) - 1) : 0xffff;
            vec y = load(sums + i * PANEL + c) + widen_some(bias + c, some);
            halves result = rounded(gelu ? gelu_of(y) : y);
            _mm256_mask_storeu_epi16(out + i * out_step + c, some, (__m256i)result);
        }
}

/* As stencil_linear, of any number of outputs: x, weight, bias and out in bfloat16, the additions in float32. weight:
 * [panels, inputs / 2, PANEL, 2], the last panel filled up with zeros; inputs is even. room: [rows, PANEL] numbers to
 * work in, if there are more than HALF_DEPTH inputs. */
void stencil_half_linear(const half *x, long x_step, int inputs, const half *weight, const half *bias, int outputs,
                         int gelu, const Piece *pieces, int num_pieces, const Addition *additions, float *room,
                         half *out, long out_step) {
    unsigned before = begin_computing();
    float whole[ROWS * PANEL];
    for (int n = 0; n < outputs; n += PANEL) {
        int columns = outputs - n < PANEL ? outputs - n : PANEL;
        for (int k = 0; k < inputs; k += HALF_DEPTH) {
            int depth = inputs - k < HALF_DEPTH ? inputs - k : HALF_DEPTH, last = k + depth == inputs;
            const half *panel = weight + (long)n * inputs + (long)k * PANEL;
            const half *next = last && n + PANEL >= outputs ? panel : panel + (long)depth * PANEL;
            for (const Piece *p = pieces; p < pieces + num_pieces; p++)
                for (long r = p->start; r < p->stop; r += ROWS) {
                    int m = p->stop - r < ROWS ? (int)(p->stop - r) : ROWS;
                    const half *fetched = r < 4 * ROWS ? next + r / ROWS * 2 * LANES : panel;
                    float *sums = inputs > HALF_DEPTH ? room + r * PANEL : whole;
                    half_tiles[m](x + r * x_step + k, x_step, depth, panel, fetched, k == 0, sums);
                    if (!last) continue;
                    add_to_sums(m, n / PANEL, r, p, additions, sums);
                    half_finish(m, sums, bias + n, gelu, columns, out + r * out_step + n, out_step);
                }
        }
    }
    end_computing(before);
}

#define DEFINE_HALF_NARROW(M)                                                                                          \
    static void half_narrow_##M(const half *x, long x_step, int inputs, const half *weight, const float *scale,        \
                                float *out, long out_step) {                                                           \
        vec sum[M];                                                                                                    \
        for (int i = 0; i < M; i++) sum[i] = all(0);                                                                   \
        for (int k = 0; k < inputs; k += 2) {                                                                          \
            pairs w = load_pairs(weight + (long)k * LANES);                                                            \
            _Pragma("GCC unroll 12") for (int i = 0; i < M; i++) sum[i] = dot(sum[i], both(x + i * x_step + k), w);    \
        }                                                                                                              \
        for (int i = 0; i < M; i++) store(out + i * out_step, scale ? sum[i] * scale[i] : sum[i]);                     \
    }
DEFINE_HALF_NARROW(1)
DEFINE_HALF_NARROW(2)
DEFINE_HALF_NARROW(3)
DEFINE_HALF_NARROW(4)
DEFINE_HALF_NARROW(5)
DEFINE_HALF_NARROW(6)
DEFINE_HALF_NARROW(7)
DEFINE_HALF_NARROW(8)
DEFINE_HALF_NARROW(9)
DEFINE_HALF_NARROW(10)
DEFINE_HALF_NARROW(11)
DEFINE_HALF_NARROW(12)

typedef void (*HalfNarrow)(const half *, long, int, const half *, const float *, float *, long);
static const HalfNarrow half_narrows[] = {
    0,             half_narrow_1, half_narrow_2, half_narrow_3, half_narrow_4,  half_narrow_5,  half_narrow_6,
    half_narrow_7, half_narrow_8, half_narrow_9, half_narrow_10, half_narrow_11, half_narrow_12};

/* As stencil_narrow_linear: x and weight in bfloat16. weight: [outputs / LANES, inputs / 2, LANES, 2]. */
void stencil_half_narrow_linear(const half *x, long x_step, int rows, int inputs, const half *weight, int outputs,
                                const float *scale, float *out) {
    unsigned before = begin_computing();
    for (int r = 0; r < rows; r += NARROW_ROWS) {
        int m = rows - r < NARROW_ROWS ? rows - r : NARROW_ROWS;
        for (int n = 0; n < outputs; n += LANES)
            half_narrows[m](x + r * x_step, x_step, inputs, weight + (long)n * inputs, scale ? scale + r : 0,
                            out + (long)r * outputs + n, outputs);
    }
    end_computing(before);
}

/* ---------------------------------------------------------------------------------------------------- attention */

/* 2^x within 2^-12 of its value, an eighth of what bfloat16 resolves; 0 or denormal for x below -126. */
static inline vec power_of_two(vec x) {
    __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vec r = x - (vec)whole;
    vec p = 1.0f + r * (0.69330322f + r * (0.24198009f + r * 0.05472473f));
    return (vec)_mm512_scalef_ps((__m512)p, whole);
}

/* scores [keys, V * LANES] = key [keys, width] times query [width / 2, V * LANES, 2]; K keys at a time fill the
 * registers. The last ones overlap, and may begin up to K - 1 keys before the first, for which both have room. */
#define DEFINE_HALF_SCORES(V, K)                                                                                       \
    static void half_scores_##V(const half *key, int keys, int width, const half *query, float *scores) {              \
        for (int k = 0; k < keys; k += K) {                                                                            \
            int start = keys - k < K ? keys - K : k;                                                                   \
            const half *rows = key + (long)start * width;                                                              \
            vec sum[K][V];                                                                                             \
            for (int i = 0; i < K; i++)                                                                                \
                for (int v = 0; v < V; v++) sum[i][v] = all(0);                                                        \
            for (int d = 0; d < width; d += 2) {                                                                       \
                pairs q[V];                                                                                            \
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) q[v] = load_pairs(query + (d * V + v * 2) * LANES);\
                _Pragma("GCC unroll 16") for (int i = 0; i < K; i++) {                                                 \
                    pairs factor = both(rows + i * width + d);                                                         \
                    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) sum[i][v] = dot(sum[i][v], factor, q[v]);      \
                }                                                                                                      \
            }                                                                                                          \
            for (int i = 0; i < K; i++)                                                                                \
                for (int v = 0; v < V; v++) store(scores + ((long)(start + i) * V + v) * LANES, sum[i][v]);            \
        }                                                                                                              \
    }
DEFINE_HALF_SCORES(1, 16)
DEFINE_HALF_SCORES(2, 12)
DEFINE_HALF_SCORES(3, 8)
DEFINE_HALF_SCORES(4, 6)

typedef void (*HalfScores)(const half *, int, int, const half *, float *);
static const HalfScores half_scores_of[] = {0, half_scores_1, half_scores_2, half_scores_3, half_scores_4};

/* Adds M queries' outputs, PANEL numbers wide, of one tile of keys, to `sums` of the tiles before, unless it is the
 * first: their weights [keys / 2, step, 2] times value [keys / 2, width, 2]. The sums are multiplied by `shrink` first. */
#define DEFINE_HALF_MIX(M)                                                                                             \
    static void half_mix_##M(const half *weights, int step, const half *value, int keys, int width, int first,         \
                             const float *shrink, float *sums) {                                                       \
        vec sum[M][4];                                                                                                 \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++)                                                                                \
                sum[i][v] = first ? all(0) : load(sums + i * width + v * LANES) * shrink[i];                           \
        for (int k = 0; k < keys; k += 2) {                                                                            \
            pairs x[4];                                                                                                \
            _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) x[v] = load_pairs(value + k * width + v * 2 * LANES);  \
            _Pragma("GCC unroll 8") for (int i = 0; i < M; i++) {                                                      \
                pairs factor = both(weights + k * step + 2 * i);                                                       \
                _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) sum[i][v] = dot(sum[i][v], factor, x[v]);          \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++) store(sums + i * width + v * LANES, sum[i][v]);                                \
    }
DEFINE_HALF_MIX(1)
DEFINE_HALF_MIX(2)
DEFINE_HALF_MIX(3)
DEFINE_HALF_MIX(4)
DEFINE_HALF_MIX(5)
DEFINE_HALF_MIX(6)

typedef void (*HalfMix)(const half *, int, const half *, int, int, int, const float *, float *);
static const HalfMix half_mixes[] = {0, half_mix_1, half_mix_2, half_mix_3, half_mix_4, half_mix_5, half_mix_6};

/* What the softmax of `step` queries knows of the tiles of keys that it has seen. */
typedef struct {
    float top[QUERIES];    /* largest exponent so far */
    float total[QUERIES];  /* sum of 2^(exponent - top) */
    float shrink[QUERIES]; /* what the sums of the tiles before are multiplied with, as `top` has grown */
} Softmax;

/* weights [keys / 2, step, 2] = 2^(factor * score - top) of one more tile of keys; 0 for the key after an odd number. */
static void half_soften(const float *scores, int keys, int step, float factor, int first, Softmax *soft, half *weights) {
    for (int q = 0; q < step; q += LANES) {
        vec top = load(scores + q);
        for (int k = 1; k < keys; k++) top = larger(load(scores + k * step + q), top);
        top = top * factor;
        vec before = load(soft->top + q), shrink = all(0), total = all(0);
        if (!first) {
            top = larger(top, before);
            shrink = power_of_two(before - top);
            total = load(soft->total + q) * shrink;
        }
        for (int k = 0; k < keys; k += 2) {
            vec even = power_of_two(load(scores + k * step + q) * factor - top), odd = all(0);
            if (k + 1 < keys) odd = power_of_two(load(scores + (k + 1) * step + q) * factor - top);
            *(pairs *)(weights + k * step + 2 * q) = side_by_side(rounded(even), rounded(odd));
            total += even + odd;
        }
        store(soft->top + q, top);
        store(soft->total + q, total);
        store(soft->shrink + q, shrink);
    }
}

/* [keys, width] -> [keys / 2, width, 2], filled up with zeros. */
static void pair_rows(const half *x, int keys, int width, half *out) {
    for (int k = 0; k < keys; k += 2, x += 2 * width, out += 2 * width)
        for (int d = 0; d < width; d += LANES) {
            halves odd = k + 1 < keys ? *(const halves *)(x + width + d) : (halves){};
            *(pairs *)(out + 2 * d) = side_by_side(*(const halves *)(x + d), odd);
        }
}

/* turned [width / 2, step, 2] = rows [count, width], each query_step numbers after the one before; zeros beyond. */
static void turn_queries(const half *rows, long query_step, int count, int step, int width, half *turned) {
    for (int q = 0; q < step; q++)
        for (int d = 0; d < width; d += 2)
            *(pair *)(turned + d * step + 2 * q) = q < count ? *(const pair *)(rows + q * query_step + d) : 0;
}

/* As stencil_attend, in bfloat16, with the scores of a tile of keys at a time (Dao et al., FlashAttention, 2022). room:
 * (keys + 1) * width + 3 * QUERIES * width + 4 * (TILE_KEYS + MOST_KEYS) * QUERIES numbers of bfloat16 to work in. */
void stencil_half_attend(const half *query, long query_step, int queries, int heads, int width, float scale,
                         const half *key, const half *value, int keys, half *room, half *out, long out_step) {
    unsigned before = begin_computing();
    half *paired = room, *turned = paired + (long)(keys + 1) / 2 * 2 * width, *weights = turned + QUERIES * width;
    float *sums = (float *)(weights + TILE_KEYS * QUERIES), *scores = sums + QUERIES * width + MOST_KEYS * QUERIES;
    Softmax soft;
    for (int h = 0; h < heads; h++, key += (long)keys * width, value += (long)keys * width) {
        pair_rows(value, keys, width, paired);
        for (int begin = 0; begin < queries; begin += QUERIES) {
            int count = queries - begin < QUERIES ? queries - begin : QUERIES;
            int vectors = (count + LANES - 1) / LANES, step = vectors * LANES;
            turn_queries(query + begin * query_step + h * width, query_step, count, step, width, turned);
            for (int k = 0; k < keys; k += TILE_KEYS) {
                int some = keys - k < TILE_KEYS ? keys - k : TILE_KEYS;
                half_scores_of[vectors](key + (long)k * width, some, width, turned, scores);
                half_soften(scores, some, step, scale * 1.44269504f, k == 0, &soft, weights);
                for (int q = 0; q < count; q += ROWS) {
                    int m = count - q < ROWS ? count - q : ROWS;
                    for (int d = 0; d < width; d += PANEL)
                        half_mixes[m](weights + 2 * q, step, paired + (long)k * width + 2 * d, some, width, k == 0,
                                      soft.shrink + q, sums + q * width + d);
                }
            }
            for (int q = 0; q < count; q++)
                for (int d = 0; d < width; d += LANES)
                    narrow(out + (begin + q) * out_step + h * width + d, load(sums + q * width + d) / soft.total[q]);
        }
    }
    end_computing(before);
}

/* -------------------------------------------------------------------------------------------------------- norms */

static inline float sum_of(vec x) { return _mm512_reduce_add_ps((__m512)x); }

/* 1 / sqrt of the mean of (x - mean)^2 plus eps. x: [width], a multiple of LANES. */
static inline float inverse_deviation(const half *x, int width, float mean, float eps) {
    vec squares = all(0), others = all(0);
    int d = 0;
    for (; d + LANES < width; d += 2 * LANES) { /* two at a time: an addition waits for the one before */
        vec apart = widen(x + d) - mean, other = widen(x + d + LANES) - mean;
        squares += apart * apart;
        others += other * other;
    }
    if (d < width) {
        vec apart = widen(x + d) - mean;
        squares += apart * apart;
    }
    return 1.0f / sqrtf(sum_of(squares + others) / (float)width + eps);
}

static inline float mean_of(const half *x, int width) {
    vec total = all(0), other = all(0);
    int d = 0;
    for (; d + LANES < width; d += 2 * LANES) {
        total += widen(x + d);
        other += widen(x + d + LANES);
    }
    if (d < width) total += widen(x + d);
    return sum_of(total + other) / (float)width;
}

/* As stencil_normalise_and_rotate, in bfloat16; rounded once. */
void stencil_half_normalise_and_rotate(half *x, long step, int tokens, int heads, int width, float eps,
                                       const float *weight, const float *rotary) {
    unsigned before = begin_computing();
    for (int t = 0; t < tokens; t++, x += step, rotary += width)
        for (int h = 0; h < heads; h++) {
            half *head = x + h * width;
            float scale = inverse_deviation(head, width, 0, eps);
            for (int d = 0; d < width; d += LANES)
                narrow(head + d, rotated(widen(head + d) * scale * load(weight + h * width + d), load(rotary + d)));
        }
    end_computing(before);
}

/* Some rows of a matrix. */
typedef struct {
    long start, stop;
} Span;

/* Layer norm of each row of the spans of x, times the span's factor, plus its shift; without shift a root-mean-square
 * norm, times factor. x: [rows, width], contiguous; out: as x, one span after the other; factor, shift: [spans, width],
 * rows factor_step and shift_step numbers apart; width: a multiple of LANES. */
void stencil_half_norm(const half *x, int width, float eps, const Span *spans, int num_spans, const half *factor,
                       long factor_step, const half *shift, long shift_step, half *out) {
    unsigned before = begin_computing();
    for (const Span *span = spans; span < spans + num_spans; span++, factor += factor_step)
        for (long r = span->start; r < span->stop; r++, out += width) {
            const half *row = x + r * width, *its = shift ? shift + (span - spans) * shift_step : 0;
            float mean = its ? mean_of(row, width) : 0, scale = inverse_deviation(row, width, mean, eps);
            for (int d = 0; d < width; d += LANES) {
                vec y = (widen(row + d) - mean) * scale * widen(factor + d);
                narrow(out + d, its ? y + widen(its + d) : y);
            }
        }
    end_computing(before);
}

/* x += gate * y, or gate * the root-mean-square norm of y if eps is not negative, for the rows of the spans of x. x:
 * [rows, width], contiguous; y: as x, one span after the other; gate: [spans, width], rows gate_step numbers apart;
 * width: a multiple of LANES. */
void stencil_half_add_gated(half *x, const half *y, int width, const Span *spans, int num_spans, const half *gate,
                            long gate_step, float eps) {
    unsigned before = begin_computing();
    for (const Span *span = spans; span < spans + num_spans; span++, gate += gate_step)
        for (long r = span->start; r < span->stop; r++, y += width) {
            half *row = x + r * width;
            float scale = eps < 0 ? 1 : inverse_deviation(y, width, 0, eps);
            for (int d = 0; d < width; d += LANES)
                narrow(row + d, widen(row + d) + widen(gate + d) * (widen(y + d) * scale));
        }
    end_computing(before);
}

/* ----------------------------------------------------------------------------------------------------------- pages */

static inline vec widen_bytes(const int8_t *p) {
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* As stencil_interpolate, rounded to bfloat16; far: 0 for near_scale * near alone. width: a multiple of LANES. */
void stencil_half_interpolate(const int8_t *near, const float *near_scale, const int8_t *far, const float *far_scale,
                              int groups, int tokens, int width, half *out, long group_step) {
    unsigned before = begin_computing();
    for (int g = 0; g < groups; g++)
        for (int t = 0; t < tokens; t++) {
            long place = (long)g * tokens + t;
            float x = near_scale[place], y = far ? far_scale[place] : 0;
            half *row = out + g * group_step + (long)t * width;
            for (int d = 0; d < width; d += LANES) {
                vec number = x * widen_bytes(near + place * width + d);
                if (far)
                    number = (vec)_mm512_fmadd_ps((__m512)all(x), (__m512)widen_bytes(near + place * width + d),
                                                  (__m512)(y * widen_bytes(far + place * width + d)));
                narrow(row + d, number);
            }
        }
    end_computing(before);
}
