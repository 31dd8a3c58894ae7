// What the kernels of products share: the order of sums, and a lane's part of a row.
#pragma once
#include "weights.cuh"

// Partial sums that wait for their neighbours: at most three of eight pieces. The stack shifts, so that no index is
// dynamic.
template <int N>
struct Stack {
    float waiting[3][N];

    DEVICE_MEMBER void push(const float (&sum)[N]) {
        UNROLL
        for (int i = 0; i < N; i++) {
            waiting[2][i] = waiting[1][i];
            waiting[1][i] = waiting[0][i];
            waiting[0][i] = sum[i];
        }
    }

    // sum becomes the topmost + sum.
    DEVICE_MEMBER void merge(float (&sum)[N]) {
        UNROLL
        for (int i = 0; i < N; i++) {
            sum[i] = waiting[0][i] + sum[i];
            waiting[0][i] = waiting[1][i];
            waiting[1][i] = waiting[2][i];
        }
    }
};

// The same for 128 sums of each thread, in local memory: registers do not suffice for them.
struct Waiting {
    float sums[3][32][4];
    u32 n;

    DEVICE_MEMBER void push(const float (&acc)[32][4]) {
        UNROLL
        for (u32 i = 0; i < 128; i++) {
            sums[n][i / 4][i % 4] = acc[i / 4][i % 4];
        }
        n++;
    }

    DEVICE_MEMBER void merge(float (&acc)[32][4]) {
        n--;
        UNROLL
        for (u32 i = 0; i < 128; i++) {
            float& sum = acc[i / 4][i % 4];
            sum = sums[n][i / 4][i % 4] + sum;
        }
    }
};

// The part of a row that a lane takes: four elements of each step of sixteen, in the order of the row.
struct Group {
    Words2 steps[2];
};

DEVICE void multiply_group(float (&acc)[4], const Fragment& w, const Group& x) {
    UNROLL
    for (int step = 0; step < 2; step++) {
        const u32(&a)[4] = w.a[step];
        multiply_tiles(acc, a[0], a[1], a[2], a[3], x.steps[step].w[0], x.steps[step].w[1]);
    }
}

// The place of a step of a group in a row of a stage. In every other pair of rows the two steps have swapped places, so
// that four rows of a step, which are read at once, use no bank twice.
DEVICE u32 place_of_step(u32 row, u32 step) { return step ^ (row / 2 % 2); }

// Starts to copy one group of all ROWS rows of a block of 256 threads: half a step, 16 bytes, for each 64 rows.
template <u32 ROWS>
DEVICE void copy_rows(Words4* stage, const bf16* x, u32 row_first, u32 n_rows, u32 n_groups, u32 group) {
    const u32 step = threadIdx.x % 4 / 2, half = threadIdx.x % 2;
    UNROLL
    for (u32 i = 0; i < ROWS / 64; i++) {
        u32 in_stage = threadIdx.x / 4 + i * 64, row = min_of(row_first + in_stage, n_rows - 1);
        copy_async(stage + in_stage * 4 + place_of_step(in_stage, step) * 2 + half,
                   (const Words4*)(x + (u64)row * n_groups * 32) + group * 4 + threadIdx.x % 4);
    }
}

// Adds the pieces of one output of one row, each piece's sum `stride` floats after the last.
DEVICE void fold_pieces(const float* sums, u32 stride, const Pieces& pieces, float* out, u64 plane) {
    Stack<1> stack = {};
    UNROLL
    for (u32 piece = 0; piece < PIECES_MAX; piece++) {
        if (piece == pieces.n) {
            break;
        }
        float sum[1] = {sums[piece * stride]};
        for (u32 i = 0; i < pieces.merges[piece]; i++) {
            stack.merge(sum);
        }
        if (pieces.ends_run[piece]) {
            *out = sum[0];
            out += plane;
        } else {
            stack.push(sum);
        }
    }
}
