// Products of very many rows on Hopper: 128 outputs of 256 rows at a time. Eight warps multiply, in two groups of four;
// four warps copy what they need. The tensor cores read the rows from shared memory and the weights from registers,
// where each warp widens its own tile. The bits are those of linear.cu: a step of the tensor cores adds the same sixteen
// products.
#include "products.cuh"

#if defined(EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WARPGROUPS
#endif

#define STAGES 8
#define ROWS 256
#define TILES 8
#define CHUNKS_PER_TILE (ROWS * 4)
// Threads that copy, after those that multiply.
#define COPYING 128

// A block of threads takes 32 rows and 4 groups. A chunk of 16 bytes has the elements that `multiply_tiles` takes as
// adjacent columns.
KERNEL(256) tile_rows(const bf16* x, u32 n_rows, u32 n_groups, Words4* out) {
    const u32 row = blockIdx.x * 32 + threadIdx.x / 8, group = blockIdx.y * 4 + threadIdx.x % 8 / 2;
    const u32 step = threadIdx.x % 2;
    if (row >= n_rows || group >= n_groups) {
        return;
    }
    const Words4* from = (const Words4*)(x + ((u64)row * n_groups + group) * 32) + step * 2;
    const Words4 low = from[0], high = from[1];
    Words4* tile = out + ((u64)(row / ROWS) * n_groups + group) * CHUNKS_PER_TILE;
    tile[place_of_chunk(row % ROWS, step * 2)] = {{low.w[0], low.w[2], high.w[0], high.w[2]}};
    tile[place_of_chunk(row % ROWS, step * 2 + 1)] = {{low.w[1], low.w[3], high.w[1], high.w[3]}};
}

#ifdef HAS_WARPGROUPS
// One group of the rows and of the weights of a block of outputs.
template <class Kind>
struct __align__(1024) Stage {
    Words4 rows[CHUNKS_PER_TILE];
    u8 weights[TILES][Kind::DIGIT_BYTES + Kind::SCALE_BYTES];
};

template <class Kind>
struct Shared {
    Stage<Kind> stages[STAGES];
    u64 filled[STAGES], used[STAGES];
};

// The stage whose turn it is, and the phase of its barriers.
struct Turn {
    u32 stage, phase;

    DEVICE_MEMBER void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

struct Product {
    const u8 *digits, *scales;
    const Words4* x;
    float* out;
    u32 ld_out, n_out, n_rows, plane_rows, per_job;
    const Pieces& pieces;

    DEVICE_MEMBER u32 row_blocks() const { return ceil_div(n_rows, ROWS); }
    DEVICE_MEMBER u32 column_blocks() const { return ceil_div(n_out, TILES * 16); }
    DEVICE_MEMBER u32 n_jobs() const { return row_blocks() * column_blocks() * (pieces.n / per_job); }
};

// Some pieces of a block of rows and outputs. Adjacent jobs have the same weights.
struct Job {
    u32 row_block, column_block, piece, begin, end;

    DEVICE_MEMBER Job(const Product& product, u32 i) {
        row_block = i % product.row_blocks();
        column_block = i / product.row_blocks() % product.column_blocks();
        piece = i / product.row_blocks() / product.column_blocks() * product.per_job;
        begin = piece == 0 ? 0 : product.pieces.end[piece - 1];
        end = product.pieces.end[piece + product.per_job - 1];
    }
};

// Four warps copy, each the weights of two tiles.
template <class Kind>
DEVICE void copy_jobs(Shared<Kind>& shared, const Product& product) {
    const u32 warp = threadIdx.x / 32 % 4, at = threadIdx.x % 32 * 16, n_groups = product.pieces.n_groups;
    const u32 last_tile = ceil_div(product.n_out, 16) - 1;
    Turn turn = {0, 0};
    for (u32 i = blockIdx.x; i < product.n_jobs(); i += gridDim.x) {
        const Job job(product, i);
        for (u32 group = job.begin; group < job.end; group++) {
            Stage<Kind>& stage = shared.stages[turn.stage];
            u64* filled = &shared.filled[turn.stage];
            // Before its first use a stage is free.
            wait_for_phase(&shared.used[turn.stage], turn.phase ^ 1);
            if (threadIdx.x % COPYING == 0) {
                arrive_expecting(filled, sizeof stage.rows);
                const u64 tile = (u64)job.row_block * n_groups + group;
                copy_bulk(stage.rows, product.x + tile * CHUNKS_PER_TILE, sizeof stage.rows, filled);
            }
            UNROLL
            for (u32 in_stage = warp * 2; in_stage < warp * 2 + 2; in_stage++) {
                // A tile beyond the last one is not used.
                const u64 tile = min_of(job.column_block * TILES + in_stage, last_tile), of = tile * n_groups + group;
                u8* to = stage.weights[in_stage];
                UNROLL
                for (u32 first = 0; first < Kind::DIGIT_BYTES; first += 512) {
                    if (first + at < Kind::DIGIT_BYTES) {
                        copy_async(to + first + at, product.digits + of * Kind::DIGIT_BYTES + first + at);
                    }
                }
                if constexpr (Kind::SCALE_BYTES > 0) {
                    if (at < Kind::SCALE_BYTES) {
                        copy_async(to + Kind::DIGIT_BYTES + at, product.scales + of * Kind::SCALE_BYTES + at);
                    }
                }
            }
            arrive_with_copies(filled);
            turn.next();
        }
    }
}

// A warp multiplies the groups of a piece. While the tensor cores compute one, it widens the next one.
template <class Kind>
struct Multiplier {
    Shared<Kind>& shared;
    Turn turn;
    u32 previous;

    // `weights` is not used again before the group after the next one.
    DEVICE_MEMBER void multiply_group(float (&acc)[32][4], Fragment& weights) {
        const u32 lane = threadIdx.x % 32;
        wait_for_phase(&shared.filled[turn.stage], turn.phase);
        const Stage<Kind>& stage = shared.stages[turn.stage];
        const u8* tile = stage.weights[threadIdx.x / 32];
        weights = Kind::widen(Kind::template fetch<FromShared>(tile, tile + Kind::DIGIT_BYTES, 0, 0, 0, lane));
        begin_products();
        multiply_rows(acc, weights.a[0], stage.rows, 0);
        multiply_rows(acc, weights.a[1], stage.rows, 1);
        commit_products();
        earlier_products_done();
        free_previous();
        previous = turn.stage;
        turn.next();
    }

    DEVICE_MEMBER void free_previous() {
        if (previous < STAGES && threadIdx.x % 32 == 0) {
            arrive(&shared.used[previous]);
        }
        previous = STAGES;
    }

    DEVICE_MEMBER void multiply_groups(float (&acc)[32][4], u32 n) {
        for (u32 i = 0; i < n; i++) {
            // The tensor cores still read the weights of one group while those of the next one are widened.
            Fragment even, odd;
            multiply_group(acc, even);
            if (++i == n) {
                break;
            }
            multiply_group(acc, odd);
        }
        products_done(acc);
        free_previous();
    }
};

DEVICE void store_block(const float (&acc)[32][4], const Product& product, const Job& job, float* out) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 column = (job.column_block * TILES + warp) * 16 + lane / 4, row_first = job.row_block * ROWS + lane % 4 * 2;
    const bool has_first = column < product.n_out, has_second = column + 8 < product.n_out;
    // The address advances step by step, because many addresses at once would take too many registers.
    float* to = out + (u64)row_first * product.ld_out + column;
    UNROLL
    for (u32 i = 0; i < 64; i++) {
        if (row_first + i / 2 * 8 + i % 2 < product.n_rows) {
            if (has_first) {
                to[0] = acc[i / 2][i % 2];
            }
            if (has_second) {
                to[8] = acc[i / 2][i % 2 + 2];
            }
        }
        to += (u64)product.ld_out * (i % 2 == 0 ? 1 : 7);
    }
}

template <class Kind>
DEVICE void multiply_jobs(Shared<Kind>& shared, const Product& product) {
    const Pieces& pieces = product.pieces;
    const u64 plane = (u64)product.plane_rows * product.ld_out;
    Multiplier<Kind> multiplier = {shared, {0, 0}, STAGES};
    for (u32 i = blockIdx.x; i < product.n_jobs(); i += gridDim.x) {
        const Job job(product, i);
        float* out = product.out;
        for (u32 piece = 0; piece < job.piece; piece++) {
            out += pieces.ends_run[piece] ? plane : 0;
        }
        Waiting waiting;
        waiting.n = 0;
        u32 group = job.begin;
        for (u32 piece = job.piece; piece < job.piece + product.per_job; piece++) {
            float acc[32][4] = {};
            multiplier.multiply_groups(acc, pieces.end[piece] - group);
            group = pieces.end[piece];
            for (u32 merges = pieces.merges[piece]; merges > 0; merges--) {
                waiting.merge(acc);
            }
            if (pieces.ends_run[piece]) {
                store_block(acc, product, job, out);
                out += plane;
            } else {
                waiting.push(acc);
            }
        }
    }
}
#endif

template <class Kind>
DEVICE void by_warpgroups(const void* digits, const void* scales, const Words4* x, float* out, u32 ld_out, u32 n_out,
                          u32 n_rows, u32 plane_rows, u32 per_job, const Pieces& pieces) {
#ifdef HAS_WARPGROUPS
    SHARED_DYNAMIC_ALIGNED(1024, bytes);
    Shared<Kind>& shared = *(Shared<Kind>*)bytes;
    static_assert(sizeof shared <= WARPGROUPS_SMEM, "the host gives this much");
    const Product product = {
        (const u8*)digits, (const u8*)scales, x, out, ld_out, n_out, n_rows, plane_rows, per_job, pieces,
    };
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            make_barrier(&shared.filled[i], COPYING + 1);
            make_barrier(&shared.used[i], TILES);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x / 32 >= TILES) {
        give_back_registers();
        copy_jobs(shared, product);
    } else {
        take_registers();
        multiply_jobs(shared, product);
    }
#endif
}

#define DEFINE_WARPGROUPS(kind, Kind)                                                                      \
    LINEAR_TILED(linear_##kind##_r256) {                                                                   \
        by_warpgroups<Kind>(digits, scales, x, out, ld_out, n_out, n_rows, plane_rows, per_job, pieces);   \
    }
DEFINE_WARPGROUPS(bf16, KindBf16)
DEFINE_WARPGROUPS(w8, KindW8)
DEFINE_WARPGROUPS(w8h, KindW8h)
DEFINE_WARPGROUPS(w4, KindW4)
DEFINE_WARPGROUPS(w4h, KindW4h)
DEFINE_WARPGROUPS(f8, KindF8)
