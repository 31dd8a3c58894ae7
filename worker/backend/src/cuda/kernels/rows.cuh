// Rows in either form: f32, or bf16 with a padding of zeros.
#pragma once
#include "device.cuh"

DEVICE float number_at(const void* rows, u32 row, u32 cols, u32 i, bool is_bf16) {
    if (is_bf16) {
        return widen(((const bf16*)rows)[(u64)row * padded(cols) + i]);
    }
    return ((const float*)rows)[(u64)row * cols + i];
}

// A thread loads this many numbers before it stores any, so that it waits for memory once.
#define AHEAD 8

// Writes row `row` with all threads of the block, and of the blocks beside it in y: number i is `number(i)`.
template <class Number>
DEVICE void put_row(void* rows, u32 row, u32 cols, bool is_bf16, Number number) {
    const u32 start = blockIdx.y * blockDim.x + threadIdx.x, stride = gridDim.y * blockDim.x;
    if (!is_bf16) {
        float* to = (float*)rows + (u64)row * cols;
        for (u32 first = start; first < cols; first += AHEAD * stride) {
            float numbers[AHEAD];
            UNROLL
            for (u32 j = 0; j < AHEAD; j++) {
                u32 i = first + j * stride;
                numbers[j] = i < cols ? number(i) : 0.0f;
            }
            UNROLL
            for (u32 j = 0; j < AHEAD; j++) {
                u32 i = first + j * stride;
                if (i < cols) {
                    to[i] = numbers[j];
                }
            }
        }
        return;
    }
    u32* to = (u32*)((bf16*)rows + (u64)row * padded(cols));
    for (u32 first = start; 2 * first < padded(cols); first += AHEAD / 2 * stride) {
        u32 pairs[AHEAD / 2];
        UNROLL
        for (u32 j = 0; j < AHEAD / 2; j++) {
            u32 i = 2 * (first + j * stride);
            pairs[j] = pack_bf16(i < cols ? number(i) : 0.0f, i + 1 < cols ? number(i + 1) : 0.0f);
        }
        UNROLL
        for (u32 j = 0; j < AHEAD / 2; j++) {
            u32 pair = first + j * stride;
            if (2 * pair < padded(cols)) {
                to[pair] = pairs[j];
            }
        }
    }
}
