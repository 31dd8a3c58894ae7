// Operations on single rows, between the products: one block for each row.
#include "math.cuh"
#include "rows.cuh"
#include "weights.cuh"

KERNEL(256) round_rows(const float* x, u32 cols, bf16* out) {
    const float* row = x + (u64)blockIdx.x * cols;
    put_row(out, blockIdx.x, cols, true, [=](u32 i) { return row[i]; });
}

KERNEL(256) widen_rows(const bf16* x, u32 cols, float* out) {
    const bf16* row = x + (u64)blockIdx.x * padded(cols);
    put_row(out, blockIdx.x, cols, false, [=](u32 i) { return widen(row[i]); });
}

KERNEL(256) gather_rows(const u32* x, const u32* rows, u32 n_words, u32* out) {
    const u32* from = x + (u64)rows[blockIdx.x] * n_words;
    for (u32 i = threadIdx.x; i < n_words; i += 256) {
        out[(u64)blockIdx.x * n_words + i] = from[i];
    }
}

KERNEL(256) add_rows(const void* x, float* residual, u32 cols, u32 forms) {
    float* sum = residual + (u64)blockIdx.x * cols;
    for (u32 i = threadIdx.x; i < cols; i += 256) {
        sum[i] = sum[i] + number_at(x, blockIdx.x, cols, i, forms & FORM_X_BF16);
    }
}

KERNEL(256) add_bias(float* x, const float* bias, u32 cols) {
    float* row = x + (u64)blockIdx.x * cols;
    for (u32 i = threadIdx.x; i < cols; i += 256) {
        row[i] = row[i] + bias[i];
    }
}

KERNEL(256) silu_mul(const float* gate_up, u32 inner, void* out, u32 forms) {
    const float* gate = gate_up + (u64)blockIdx.x * 2 * inner;
    put_row(out, blockIdx.x, inner, forms & FORM_OUT_BF16, [=](u32 i) { return silu_of(gate[i]) * gate[inner + i]; });
}

KERNEL(256) gelu_mul(const float* gate_up, u32 inner, void* out, u32 forms) {
    const float* gate = gate_up + (u64)blockIdx.x * 2 * inner;
    put_row(out, blockIdx.x, inner, forms & FORM_OUT_BF16, [=](u32 i) { return gelu_of(gate[i]) * gate[inner + i]; });
}

KERNEL(256) gelu_rows(float* x, u32 cols) {
    float* row = x + (u64)blockIdx.x * cols;
    put_row(x, blockIdx.x, cols, false, [=](u32 i) { return gelu_of(row[i]); });
}

KERNEL(256) scale_rows(float* x, u32 cols, float factor) {
    float* row = x + (u64)blockIdx.x * cols;
    put_row(x, blockIdx.x, cols, false, [=](u32 i) { return row[i] * factor; });
}

KERNEL(256) soft_cap_rows(float* x, u32 cols, float cap) {
    float* row = x + (u64)blockIdx.x * cols;
    put_row(x, blockIdx.x, cols, false, [=](u32 i) { return soft_cap_of(row[i], cap); });
}

KERNEL(256) gelu_erf_rows(float* x, u32 cols) {
    float* row = x + (u64)blockIdx.x * cols;
    put_row(x, blockIdx.x, cols, false, [=](u32 i) { return gelu_erf_of(row[i]); });
}

KERNEL(256) clamped_silu_mul(const float* gate_up, u32 inner, float alpha, float limit, void* out, u32 forms) {
    const float* gate = gate_up + (u64)blockIdx.x * 2 * inner;
    put_row(out, blockIdx.x, inner, forms & FORM_OUT_BF16,
            [=](u32 i) { return clamped_silu_of(gate[i], gate[inner + i], alpha, limit); });
}

KERNEL(256) scale_queries(float* x, u32 ld, u32 n, const float* factors, const u32* positions) {
    float* row = x + (u64)blockIdx.x * ld;
    const float factor = factors[positions[blockIdx.x]];
    for (u32 i = threadIdx.x; i < n; i += 256) {
        row[i] = row[i] * factor;
    }
}

KERNEL(256) copy_columns(const float* from, u32 ld_from, float* to, u32 ld_to, u32 n) {
    for (u32 i = threadIdx.x; i < n; i += 256) {
        to[(u64)blockIdx.x * ld_to + i] = from[(u64)blockIdx.x * ld_from + i];
    }
}

KERNEL(256) add_expert_bias(float* x, u32 cols, const u32* chosen, const u32* order, u32 first, u32 n,
                            const float* bias) {
    const u32 expert = chosen[order[blockIdx.x]] - first;
    if (expert >= n) {
        return;
    }
    float* row = x + (u64)blockIdx.x * cols;
    for (u32 i = threadIdx.x; i < cols; i += 256) {
        row[i] = row[i] + bias[(u64)expert * cols + i];
    }
}

// A token of another rank's part of the table leaves its row unchanged.
template <class Kind>
DEVICE void embed(const void* digits, const void* scales, const u32* tokens, u32 first, u32 n_table, u32 k,
                  float* out) {
    u32 row = tokens[blockIdx.x] - first;
    if (row >= n_table) {
        return;
    }
    const u32 n_groups = padded(k) / 32;
    const u64 at = (u64)(row / 16) * n_groups;
    put_row(out, blockIdx.x, k, false,
            [=](u32 i) { return widen(Kind::one(digits, scales, at, i / 32, n_groups, row % 16, i % 32)); });
}

#define DEFINE_EMBED(kind, Kind)                                                  \
    EMBED(embed_##kind) {                                                         \
        embed<Kind>(digits, scales, tokens, first, n_table, k, out);              \
    }
DEFINE_EMBED(bf16, KindBf16)
DEFINE_EMBED(plain, KindPlain)
DEFINE_EMBED(w8, KindW8)
DEFINE_EMBED(w8h, KindW8h)
DEFINE_EMBED(w4, KindW4)
DEFINE_EMBED(w4h, KindW4h)
DEFINE_EMBED(f8, KindF8)
DEFINE_EMBED(f8plain, KindF8Plain)

// ---- numbers of eight bits ----------------------------------------------------------------------------------------

// The bits of the largest size of a row; all threads have it. A NaN is the largest of all.
DEVICE u32 largest_bits(const Words4* row, u32 n_eights) {
    SHARED(u32, of_warps, 8);
    u32 most = 0;
    for (u32 i = threadIdx.x; i < n_eights; i += 256) {
        Words4 eight = row[i];
        UNROLL
        for (int j = 0; j < 4; j++) {
            most = max_of(most, max_of(eight.w[j] << 16 & 0x7fff0000u, eight.w[j] & 0x7fff0000u));
        }
    }
    UNROLL
    for (int half = 16; half > 0; half /= 2) {
        most = max_of(most, shuffle_xor(most, half));
    }
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
    __syncthreads();
    UNROLL
    for (int warp = 0; warp < 8; warp++) {
        most = max_of(most, of_warps[warp]);
    }
    return most;
}

// Two numbers of bf16, times a factor, as two of eight bits.
DEVICE u32 narrow_pair(u32 pair, float factor) {
    float low = low_bf16(pair) * factor, high = bits_to_float(pair & 0xffff0000u) * factor;
    return narrow_f8(smaller(448.0f, larger(-448.0f, low))) | narrow_f8(smaller(448.0f, larger(-448.0f, high))) << 8;
}

KERNEL(256) quantize_rows(const bf16* x, u32 n_groups, u8* out, float* scales) {
    const u32 n_eights = n_groups * 4;
    const Words4* row = (const Words4*)x + (u64)blockIdx.x * n_eights;
    Words2* to = (Words2*)out + (u64)blockIdx.x * n_eights;
    const u32 bits = largest_bits(row, n_eights);
    const bool is_finite = bits < 0x7f800000u;
    const float largest = larger(bits_to_float(bits), 0x1p-100f), factor = 448.0f / largest;
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = is_finite ? largest / 448.0f : bits_to_float(0x7fffffffu);
    }
    for (u32 i = threadIdx.x; i < n_eights; i += 256) {
        Words4 eight = row[i];
        Words2 made;
        UNROLL
        for (int j = 0; j < 2; j++) {
            u32 word = narrow_pair(eight.w[2 * j], factor) | narrow_pair(eight.w[2 * j + 1], factor) << 16;
            made.w[j] = is_finite ? word : 0;
        }
        to[i] = made;
    }
}

KERNEL(256) scale_product(float* out, u32 ld_out, u32 n_out, const float* scales, u32 n_groups, const float* of_rows) {
    float* row = out + (u64)blockIdx.y * ld_out;
    const float of_row = of_rows[blockIdx.y];
    UNROLL
    for (int i = 0; i < 4; i++) {
        u32 column = blockIdx.x * 1024 + i * 256 + threadIdx.x;
        if (column < n_out) {
            float of_column = scales[(u64)(column / 16) * n_groups * 16 + column % 8 * 2 + column % 16 / 8];
            row[column] = row[column] * of_column * of_row;
        }
    }
}

KERNEL(256) widen_weights(const void* digits, const void* scales, u32 n_groups, bf16* out) {
    const u32 row = blockIdx.x % 16, n_eights = n_groups * 4;
    const Words2* from = (const Words2*)digits + (u64)blockIdx.x * n_eights;
    Words4* to = (Words4*)out + (u64)blockIdx.x * n_eights;
    const float* of_tile = (const float*)scales + (u64)(blockIdx.x / 16) * n_groups * 16 + row % 8 * 2 + row / 8;
    for (u32 i = threadIdx.x; i < n_eights; i += 256) {
        const Words2 eight = from[i];
        const float scale = of_tile[i / 4 * 16];
        Words4 made;
        UNROLL
        for (int j = 0; j < 4; j++) {
            u32 pair = eight.w[j / 2] >> (j % 2 * 16);
            made.w[j] = pack_bf16(widen_f8(pair) * scale, widen_f8(pair >> 8) * scale);
        }
        to[i] = made;
    }
}
