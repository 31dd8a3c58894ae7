// Norms: one block for each row. All threads bring the row to shared memory; half a warp reduces it in sixteen lanes.
#include "kernels.cuh"
#include "math.cuh"
#include "rows.cuh"

// Loads a row: number i is `number(i)`, and goes to `put(i, number)`. A thread loads several numbers before it puts
// any.
template <class Number, class Put>
DEVICE void read_row(u32 cols, Number number, Put put) {
    const u32 N = 16;
    for (u32 first = threadIdx.x; first < cols; first += N * 256) {
        float numbers[N];
        UNROLL
        for (u32 j = 0; j < N; j++) {
            // A number beyond the last one is not put.
            numbers[j] = number(min_of(first + j * 256, cols - 1));
        }
        UNROLL
        for (u32 j = 0; j < N; j++) {
            u32 i = first + j * 256;
            if (i < cols) {
                put(i, numbers[j]);
            }
        }
    }
}

// The same for a row of x in either form. The form is decided once, because loads do not move across a branch.
template <class Add, class Put>
DEVICE void read_row_of(const void* x, u32 cols, bool is_bf16, Add add, Put put) {
    if (is_bf16) {
        const bf16* row = (const bf16*)x + (u64)blockIdx.x * padded(cols);
        read_row(cols, [=](u32 i) { return add(i, widen(row[i])); }, put);
    } else {
        const float* row = (const float*)x + (u64)blockIdx.x * cols;
        read_row(cols, [=](u32 i) { return add(i, row[i]); }, put);
    }
}

// The weight is read only when the row has been reduced.
DEVICE void prefetch_weight(const float* weight, u32 cols) {
    if (threadIdx.x == 0 && cols >= 4) {
        prefetch(weight, cols / 4 * 16);
    }
}

// Lane j of sixteen takes elements j, j + 16, ..; both halves of a whole warp do the same. `add(sum, number)` is the
// next sum. A lane loads a batch of numbers while it adds the batch before: otherwise it waits for each.
template <class Number, class Add>
DEVICE float sum_lanes(u32 n, Number number, Add add) {
    const u32 N = 32, lane = threadIdx.x % 16, n_batches = n / (N * 16);
    float next[N], sum = 0.0f;
    UNROLL
    for (u32 j = 0; j < N; j++) {
        next[j] = n_batches > 0 ? number(j * 16 + lane) : 0.0f;
    }
    for (u32 batch = 0; batch < n_batches; batch++) {
        // The last batch is loaded twice.
        const u32 first = min_of(batch + 1, n_batches - 1) * N * 16 + lane;
        float numbers[N];
        UNROLL
        for (u32 j = 0; j < N; j++) {
            numbers[j] = next[j];
            next[j] = number(first + j * 16);
        }
        UNROLL
        for (u32 j = 0; j < N; j++) {
            sum = add(sum, numbers[j]);
        }
    }
    for (u32 i = n_batches * N * 16 + lane; i < n; i += 16) {
        sum = add(sum, number(i));
    }
    return tree_sum(sum);
}

template <class Number>
DEVICE float sum_of_squares(u32 n, Number number) {
    return sum_lanes(n, number, [](float sum, float x) { return fmaf(x, x, sum); });
}

DEVICE float sum_of(const float* x, u32 n) {
    return sum_lanes(n, [=](u32 i) { return x[i]; }, [](float sum, float x) { return sum + x; });
}

DEVICE float scale_of(float sum_of_squares, u32 n, float eps) { return 1.0f / sqrtf(sum_of_squares / (float)n + eps); }

// out = (row * scale) * weight; `row` in shared memory, just written.
DEVICE void norm_row(const float* row, const float* weight, float eps, u32 cols, void* out, u32 forms) {
    SHARED(float, shared_scale, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = sum_of_squares(cols, [=](u32 i) { return row[i]; });
        if (threadIdx.x == 0) {
            *shared_scale = scale_of(sum, cols, eps);
        }
    }
    __syncthreads();
    float scale = *shared_scale;
    put_row(out, blockIdx.x, cols, forms & FORM_OUT_BF16, [=](u32 i) { return row[i] * scale * weight[i]; });
}

KERNEL(256) rms_norm(const void* x, const float* weight, float eps, u32 cols, void* out, u32 forms) {
    prefetch_weight(weight, cols);
    SHARED_DYNAMIC(bytes);
    float* row = (float*)bytes;
    read_row_of(x, cols, forms & FORM_X_BF16, [=](u32, float number) { return number; },
                [=](u32 i, float number) { row[i] = number; });
    norm_row(row, weight, eps, cols, out, forms);
}

KERNEL(256) add_rms_norm(const void* x, float* residual, const float* weight, float eps, u32 cols, void* out,
                         u32 forms) {
    prefetch_weight(weight, cols);
    SHARED_DYNAMIC(bytes);
    float* row = (float*)bytes;
    float* sum = residual + (u64)blockIdx.x * cols;
    read_row_of(x, cols, forms & FORM_X_BF16, [=](u32 i, float number) { return sum[i] + number; },
                [=](u32 i, float number) { row[i] = sum[i] = number; });
    norm_row(row, weight, eps, cols, out, forms);
}

KERNEL(256) layer_norm(const void* x, const float* weight, const float* bias, float eps, u32 cols, void* out,
                       u32 forms) {
    prefetch_weight(weight, cols);
    SHARED_DYNAMIC(bytes);
    SHARED(float, shared, 2);
    float* row = (float*)bytes;
    read_row_of(x, cols, forms & FORM_X_BF16, [=](u32, float number) { return number; },
                [=](u32 i, float number) { row[i] = number; });
    __syncthreads();
    if (threadIdx.x < 32) {
        float mean = sum_of(row, cols) / (float)cols;
        float sum = sum_of_squares(cols, [=](u32 i) { return row[i] - mean; });
        if (threadIdx.x == 0) {
            shared[0] = mean;
            shared[1] = scale_of(sum, cols, eps);
        }
    }
    __syncthreads();
    float mean = shared[0], scale = shared[1];
    put_row(out, blockIdx.x, cols, forms & FORM_OUT_BF16,
            [=](u32 i) { return fmaf((row[i] - mean) * scale, weight[i], bias[i]); });
}

KERNEL(256) norm_columns(float* x, u32 ld, u32 cols, const float* whole, u32 n, const float* weight, float eps) {
    SHARED(float, shared_scale, 1);
    const float* of = whole + (u64)blockIdx.x * n;
    if (threadIdx.x < 32) {
        float sum = sum_of_squares(n, [=](u32 i) { return of[i]; });
        if (threadIdx.x == 0) {
            *shared_scale = scale_of(sum, n, eps);
        }
    }
    __syncthreads();
    float scale = *shared_scale;
    float* row = x + (u64)blockIdx.x * ld;
    for (u32 i = threadIdx.x; i < cols; i += 256) {
        row[i] = row[i] * scale * weight[i];
    }
}

KERNEL(32) norm_heads(float* qkv, const float* q, const float* k, float eps, HeadShape heads) {
    const u32 n_cols = (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim;
    float* x = qkv + (u64)blockIdx.x * n_cols + blockIdx.y * heads.head_dim;
    const float* weight = blockIdx.y < heads.n_heads ? q : k;
    // The sum synchronizes the lanes, so no lane writes before all have read.
    float scale = scale_of(sum_of_squares(heads.head_dim, [=](u32 i) { return x[i]; }), heads.head_dim, eps);
    for (u32 i = threadIdx.x; i < heads.head_dim; i += 32) {
        x[i] = x[i] * scale * weight[i];
    }
}
