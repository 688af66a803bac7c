/* What a transformer block does before its attention, and after it, in bfloat16 with AMX's tiles; a part of
 * cpu_kernels.c.
 *
 * It is computed by the functions that Python would call one by one, so that results have the same bits.
 */
#ifdef HAS_TILES

/* A linear layer, its weight as stencil_tile_linear reads it. inputs: a multiple of TILE_DEPTH, at most BLOCK_DEPTH. */
typedef struct {
    const half *weight, *bias;
    int inputs, outputs;
} Layer;

/* The layers for one kind of token: text, image, or both together. down: unused if both are together. */
typedef struct {
    Layer qkv, out, up, down;
    const float *qk_norm; /* [2, heads, head_width], weights of the norms of queries and keys */
    float qk_eps, eps;    /* of these norms, and of those of the hidden state */
} Layers;

/* Rows of all requests of one kind, in the hidden state. */
typedef struct {
    const Span *spans;
    int requests;
    long rows;      /* of all spans */
    int is_one_run; /* the spans follow one another */
} Rows;

/* What all blocks of a pass share. All but `hidden` and `rotary` is to work in. */
typedef struct {
    half *hidden;               /* [tokens, width] */
    const float *rotary;        /* [tokens, head_width], a rotation for each pair of numbers */
    half *qkv;                  /* [tokens, 3, heads, head_width] */
    half *attended;             /* [tokens, heads * head_width] */
    half *normed, *summed;      /* [tokens, width] */
    half *inner;                /* [tokens, heads * head_width + the most numbers of an MLP, or 3 * heads * head_width] */
    int width, heads, head_width;
} Pass;

/* Parts of a block's modulation: [requests, width] each, side by side, and rows `step` numbers apart. */
typedef struct {
    const half *parts;
    long step;
} Modulation;

static void multiply(const Layer *layer, const half *x, long x_step, long rows, int gelu, half *out, long out_step) {
    Piece whole = {0, rows, 0, 0};
    stencil_tile_linear(x, x_step, layer->inputs, layer->weight, layer->bias, layer->outputs, gelu, &whole, 1, 0, 0, 0, out,
                        out_step);
}

/* Copies rows of `width` numbers that lie one after the other in `packed` to or from those of the spans in `all`. */
static void copy_rows(const Rows *rows, half *all, half *packed, long width, int to_all) {
    for (const Span *span = rows->spans; span < rows->spans + rows->requests; span++) {
        long numbers = (span->stop - span->start) * width;
        half *its = all + span->start * width;
        memcpy(to_all ? its : packed, to_all ? packed : its, numbers * sizeof(half));
        packed += numbers;
    }
}

/* normed = the rows, normed and modulated by part `shift` and the one after it, the factor. */
static void norm_rows(const Pass *p, const Layers *layers, const Rows *rows, Modulation m, int shift) {
    const half *its = m.parts + (long)shift * p->width;
    stencil_half_norm(p->hidden, p->width, layers->eps, rows->spans, rows->requests, its + p->width, m.step, its, m.step,
                      p->normed);
}

/* The rows of the hidden state += part `gate` times `summed`. */
static void add_summed(const Pass *p, const Rows *rows, Modulation m, int gate) {
    stencil_half_add_gated(p->hidden, p->summed, p->width, rows->spans, rows->requests, m.parts + (long)gate * p->width,
                           m.step, -1);
}

/* Rows of qkv, queries and keys normed and rotated, from `normed`. */
static void project(const Pass *p, const Layers *layers, const Rows *rows) {
    long width = 3L * p->heads * p->head_width;
    half *first = p->qkv + rows->spans->start * width;
    multiply(&layers->qkv, p->normed, p->width, rows->rows, 0, rows->is_one_run ? first : p->inner, width);
    if (!rows->is_one_run) copy_rows(rows, p->qkv, p->inner, width, 1);
    for (const Span *span = rows->spans; span < rows->spans + rows->requests; span++)
        stencil_half_normalise_and_rotate(p->qkv + span->start * width, width, (int)(span->stop - span->start), 2 * p->heads,
                                          p->head_width, layers->qk_eps, layers->qk_norm,
                                          p->rotary + span->start * p->head_width);
}

/* What follows attention for one kind of token of a double block. part: the first of its six parts. */
static void finish_kind(const Pass *p, const Layers *layers, const Rows *rows, Modulation m, int part) {
    long width = (long)p->heads * p->head_width;
    half *its = p->attended + rows->spans->start * width;
    if (!rows->is_one_run) copy_rows(rows, p->attended, its = p->qkv, width, 0);
    multiply(&layers->out, its, width, rows->rows, 0, p->summed, p->width);
    add_summed(p, rows, m, part + 2);
    norm_rows(p, layers, rows, m, part + 3);
    multiply(&layers->up, p->normed, p->width, rows->rows, 1, p->inner, layers->up.outputs);
    multiply(&layers->down, p->inner, layers->up.outputs, rows->rows, 0, p->summed, p->width);
    add_summed(p, rows, m, part + 5);
}

/* A block with layers of their own for text (0) and image (1), until queries, keys and values are in p->qkv. Parts: shift,
 * factor and gate of attention, then those of the MLP; of the image, then of the text. */
void stencil_begin_double_block(const Pass *p, const Layers *layers, const Rows *rows, const half *parts, long step) {
    for (int kind = 0; kind < 2; kind++) {
        norm_rows(p, layers + kind, rows + kind, (Modulation){parts, step}, kind ? 0 : 6);
        project(p, layers + kind, rows + kind);
    }
}

/* The rest of it, with the attention's result in p->attended. */
void stencil_end_double_block(const Pass *p, const Layers *layers, const Rows *rows, const half *parts, long step) {
    for (int kind = 0; kind < 2; kind++)
        finish_kind(p, layers + kind, rows + kind, (Modulation){parts, step}, kind ? 0 : 6);
}

/* As stencil_begin_double_block, of a block whose layers all tokens share (rows 2), and whose last layer reads what
 * attention and MLP give, side by side in p->inner. Parts: shift, factor, gate. */
void stencil_begin_single_block(const Pass *p, const Layers *layers, const Rows *rows, const half *parts, long step) {
    long width = (long)p->heads * p->head_width;
    norm_rows(p, layers, rows + 2, (Modulation){parts, step}, 0);
    project(p, layers, rows + 2);
    multiply(&layers->up, p->normed, p->width, rows[2].rows, 1, p->inner + width, width + layers->up.outputs);
}

void stencil_end_single_block(const Pass *p, const Layers *layers, const Rows *rows, const half *parts, long step) {
    multiply(&layers->out, p->inner, layers->out.inputs, rows[2].rows, 0, p->summed, p->width);
    add_summed(p, rows + 2, (Modulation){parts, step}, 2);
}
#endif
