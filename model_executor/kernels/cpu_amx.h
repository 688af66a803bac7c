/* AMX's tiles: eight registers of 16 rows of 64 bytes, whose product instruction multiplies bfloat16 numbers in pairs.
 *
 * TDPBF16PS adds to each float32 sum the product of the even numbers of 16 pairs and that of the odd ones. It takes
 * denormal numbers for zeros and rounds to nearest whatever MXCSR says, and a row of its result depends on that row of
 * the first operand alone. It rounds otherwise than `dot` of cpu_bfloat16.c: results with tiles have their own bits.
 */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16       /* rows of a tile, and the numbers in float32 of a row */
#define TILE_DEPTH 32 /* numbers in bfloat16 of a row */

/* The instructions. A compiler's own (GCC 12's _tile_loadd) do not tell it that they read memory, so that it may move a
 * store to that memory behind them. t, sums, x, y: a tile's number, 0 to 7; step: bytes from one row to the next. */
#define TILE_LOAD(t, p, step) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((long)(step)) : "memory")
#define TILE_STORE(t, p, step) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((long)(step)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %tmm" #t)
#define TILE_DOT(sums, x, y) __asm__ volatile("tdpbf16ps %tmm" #y ", %tmm" #x ", %tmm" #sums)

/* What LDTILECFG reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* Make all tiles 16 rows of 64 bytes, until `end_tiles`. Each function that uses tiles does so for itself, since oneDNN
 * has its own shapes. */
static inline void begin_tiles(void) {
    TileShapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) shapes.row_bytes[t] = 64, shapes.rows[t] = TILE;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

/* Tiles that are in use are saved whenever the system switches threads. */
static inline void end_tiles(void) { __asm__ volatile("tilerelease"); }
#endif

/* Ask the system to let this process use tiles. 0: it refuses, or the library is compiled for a CPU without them. */
int stencil_allow_tiles(void) {
#ifdef HAS_TILES
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM; granted once for all threads */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}
