// Products of many rows: 256 outputs of 128 rows for each block, a warp has 64 of each. The block widens each weight
// once, into shared memory, so formats of few bits cost little more than bf16. The bits are those of linear.cu.
#include "products.cuh"

#define STAGES 4
#define ROWS 128
#define TILES 16

// One group of the block's weights, as those of `KindBf16`, and of its rows.
struct Stage {
    Words4 weights[TILES * 64];
    Words4 rows[ROWS * 4];
};

// The block's weights, group after group: loaded into registers, widened, and stored for all warps.
template <class Kind>
struct Weights {
    const void *digits, *scales;
    u32 tile_first, n_tiles, n_groups;
    typename Kind::Raw raw[TILES / 8];

    DEVICE_MEMBER void fetch(u32 group) {
        UNROLL
        for (u32 i = 0; i < TILES / 8; i++) {
            // A tile beyond the last one is not used.
            u32 tile = min_of(tile_first + threadIdx.x / 32 + i * 8, n_tiles - 1);
            raw[i] = Kind::fetch(digits, scales, (u64)tile * n_groups, group, n_groups, threadIdx.x % 32);
        }
    }

    DEVICE_MEMBER void store(Stage& stage) const {
        UNROLL
        for (u32 i = 0; i < TILES / 8; i++) {
            const Fragment w = Kind::widen(raw[i]);
            Words4* to = stage.weights + (threadIdx.x / 32 + i * 8) * 64 + threadIdx.x % 32;
            to[0] = {{w.a[0][0], w.a[0][1], w.a[0][2], w.a[0][3]}};
            to[32] = {{w.a[1][0], w.a[1][1], w.a[1][2], w.a[1][3]}};
        }
    }

    // Prepares `group` before the loop, which begins at `begin`.
    DEVICE_MEMBER void prepare(Stage* stages, u32 begin, u32 group, u32 end) {
        if (group == begin) {
            fetch(begin);
            store(stages[begin % STAGES]);
            if (begin + 1 < end) {
                fetch(begin + 1);
            }
        }
    }

    // While `group` is multiplied, the next one is stored, and the one after it is loaded.
    DEVICE_MEMBER void advance(Stage* stages, u32 group, u32 end) {
        if (group + 1 < end) {
            store(stages[(group + 1) % STAGES]);
        }
        if (group + 2 < end) {
            fetch(group + 2);
        }
    }
};

// bf16 is copied without passing through registers.
template <>
struct Weights<KindBf16> {
    const void *digits, *scales;
    u32 tile_first, n_tiles, n_groups;

    DEVICE_MEMBER void prepare(Stage* stages, u32, u32 group, u32 end) {
        if (group >= end) {
            return;
        }
        Stage& stage = stages[group % STAGES];
        UNROLL
        for (u32 i = 0; i < TILES / 4; i++) {
            u32 in_stage = threadIdx.x / 64 + i * 4, tile = min_of(tile_first + in_stage, n_tiles - 1);
            copy_async(stage.weights + in_stage * 64 + threadIdx.x % 64,
                       (const Words4*)digits + ((u64)tile * n_groups + group) * 64 + threadIdx.x % 64);
        }
    }

    DEVICE_MEMBER void advance(Stage* stages, u32 group, u32 end) { prepare(stages, 0, group + STAGES - 1, end); }
};

// acc[8 * tile + rows / 8][..]; a warp has 4 tiles, from `tile` on, and 8 times 8 rows, from `row` on.
DEVICE void multiply_stage(const Stage& stage, u32 tile, u32 row, float (&acc)[32][4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    KindBf16::Raw left[4];
    UNROLL
    for (u32 m = 0; m < 4; m++) {
        const Words4* w = stage.weights + (tile + m) * 64 + lane;
        UNROLL
        for (u32 step = 0; step < 2; step++) {
            left[m].steps[step] = w[step * 32];
        }
    }
    // Consecutive products go to different accumulators, because the tensor cores take long for each.
    UNROLL
    for (u32 pair = 0; pair < 8; pair += 2) {
        Group right[2];
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 r = row + (pair + i / 2) * 8 + g;
            right[i / 2].steps[i % 2] = ((const Words2*)stage.rows)[r * 8 + place_of_step(r, i % 2) * 4 + t];
        }
        UNROLL
        for (u32 step = 0; step < 2; step++) {
            UNROLL
            for (u32 i = 0; i < 8; i++) {
                const u32(&a)[4] = left[i % 4].steps[step].w;
                const Words2& x = right[i / 4].steps[step];
                multiply_tiles(acc[i % 4 * 8 + pair + i / 4], a[0], a[1], a[2], a[3], x.w[0], x.w[1]);
            }
        }
    }
}

DEVICE void store_run(const float (&acc)[32][4], float* out, u32 ld_out, u32 column, u32 row, u32 n_out,
                      u32 n_rows) {
    UNROLL
    for (u32 i = 0; i < 128; i++) {
        u32 c = column + i / 32 * 16 + i % 4 / 2 * 8, r = row + i / 4 % 8 * 8 + i % 2;
        if (c < n_out && r < n_rows) {
            out[(u64)r * ld_out + c] = acc[i / 4][i % 4];
        }
    }
}

template <class Kind>
DEVICE void wide(const void* digits, const void* scales, const bf16* x, float* out, u32 ld_out, u32 n_out, u32 n_rows,
                 const Pieces& pieces) {
    SHARED_DYNAMIC(bytes);
    Stage* stages = (Stage*)bytes;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_groups = pieces.n_groups;
    const u32 row_first = blockIdx.x * ROWS, tile = warp % 4 * 4, row = warp / 4 * 64;
    const bool is_split = gridDim.z > 1;
    u32 piece = is_split ? blockIdx.z : 0;
    const u32 begin = piece == 0 ? 0 : pieces.end[piece - 1], end = is_split ? pieces.end[piece] : n_groups;
    Weights<Kind> weights;
    weights.digits = digits;
    weights.scales = scales;
    weights.tile_first = blockIdx.y * TILES;
    weights.n_tiles = ceil_div(n_out, 16);
    weights.n_groups = n_groups;
    const u32 column = blockIdx.y * TILES * 16 + tile * 16 + lane / 4, out_row = row_first + row + lane % 4 * 2;
    const u64 plane = (u64)n_rows * ld_out;
    UNROLL
    for (u32 i = 0; i < STAGES - 1; i++) {
        const u32 group = begin + i;
        if (group < end) {
            copy_rows<ROWS>(stages[group % STAGES].rows, x, row_first, n_rows, n_groups, group);
        }
        weights.prepare(stages, begin, group, end);
        commit_copies();
    }
    Waiting waiting;
    waiting.n = 0;
    u32 group = begin;
    do {
        float acc[32][4] = {};
        for (const u32 piece_end = pieces.end[piece]; group < piece_end; group++) {
            copies_arrived<STAGES - 2>();
            // All threads have stored and copied this group, and have read the stage that is overwritten now.
            __syncthreads();
            const u32 ahead = group + STAGES - 1;
            if (ahead < end) {
                copy_rows<ROWS>(stages[ahead % STAGES].rows, x, row_first, n_rows, n_groups, ahead);
            }
            weights.advance(stages, group, end);
            commit_copies();
            multiply_stage(stages[group % STAGES], tile, row, acc);
        }
        if (is_split) {
            store_run(acc, out + piece * plane, ld_out, column, out_row, n_out, n_rows);
            return;
        }
        for (u32 i = 0; i < pieces.merges[piece]; i++) {
            waiting.merge(acc);
        }
        if (pieces.ends_run[piece]) {
            store_run(acc, out, ld_out, column, out_row, n_out, n_rows);
            out += plane;
        } else {
            waiting.push(acc);
        }
        piece++;
    } while (group < end);
}

#define DEFINE_WIDE(kind, Kind)                                                    \
    LINEAR(linear_##kind##_r128) {                                                 \
        wide<Kind>(digits, scales, x, out, ld_out, n_out, n_rows, pieces);         \
    }
DEFINE_WIDE(bf16, KindBf16)
DEFINE_WIDE(plain, KindPlain)
DEFINE_WIDE(w8, KindW8)
DEFINE_WIDE(w8h, KindW8h)
DEFINE_WIDE(w4, KindW4)
DEFINE_WIDE(w4h, KindW4h)
DEFINE_WIDE(f8, KindF8)
DEFINE_WIDE(f8plain, KindF8Plain)
