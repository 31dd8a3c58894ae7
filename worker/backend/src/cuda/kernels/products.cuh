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
