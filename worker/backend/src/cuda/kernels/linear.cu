// Products of rows with packed weights. The weights are the left operand of the tensor cores (16 outputs), the rows the
// right one (8 rows). The bits of an output depend neither on the number of rows nor on the kernel that computed it.
#include "products.cuh"

// ---- few rows: a warp for each piece of a tile, or of two tiles ----------------------------------------------------

struct Rows {
    const bf16* x;
    // Row i is row order[i] / n_used of x; null: row i.
    const u32* order;
    u32 n_used;
    u32 n_rows;
    float* out;  // of the first row
    u32 ld_out;
    u32 n_out;
};

// The operands of a piece: 16 * NT outputs, and 8 * NR rows.
template <class Kind, int NR, int NT>
struct Operands {
    // Groups that are loaded at once.
    static constexpr u32 AHEAD = NR > 2 ? 2 : NR == 1 && sizeof(typename Kind::Raw) > 24 ? 8 : 4;
    const void *digits, *scales;
    u64 first[NT];
    u32 n_groups;
    const Words2* x[NR];

    // Multiplies AHEAD groups from `group` on; IS_LAST: of these only those before `end`.
    template <bool IS_LAST>
    DEVICE_MEMBER void multiply(u64 group, u64 end, float (&acc)[NT][NR][4]) const {
        typename Kind::Raw raw[AHEAD][NT];
        Group right[AHEAD][NR];
        UNROLL
        for (u32 i = 0; i < AHEAD; i++) {
            if (!IS_LAST || group + i < end) {
                UNROLL
                for (int m = 0; m < NT; m++) {
                    raw[i][m] = Kind::fetch(digits, scales, first[m], group + i, n_groups, threadIdx.x % 32);
                }
                UNROLL
                for (int n = 0; n < NR; n++) {
                    const Words2* of_group = x[n] + (group + i) * 8;
                    right[i][n] = {{of_group[0], of_group[4]}};
                }
            }
        }
        UNROLL
        for (u32 i = 0; i < AHEAD; i++) {
            if (!IS_LAST || group + i < end) {
                UNROLL
                for (int m = 0; m < NT; m++) {
                    Fragment w = Kind::widen(raw[i][m]);
                    UNROLL
                    for (int n = 0; n < NR; n++) {
                        multiply_group(acc[m][n], w, right[i][n]);
                    }
                }
            }
        }
    }
};

// NT tiles of sixteen outputs, from `tile` on, of 8 * NR rows over the groups of one piece. The last tile stands in for
// those that do not exist.
template <class Kind, int NR, int NT>
DEVICE void multiply_piece(const void* digits, const void* scales, const Rows& rows, u32 row_first, u32 tile,
                           u32 n_groups, u32 begin, u32 end, float (&acc)[NT][NR][4]) {
    const u32 lane = threadIdx.x % 32;
    Operands<Kind, NR, NT> of;
    of.digits = digits;
    of.scales = scales;
    UNROLL
    for (int m = 0; m < NT; m++) {
        of.first[m] = (u64)min_of(tile + m, ceil_div(rows.n_out, 16) - 1) * n_groups;
    }
    of.n_groups = n_groups;
    UNROLL
    for (int n = 0; n < NR; n++) {
        // Results of rows that do not exist are not written.
        u32 row = min_of(row_first + n * 8 + lane / 4, rows.n_rows - 1);
        u32 from = rows.order ? rows.order[row] / rows.n_used : row;
        of.x[n] = (const Words2*)(rows.x + (u64)from * n_groups * 32) + lane % 4;
    }
    u64 group = begin;
    for (; group + of.AHEAD <= end; group += of.AHEAD) {
        of.template multiply<false>(group, end, acc);
    }
    if (group < end) {
        of.template multiply<true>(group, end, acc);
    }
}

template <class Kind, int NR, int NT>
DEVICE void few_rows(const void* digits, const void* scales, const Rows& rows, const Pieces& pieces) {
    const u32 WARPS = 8, R = 8 * NR, OUTPUTS = 16 * NT;
    SHARED(float, sums, WARPS * R * OUTPUTS);
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 n_slots = pieces.n <= 1 ? 1 : pieces.n <= 2 ? 2 : pieces.n <= 4 ? 4 : 8;
    const u32 tile_first = blockIdx.x * (WARPS / n_slots) * NT, row_first = blockIdx.y * R;
    const u32 tile = tile_first + warp / n_slots * NT, piece = warp % n_slots;
    if (piece < pieces.n && tile * 16 < rows.n_out) {
        float acc[NT][NR][4] = {};
        u32 begin = piece == 0 ? 0 : pieces.end[piece - 1];
        multiply_piece<Kind, NR, NT>(digits, scales, rows, row_first, tile, pieces.n_groups, begin, pieces.end[piece],
                                     acc);
        UNROLL
        for (int i = 0; i < NT * NR * 4; i++) {
            u32 row = i / 4 % NR * 8 + 2 * t + i % 2, column = i / (4 * NR) * 16 + g + i % 4 / 2 * 8;
            sums[(warp * R + row) * OUTPUTS + column] = acc[i / (4 * NR)][i / 4 % NR][i % 4];
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < WARPS / n_slots * R * OUTPUTS; i += 256) {
        u32 slot = i / (R * OUTPUTS), row = row_first + i / OUTPUTS % R;
        u32 column = tile_first * 16 + slot * OUTPUTS + i % OUTPUTS;
        if (row < rows.n_rows && column < rows.n_out) {
            const float* from = sums + slot * n_slots * R * OUTPUTS + i % (R * OUTPUTS);
            float* to = rows.out + (u64)row * rows.ld_out + column;
            fold_pieces(from, R * OUTPUTS, pieces, to, (u64)rows.n_rows * rows.ld_out);
        }
    }
}

// ---- many rows: 128 outputs of 64 rows for each block, a warp has 32 of each ---------------------------------------

#define STAGES 4
#define TILE_ROWS 64

// acc[tile][8 rows][..]; the warp's four times eight rows begin at `x` in shared memory.
template <class Kind>
DEVICE void multiply_stage(const typename Kind::Raw (&raw)[2], const Words4* x, float (&acc)[32]) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Group right[4];
    UNROLL
    for (int i = 0; i < 8; i++) {
        u32 row = i / 2 * 8 + g, step = i % 2;
        right[i / 2].steps[step] = ((const Words2*)x)[row * 8 + place_of_step(row, step) * 4 + t];
    }
    const Fragment left[2] = {Kind::widen(raw[0]), Kind::widen(raw[1])};
    // Consecutive products go to different accumulators, because the tensor cores take long for each.
    UNROLL
    for (int step = 0; step < 2; step++) {
        UNROLL
        for (int i = 0; i < 8; i++) {
            const u32(&a)[4] = left[i / 4].a[step];
            const Words2& b = right[i % 4].steps[step];
            multiply_tiles(*(float(*)[4])(acc + i * 4), a[0], a[1], a[2], a[3], b.w[0], b.w[1]);
        }
    }
}

DEVICE void store_run(const float (&acc)[32], float* out, u32 ld_out, u32 column, u32 row, u32 n_out, u32 n_rows) {
    UNROLL
    for (int i = 0; i < 32; i++) {
        u32 c = column + i / 16 * 16 + i % 4 / 2 * 8, r = row + i / 4 % 4 * 8 + i % 2;
        if (c < n_out && r < n_rows) {
            out[(u64)r * ld_out + c] = acc[i];
        }
    }
}

template <class Kind>
DEVICE void many_rows(const void* digits, const void* scales, const bf16* x, float* out, u32 ld_out, u32 n_out,
                      u32 n_rows, const Pieces& pieces) {
    SHARED(Words4, stages, STAGES * TILE_ROWS * 4);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_groups = pieces.n_groups;
    const u32 row_first = blockIdx.y * TILE_ROWS, warp_row = warp / 4 * 32, n_tiles = ceil_div(n_out, 16);
    const u32 column = blockIdx.x * 128 + warp % 4 * 32;
    u64 at[2];
    typename Kind::Raw next[2];
    UNROLL
    for (int m = 0; m < 2; m++) {
        at[m] = (u64)min_of(column / 16 + m, n_tiles - 1) * n_groups;
        next[m] = Kind::fetch(digits, scales, at[m], 0, n_groups, lane);
    }
    UNROLL
    for (u32 group = 0; group < STAGES - 1; group++) {
        if (group < n_groups) {
            copy_rows<TILE_ROWS>(stages + group * TILE_ROWS * 4, x, row_first, n_rows, n_groups, group);
        }
        commit_copies();
    }
    Stack<32> stack = {};
    u32 group = 0;
    for (u32 piece = 0; group < n_groups; piece++) {
        float acc[32] = {};
        for (const u32 end = pieces.end[piece]; group < end; group++) {
            copies_arrived<STAGES - 2>();
            // The copies of all threads have arrived, and all threads have read the stage before.
            __syncthreads();
            u32 ahead = group + STAGES - 1;
            if (ahead < n_groups) {
                copy_rows<TILE_ROWS>(stages + ahead % STAGES * TILE_ROWS * 4, x, row_first, n_rows, n_groups, ahead);
            }
            commit_copies();
            typename Kind::Raw raw[2] = {next[0], next[1]};
            if (group + 1 < n_groups) {
                UNROLL
                for (int m = 0; m < 2; m++) {
                    next[m] = Kind::fetch(digits, scales, at[m], group + 1, n_groups, lane);
                }
            }
            multiply_stage<Kind>(raw, stages + group % STAGES * TILE_ROWS * 4 + warp_row * 4, acc);
        }
        for (u32 i = 0; i < pieces.merges[piece]; i++) {
            stack.merge(acc);
        }
        if (pieces.ends_run[piece]) {
            store_run(acc, out, ld_out, column + lane / 4, row_first + warp_row + lane % 4 * 2, n_out, n_rows);
            out += (u64)n_rows * ld_out;
        } else {
            stack.push(acc);
        }
    }
}

// ---- the kernels -------------------------------------------------------------------------------------------------

#define DEFINE_FEW(name, Kind, NR, NT)                                      \
    LINEAR(name) {                                                          \
        Rows rows = {x, 0, 1, n_rows, out, ld_out, n_out};                  \
        few_rows<Kind, NR, NT>(digits, scales, rows, pieces);               \
    }
#define DEFINE_KIND(kind, Kind)                                             \
    DEFINE_FEW(linear_##kind##_r8, Kind, 1, 1)                              \
    DEFINE_FEW(linear_##kind##_r16, Kind, 2, 1)                             \
    DEFINE_FEW(linear_##kind##_r32, Kind, 4, 2)                             \
    LINEAR(linear_##kind##_r64) {                                           \
        many_rows<Kind>(digits, scales, x, out, ld_out, n_out, n_rows, pieces); \
    }                                                                       \
    LINEAR_GROUPED(linear_grouped_##kind) {                                 \
        grouped<Kind>(digits, scales, x, out, ld_out, n_out, starts, first, order, n_used, pieces); \
    }

template <class Kind>
DEVICE void grouped(const u64* digits, const u64* scales, const bf16* x, float* out, u32 ld_out, u32 n_out,
                    const u32* starts, u32 first, const u32* order, u32 n_used, const Pieces& pieces) {
    const u32 expert = blockIdx.z, start = starts[first + expert], n_rows = starts[first + expert + 1] - start;
    if (blockIdx.y * 16 >= n_rows) {
        return;
    }
    const bf16* from = order ? x : x + (u64)start * pieces.n_groups * 32;
    Rows rows = {from, order ? order + start : 0, n_used, n_rows, out + (u64)start * ld_out, ld_out, n_out};
    few_rows<Kind, 2, 1>((const void*)digits[expert], (const void*)scales[expert], rows, pieces);
}

DEFINE_KIND(bf16, KindBf16)
DEFINE_KIND(plain, KindPlain)
DEFINE_KIND(w8, KindW8)
DEFINE_KIND(w8h, KindW8h)
DEFINE_KIND(w4, KindW4)
DEFINE_KIND(w4h, KindW4h)
DEFINE_KIND(f8, KindF8)
DEFINE_KIND(f8plain, KindF8Plain)

// A thread loads the sums of all pieces before it adds any.
KERNEL(256) fold_split(const float* sums, u32 n_rows, u32 cols, float* out, u32 ld_out, BY_VALUE Pieces pieces) {
    const u32 column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column >= cols) {
        return;
    }
    float of_pieces[PIECES_MAX];
    UNROLL
    for (u32 piece = 0; piece < PIECES_MAX; piece++) {
        of_pieces[piece] = piece < pieces.n ? sums[((u64)piece * n_rows + row) * cols + column] : 0.0f;
    }
    fold_pieces(of_pieces, 1, pieces, out + (u64)row * ld_out + column, (u64)n_rows * ld_out);
}

// Deep enough for 2^12 planes.
#define FOLD_DEPTH 12

KERNEL(256) fold_planes(const float* planes, u32 n_planes, const u8* merges, u64 n, float* out) {
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) {
        return;
    }
    float waiting[FOLD_DEPTH] = {};
    u32 depth = 0;
    float sum = -0.0f;
    for (u32 plane = 0; plane < n_planes; plane++) {
        sum = planes[plane * n + i];
        bool is_last = plane + 1 == n_planes;
        u32 n_merges = is_last ? depth : merges[plane];
        for (u32 m = 0; m < n_merges; m++) {
            sum = waiting[0] + sum;
            UNROLL
            for (int j = 0; j + 1 < FOLD_DEPTH; j++) {
                waiting[j] = waiting[j + 1];
            }
        }
        depth = depth + 1 - n_merges;
        UNROLL
        for (int j = FOLD_DEPTH - 1; j > 0; j--) {
            waiting[j] = waiting[j - 1];
        }
        waiting[0] = sum;
    }
    out[i] = sum;
}
