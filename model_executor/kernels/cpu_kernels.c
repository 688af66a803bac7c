/* For one core: page reading, and with AVX-512 the denoiser's float32 products and attention, and the VAE's bfloat16
 * norms. Included last are what denoisers compute in bfloat16: cpu_bfloat16.c, and instead of its products and attention,
 * where there is AMX, cpu_amx_linear.c and cpu_amx_attention.c. cpu_kernels.py compiles them.
 *
 * All matrices are row-major. A row of a result is computed by the same operations in the same order whatever the
 * number of rows, so that a request's bits depend neither on its batch nor on how many of its tokens are computed.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* All parts that PyTorch asks for where it names a CPU's instruction set AVX512, and so does cpu_kernels.py. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_AVX512
#endif

/* -------------------------------------------------------------------------------------------------- reading pages */

/* Which product is added without being rounded first; with AVX2, as in PyTorch. */
#ifdef HAS_AVX512
#define BETWEEN(x, near, y, far) __builtin_fmaf(x, near, (y) * (far))
#else
#define BETWEEN(x, near, y, far) __builtin_fmaf(y, far, (x) * (near))
#endif

/* out = near_scale * near + far_scale * far. near, far: [groups, tokens, width]; scales: [groups, tokens]; out:
 * [groups, tokens, width], groups group_step numbers apart. */
void stencil_interpolate(const int8_t *near, const float *near_scale, const int8_t *far, const float *far_scale,
                         int groups, int tokens, int width, float *out, long group_step) {
    for (int g = 0; g < groups; g++)
        for (int t = 0; t < tokens; t++, near += width, far += width) {
            float x = *near_scale++, y = *far_scale++, *row = out + g * group_step + (long)t * width;
            for (int d = 0; d < width; d++) row[d] = BETWEEN(x, near[d], y, far[d]);
        }
}

#ifdef HAS_AVX512

#define LANES 16
#define PANEL 64   /* output columns at a time: four vectors */
#define ROWS 6     /* rows at a time: 6 x 4 accumulators, which with operands fill the 32 vector registers */
#define NARROW_ROWS 12
#define DEPTH 640  /* inputs at a time: a panel's weights fit the second-level cache */
#define QUERIES 64 /* queries at a time */

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));

#ifdef __clang__
#define SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLE(x, ...) __builtin_shuffle(x, (ints){__VA_ARGS__})
#endif

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec all(float x) { return (vec){} + x; }
static inline vec larger(vec x, vec y) { return (vec)_mm512_max_ps((__m512)x, (__m512)y); }  /* x > y ? x : y */
static inline vec smaller(vec x, vec y) { return (vec)_mm512_min_ps((__m512)x, (__m512)y); } /* x < y ? x : y */

typedef uint16_t halves __attribute__((vector_size(32), aligned(2)));
typedef uint32_t words __attribute__((vector_size(64), aligned(4)));

static inline vec widen(const uint16_t *p) { /* gcc 12 makes four instructions of the conversion in C */
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}

/* Rounded to nearest, ties to even. */
static inline halves rounded(vec x) {
#ifdef __AVX512BF16__
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else /* a NaN may become another NaN or infinity */
    words bits = (words)x;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves);
#endif
}

static inline void narrow(uint16_t *p, vec x) { *(halves *)p = rounded(x); }

/* e^x within 2 units in the last place, for x from -87 to 87 and as at these ends beyond. Cephes' expf. */
static inline vec exponential(vec x) {
    x = smaller(larger(x, all(-87.0f)), all(87.0f));
    vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec n = (x * 1.44269504f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* GELU by its tanh approximation: x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3). */
static inline vec gelu_of(vec x) { return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x))); }

/* ------------------------------------------------------------------------------------------------------- linear */

/* m x PANEL outputs over `depth` inputs. next: weights needed soon, prefetched: a core that waits for
 * its weights otherwise loses a fourth of the time with 50 rows. */
#define DEFINE_TILE(M)                                                                                                 \
    static void tile_##M(const float *x, long x_step, int depth, const float *weight, const float *next,               \
                         const float *bias, int first, int last, int gelu, float *out, long out_step) {                \
        vec sum[M][4];                                                                                                 \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++) sum[i][v] = first ? all(0) : load(out + i * out_step + v * LANES);             \
        for (int k = 0; k < depth; k++) {                                                                              \
            vec w[4];                                                                                                  \
            _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) w[v] = load(weight + k * PANEL + v * LANES);           \
            __builtin_prefetch(next + k * PANEL, 0, 2);                                                                \
            _Pragma("GCC unroll 8") for (int i = 0; i < M; i++) {                                                      \
                float factor = x[i * x_step + k];                                                                      \
                _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) sum[i][v] += factor * w[v];                        \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++) {                                                                              \
                vec y = sum[i][v];                                                                                     \
                if (last) y += load(bias + v * LANES);                                                                 \
                store(out + i * out_step + v * LANES, last && gelu ? gelu_of(y) : y);                                  \
            }                                                                                                          \
    }
DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)

typedef void (*Tile)(const float *, long, int, const float *, const float *, const float *, int, int, int, float *, long);
static const Tile tiles[] = {0, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

/* To the outputs of some rows is added low [rows, low_step] times `up`, before their activation. up: [outputs / PANEL,
 * depth, PANEL]; columns [outputs / PANEL]: the first number of `low` that a panel reads, -1 for panels that nothing is
 * added to. */
typedef struct {
    const float *low;
    long low_step;
    const float *up;
    const int *columns;
    long depth;
} Addition;

/* Rows with the same `count` additions, those from `first` on. */
typedef struct {
    long start, stop, first, count;
} Piece;

/* The last inputs of m rows, from `row` on: their products, what is added to this panel, then bias and activation. */
static void finish(int m, const float *x, long x_step, int depth, const float *panel, const float *next,
                   const float *bias, int first, int gelu, int number, long row, const Piece *piece,
                   const Addition *additions, float *out, long out_step) {
    long last = -1;
    for (long a = piece->first; a < piece->first + piece->count; a++)
        if (additions[a].columns[number] >= 0) last = a;
    tiles[m](x, x_step, depth, panel, next, bias, first, last < 0, gelu, out, out_step);
    for (long a = piece->first; a <= last; a++) {
        const Addition *it = additions + a;
        if (it->columns[number] < 0) continue;
        const float *low = it->low + (row - piece->start) * it->low_step + it->columns[number];
        const float *up = it->up + (long)number * it->depth * PANEL;
        tiles[m](low, it->low_step, (int)it->depth, up, up, bias, 0, a == last, gelu, out, out_step);
    }
}

/* out [rows, outputs] = x [rows, inputs] times weight, plus bias [outputs] and the pieces' additions; and its GELU.
 * weight: [outputs / PANEL, inputs, PANEL]; outputs is a multiple of PANEL. x_step, out_step: numbers from one row to the
 * next. pieces: all rows, in order; their additions' `low` begins at the piece's first row. */
void stencil_linear(const float *x, long x_step, int inputs, const float *weight, const float *bias, int outputs,
                    int gelu, const Piece *pieces, int num_pieces, const Addition *additions, float *out, long out_step) {
    for (int k = 0; k < inputs; k += DEPTH) {
        int depth = inputs - k < DEPTH ? inputs - k : DEPTH, last = k + depth == inputs;
        for (int n = 0; n < outputs; n += PANEL) {
            const float *panel = weight + (long)n * inputs + (long)k * PANEL;
            const float *next = n + PANEL < outputs ? panel + (long)inputs * PANEL : panel;
            for (const Piece *p = pieces; p < pieces + num_pieces; p++)
                for (long r = p->start; r < p->stop; r += ROWS) {
                    int m = p->stop - r < ROWS ? (int)(p->stop - r) : ROWS;
                    const float *fetched = r < 4 * ROWS ? next + r / ROWS * LANES : panel;
                    const float *rows = x + r * x_step + k;
                    float *to = out + r * out_step + n;
                    if (last && p->count)
                        finish(m, rows, x_step, depth, panel, fetched, bias + n, k == 0, gelu, n / PANEL, r, p,
                               additions, to, out_step);
                    else
                        tiles[m](rows, x_step, depth, panel, fetched, bias + n, k == 0, last, gelu, to, out_step);
                }
        }
    }
}

/* M rows of a product with LANES outputs; a row of x is read once, not once per PANEL as above. */
#define DEFINE_NARROW(M)                                                                                               \
    static void narrow_##M(const float *x, long x_step, int inputs, const float *weight, const float *scale,           \
                           float *out, long out_step) {                                                                \
        vec sum[M];                                                                                                    \
        for (int i = 0; i < M; i++) sum[i] = all(0);                                                                   \
        for (int k = 0; k < inputs; k++) {                                                                             \
            vec w = load(weight + (long)k * LANES);                                                                    \
            _Pragma("GCC unroll 12") for (int i = 0; i < M; i++) sum[i] += x[i * x_step + k] * w;                      \
        }                                                                                                              \
        for (int i = 0; i < M; i++) store(out + i * out_step, scale ? sum[i] * scale[i] : sum[i]);                     \
    }
DEFINE_NARROW(1)
DEFINE_NARROW(2)
DEFINE_NARROW(3)
DEFINE_NARROW(4)
DEFINE_NARROW(5)
DEFINE_NARROW(6)
DEFINE_NARROW(7)
DEFINE_NARROW(8)
DEFINE_NARROW(9)
DEFINE_NARROW(10)
DEFINE_NARROW(11)
DEFINE_NARROW(12)

typedef void (*Narrow)(const float *, long, int, const float *, const float *, float *, long);
static const Narrow narrows[] = {0,        narrow_1, narrow_2, narrow_3, narrow_4,  narrow_5,  narrow_6,
                                 narrow_7, narrow_8, narrow_9, narrow_10, narrow_11, narrow_12};

/* out [rows, outputs] = x [rows, inputs] times weight, each row times its scale; no scale: 1. weight: [outputs / LANES,
 * inputs, LANES]; outputs is a small multiple of LANES. */
void stencil_narrow_linear(const float *x, long x_step, int rows, int inputs, const float *weight, int outputs,
                           const float *scale, float *out) {
    for (int r = 0; r < rows; r += NARROW_ROWS) {
        int m = rows - r < NARROW_ROWS ? rows - r : NARROW_ROWS;
        for (int n = 0; n < outputs; n += LANES)
            narrows[m](x + r * x_step, x_step, inputs, weight + (long)n * inputs, scale ? scale + r : 0,
                       out + (long)r * outputs + n, outputs);
    }
}

/* ---------------------------------------------------------------------------------------------------- attention */

/* scores [keys, V * LANES] = key [keys, width] times query [width, V * LANES]; K keys at a time fill the registers. */
#define DEFINE_SCORES(V, K)                                                                                            \
    static void scores_##V(const float *key, int keys, int width, const float *query, float *scores) {                 \
        for (int k = 0; k < keys; k += K) {                                                                            \
            int start = keys - k < K ? keys - K : k; /* the last ones overlap */                                       \
            const float *rows = key + (long)start * width;                                                             \
            vec sum[K][V];                                                                                             \
            for (int i = 0; i < K; i++)                                                                                \
                for (int v = 0; v < V; v++) sum[i][v] = all(0);                                                        \
            for (int d = 0; d < width; d++) {                                                                          \
                vec q[V];                                                                                              \
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) q[v] = load(query + (d * V + v) * LANES);          \
                _Pragma("GCC unroll 16") for (int i = 0; i < K; i++) {                                                 \
                    float factor = rows[i * width + d];                                                                \
                    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) sum[i][v] += factor * q[v];                    \
                }                                                                                                      \
            }                                                                                                          \
            for (int i = 0; i < K; i++)                                                                                \
                for (int v = 0; v < V; v++) store(scores + ((long)(start + i) * V + v) * LANES, sum[i][v]);            \
        }                                                                                                              \
    }
DEFINE_SCORES(1, 16)
DEFINE_SCORES(2, 12)
DEFINE_SCORES(3, 8)
DEFINE_SCORES(4, 6)

typedef void (*Scores)(const float *, int, int, const float *, float *);
static const Scores scores_of[] = {0, scores_1, scores_2, scores_3, scores_4};

/* M queries' outputs, PANEL numbers wide: their weights, one column each, times value [keys, width]. */
#define DEFINE_MIX(M)                                                                                                  \
    static void mix_##M(const float *weights, int step, const float *value, int keys, int width, const float *inverse, \
                        float *out, long out_step) {                                                                   \
        vec sum[M][4];                                                                                                 \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++) sum[i][v] = all(0);                                                            \
        for (int k = 0; k < keys; k++) {                                                                               \
            vec x[4];                                                                                                  \
            _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) x[v] = load(value + (long)k * width + v * LANES);      \
            _Pragma("GCC unroll 8") for (int i = 0; i < M; i++) {                                                      \
                float factor = weights[(long)k * step + i];                                                            \
                _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) sum[i][v] += factor * x[v];                        \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < M; i++)                                                                                    \
            for (int v = 0; v < 4; v++) store(out + i * out_step + v * LANES, sum[i][v] * inverse[i]);                 \
    }
DEFINE_MIX(1)
DEFINE_MIX(2)
DEFINE_MIX(3)
DEFINE_MIX(4)
DEFINE_MIX(5)
DEFINE_MIX(6)

typedef void (*Mix)(const float *, int, const float *, int, int, const float *, float *, long);
static const Mix mixes[] = {0, mix_1, mix_2, mix_3, mix_4, mix_5, mix_6};

/* e^(score - largest of its column) in place; inverse: 1 / their sum. step: numbers from one key to the next. */
static void soften(float *scores, int keys, int step, float *inverse) {
    for (int q = 0; q < step; q += LANES) {
        vec top = load(scores + q), sum = all(0);
        for (int k = 1; k < keys; k++) top = larger(load(scores + (long)k * step + q), top);
        for (int k = 0; k < keys; k++) {
            vec weight = exponential(load(scores + (long)k * step + q) - top);
            store(scores + (long)k * step + q, weight);
            sum += weight;
        }
        store(inverse + q, 1.0f / sum);
    }
}

/* out [queries, heads * width] = softmax(scale * query key^T) value, head by head. query: [queries, heads, width]; rows
 * of query and out are query_step and out_step numbers apart; key, value: [heads, keys, width]; width is a multiple of PANEL; at least 16 keys.
 * room: (width + keys + 1) * QUERIES numbers to work in. */
void stencil_attend(const float *query, long query_step, int queries, int heads, int width, float scale,
                    const float *key, const float *value, int keys, float *room, float *out, long out_step) {
    float *turned = room, *scores = turned + width * QUERIES, *inverse = scores + (long)keys * QUERIES;
    for (int h = 0; h < heads; h++, key += (long)keys * width, value += (long)keys * width) {
        for (int first = 0; first < queries; first += QUERIES) {
            int count = queries - first < QUERIES ? queries - first : QUERIES;
            int vectors = (count + LANES - 1) / LANES, step = vectors * LANES;
            const float *rows = query + first * query_step + h * width;
            for (int q = 0; q < step; q++)
                for (int d = 0; d < width; d++) turned[d * step + q] = q < count ? rows[q * query_step + d] * scale : 0;
            scores_of[vectors](key, keys, width, turned, scores);
            soften(scores, keys, step, inverse);
            for (int q = 0; q < count; q += ROWS) {
                int m = count - q < ROWS ? count - q : ROWS;
                for (int d = 0; d < width; d += PANEL)
                    mixes[m](scores + q, step, value + d, keys, width, inverse + q,
                             out + (first + q) * out_step + h * width + d, out_step);
            }
        }
    }
}

/* Interleaved pairs, rotated. turn: cosine and sine in turn. */
static inline vec rotated(vec y, vec turn) {
    const vec sign = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    vec other = SHUFFLE(y, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    vec cosine = SHUFFLE(turn, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
    vec sine = SHUFFLE(turn, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15);
    return y * cosine + other * (sine * sign);
}

/* Root-mean-square norm and rotary embedding of interleaved pairs, in place. x: [tokens, heads, width], tokens step
 * numbers apart; weight: [heads, width]; rotary: [tokens, width], cosine and sine in turn; width is a multiple of LANES. */
void stencil_normalise_and_rotate(float *x, long step, int tokens, int heads, int width, float eps,
                                  const float *weight, const float *rotary) {
    for (int t = 0; t < tokens; t++, x += step, rotary += width) {
        float *head = x;
        for (int h = 0; h < heads; h++, head += width) {
            vec squares = all(0);
            for (int d = 0; d < width; d += LANES) squares += load(head + d) * load(head + d);
            float sum = 0;
            for (int i = 0; i < LANES; i++) sum += squares[i];
            float scale = 1.0f / sqrtf(sum / (float)width + eps);
            for (int d = 0; d < width; d += LANES)
                store(head + d, rotated(load(head + d) * scale * load(weight + (long)h * width + d), load(rotary + d)));
        }
    }
}

/* --------------------------------------------------------------------------------------------------- making pages */

/* Symmetric int8: scales = largest magnitude of a row / 127, NaN if it has one; values = x / scales, 0 where a scale is 0
 * or not finite.
 * x: [kinds, heads, tokens, width] by its steps, of float32 numbers or, if halves, of bfloat16 ones; values: [kinds,
 * heads, tokens, width], scales: [kinds, heads, tokens], kinds values_step and scales_step numbers apart; width: a
 * multiple of LANES. */
void stencil_quantise(const void *x, long kind_step, long head_step, long token_step, int kinds, int heads, int tokens,
                      int width, int halves, int8_t *values, long values_step, float *scales, long scales_step) {
    float wide[width];
    for (int kind = 0; kind < kinds; kind++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < tokens; t++) {
                long from = kind * kind_step + h * head_step + t * token_step, place = (long)h * tokens + t;
                const float *row = halves ? wide : (const float *)x + from;
                for (int d = 0; halves && d < width; d += LANES) store(wide + d, widen((const uint16_t *)x + from + d));
                int8_t *to = values + kind * values_step + place * width;
                __m512 top = _mm512_setzero_ps();
                int is_number = 1;
                for (int d = 0; d < width; d += LANES) {
                    __m512 part = (__m512)load(row + d);
                    is_number &= !_mm512_cmp_ps_mask(part, part, _CMP_UNORD_Q);
                    top = _mm512_max_ps(_mm512_abs_ps(part), top);
                }
                float scale = is_number ? _mm512_reduce_max_ps(top) / 127.0f : NAN;
                scales[kind * scales_step + place] = scale;
                int is_scale = scale > 0.0f && scale < INFINITY;
                for (int d = 0; d < width; d += LANES) {
                    vec share = load(row + d) / all(is_scale ? scale : 1.0f);
                    __m512i whole = _mm512_cvtps_epi32((__m512)smaller(larger(share, all(-127.0f)), all(127.0f)));
                    _mm_storeu_si128((__m128i *)(to + d), _mm512_cvtsepi32_epi8(is_scale ? whole : (__m512i){}));
                }
            }
}

/* --------------------------------------------------------------------------------------------------- group norms */

/* x / (1 + e^-x) within 2^-12 of its value, an eighth of what bfloat16 resolves. 2^r: a polynomial for -0.5..0.5. */
static inline vec silu_of(vec x) {
    __m512 power = (__m512)(x * -1.44269504f);
    __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vec r = (vec)power - (vec)whole;
    vec p = 1.0f + r * (0.69330322f + r * (0.24198009f + r * 0.05472473f));
    vec e = (vec)_mm512_scalef_ps((__m512)p, whole);
    return x * (vec)_mm512_rcp14_ps((__m512)(1.0f + e));
}

/* Adds weight times the sums of n pixels and of their squares to sums[0..channels) and to those `squares` on. */
static inline void add_sums(const uint16_t *x, int n, int channels, float weight, float *sums, long squares) {
    for (int c = 0; c < channels; c += LANES) {
        vec total = all(0), other = all(0), square = all(0), another = all(0);
        int k = 0;
        for (; k + 1 < n; k += 2) { /* two at a time: an addition waits for the one before */
            vec first = widen(x + (long)k * channels + c), second = widen(x + (long)(k + 1) * channels + c);
            total += first;
            other += second;
            square += first * first;
            another += second * second;
        }
        if (k < n) {
            vec last = widen(x + (long)k * channels + c);
            total += last;
            square += last * last;
        }
        store(sums + c, load(sums + c) + weight * (total + other));
        store(sums + squares + c, load(sums + squares + c) + weight * (square + another));
    }
}

/* Sums of x and of its squares over tiles. x: [rows, columns, channels], whole tiles, channels a multiple of LANES;
 * sums: [2, rows / tile_rows, columns / tile_columns, channels]. */
void stencil_tile_sums(const uint16_t *x, int rows, int columns, int channels, int tile_rows, int tile_columns,
                       float *sums) {
    int across = columns / tile_columns;
    long tiles = (long)(rows / tile_rows) * across;
    for (long i = 0; i < 2 * tiles * channels; i++) sums[i] = 0;
    for (int row = 0; row < rows; row++)
        for (int t = 0; t < across; t++) {
            const uint16_t *first = x + ((long)row * columns + (long)t * tile_columns) * channels;
            float *sum = sums + ((long)(row / tile_rows) * across + t) * channels;
            add_sums(first, tile_columns, channels, 1, sum, tiles * channels);
        }
}

/* Means of x and of its squares by group of channels, [2, groups]: of each tile, times its weight, in sum. x: as above;
 * weights: [rows / tile_rows, columns / tile_columns]. */
void stencil_moments(const uint16_t *x, int rows, int columns, int channels, int tile_rows, int tile_columns,
                     const float *weights, int groups, float *moments) {
    int across = columns / tile_columns, width = channels / groups;
    float sums[2 * channels];
    for (int c = 0; c < 2 * channels; c++) sums[c] = 0;
    for (int row = 0; row < rows; row++)
        for (int t = 0; t < across; t++) {
            const uint16_t *first = x + ((long)row * columns + (long)t * tile_columns) * channels;
            float weight = weights[(row / tile_rows) * across + t];
            if (weight != 0) add_sums(first, tile_columns, channels, weight, sums, channels);
        }
    for (int g = 0; g < 2 * groups; g++) {
        float sum = 0;
        for (int c = g * width; c < (g + 1) * width; c++) sum += sums[c];
        moments[g] = sum / ((float)width * tile_rows * tile_columns);
    }
}

/* Group norm with given moments, [2, groups], and SiLU. x, out: [pixels, channels]; weight, bias: [channels], a
 * multiple of LANES. */
void stencil_norm_silu(const uint16_t *x, long pixels, int channels, const float *moments, int groups,
                       const float *weight, const float *bias, float eps, uint16_t *out) {
    float scale[channels], shift[channels];
    for (int c = 0; c < channels; c++) {
        int group = c / (channels / groups);
        float mean = moments[group], variance = moments[groups + group] - mean * mean;
        scale[c] = weight[c] / sqrtf((variance > 0 ? variance : 0) + eps);
        shift[c] = bias[c] - mean * scale[c];
    }
    for (long i = 0; i < pixels; i++, x += channels, out += channels)
        for (int c = 0; c < channels; c += LANES)
            narrow(out + c, silu_of(widen(x + c) * load(scale + c) + load(shift + c)));
}

/* ------------------------------------------------------------------------------------------------------------ GELU */

/* Its tanh approximation in place, of float32 numbers or, if halves, of bfloat16 ones; number: a multiple of LANES. */
void stencil_gelu(void *x, long number, int halves) {
    for (long i = 0; i < number; i += LANES) {
        if (halves)
            narrow((uint16_t *)x + i, gelu_of(widen((uint16_t *)x + i)));
        else
            store((float *)x + i, gelu_of(load((float *)x + i)));
    }
}

/* ---------------------------------------------------------------------------------------------------------- SwiGLU */

/* silu(gate) * up of rows that hold gate and up side by side, `width` numbers each, a multiple of LANES: of float32
 * numbers or, if halves, of bfloat16 ones. */
void stencil_swiglu(const void *x, long x_step, long rows, long width, int halves, void *out, long out_step) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < width; c += LANES) {
            long from = r * x_step + c, to = r * out_step + c;
            if (halves) {
                vec gate = widen((const uint16_t *)x + from), up = widen((const uint16_t *)x + from + width);
                narrow((uint16_t *)out + to, gate / (1.0f + exponential(-gate)) * up);
            } else {
                vec gate = load((const float *)x + from), up = load((const float *)x + from + width);
                store((float *)out + to, gate / (1.0f + exponential(-gate)) * up);
            }
        }
}

#include "cpu_bfloat16.c"
#include "cpu_amx.h"
#include "cpu_amx_linear.c"
#include "cpu_amx_attention.c"
#include "cpu_amx_blocks.c"

#endif
