// Draws a token from each row of logits: the CPU's draw (`cpu/sample`), bit for bit. One block for each row. Logits are
// already edited (penalties, bias, ..).
#include "kernels.cuh"
#include "math.cuh"

#define THREADS 512
// The number of e^x that are computed together, before sixteen lanes add them.
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

// The best of all threads' bests.
DEVICE u32 best_of_all(Best best, double* scores, u32* tokens) {
    const u32 thread = threadIdx.x;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        scores[thread] = best.score;
        tokens[thread] = best.token;
        __syncthreads();
        best.offer(scores[thread ^ half], tokens[thread ^ half]);
        __syncthreads();
    }
    return best.token;
}

DEVICE u32 draw_token(const float* row, u32 n, const Largest& largest, const DrawRow& draw) {
    SHARED(double, scores, THREADS);
    SHARED(u32, tokens, THREADS);
    // The most likely token comes first: the bound of most others is below its score.
    Best best = {gumbel_of(noise_bits(draw.key, largest.first)), largest.first};
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        double scaled = (double)(row[i] - largest.value) * draw.scale;
        if (!(scaled >= draw.least)) {
            continue;
        }
        u64 bits = noise_bits(draw.key, i);
        if (scaled + gumbel_bound(bits) >= best.score) {
            best.offer(scaled + gumbel_of(bits), i);
        }
    }
    return best_of_all(best, scores, tokens);
}

// The sum of e^((x - largest) * scale) in sixteen lanes: all threads compute the terms of a chunk, and half a warp adds
// them.
DEVICE float sum_exp_of(const float* row, u32 n, float largest, float scale) {
    SHARED(float, terms, CHUNK);
    SHARED(float, whole, 1);
    float sum = 0.0f;
    for (u32 start = 0; start < n; start += CHUNK) {
        u32 end = min_of(n - start, CHUNK);
        for (u32 i = threadIdx.x; i < end; i += THREADS) {
            terms[i] = exp_of((row[start + i] - largest) * scale);
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
            *whole = sum;
        }
    }
    __syncthreads();
    return *whole;
}

// The drawn token, and its logprob if `wants_logprob`.
DEVICE Drawn drawn_token(const float* row, u32 n, const Largest& largest, u32 token, bool wants_logprob) {
    Drawn out = {token, 0.0f, largest.value, 0.0f};
    if (wants_logprob && token < n) {
        out.log_sum = largest.value + ln_of(sum_exp_of(row, n, largest.value, 1.0f));
        out.logprob = row[token] - out.log_sum;
    }
    return out;
}

// Whether a token can be drawn: the row has no NaN and not only masks.
DEVICE bool is_drawable(const Largest& largest) {
    return !largest.holds_nan && fabsf(largest.value) < bits_to_float(0x7f800000u);
}

KERNEL_SHARING(512, 2) draw(const float* logits, u32 n_vocab, const DrawRow* draws, Drawn* out) {
    const float* row = logits + (u64)blockIdx.x * n_vocab;
    const DrawRow draw = draws[blockIdx.x];
    const Largest largest = largest_of(row, n_vocab);
    u32 token = DRAWN_NONE;
    if (is_drawable(largest)) {
        token = draw.is_greedy ? largest.first : draw_token(row, n_vocab, largest, draw);
    }
    Drawn now = drawn_token(row, n_vocab, largest, token, draw.wants_logprob);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = now;
    }
}

// ---- filters that need an order -------------------------------------------------------------------------------------

// A logit and its token as one number: the smaller, the more likely, and among equals the lower id.
DEVICE u64 key_of(float logit, u32 token) {
    // Adding zero makes -0 equal to 0. The bits of a positive float grow with it, those of a negative one fall.
    u32 bits = float_to_bits(logit + 0.0f);
    u32 falling = bits >> 31 == 0 ? ~bits & 0x7fffffffu : bits;
    return (u64)falling << 32 | token;
}

// The n-th smallest key of a row, n from 1. Finds its bytes from the top: each round takes the keys that share the
// known prefix and counts them by their next byte.
DEVICE u64 nth_key(const float* row, u32 n_vocab, u32 n) {
    SHARED(u32, counts, 256);
    SHARED(u32, chosen, 2);
    u64 prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256; i += THREADS) {
            counts[i] = 0;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < n_vocab; i += THREADS) {
            u64 key = key_of(row[i], i);
            if (shift == 56 || (key ^ prefix) >> (shift + 8) == 0) {
                count_up(counts + (key >> shift & 255));
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 byte = 0, left = n;
            while (counts[byte] < left) {
                left -= counts[byte++];
            }
            chosen[0] = byte;
            chosen[1] = left;
        }
        __syncthreads();
        prefix |= (u64)chosen[0] << shift;
        n = chosen[1];
    }
    return prefix;
}

// Puts the keys up to `last`, of which there are n <= SURVIVORS_MAX, in ascending order.
DEVICE void sort_keys(const float* row, u32 n_vocab, u64 last, u64* keys) {
    SHARED(u32, n_found, 1);
    for (u32 i = threadIdx.x; i < SURVIVORS_MAX; i += THREADS) {
        keys[i] = ~0ull;
    }
    if (threadIdx.x == 0) {
        *n_found = 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < n_vocab; i += THREADS) {
        u64 key = key_of(row[i], i);
        if (key <= last) {
            keys[count_up(n_found)] = key;
        }
    }
    // Runs of twice the length each time, merged by exchanges over shrinking distances.
    for (u32 length = 2; length <= SURVIVORS_MAX; length *= 2) {
        for (u32 distance = length / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (u32 pair = threadIdx.x; pair < SURVIVORS_MAX / 2; pair += THREADS) {
                u32 low = pair / distance * 2 * distance + pair % distance, high = low + distance;
                bool rises = (low & length) == 0;
                u64 a = keys[low], b = keys[high];
                if ((a > b) == rises) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
        }
    }
    __syncthreads();
}

// How many of n weights reach `target`; n + 1 if all together do not. Adds them one by one, as the CPU does.
DEVICE u32 n_reaching(const double* weights, u32 n, double target) {
    double reached = 0.0;
    for (u32 i = 0; i < n; i++) {
        reached = reached + weights[i];
        if (reached >= target) {
            return i + 1;
        }
    }
    return n + 1;
}

// How many of the sorted keys the filters keep; 0 if they may keep more than SURVIVORS_MAX, so that the host draws.
DEVICE u32 n_kept(const float* row, u32 n_vocab, const Largest& largest, const FilterRow& filter, u64* keys) {
    SHARED(double, weights, SURVIVORS_MAX);
    SHARED(u32, kept, 1);
    const u32 top_k = filter.top_k == 0 ? n_vocab : min_of(filter.top_k, n_vocab);
    const u32 n = min_of(top_k, SURVIVORS_MAX);
    const bool is_all = top_k <= SURVIVORS_MAX, is_whole = top_k == n_vocab && filter.least == (double)minus_infinity();
    sort_keys(row, n_vocab, nth_key(row, n_vocab, n), keys);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float below = row[(u32)keys[i]] - largest.value;
        // A token that min_p removes has a negative weight.
        bool is_kept = i == 0 || (double)below * filter.scale >= filter.least;
        weights[i] = is_kept ? (double)exp_of(below * filter.scale_f32) : -1.0;
    }
    // Without top_k and min_p, top_p is a share of the whole row.
    const bool has_top_p = filter.top_p < 1.0;
    const float whole = is_whole && has_top_p ? sum_exp_of(row, n_vocab, largest.value, filter.scale_f32) : 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 n_seen = 0;
        double total = 0.0;
        while (n_seen < n && weights[n_seen] >= 0.0) {
            total = total + weights[n_seen++];
        }
        bool sees_all = is_all || n_seen < n;
        u32 reaching = n_seen + 1;
        if (has_top_p && (is_whole || sees_all)) {
            reaching = n_reaching(weights, n_seen, (is_whole ? (double)whole : total) * filter.top_p);
        }
        *kept = reaching <= n_seen ? reaching : sees_all ? n_seen : 0;
    }
    __syncthreads();
    return *kept;
}

KERNEL_SHARING(512, 2) draw_filtered(const float* logits, u32 n_vocab, const FilterRow* filters, Drawn* out) {
    SHARED(u64, keys, SURVIVORS_MAX);
    SHARED(double, scores, THREADS);
    SHARED(u32, tokens, THREADS);
    const float* row = logits + (u64)blockIdx.x * n_vocab;
    const FilterRow filter = filters[blockIdx.x];
    const Largest largest = largest_of(row, n_vocab);
    u32 token = DRAWN_NONE;
    if (is_drawable(largest)) {
        const u32 n = n_kept(row, n_vocab, largest, filter, keys);
        const u32 first = (u32)keys[0];
        Best best = {gumbel_of(noise_bits(filter.key, first)), first};
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            u32 other = (u32)keys[i];
            double scaled = (double)(row[other] - largest.value) * filter.scale;
            best.offer(scaled + gumbel_of(noise_bits(filter.key, other)), other);
        }
        token = n == 0 ? DRAWN_BY_HOST : best_of_all(best, scores, tokens);
    }
    Drawn now = drawn_token(row, n_vocab, largest, token, filter.wants_logprob);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = now;
    }
}

KERNEL(256) take_drawn(u32* tokens, const u32* pairs, u32 n, const Drawn* drawn) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) {
        tokens[pairs[2 * i]] = drawn[pairs[2 * i + 1]].token;
    }
}
