// Mixtures of experts: the choice of experts, the order in which they are computed, and the sum of their results. The
// products between them are `linear_grouped_*`.
#include "kernels.cuh"
#include "math.cuh"

#define NO_EXPERT 0xffffffffu

// Lane j of sixteen takes scores j, j + 16, ..; both halves of the warp do the same.
DEVICE float largest_of(const float* scores, u32 n) {
    float largest = minus_infinity();
    for (u32 i = threadIdx.x % 16; i < n; i += 16) {
        largest = larger(scores[i], largest);
    }
    return tree_largest(largest);
}

DEVICE float sum_exp(const float* scores, u32 n, float shift) {
    float sum = 0.0f;
    for (u32 i = threadIdx.x % 16; i < n; i += 16) {
        sum = sum + exp_of(scores[i] - shift);
    }
    return tree_sum(sum);
}

struct Candidate {
    u32 id;
    float score;

    // Keeps the larger score, and the lower id of equal scores. Keeps a NaN only if there is nothing else.
    DEVICE_MEMBER void offer(u32 other, float its_score) {
        bool is_better = its_score > score || (is_nan(score) && !is_nan(its_score));
        bool is_equal = its_score == score || (is_nan(score) && is_nan(its_score));
        if (other != NO_EXPERT && (id == NO_EXPERT || is_better || (is_equal && other < id))) {
            id = other;
            score = its_score;
        }
    }
};

// The best expert that is not taken. Bit j of a lane's `taken` is expert 32 j + lane.
DEVICE u32 best_of(const float* scores, u32 n, u32 taken) {
    Candidate best = {NO_EXPERT, 0.0f};
    for (u32 i = threadIdx.x; i < n; i += 32) {
        if (!(taken >> i / 32 & 1)) {
            best.offer(i, scores[i]);
        }
    }
    UNROLL
    for (int half = 16; half > 0; half /= 2) {
        u32 id = shuffle_xor(best.id, half);
        best.offer(id, shuffle_xor(best.score, half));
    }
    return best.id;
}

KERNEL(32) route(const float* scores, u32 n_experts, u32 n_used, u32 normalized, u32* chosen, float* weights) {
    SHARED(float, counts, 32);
    const float* row = scores + (u64)blockIdx.x * n_experts;
    const u64 at = (u64)blockIdx.x * n_used;
    const float shift = largest_of(row, n_experts), sum = sum_exp(row, n_experts, shift);
    u32 taken = 0;
    for (u32 i = 0; i < n_used; i++) {
        u32 best = best_of(row, n_experts, taken);
        taken |= best % 32 == threadIdx.x ? 1u << best / 32 : 0;
    }
    u32 n_before = 0;
    for (u32 i = threadIdx.x; i < padded(n_experts); i += 32) {
        bool is_taken = taken >> i / 32 & 1;
        u32 all = votes(is_taken), place = n_before + count_ones(all & ((1u << threadIdx.x) - 1));
        if (is_taken) {
            chosen[at + place] = i;
            counts[place] = exp_of(row[i] - shift) / sum;
        }
        n_before += count_ones(all);
    }
    __syncwarp();
    float total = 0.0f;
    for (u32 i = 0; i < n_used; i++) {
        total = total + counts[i];
    }
    if (threadIdx.x < n_used) {
        weights[at + threadIdx.x] = normalized ? counts[threadIdx.x] / total : counts[threadIdx.x];
    }
}

// The sum of a group's two largest, the larger first.
DEVICE float two_best(const float* seen, u32 n) {
    float best = minus_infinity(), next = minus_infinity();
    for (u32 i = 0; i < n; i++) {
        if (seen[i] > best) {
            next = best;
            best = seen[i];
        } else if (seen[i] > next) {
            next = seen[i];
        }
    }
    return n > 1 ? best + next : best;
}

KERNEL(32) route_sigmoid(const float* scores, const float* correction, u32 n_experts, u32 n_used, u32 n_groups,
                         u32 n_groups_used, u32 normalized, float factor, u32* chosen, float* weights) {
    SHARED(float, seen, 1024);
    SHARED(float, groups, 32);
    SHARED(u32, is_used, 32);
    SHARED(float, counts, 32);
    const float* row = scores + (u64)blockIdx.x * n_experts;
    const u64 at = (u64)blockIdx.x * n_used;
    const u32 size = n_experts / n_groups;
    for (u32 i = threadIdx.x; i < n_experts; i += 32) {
        seen[i] = 1.0f / (1.0f + exp_of(0.0f - row[i])) + (correction ? correction[i] : 0.0f);
    }
    is_used[threadIdx.x] = 0;
    __syncwarp();
    if (threadIdx.x < n_groups) {
        groups[threadIdx.x] = two_best(seen + threadIdx.x * size, size);
    }
    __syncwarp();
    u32 taken = 0;
    for (u32 i = 0; i < n_groups_used; i++) {
        u32 best = best_of(groups, n_groups, taken);
        if (best == threadIdx.x) {
            taken = 1;
            is_used[best] = 1;
        }
    }
    __syncwarp();
    taken = 0;
    for (u32 i = threadIdx.x; i < n_experts; i += 32) {
        taken |= is_used[i / size] ? 0 : 1u << i / 32;
    }
    u32 mine = 0;
    for (u32 i = 0; i < n_used; i++) {
        u32 best = best_of(seen, n_experts, taken);
        u32 bit = best % 32 == threadIdx.x ? 1u << best / 32 : 0;
        taken |= bit;
        mine |= bit;
    }
    u32 n_before = 0;
    for (u32 i = threadIdx.x; i < padded(n_experts); i += 32) {
        bool is_mine = mine >> i / 32 & 1;
        u32 all = votes(is_mine), place = n_before + count_ones(all & ((1u << threadIdx.x) - 1));
        if (is_mine) {
            chosen[at + place] = i;
            counts[place] = 1.0f / (1.0f + exp_of(0.0f - row[i]));
        }
        n_before += count_ones(all);
    }
    __syncwarp();
    float total = 0.0f;
    for (u32 i = 0; i < n_used; i++) {
        total = total + counts[i];
    }
    if (threadIdx.x < n_used) {
        float count = counts[threadIdx.x];
        weights[at + threadIdx.x] = (normalized ? count / (total + 1e-20f) : count) * factor;
    }
}

// A warp for each expert reads all choices, so that no warp waits for the count of another.
KERNEL(32) group_choices(const u32* chosen, u32 n_choices, u32* starts, u32* order, u32* place) {
    const u32 expert = blockIdx.x;
    u32 start = 0;
    for (u32 i = threadIdx.x; i < padded(n_choices); i += 32) {
        start += count_ones(votes(i < n_choices && chosen[i] < expert));
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert + 1 == gridDim.x) {
            starts[gridDim.x] = n_choices;
        }
    }
    for (u32 i = threadIdx.x; i < padded(n_choices); i += 32) {
        bool is_mine = i < n_choices && chosen[i] == expert;
        u32 all = votes(is_mine);
        if (is_mine) {
            u32 to = start + count_ones(all & ((1u << threadIdx.x) - 1));
            order[to] = i;
            place[i] = to;
        }
        start += count_ones(all);
    }
}

// Deep enough for 2^10 experts.
#define DEPTH 11

// The waiting sums, the topmost first, and the level of ids at which the tree joins each with its successor.
struct Waiting {
    float sums[DEPTH];
    u32 levels[DEPTH];
    u32 depth;

    DEVICE_MEMBER void push(float sum, u32 level) {
        UNROLL
        for (int i = DEPTH - 1; i > 0; i--) {
            sums[i] = sums[i - 1];
            levels[i] = levels[i - 1];
        }
        sums[0] = sum;
        levels[0] = level;
        depth++;
    }

    // Adds the topmost and `sum`, which follows it in the tree.
    DEVICE_MEMBER float pop(float sum) {
        sum = sums[0] + sum;
        UNROLL
        for (int i = 0; i + 1 < DEPTH; i++) {
            sums[i] = sums[i + 1];
            levels[i] = levels[i + 1];
        }
        depth--;
        return sum;
    }
};

KERNEL(256) fold_experts(const float* y, const u32* place, const u32* chosen, const float* weights, u32 n_used,
                         const u32* runs, u32 cols, float* out) {
    const u32 column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, n_rows = gridDim.y;
    if (column >= cols) {
        return;
    }
    Waiting waiting = {};
    float sum = -0.0f;
    u32 last = NO_EXPERT;
    for (u32 choice = row * n_used; choice < (row + 1) * n_used; choice++) {
        u32 expert = chosen[choice];
        if (expert < runs[2 * blockIdx.z] || expert >= runs[2 * blockIdx.z + 1]) {
            continue;
        }
        float made = y[(u64)place[choice] * cols + column] * weights[choice];
        if (last != NO_EXPERT) {
            u32 level = 32 - __clz(last ^ expert);
            while (waiting.depth > 0 && waiting.levels[0] < level) {
                sum = waiting.pop(sum);
            }
            waiting.push(sum, level);
        }
        sum = made;
        last = expert;
    }
    while (waiting.depth > 0) {
        sum = waiting.pop(sum);
    }
    out[((u64)blockIdx.z * n_rows + row) * cols + column] = sum;
}
