// Every kernel: its result, its launch and the layout of its data. The host code follows this header, and each .cu
// includes it, so that a signature that differs does not compile. Independent of models and requests.
//
// COMPILING   Each .cu is a unit of its own; headers are found by name. `-std=c++17 -fmad=false`, no fast math: a
//             multiply and an add are fused only by `fmaf`. sm_80 or later.
// LAUNCHING   No kernel is launched with an empty grid: without rows, columns or heads there is nothing to do. Shared
//             memory is static except where a size is given. Pointers to rows and weights are aligned to 16 bytes.
// ROWS        f32: `[n_rows, cols]`, one after another. bf16: `[n_rows, padded(cols)]`, padded(n) = n rounded up to a
//             multiple of 32, and the padding is zero: a kernel that writes bf16 rows writes the padding too. Where
//             an argument may have either form, `FORM_*` flags select it. Products and the residual stream are f32.
//             The inputs of a product are bf16, rounded to the nearest, ties to even.
//
// STEPS       Tensor cores multiply in steps of 16 adjacent elements, ascending. One accumulator in f32
//             takes the sixteen products of a step at once, in the inner order of the hardware. The emulator adds them
//             one by one: 4t, 4t + 1 for t = 0..4, and then 4t + 2, 4t + 3 for t = 0..4.
//             Where rows are stored for this, they are `by_lane`: element e of 32 is at e / 4 % 4 * 8 + e / 16 * 4 +
//             e % 4, so that a lane reads its part of two steps from adjacent elements.
//
// WEIGHTS     A matrix [n_out, k] is cut in tiles of 16 outputs, and k in groups of 32; both are padded with zeros (a
//             digit of 0 with a scale and a minimum of 0). n_groups = padded(k) / 32. `digits` is, tile after tile and
//             group after group, for row r of the tile and the element at place p by lane, lane = r % 8 * 4 + p / 8,
//             h = r / 8:
//               bf16       1024 bytes  [e / 16][lane][e % 4 / 2][h][e % 2] of bf16: a lane's operand of each step
//               plain                  of bf16 too, rows of the whole padded k as in the matrix, one after another: for
//                                      a library
//               w8, w8h     512 bytes  [lane][h][p % 8] of u8
//               w4, w4h     256 bytes  [lane][h] of u32: nibble p % 8 is the element
//               f8          512 bytes  [lane][h][p % 8] of u8, each a float: sign, 4 bits of exponent, 3 of fraction
//               f8plain                of these, rows of the whole padded k as in the matrix: for a library
//             `scales` (none for bf16 and plain) is, tile by tile and group by group, pairs of f16 (scale, minimum):
//               w8, w4       64 bytes  [r % 8][h] one pair for the 32 elements
//               w8h, w4h    128 bytes  [r % 8][e / 16][h] one pair for each 16
//               f8, f8plain  64 bytes  [r % 8][h] no pair but one f32 for the 32 elements
//             weight = bf16(fmaf(scale, digit, minimum)): all kernels use exactly this number.
//             For f8 it is bf16(float * scale), the product rounded to f32 first. No digit is a NaN: where the file
//             has one, its scale is NaN.
//             Signed or offset digits are stored unsigned, with minimum = -offset * scale, which is exact.
//
// PRODUCTS    K is cut in at most PIECES_MAX pieces at multiples of 32 (`Pieces`): the owned leaves of a row-parallel
//             matrix; of any other 4 strands, piece i ending at group (i + 1) * n_groups / 4 (fewer if there are fewer
//             groups: then n = n_groups). Within a piece: one accumulator from 0, step by step. Leaves are added by the
//             tree of `types::leaves`, strands from the left: ((0 + 1) + 2) + 3. Neither the number of rows
//             nor the choice of kernel changes the order.
// ATTENTION   Tiles of 256 positions from 0, chunks of 16 tiles. score = q . k in bf16 on the tensor cores, step
//             by step along head_dim; times scale; softly capped; -inf where the row may not attend. p = bf16(exp(
//             score - largest of the tile)); sum of p in 16 lanes (lane = position % 16, ascending) and one tree
//             (halves onto halves); p . v in steps of 16 positions. Tiles merge in ascending order into their chunk,
//             chunks in ascending order into the row: largest = max, acc = fmaf(acc, keep, next * take), where keep =
//             exp(acc's largest - new largest) and take = exp(next one's largest - new largest); out = acc / sum + 0.
//             A tile or chunk that a row does not see changes nothing. Split or not, decode or prefill: the same bits.
//             A sink is one more score of the first tile that a row sees: it may be the largest, and exp(sink -
//             largest), in f32, is added to the sum of p.
// FUNCTIONS   exp, ln, tanh, silu, gelu, soft cap and the reductions over a row are the CPU's, operation for operation,
//             so pointwise results in f32 are the CPU's bits.
#pragma once
#include "device.cuh"

// ---- shapes that are passed by value ---------------------------------------------------------------------------

#define PIECES_MAX 8
// `end[i]` is where piece i ends, in groups of 32, ascending. After piece i its sum is pushed on a stack and the two
// topmost are merged `merges[i]` times; if `ends_run[i]` the stack holds one number, which is the next plane's.
struct Pieces {
    u32 n;
    u32 n_groups;
    u32 end[PIECES_MAX];
    u8 merges[PIECES_MAX];
    u8 ends_run[PIECES_MAX];
};

// Of one layer on this rank; as `backend::Heads`. window 0: all positions. cap 0: none.
struct HeadShape {
    u32 n_heads;
    u32 n_kv_heads;
    u32 per_kv;
    u32 first;
    u32 head_dim;
    u32 window;
    float scale;
    float cap;
    const float* sinks;  // [n_heads], or null
};

// Consecutive rows of one sequence that a block of threads attends together. Does nothing if `n_rows` is 0.
struct AttendItem {
    u32 row;
    u32 n_rows;  // n_rows * min(per_kv, QUERIES) <= QUERIES of the kernel
    u32 position;  // of the first row
    u32 table;  // where its sequence's block table begins in `blocks`
};

// The inputs of a row's draw besides its logits.
struct DrawRow {
    u64 key;  // of (seed, choice, position): the CPU's `Noise::new`
    double scale;  // 1 / temperature; unused where greedy
    double least;  // scaled logits below it are not drawn (ln of min_p; -inf without)
    u32 is_greedy;
    u32 wants_logprob;
};

// The same where tokens have to be ordered: top_k, top_p, and with them min_p.
struct FilterRow {
    u64 key;
    double scale;
    double least;
    double top_p;  // 1: all
    float scale_f32;  // 1 / temperature in f32, at most the largest f32
    u32 top_k;  // 0: all
    u32 wants_logprob;
    u32 unused;
};

// The most tokens that a filter considers on the device. If it needs more, the host draws.
#define SURVIVORS_MAX 1024u

struct Drawn {
    u32 token;  // DRAWN_NONE: the row holds a NaN, or no token that can be drawn
    float logprob;  // logit - log_sum, if `wants_logprob`
    float largest;
    float log_sum;  // largest + ln(sum of e^(logit - largest)), if `wants_logprob`
};
#define DRAWN_NONE 0xffffffffu
#define DRAWN_BY_HOST 0xfffffffeu

// A sum over the ranks of a stage that reach each other's memory. Each rank has a buffer of ONE_SHOT_BUFFER bytes on
// its own device, zeroed before its first use:
//   0               u64 [BLOCKS]         sums that this rank's blocks have finished, written by itself
//   ONE_SHOT_FLAGS  u64 [BLOCKS][RANKS]  the last sum for which that rank's block has copied its planes to its buffer
//   ONE_SHOT_BROKEN u64                  not 0: this rank has aborted a sum, and raises no more flags
//   ONE_SHOT_DATA   f32 [2][BLOCKS][REGION]  planes, one after another: of even sums and of odd ones
#define ONE_SHOT_RANKS 8
#define ONE_SHOT_PLANES 128
#define ONE_SHOT_BLOCKS 64
#define ONE_SHOT_REGION 2048
#define ONE_SHOT_DEPTH 8
#define ONE_SHOT_FLAGS 512
#define ONE_SHOT_BROKEN 4608
#define ONE_SHOT_DATA 8192
#define ONE_SHOT_BUFFER (2 << 20)
struct OneShot {
    u64 buffers[ONE_SHOT_RANKS];  // their addresses on this device
    u32 n_ranks;
    u32 me;
    u32 n_planes;  // of all ranks
    u32 per_block;  // numbers of each plane; per_block * planes of any rank <= ONE_SHOT_REGION
    // By plane, in the order of their leaves: its rank, its number among that rank's planes, and how often to merge
    // after it. At most ONE_SHOT_DEPTH sums wait at a time.
    u8 rank[ONE_SHOT_PLANES];
    u8 number[ONE_SHOT_PLANES];
    u8 merges[ONE_SHOT_PLANES];
};

// Which arguments are bf16 rows; the others are f32 rows.
#define FORM_X_BF16 1u
#define FORM_OUT_BF16 2u

// ---- rows (rows.cu): grid (n_rows), block 256, unless noted otherwise --------------------------------------------

// Between the two forms of rows.
KERNEL(256) round_rows(const float* x, u32 cols, bf16* out);
KERNEL(256) widen_rows(const bf16* x, u32 cols, float* out);
// out[i] = x[rows[i]]; rows of either form, as words of 4 bytes. grid (n of rows)
KERNEL(256) gather_rows(const u32* x, const u32* rows, u32 n_words, u32* out);
// residual += x. `residual` f32.
KERNEL(256) add_rows(const void* x, float* residual, u32 cols, u32 forms);
// x += bias, in f32.
KERNEL(256) add_bias(float* x, const float* bias, u32 cols);
// out = silu(gate) * up, or gelu. gate_up: [n_rows, 2 * inner] f32, out: [n_rows, inner] of either form
KERNEL(256) silu_mul(const float* gate_up, u32 inner, void* out, u32 forms);
KERNEL(256) gelu_mul(const float* gate_up, u32 inner, void* out, u32 forms);
// In place, f32: gelu(x); x * factor; cap * tanh(x / cap)
KERNEL(256) gelu_rows(float* x, u32 cols);
KERNEL(256) scale_rows(float* x, u32 cols, float factor);
KERNEL(256) soft_cap_rows(float* x, u32 cols, float cap);
// In place, f32: gelu(x) with the error function
KERNEL(256) gelu_erf_rows(float* x, u32 cols);
// A gate with clamps; as silu_mul.
KERNEL(256) clamped_silu_mul(const float* gate_up, u32 inner, float alpha, float limit, void* out, u32 forms);
// The first n of each row of x (f32, `ld` numbers apart) *= factors[positions[row]]
KERNEL(256) scale_queries(float* x, u32 ld, u32 n, const float* factors, const u32* positions);
// to[row * ld_to + i] = from[row * ld_from + i] for i below n; f32
KERNEL(256) copy_columns(const float* from, u32 ld_from, float* to, u32 ld_to, u32 n);
// x[row * cols + i] += bias[(expert - first) * cols + i], where expert = chosen[order[row]] is one of the n from
// `first` on; other rows are left unchanged. grid (n of choices)
KERNEL(256) add_expert_bias(float* x, u32 cols, const u32* chosen, const u32* order, u32 first, u32 n,
                            const float* bias);
// out[i] = row tokens[i] - first of the table, if the table has that row: values of weights, f32. grid (n of tokens)
#define EMBED(name)                                                                                                 \
    KERNEL(256) name(const void* digits, const void* scales, const u32* tokens, u32 first, u32 n_table, u32 k,      \
                     float* out)
EMBED(embed_bf16);
EMBED(embed_plain);
EMBED(embed_w8);
EMBED(embed_w8h);
EMBED(embed_w4);
EMBED(embed_w4h);
EMBED(embed_f8);
EMBED(embed_f8plain);
// Rows of bf16 (padded(cols) = 32 * n_groups) to f8, as a library multiplies it: scale = largest / 448 of the row, and
// out = f8(x * (448 / largest)), to the nearest, ties to even. The largest is taken as at least 2^-100. A row with an
// infinity or a NaN has a scale of NaN, and zeros. out: [n_rows, 32 * n_groups]
KERNEL(256) quantize_rows(const bf16* x, u32 n_groups, u8* out, float* scales);
// out[row * ld_out + column] = out * scale of the column's weights * of_rows[row], f32, where each row of the weights
// has one scale. grid (ceil(n_out / 1024), n_rows), block 256
KERNEL(256) scale_product(float* out, u32 ld_out, u32 n_out, const float* scales, u32 n_groups, const float* of_rows);
// Weights as f8plain -> as plain. grid (n of rows of the weights)
KERNEL(256) widen_weights(const void* digits, const void* scales, u32 n_groups, bf16* out);

// ---- norms (norms.cu): grid (n_rows), block 256 -------------------------------------------------------------------
// Shared memory: 4 * cols bytes, dynamic (over 48 KiB the host must raise the limit). weight, bias: f32 [cols]

KERNEL(256) rms_norm(const void* x, const float* weight, float eps, u32 cols, void* out, u32 forms);
// residual += x, then out = norm(residual). `residual` f32
KERNEL(256) add_rms_norm(const void* x, float* residual, const float* weight, float eps, u32 cols, void* out,
                         u32 forms);
KERNEL(256) layer_norm(const void* x, const float* weight, const float* bias, float eps, u32 cols, void* out,
                       u32 forms);
// The first `cols` of each row of x (f32, `ld` numbers apart) become x / rms(row of whole) * weight. whole: [n_rows, n]
KERNEL(256) norm_columns(float* x, u32 ld, u32 cols, const float* whole, u32 n, const float* weight, float eps);
// Norms each head of Q with `q` and of K with `k`, in place. qkv: f32. grid (n_rows, n_heads + n_kv_heads), block 32,
// no dynamic shared memory; head_dim at most 256
KERNEL(32) norm_heads(float* qkv, const float* q, const float* k, float eps, HeadShape heads);

// ---- products (linear.cu): block 256 ------------------------------------------------------------------------------
// x: bf16 [n_rows, 32 * pieces.n_groups]; out[(plane * n_rows + row) * ld_out + column], f32, columns below n_out:
// parts of a stacked matrix write adjacent columns. One plane for each piece that ends a run, so one if K is not cut.
//
//   linear_{kind}_r8, _r16, _r32   few rows: that many for each block. grid (ceil(n_tiles / (8 / P)), ceil(n_rows / R))
//                                  where n_tiles = ceil(n_out / 16), P = pieces.n rounded up to a power of two. A block
//                                  of _r32 takes twice as many tiles
//   linear_{kind}_r64              many rows: 64 for each block. grid (ceil(n_out / 128), ceil(n_rows / 64))
//   linear_{kind}_r128             (wide.cu) 128 for each block. grid (ceil(n_rows / 128), ceil(n_out / 256), 1 or
//                                  pieces.n), WIDE_SMEM bytes of shared memory. With several blocks in z, block z
//                                  computes piece z alone into plane z of out, for `fold_split`
// kind: bf16, plain, w8, w8h, w4, w4h, f8, f8plain. Each of the five computes any number of rows, with the same bits.
#define WIDE_SMEM (4 * (256 + 128) * 64)

#define LINEAR(name)                                                                                                \
    KERNEL(256) name(const void* digits, const void* scales, const bf16* x, float* out, u32 ld_out, u32 n_out,      \
                     u32 n_rows, BY_VALUE Pieces pieces)
#define LINEARS(kind) \
    LINEAR(linear_##kind##_r8); LINEAR(linear_##kind##_r16); LINEAR(linear_##kind##_r32);                           \
    LINEAR(linear_##kind##_r64); LINEAR(linear_##kind##_r128)
LINEARS(bf16);
LINEARS(plain);
LINEARS(w8);
LINEARS(w8h);
LINEARS(w4);
LINEARS(w4h);
LINEARS(f8);
LINEARS(f8plain);

// The same on Hopper (warpgroups.cu), from rows in tiles of 256 rows of one group: out[tile of rows][group] has the
// row's elements 2i and 2i + 1 of a step at word i / 2 + i % 2 * 4, in chunks of 16 bytes that change places
// (`place_of_chunk`). Tiles beyond the last row may have any numbers there. grid (ceil(n_rows / 32), ceil(n_groups / 4))
KERNEL(256) tile_rows(const bf16* x, u32 n_rows, u32 n_groups, Words4* out);
//   linear_{kind}_r256             256 rows for each block, of 384 threads, and WARPGROUPS_SMEM bytes of shared memory.
//                                  Any grid of one dimension; blocks share ceil(n_rows / 256) * ceil(n_out / 128) *
//                                  (pieces.n / per_job) jobs
// plane_rows: the rows of a plane of out. per_job: the pieces of a job, which divides their number. Runs end within a
// job, so that its sums are planes for `fold_split`. On other devices these kernels do nothing.
#define WARPGROUPS_SMEM (8 * (256 + 128) * 64 + 1024)
#define LINEAR_TILED(name)                                                                                          \
    KERNEL(384) name(const void* digits, const void* scales, const Words4* x, float* out, u32 ld_out, u32 n_out,    \
                     u32 n_rows, u32 plane_rows, u32 per_job, BY_VALUE Pieces pieces)
LINEAR_TILED(linear_bf16_r256);
LINEAR_TILED(linear_w8_r256);
LINEAR_TILED(linear_w8h_r256);
LINEAR_TILED(linear_w4_r256);
LINEAR_TILED(linear_w4h_r256);
LINEAR_TILED(linear_f8_r256);

// Experts: matrix e of `digits` and `scales` (device pointers, n of them = grid z) is that of expert first + e. Its
// rows are choices starts[first + e] .. starts[first + e + 1] in the order of `group_choices`. Choice i reads row
// order[i] / n_used of x, or row i where `order` is null, and writes row i of out: [n_choices, ld_out].
// grid (ceil(n_tiles / (8 / P)), ceil(n_rows / 16), n_experts of this rank), n_rows those of the pass
#define LINEAR_GROUPED(name)                                                                                        \
    KERNEL_SHARING(256, 2) name(const u64* digits, const u64* scales, const bf16* x, float* out, u32 ld_out,        \
                                u32 n_out, const u32* starts, u32 first, const u32* order, u32 n_used,              \
                                BY_VALUE Pieces pieces)
LINEAR_GROUPED(linear_grouped_bf16);
LINEAR_GROUPED(linear_grouped_plain);
LINEAR_GROUPED(linear_grouped_w8);
LINEAR_GROUPED(linear_grouped_w8h);
LINEAR_GROUPED(linear_grouped_w4);
LINEAR_GROUPED(linear_grouped_w4h);
LINEAR_GROUPED(linear_grouped_f8);
LINEAR_GROUPED(linear_grouped_f8plain);

// out = the sum of planes by the tree: after plane i is pushed, merge `merges[i]` times; in the end merge what is left.
// planes: [n_planes, n] f32, out: [n], which may be the first plane. grid (ceil(n / 256)), block 256
KERNEL(256) fold_planes(const float* planes, u32 n_planes, const u8* merges, u64 n, float* out);

// The product of which `sums` are the pieces, f32 [pieces.n, n_rows, cols]: out as that of the kernels above.
// grid (ceil(cols / 256), n_rows), block 256
KERNEL(256) fold_split(const float* sums, u32 n_rows, u32 cols, float* out, u32 ld_out, BY_VALUE Pieces pieces);

// ---- sums of several devices (one_shot.cu) --------------------------------------------------------------------------

// The first n numbers of the first plane become the sum of all ranks' planes by the tree. `planes`: this rank's,
// `stride` numbers apart, or room for the sum if it has none. All ranks launch the same sums in the same order, each
// after the one before has ended. Ranks that share a device need room there for the blocks of all.
// grid (ceil(n / per_block)), at most ONE_SHOT_BLOCKS; block 256.
// control: host memory. A nonzero [0] ends all waiting, and so do `patience` nanoseconds. If a rank is missing, the sum
// is not written, and [1] becomes the number + 1 of the first missing rank, unless [1] is set already.
KERNEL(256) sum_one_shot(float* planes, u64 stride, u32 n, BY_VALUE OneShot ranks, u32* control, u64 patience);

// ---- attention (attention.cu) -------------------------------------------------------------------------------------
// kv: bf16, of one layer: [n_blocks][n_kv_heads][K: [16 positions][D] | V: [D][16 positions]], D = padded(head_dim).
// Each row of K is by lane. The host zeroes it once. Query heads, KV heads and `first` as in `backend::Heads`.

// Turns Q and K of qkv (f32 [n_rows, (n_heads + 2 n_kv_heads) * head_dim]) in place, where `cos` is not null, and
// stores K and V. slots[row] = block * 16 + position % 16, or NO_SLOT: the row is left unchanged. cos, sin: f32
// [context, half_dim].
// style 0: i and i + half_dim turn together; 1: 2i and 2i + 1. grid (n_rows, n_heads + 2 n_kv_heads), block 32
#define NO_SLOT 0xffffffffu
KERNEL(32) rope_store(float* qkv, const float* cos, const float* sin, u32 half_dim, u32 style, HeadShape heads,
                      const u32* positions, const u32* slots, bf16* kv);

// attend_d{D}_q{QUERIES}: D = padded(head_dim) of 32, 64, 96, 128, 160, 192, 224, 256; QUERIES 16 for all (few rows),
// and 64 up to D = 128, 32 beyond (many rows). A block of threads takes an item's rows for a KV head and walks all
// tiles. grid (n_items, n_kv_heads * ceil(per_kv / QUERIES)), block 128, dynamic shared memory
// ATTEND_SMEM(D, QUERIES), which may be over 48 KiB (89 KiB for d128_q64): then the host must raise the limit.
// out: bf16 rows of n_heads * head_dim. Overwrites Q in qkv: a block with several chunks keeps their sum there.
//
// attend_split_d{D}_q16: a block takes one tile, counted from `tile_first`: grid z = n of tiles at most. It writes
// partial[((row * n_heads + head) * n_tiles + tile) * (D + 2)]: largest, sum, acc[D], f32, of tiles that the row sees;
// then attend_merge merges them: grid (n_rows, n_heads), block 32.
#define ATTEND_SMEM(D, QUERIES) ((QUERIES) * (D) * 2 + (QUERIES) * 264 * 4 + (QUERIES) * 9 * 4 + 64)
#define ATTEND(name)                                                                                                \
    KERNEL_SHARING(128, 2) name(float* qkv, const bf16* kv, HeadShape heads, const AttendItem* items,               \
                                const u32* blocks, bf16* out)
#define ATTEND_SPLIT(name)                                                                                          \
    KERNEL_SHARING(128, 4) name(const float* qkv, const bf16* kv, HeadShape heads, const AttendItem* items,         \
                                const u32* blocks, u32 tile_first, u32 n_tiles, float* partial)
ATTEND(attend_d32_q16); ATTEND(attend_d64_q16); ATTEND(attend_d96_q16); ATTEND(attend_d128_q16);
ATTEND(attend_d160_q16); ATTEND(attend_d192_q16); ATTEND(attend_d224_q16); ATTEND(attend_d256_q16);
ATTEND(attend_d32_q64); ATTEND(attend_d64_q64); ATTEND(attend_d96_q64); ATTEND(attend_d128_q64);
ATTEND(attend_d160_q32); ATTEND(attend_d192_q32); ATTEND(attend_d224_q32); ATTEND(attend_d256_q32);
ATTEND_SPLIT(attend_split_d32_q16); ATTEND_SPLIT(attend_split_d64_q16); ATTEND_SPLIT(attend_split_d96_q16);
ATTEND_SPLIT(attend_split_d128_q16); ATTEND_SPLIT(attend_split_d160_q16); ATTEND_SPLIT(attend_split_d192_q16);
ATTEND_SPLIT(attend_split_d224_q16); ATTEND_SPLIT(attend_split_d256_q16);
KERNEL(32) attend_merge(const float* partial, HeadShape heads, const u32* positions, u32 tile_first, u32 n_tiles,
                        bf16* out);

// ---- experts (experts.cu) -----------------------------------------------------------------------------------------

// Softmax of each row's scores (f32 [n_rows, n_experts]), the n_used best in ascending order of id, and the weight
// of each. chosen, weights: [n_rows, n_used]. grid (n_rows), block 32; n_used at most 32, n_experts at most 1024
KERNEL(32) route(const float* scores, u32 n_experts, u32 n_used, u32 normalized, u32* chosen, float* weights);
// The same by sigmoids. correction ([n_experts], or null) is added for the choice only. Experts come from the best
// n_groups_used of n_groups equal groups (at most 32); a group's score is the sum of its two best. Weights are
// multiplied by factor.
KERNEL(32) route_sigmoid(const float* scores, const float* correction, u32 n_experts, u32 n_used, u32 n_groups,
                         u32 n_groups_used, u32 normalized, float factor, u32* chosen, float* weights);
// The choices in order of expert, then choice: order[starts[e] .. starts[e + 1]] are those of expert e, and
// place[order[i]] = i. n_choices = n_rows * n_used; starts: [n_experts + 1]. grid (n_experts), block 32
KERNEL(32) group_choices(const u32* chosen, u32 n_choices, u32* starts, u32* order, u32* place);
// out[(run * n_rows + row) * cols + column]: the sum of y[place[choice]] * weights[choice] over the row's choices with
// an expert in runs[2 * run] .. runs[2 * run + 1], by the tree with the experts as leaves; -0.0 where there is none.
// y: f32 [n_choices, cols]. grid (ceil(cols / 256), n_rows, n_runs), block 256
KERNEL(256) fold_experts(const float* y, const u32* place, const u32* chosen, const float* weights, u32 n_used,
                         const u32* runs, u32 cols, float* out);

// ---- sampling (sample.cu) -----------------------------------------------------------------------------------------

// Draws from each row of logits (f32 [n_rows, n_vocab]) as the CPU does, bit for bit: greedy, or temperature with or
// without min_p. Edits of logits (penalties, bias, ..) come before. grid (n_rows), block 512
KERNEL_SHARING(512, 2) draw(const float* logits, u32 n_vocab, const DrawRow* draws, Drawn* out);
// The same with top_k and top_p. DRAWN_BY_HOST where they keep, or min_p keeps before top_p, more than SURVIVORS_MAX.
// Not for other filters (top_n_sigma, typical_p, XTC). grid (n_rows), block 512
KERNEL_SHARING(512, 2) draw_filtered(const float* logits, u32 n_vocab, const FilterRow* filters, Drawn* out);
// tokens[pairs[2 * i]] = what was drawn as number pairs[2 * i + 1]. grid (ceil(n / 256)), block 256
KERNEL(256) take_drawn(u32* tokens, const u32* pairs, u32 n, const Drawn* drawn);
