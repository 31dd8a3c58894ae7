// What happens to each row alone, between the products: one block for each row.
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

// A token of another rank's table leaves its row as it is.
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
