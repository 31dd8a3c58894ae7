// Rows in either form: f32, or bf16 with a padding of zeros.
#pragma once
#include "device.cuh"

DEVICE float number_at(const void* rows, u32 row, u32 cols, u32 i, bool is_bf16) {
    if (is_bf16) {
        return widen(((const bf16*)rows)[(u64)row * padded(cols) + i]);
    }
    return ((const float*)rows)[(u64)row * cols + i];
}

// Writes row `row` with all threads of the block: number i is `number(i)`.
template <class Number>
DEVICE void put_row(void* rows, u32 row, u32 cols, bool is_bf16, Number number) {
    if (!is_bf16) {
        float* to = (float*)rows + (u64)row * cols;
        for (u32 i = threadIdx.x; i < cols; i += blockDim.x) {
            to[i] = number(i);
        }
        return;
    }
    u32* to = (u32*)((bf16*)rows + (u64)row * padded(cols));
    for (u32 i = 2 * threadIdx.x; i < padded(cols); i += 2 * blockDim.x) {
        float low = i < cols ? number(i) : 0.0f, high = i + 1 < cols ? number(i + 1) : 0.0f;
        to[i / 2] = pack_bf16(low, high);
    }
}
