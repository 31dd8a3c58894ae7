// Draws a token from each row of logits: the CPU's draw (`cpu/sample`), bit for bit. One block for each row.
#include "kernels.cuh"
#include "math.cuh"

#define THREADS 512
// Logits whose e^x are made together, before sixteen lanes add them.
#define CHUNK 4096

// ---- the largest ----------------------------------------------------------------------------------------------------

struct Largest {
    float value;
    u32 first;  // of equals
    u32 holds_nan;
};

DEVICE Largest largest_of(const float* row, u32 n) {
    SHARED(float, values, THREADS);
    SHARED(u32, firsts, THREADS);
    SHARED(u32, nans, THREADS);
    const u32 thread = threadIdx.x;
    Largest mine = {minus_infinity(), 0, 0};
    for (u32 i = thread; i < n; i += THREADS) {
        float x = row[i];
        mine.holds_nan |= is_nan(x);
        if (x > mine.value) {
            mine.value = x;
            mine.first = i;
        }
    }
    for (u32 half = THREADS / 2;; half /= 2) {
        values[thread] = mine.value;
        firsts[thread] = mine.first;
        nans[thread] = mine.holds_nan;
        __syncthreads();
        if (half == 0) {
            return {values[0], firsts[0], nans[0]};
        }
        u32 other = thread ^ half;
        float value = values[other];
        u32 first = firsts[other];
        mine.holds_nan |= nans[other];
        if (value > mine.value || (value == mine.value && first < mine.first)) {
            mine.value = value;
            mine.first = first;
        }
        __syncthreads();
    }
}

// ---- noise ----------------------------------------------------------------------------------------------------------

// libm's logarithm of a positive normal double, operation for operation: 0 where x is 1.
DEVICE double log_of(double x) {
    u64 bits = double_to_bits(x);
    if (bits == 0x3ff0000000000000ull) {
        return 0.0;
    }
    // From x to [sqrt(2) / 2, sqrt(2)).
    u32 high = (u32)(bits >> 32) + (0x3ff00000u - 0x3fe6a09eu);
    int k = (int)(high >> 20) - 0x3ff;
    high = (high & 0x000fffffu) + 0x3fe6a09eu;
    x = bits_to_double((u64)high << 32 | (bits & 0xffffffffu));
    double f = x - 1.0;
    double hfsq = 0.5 * f * f;
    double s = f / (2.0 + f);
    double z = s * s;
    double w = z * z;
    double t1 = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double t2 = z * (6.666666666666735130e-01 +
                     w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    double r = t2 + t1;
    double dk = (double)k;
    return s * (hfsq + r) + dk * 1.90821492927058770002e-10 - hfsq + f + dk * 6.93147180369123816490e-01;
}

DEVICE u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

DEVICE u64 noise_bits(u64 key, u32 token) { return mix(key + 0x9e3779b97f4a7c15ull * ((u64)token + 1)); }

// -ln(-ln u) for u = (2r + 1) / 2^53 of the upper 52 bits r.
DEVICE double gumbel_of(u64 bits) {
    double u = (double)(bits >> 11 | 1) * (1.0 / 9007199254740992.0);
    return -log_of(-log_of(u));
}

// At least `gumbel_of(bits)`.
DEVICE double gumbel_bound(u64 bits) {
    u32 n_ones = (u32)__clzll(~(bits & ~0xfffull));
    return (double)(n_ones + 1) * 0.693148;
}

// ---- the draw -------------------------------------------------------------------------------------------------------

struct Best {
    double score;
    u32 token;

    DEVICE_MEMBER void offer(double other, u32 its_token) {
        if (other > score || (other == score && its_token < token)) {
            score = other;
            token = its_token;
        }
    }
};

DEVICE u32 drawn(const float* row, u32 n, const Largest& largest, const DrawRow& draw) {
    SHARED(double, scores, THREADS);
    SHARED(u32, tokens, THREADS);
    const u32 thread = threadIdx.x;
    // The most likely raises the bar that the rest must pass.
    Best best = {gumbel_of(noise_bits(draw.key, largest.first)), largest.first};
    for (u32 i = thread; i < n; i += THREADS) {
        double scaled = (double)(row[i] - largest.value) * draw.scale;
        if (!(scaled >= draw.least)) {
            continue;
        }
        u64 bits = noise_bits(draw.key, i);
        if (scaled + gumbel_bound(bits) >= best.score) {
            best.offer(scaled + gumbel_of(bits), i);
        }
    }
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        scores[thread] = best.score;
        tokens[thread] = best.token;
        __syncthreads();
        best.offer(scores[thread ^ half], tokens[thread ^ half]);
        __syncthreads();
    }
    return best.token;
}

// ln of the sum of e^(x - largest), which sixteen lanes add: all threads make the terms of a chunk, half a warp adds them.
DEVICE float log_sum_of(const float* row, u32 n, float largest) {
    SHARED(float, terms, CHUNK);
    SHARED(float, log_sum, 1);
    float sum = 0.0f;
    for (u32 start = 0; start < n; start += CHUNK) {
        u32 end = min_of(n - start, CHUNK);
        for (u32 i = threadIdx.x; i < end; i += THREADS) {
            terms[i] = exp_of(row[start + i] - largest);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            UNROLL_BY(8)
            for (u32 i = threadIdx.x % 16; i < end; i += 16) {
                sum = sum + terms[i];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < 32) {
        sum = tree_sum(sum);
        if (threadIdx.x == 0) {
            *log_sum = largest + ln_of(sum);
        }
    }
    __syncthreads();
    return *log_sum;
}

KERNEL_SHARING(512, 2) draw(const float* logits, u32 n_vocab, const DrawRow* draws, Drawn* out) {
    const float* row = logits + (u64)blockIdx.x * n_vocab;
    const DrawRow draw = draws[blockIdx.x];
    const Largest largest = largest_of(row, n_vocab);
    Drawn drawn_now = {DRAWN_NONE, 0.0f, largest.value, 0.0f};
    const bool is_finite = fabsf(largest.value) < bits_to_float(0x7f800000u);
    if (!largest.holds_nan && is_finite) {
        drawn_now.token = draw.is_greedy ? largest.first : drawn(row, n_vocab, largest, draw);
        if (draw.wants_logprob) {
            drawn_now.log_sum = log_sum_of(row, n_vocab, largest.value);
            drawn_now.logprob = row[drawn_now.token] - drawn_now.log_sum;
        }
    }
    if (threadIdx.x == 0) {
        out[blockIdx.x] = drawn_now;
    }
}
