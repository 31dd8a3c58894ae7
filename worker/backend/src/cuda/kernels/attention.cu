// Attention over paged K and V, tile by tile, on the tensor cores; and the kernel that stores K and V before it.
//
// Queries are the left operand: sixteen heads of one KV head, of consecutive rows. Four warps share a tile: for the
// scores each takes blocks of positions, for the weighted values each takes a quarter of the head.
#include "kernels.cuh"
#include "math.cuh"

#define POSITIONS 16
#define TILE 256
#define TILE_BLOCKS (TILE / POSITIONS)
#define CHUNK_TILES 16
#define WARPS 4
// Floats from one row of scores to the next: rows begin in different banks.
#define SCORES_LD 264

DEVICE u32 minus(u32 a, u32 b) { return a > b ? a - b : 0; }
DEVICE u32 qkv_cols(const HeadShape& heads) { return (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim; }

// ---- turning and storing ------------------------------------------------------------------------------------------

DEVICE void turn(float* head, const float* cos, const float* sin, u32 half_dim, u32 style) {
    for (u32 i = threadIdx.x; i < half_dim; i += 32) {
        float* x = head + (style == 0 ? i : 2 * i);
        float* y = head + (style == 0 ? i + half_dim : 2 * i + 1);
        float a = *x, b = *y, c = cos[i], s = sin[i];
        *x = fmaf(a, c, -(b * s));
        *y = fmaf(b, c, a * s);
    }
    __syncwarp();
}

KERNEL(32) rope_store(float* qkv, const float* cos, const float* sin, u32 half_dim, u32 style, HeadShape heads,
                      const u32* positions, const u32* slots, bf16* kv) {
    const u32 row = blockIdx.x, turning = heads.n_heads + heads.n_kv_heads, n = padded(heads.head_dim);
    float* head = qkv + (u64)row * qkv_cols(heads) + blockIdx.y * heads.head_dim;
    if (slots[row] == NO_SLOT) {
        return;
    }
    if (cos && blockIdx.y < turning) {
        u64 at = (u64)positions[row] * half_dim;
        turn(head, cos + at, sin + at, half_dim, style);
    }
    if (blockIdx.y < heads.n_heads) {
        return;
    }
    const bool is_value = blockIdx.y >= turning;
    const u32 kv_head = blockIdx.y - (is_value ? turning : heads.n_heads);
    const u32 block = slots[row] / POSITIONS, slot = slots[row] % POSITIONS;
    bf16* page = kv + ((u64)block * heads.n_kv_heads + kv_head) * 2 * POSITIONS * n;
    for (u32 i = threadIdx.x; i < n; i += 32) {
        bf16* to = is_value ? page + POSITIONS * n + i * POSITIONS + slot : page + slot * n + by_lane(i);
        *to = narrow(i < heads.head_dim ? head[i] : 0.0f);
    }
}

// ---- merging the tiles of a chunk, or the chunks of a row -----------------------------------------------------------

struct Merge {
    float largest, sum, keep, take;
};

// acc becomes acc * keep + next * take. An unseen part leaves acc unchanged, and the first seen part replaces it.
DEVICE Merge merge_parts(float largest, float sum, float next_largest, float next_sum) {
    if (next_largest == minus_infinity()) {
        return {largest, sum, 1.0f, 0.0f};
    }
    if (largest == minus_infinity()) {
        return {next_largest, next_sum, 0.0f, 1.0f};
    }
    float both = larger(largest, next_largest);
    float keep = exp_of(largest - both), take = exp_of(next_largest - both);
    return {both, fmaf(sum, keep, next_sum * take), keep, take};
}

// The result of a row. An unseen part may have made a zero positive, so the addition makes all zeros positive.
DEVICE float weighted(float acc, float sum) { return acc / sum + 0.0f; }

// ---- a block's queries and its shared memory ------------------------------------------------------------------------

template <int D, int QUERIES>
struct Room {
    Words4* queries;  // [QUERIES / 16][D / 16][lane]: the operand of each step, as in `KindBf16`
    float* scores;    // [QUERIES, SCORES_LD], then as many bf16 of e^score in the same rows
    u32 *first, *end, *place;  // positions [first, end) are seen; place = row * n_heads + head
    float *largest, *sum, *row_largest, *row_sum;  // of the chunk so far, and of the chunks before
    float *keep, *take;
    u32* pages;  // [TILE_BLOCKS] of the tile

    DEVICE_MEMBER explicit Room(u8* bytes) {
        queries = (Words4*)bytes;
        scores = (float*)(queries + QUERIES * D / 8);
        first = (u32*)(scores + QUERIES * SCORES_LD);
        end = first + QUERIES;
        place = end + QUERIES;
        largest = (float*)(place + QUERIES);
        sum = largest + QUERIES;
        row_largest = sum + QUERIES;
        row_sum = row_largest + QUERIES;
        keep = row_sum + QUERIES;
        take = keep + QUERIES;
        pages = (u32*)(take + QUERIES);
    }
};

// The work of a block: rows of a sequence, and those of their heads that read one KV head.
struct Work {
    u32 kv_head, head, n_heads;
    u32 row, n_rows, n_queries;
    u32 seen_first, seen_end;
    const u32* table;
};

DEVICE Work work_of(const HeadShape& heads, const AttendItem& item, const u32* blocks, u32 queries_max) {
    Work work;
    u32 n_chunks = ceil_div(heads.per_kv, queries_max), chunk = blockIdx.y % n_chunks;
    work.kv_head = blockIdx.y / n_chunks;
    u32 start = minus(work.kv_head * heads.per_kv, heads.first);
    u32 end = min_of(minus((work.kv_head + 1) * heads.per_kv, heads.first), heads.n_heads);
    work.head = start + chunk * queries_max;
    work.n_heads = min_of(minus(end, work.head), queries_max);
    work.row = item.row;
    work.n_rows = item.n_rows;
    work.n_queries = item.n_rows * work.n_heads;
    work.seen_end = item.position + item.n_rows;
    work.seen_first = heads.window ? minus(item.position + 1, heads.window) : 0;
    work.table = blocks + item.table;
    return work;
}

template <int D, int QUERIES>
DEVICE void load_queries(const Room<D, QUERIES>& room, const float* qkv, const HeadShape& heads, const Work& work,
                         u32 position) {
    for (u32 i = threadIdx.x; i < QUERIES; i += WARPS * 32) {
        bool is = i < work.n_queries;
        u32 row = is ? i / work.n_heads : 0, end = position + row + 1;
        room.end[i] = is ? end : 0;
        room.first[i] = is && heads.window ? minus(end, heads.window) : 0;
        room.place[i] = is ? (work.row + row) * heads.n_heads + work.head + i % work.n_heads : 0;
        room.largest[i] = room.row_largest[i] = minus_infinity();
        room.sum[i] = room.row_sum[i] = 0.0f;
    }
    // A thread loads several pairs before it stores any, so that it waits for memory once.
    const u32 N = D / 16 < 8 ? D / 16 : 8;
    for (u32 first = threadIdx.x; first < QUERIES * D / 2; first += N * WARPS * 32) {
        u32 pairs[N];
        float low[N], high[N];
        UNROLL
        for (u32 j = 0; j < N; j++) {
            u32 i = first + j * WARPS * 32, at = min_of(i % (D / 2) * 2, heads.head_dim - 2);
            u32 query = min_of(i / (D / 2), work.n_queries - 1);
            u32 row = work.row + query / work.n_heads, head = work.head + query % work.n_heads;
            const float* from = qkv + (u64)row * qkv_cols(heads) + head * heads.head_dim + at;
            low[j] = from[0];
            high[j] = from[1];
        }
        UNROLL
        for (u32 j = 0; j < N; j++) {
            u32 i = first + j * WARPS * 32;
            bool is = i / (D / 2) < work.n_queries && i % (D / 2) * 2 < heads.head_dim;
            pairs[j] = is ? pack_bf16(low[j], high[j]) : 0;
        }
        UNROLL
        for (u32 j = 0; j < N; j++) {
            u32 i = first + j * WARPS * 32, query = i / (D / 2), at = i % (D / 2) * 2;
            u32 lane = query % 8 * 4 + at / 4 % 4, word = at % 4 + query % 16 / 8;
            if (query < QUERIES) {
                room.queries[(query / 16 * (D / 16) + at / 16) * 32 + lane].w[word] = pairs[j];
            }
        }
    }
}

// ---- a tile ---------------------------------------------------------------------------------------------------------

// The blocks of a tile that any query sees: [first, end).
struct Seen {
    u32 first, end;
};

DEVICE Seen seen_blocks(const Work& work, u32 tile) {
    u32 start = tile * TILE;
    return {minus(work.seen_first, start) / POSITIONS, ceil_div(min_of(work.seen_end - start, TILE), POSITIONS)};
}

// Brings the numbers of the tile's pages to shared memory. A barrier follows, and one was passed since the last tile.
template <int D, int QUERIES>
DEVICE void load_pages(const Room<D, QUERIES>& room, const Work& work, u32 tile) {
    const Seen seen = seen_blocks(work, tile);
    const u32 block = seen.first + threadIdx.x;
    if (block < seen.end) {
        room.pages[block] = work.table[tile * TILE_BLOCKS + block];
    }
}

template <int D, int QUERIES>
DEVICE const bf16* page_of(const Room<D, QUERIES>& room, const bf16* kv, const HeadShape& heads, const Work& work,
                           u32 block) {
    return kv + ((u64)room.pages[block] * heads.n_kv_heads + work.kv_head) * 2 * POSITIONS * D;
}

// Prefetches the pages with the numbers that this thread has loaded.
template <int D, int QUERIES>
DEVICE void prefetch_pages(const Room<D, QUERIES>& room, const bf16* kv, const HeadShape& heads, const Work& work,
                           u32 tile) {
    const Seen seen = seen_blocks(work, tile);
    const u32 block = seen.first + threadIdx.x;
    if (block < seen.end) {
        prefetch(page_of(room, kv, heads, work, block), 2 * POSITIONS * D * sizeof(bf16));
    }
}

// acc += q . k over 32 elements of the head, from 32 * i on.
template <int D, int QUERIES>
DEVICE void multiply_keys(const Room<D, QUERIES>& room, u32 i, const Words4 (&keys)[2],
                          float (&acc)[QUERIES / 16][2][4]) {
    UNROLL
    for (u32 q = 0; q < QUERIES / 16; q++) {
        UNROLL
        for (u32 step = 0; step < 2; step++) {
            const Words4 left = room.queries[(q * (D / 16) + i * 2 + step) * 32 + threadIdx.x % 32];
            UNROLL
            for (u32 n = 0; n < 2; n++) {
                multiply_tiles(acc[q][n], left.w[0], left.w[1], left.w[2], left.w[3], keys[n].w[2 * step],
                               keys[n].w[2 * step + 1]);
            }
        }
    }
}

// scores = q . k * scale, for each query and each position of the blocks that are seen.
template <int D, int QUERIES, bool IS_SPLIT>
DEVICE void score_tile(const Room<D, QUERIES>& room, const bf16* kv, const HeadShape& heads, const Work& work,
                       u32 tile) {
    const u32 QT = QUERIES / 16;
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Seen seen = seen_blocks(work, tile);
    // A warp loads N blocks before it multiplies any, so that it waits for memory less often. The last block may stand
    // in for those that do not exist.
    const u32 N = !IS_SPLIT || D > 128 ? 1 : D > 64 ? 2 : 4;
    UNROLL_BY(QUERIES == 16 && N == 1 ? 4 : 1)
    for (u32 first = seen.first + warp; first < seen.end; first += N * WARPS) {
        Words4 right[N][D / 32][2];
        UNROLL
        for (u32 j = 0; j < N; j++) {
            const u32 block = min_of(first + j * WARPS, seen.end - 1);
            const Words4* k = (const Words4*)(page_of(room, kv, heads, work, block) + g * D) + t;
            UNROLL
            for (u32 i = 0; i < D / 32; i++) {
                right[j][i][0] = k[i * 4];
                right[j][i][1] = k[D + i * 4];
            }
        }
        UNROLL
        for (u32 j = 0; j < N; j++) {
            float acc[QT][2][4] = {};
            UNROLL
            for (u32 i = 0; i < D / 32; i++) {
                multiply_keys(room, i, right[j][i], acc);
            }
            const u32 block = min_of(first + j * WARPS, seen.end - 1);
            float* scores = room.scores + g * SCORES_LD + block * POSITIONS + 2 * t;
            UNROLL
            for (u32 i = 0; i < QT * 8; i++) {
                u32 at = (i / 8 * 16 + i % 4 / 2 * 8) * SCORES_LD + i / 4 % 2 * 8 + i % 2;
                scores[at] = acc[i / 8][i / 4 % 2][i % 4] * heads.scale;
            }
        }
    }
}

// The sink of a query for which this tile is the first that it sees; none otherwise.
template <int D, int QUERIES>
DEVICE float sink_of(const Room<D, QUERIES>& room, const HeadShape& heads, u32 q, u32 tile) {
    bool is_first = heads.sinks && room.end[q] > 0 && room.first[q] / TILE == tile;
    return is_first ? heads.sinks[room.place[q] % heads.n_heads] : minus_infinity();
}

// Scores become bf16 of e^(score - largest of the tile), 0 where a query does not see: half a warp for each row.
template <int D, int QUERIES, bool IS_SPLIT>
DEVICE void weigh_tile(const Room<D, QUERIES>& room, const HeadShape& heads, u32 n_queries, u32 tile) {
    const u32 lane = threadIdx.x % 16;
    // Whole warps: the two rows of a warp may be one that exists and one that does not.
    for (u32 q = threadIdx.x / 16; q / 2 * 2 < n_queries; q += WARPS * 2) {
        float* scores = room.scores + q * SCORES_LD;
        if (heads.cap > 0.0f) {
            UNROLL_BY(1)
            for (u32 i = lane; i < TILE; i += 16) {
                scores[i] = soft_cap_of(scores[i], heads.cap);
            }
        }
        const u32 first = room.first[q], end = room.end[q];
        float score[TILE / 16], largest = minus_infinity(), sum = 0.0f;
        UNROLL
        for (u32 i = 0; i < TILE / 16; i++) {
            u32 position = tile * TILE + i * 16 + lane;
            float found = scores[i * 16 + lane];
            score[i] = first <= position && position < end ? found : minus_infinity();
            largest = larger(score[i], largest);
        }
        const float sink = sink_of(room, heads, q, tile);
        largest = larger(sink, tree_largest(largest));
        // All lanes have read the row, and now it is overwritten.
        __syncwarp();
        float e[TILE / 16];
        bool is_normal = true;
        UNROLL
        for (u32 i = 0; i < TILE / 16; i++) {
            // A score of -inf is not seen.
            float x = score[i] == minus_infinity() ? 0.0f : score[i] - largest;
            is_normal = is_normal && is_exp_normal(x);
            e[i] = score[i] == minus_infinity() ? 0.0f : exp_normal(x);
        }
        if (!is_normal) {
            UNROLL
            for (u32 i = 0; i < TILE / 16; i++) {
                e[i] = score[i] == minus_infinity() ? 0.0f : exp_of(score[i] - largest);
            }
        }
        UNROLL
        for (u32 i = 0; i < TILE / 16; i++) {
            bf16 p = narrow(e[i]);
            ((bf16*)scores)[i * 16 + lane] = p;
            sum = sum + widen(p);
        }
        sum = tree_sum(sum);
        if (sink != minus_infinity()) {
            sum = sum + exp_of(sink - largest);
        }
        if (lane == 0) {
            Merge merge = {largest, sum, 0.0f, 1.0f};
            if (!IS_SPLIT) {
                merge = merge_parts(room.largest[q], room.sum[q], largest, sum);
            }
            room.largest[q] = merge.largest;
            room.sum[q] = merge.sum;
            room.keep[q] = merge.keep;
            room.take[q] = merge.take;
        }
    }
}

// The mask of a pair of positions: the halves that any query sees. Other positions may hold undefined data.
DEVICE u32 seen_pair(const Work& work, u32 position) {
    u32 low = work.seen_first <= position && position < work.seen_end ? 0xffffu : 0;
    u32 high = work.seen_first <= position + 1 && position + 1 < work.seen_end ? 0xffff0000u : 0;
    return low | high;
}

// acc = p . v over the tile's positions, ascending; a warp has a quarter of the head. acc[16 queries][8 elements][..]
template <int D, int QUERIES, bool IS_SPLIT>
DEVICE void accumulate_values(const Room<D, QUERIES>& room, const bf16* kv, const HeadShape& heads, const Work& work,
                              u32 tile, float (&acc)[QUERIES / 16][D / 32][4]) {
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Seen seen = seen_blocks(work, tile);
    // This many blocks are loaded at once: with few blocks of threads there is room for more registers.
    UNROLL_BY(QUERIES > 16 ? 2 : IS_SPLIT && D <= 128 ? 8 : 4)
    for (u32 block = seen.first; block < seen.end; block++) {
        const bf16* v =
            page_of(room, kv, heads, work, block) + POSITIONS * D + (warp * (D / 4) + g) * POSITIONS;
        const u32 position = tile * TILE + block * POSITIONS + 4 * t;
        const u32 low_seen = seen_pair(work, position), high_seen = seen_pair(work, position + 2);
        Words2 left[QUERIES / 16][2];
        UNROLL
        for (u32 i = 0; i < QUERIES / 8; i++) {
            const bf16* row = (const bf16*)(room.scores + (i * 8 + g) * SCORES_LD);
            left[i / 2][i % 2] = *(const Words2*)(row + block * POSITIONS + 4 * t);
        }
        UNROLL
        for (u32 n = 0; n < D / 32; n++) {
            const Words2 right = *(const Words2*)(v + n * 8 * POSITIONS + 4 * t);
            UNROLL
            for (u32 q = 0; q < QUERIES / 16; q++) {
                multiply_tiles(acc[q][n], left[q][0].w[0], left[q][1].w[0], left[q][0].w[1], left[q][1].w[1],
                               right.w[0] & low_seen, right.w[1] & high_seen);
            }
        }
    }
}

// ---- the kernels ----------------------------------------------------------------------------------------------------

// Writes two neighbours of a head's output, and after the last head the padding.
DEVICE void put_pair(bf16* out, const HeadShape& heads, u32 place, u32 at, float low, float high) {
    const u32 cols = heads.n_heads * heads.head_dim, row = place / heads.n_heads, head = place % heads.n_heads;
    if (at < heads.head_dim) {
        *(u32*)(out + (u64)row * padded(cols) + head * heads.head_dim + at) = pack_bf16(low, high);
    } else if (head + 1 == heads.n_heads && head * heads.head_dim + at < padded(cols)) {
        *(u32*)(out + (u64)row * padded(cols) + head * heads.head_dim + at) = 0;
    }
}

// The place of element i of a lane's accumulators: a query, and an element of the head.
struct Place {
    u32 query, at;
};

template <int D>
DEVICE Place place_of(u32 i) {
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n = D / 32;
    return {i / (4 * n) * 16 + g + i % 4 / 2 * 8, warp * (D / 4) + i / 4 % n * 8 + 2 * t + i % 2};
}

// Adds the chunk that has ended to those before. acc becomes their sum, or zero if another chunk follows. In that case
// the sum waits in qkv in place of the query, which has been read: registers do not suffice for a third accumulator.
template <int D, int QUERIES>
DEVICE void merge_chunk(const Room<D, QUERIES>& room, float* qkv, const HeadShape& heads, const Work& work,
                        bool is_first, bool is_last, float (&acc)[QUERIES / 16][D / 32][4]) {
    const u32 ND = D / 32, q = threadIdx.x;
    if (q < QUERIES) {
        Merge merge = merge_parts(room.row_largest[q], room.row_sum[q], room.largest[q], room.sum[q]);
        room.row_largest[q] = merge.largest;
        room.row_sum[q] = merge.sum;
        room.keep[q] = merge.keep;
        room.take[q] = merge.take;
        room.largest[q] = minus_infinity();
        room.sum[q] = 0.0f;
    }
    __syncthreads();
    UNROLL
    for (u32 i = 0; i < QUERIES / 16 * ND * 4; i++) {
        Place place = place_of<D>(i);
        float& sum = acc[i / (4 * ND)][i / 4 % ND][i % 4];
        if (place.query < work.n_queries && place.at < heads.head_dim) {
            const u32 row = room.place[place.query] / heads.n_heads, head = room.place[place.query] % heads.n_heads;
            float* waiting = qkv + (u64)row * qkv_cols(heads) + head * heads.head_dim + place.at;
            float before = is_first ? 0.0f : *waiting;
            sum = fmaf(before, room.keep[place.query], sum * room.take[place.query]);
            if (!is_last) {
                *waiting = sum;
                sum = 0.0f;
            }
        }
    }
}

template <int D, int QUERIES>
DEVICE void attend(float* qkv, const bf16* kv, const HeadShape& heads, const AttendItem* items, const u32* blocks,
                   bf16* out) {
    SHARED_DYNAMIC(bytes);
    const u32 QT = QUERIES / 16, ND = D / 32;
    const Room<D, QUERIES> room(bytes);
    const AttendItem item = items[blockIdx.x];
    const Work work = work_of(heads, item, blocks, QUERIES);
    if (work.n_queries == 0) {
        return;
    }
    load_queries(room, qkv, heads, work, item.position);
    const u32 tile_first = work.seen_first / TILE, tile_end = ceil_div(work.seen_end, TILE);
    float acc[QT][ND][4] = {};
    for (u32 tile = tile_first; tile < tile_end; tile++) {
        load_pages(room, work, tile);
        __syncthreads();
        score_tile<D, QUERIES, false>(room, kv, heads, work, tile);
        __syncthreads();
        weigh_tile<D, QUERIES, false>(room, heads, work.n_queries, tile);
        __syncthreads();
        float now[QT][ND][4] = {};
        accumulate_values<D, QUERIES, false>(room, kv, heads, work, tile, now);
        UNROLL
        for (u32 i = 0; i < QT * ND * 4; i++) {
            u32 query = place_of<D>(i).query;
            float& sum = acc[i / (4 * ND)][i / 4 % ND][i % 4];
            sum = fmaf(sum, room.keep[query], now[i / (4 * ND)][i / 4 % ND][i % 4] * room.take[query]);
        }
        __syncthreads();
        const bool is_last = tile + 1 == tile_end;
        if (is_last || (tile + 1) % CHUNK_TILES == 0) {
            merge_chunk(room, qkv, heads, work, tile / CHUNK_TILES == tile_first / CHUNK_TILES, is_last, acc);
        }
    }
    UNROLL
    for (u32 i = 0; i < QT * ND * 4; i += 2) {
        Place place = place_of<D>(i);
        if (place.query < work.n_queries) {
            const float(&sums)[4] = acc[i / (4 * ND)][i / 4 % ND];
            float sum = room.row_sum[place.query], low = weighted(sums[i % 4], sum);
            put_pair(out, heads, room.place[place.query], place.at, low, weighted(sums[i % 4 + 1], sum));
        }
    }
}

template <int D, int QUERIES>
DEVICE void attend_split(const float* qkv, const bf16* kv, const HeadShape& heads, const AttendItem* items,
                         const u32* blocks, u32 tile_first, u32 n_tiles, float* partial) {
    SHARED_DYNAMIC(bytes);
    const u32 QT = QUERIES / 16, ND = D / 32, tile = tile_first + blockIdx.z;
    const Room<D, QUERIES> room(bytes);
    const AttendItem item = items[blockIdx.x];
    const Work work = work_of(heads, item, blocks, QUERIES);
    if (work.n_queries == 0 || tile * TILE >= work.seen_end || (tile + 1) * TILE <= work.seen_first) {
        return;
    }
    load_pages(room, work, tile);
    prefetch_pages(room, kv, heads, work, tile);
    load_queries(room, qkv, heads, work, item.position);
    __syncthreads();
    score_tile<D, QUERIES, true>(room, kv, heads, work, tile);
    __syncthreads();
    weigh_tile<D, QUERIES, true>(room, heads, work.n_queries, tile);
    __syncthreads();
    float acc[QT][ND][4] = {};
    accumulate_values<D, QUERIES, true>(room, kv, heads, work, tile, acc);
    UNROLL
    for (u32 i = 0; i < QT * ND * 4; i++) {
        Place place = place_of<D>(i);
        if (place.query < work.n_queries) {
            float* to = partial + ((u64)room.place[place.query] * n_tiles + blockIdx.z) * (D + 2);
            to[2 + place.at] = acc[i / (4 * ND)][i / 4 % ND][i % 4];
        }
    }
    if (threadIdx.x < work.n_queries) {
        float* to = partial + ((u64)room.place[threadIdx.x] * n_tiles + blockIdx.z) * (D + 2);
        to[0] = room.largest[threadIdx.x];
        to[1] = room.sum[threadIdx.x];
    }
}

#define DEFINE_ATTEND(D, QUERIES)                                                   \
    ATTEND(attend_d##D##_q##QUERIES) {                                              \
        attend<D, QUERIES>(qkv, kv, heads, items, blocks, out);                     \
    }
#define DEFINE_SPLIT(D)                                                                             \
    ATTEND_SPLIT(attend_split_d##D##_q16) {                                                         \
        attend_split<D, 16>(qkv, kv, heads, items, blocks, tile_first, n_tiles, partial);           \
    }
DEFINE_ATTEND(32, 16) DEFINE_ATTEND(32, 64) DEFINE_SPLIT(32)
DEFINE_ATTEND(64, 16) DEFINE_ATTEND(64, 64) DEFINE_SPLIT(64)
DEFINE_ATTEND(96, 16) DEFINE_ATTEND(96, 64) DEFINE_SPLIT(96)
DEFINE_ATTEND(128, 16) DEFINE_ATTEND(128, 64) DEFINE_SPLIT(128)
DEFINE_ATTEND(160, 16) DEFINE_ATTEND(160, 32) DEFINE_SPLIT(160)
DEFINE_ATTEND(192, 16) DEFINE_ATTEND(192, 32) DEFINE_SPLIT(192)
DEFINE_ATTEND(224, 16) DEFINE_ATTEND(224, 32) DEFINE_SPLIT(224)
DEFINE_ATTEND(256, 16) DEFINE_ATTEND(256, 32) DEFINE_SPLIT(256)

// The merged result of some parts of a row: a lane has pairs of elements 2 * lane, 2 * lane + 64, ..
struct Merged {
    static constexpr u32 PAIRS = 4;
    float largest, sum, acc[PAIRS * 2];

    DEVICE_MEMBER Merged() : largest(minus_infinity()), sum(0.0f), acc() {}

    // The element of the head that is number i of the lane.
    static DEVICE_MEMBER u32 at(u32 i) { return i / 2 * 64 + threadIdx.x * 2 + i % 2; }

    // Merges the part that comes next; `number(i)` is the lane's number i of it.
    template <class Number>
    DEVICE_MEMBER void merge(float next_largest, float next_sum, Number number) {
        Merge merge = merge_parts(largest, sum, next_largest, next_sum);
        largest = merge.largest;
        sum = merge.sum;
        UNROLL
        for (u32 i = 0; i < PAIRS * 2; i++) {
            acc[i] = fmaf(acc[i], merge.keep, number(i) * merge.take);
        }
    }
};

KERNEL(32) attend_merge(const float* partial, HeadShape heads, const u32* positions, u32 tile_first, u32 n_tiles,
                        bf16* out) {
    const u32 row = blockIdx.x, n = padded(heads.head_dim);
    const u32 place = row * heads.n_heads + blockIdx.y, end = positions[row] + 1;
    const u32 first = heads.window ? minus(end, heads.window) : 0, tile_end = ceil_div(end, TILE);
    Merged all, chunk;
    for (u32 tile = first / TILE; tile < tile_end; tile++) {
        const float* from = partial + ((u64)place * n_tiles + tile - tile_first) * (n + 2);
        chunk.merge(from[0], from[1], [=](u32 i) { return Merged::at(i) < n ? from[2 + Merged::at(i)] : 0.0f; });
        if (tile + 1 == tile_end || (tile + 1) % CHUNK_TILES == 0) {
            all.merge(chunk.largest, chunk.sum, [&](u32 i) { return chunk.acc[i]; });
            chunk = Merged();
        }
    }
    UNROLL
    for (u32 i = 0; i < Merged::PAIRS * 2; i += 2) {
        if (Merged::at(i) < n) {
            put_pair(out, heads, place, Merged::at(i), weighted(all.acc[i], all.sum), weighted(all.acc[i + 1], all.sum));
        }
    }
}
