// A sum over all ranks of a stage with devices that reach each other's memory, in one launch. Each block copies its
// part of this rank's planes to this rank's buffer, signals the same block of every other rank, and waits for their
// signals. Then it adds the planes of all buffers.
//
// One exchange of signals per sum is enough, because buffers have two sides. A rank writes a side again two sums later.
// By then it has exchanged signals with all ranks in the sum between, and they had read this side before: a kernel
// begins when the one before has ended.
//
// Each block has its own count, so no block waits for another of its own launch. A launch that a graph has recorded
// continues the count in each replay.
#include "kernels.cuh"

// Numbers per thread at a time, and planes that are loaded at once: the loads from other devices overlap.
#define EACH 2
#define AHEAD 8
// Loads of a flag between two checks of the clock and of the host's flag, which is slow to load.
#define LOADS_PER_CHECK 256

DEVICE float* part_of(u64 buffer, u32 side) {
    return (float*)(buffer + ONE_SHOT_DATA) + (u64)(side * ONE_SHOT_BLOCKS + blockIdx.x) * ONE_SHOT_REGION;
}

DEVICE u64* flag_of(u64 buffer, u32 rank) {
    return (u64*)(buffer + ONE_SHOT_FLAGS) + blockIdx.x * ONE_SHOT_RANKS + rank;
}

// Waits for a flag. Returns false if the host ends the wait or `patience` runs out.
DEVICE bool wait_for_flag(const u64* flag, u64 count, const u32* control, u64 patience) {
    const u64 since = nanoseconds();
    for (u32 n_loads = 1; load_acquire(flag) < count; n_loads++) {
        if (n_loads % LOADS_PER_CHECK == 0 && (load_acquire(control) != 0 || nanoseconds() - since > patience)) {
            return false;
        }
        wait_a_little();
    }
    return true;
}

// Runs in the first warp, with a lane for each rank. Returns the missing ranks, one bit each. A rank that has aborted a
// sum has no valid planes for the next one, so it raises no flags.
DEVICE u32 meet(const OneShot& ranks, u64 count, u32* control, u64 patience) {
    const u32 lane = threadIdx.x;
    const u64 buffer = ranks.buffers[ranks.me];
    const bool is_other = lane < ranks.n_ranks && lane != ranks.me;
    const bool is_broken = load_acquire((const u64*)(buffer + ONE_SHOT_BROKEN)) != 0;
    if (is_other && !is_broken) {
        store_release(flag_of(ranks.buffers[lane], ranks.me), count);
    }
    // This rank raises all its flags before it waits for another rank.
    __syncwarp();
    return votes(is_other && (is_broken || !wait_for_flag(flag_of(buffer, lane), count, control, patience)));
}

DEVICE void abort_sum(u64 buffer, u32 missing, u32* control) {
    store_release((u64*)(buffer + ONE_SHOT_BROKEN), 1);
    if (load_acquire(control + 1) == 0) {
        u32 first = 0;
        while ((missing >> first & 1) == 0) {
            first++;
        }
        store_release(control + 1, first + 1);
    }
}

// Sums of EACH numbers by the tree.
struct Tree {
    float sum[EACH];
    float waiting[EACH][ONE_SHOT_DEPTH];
    u32 depth;

    DEVICE_MEMBER void push(const float (&numbers)[EACH], u32 n_merges) {
        UNROLL
        for (int i = 0; i < EACH; i++) {
            sum[i] = numbers[i];
        }
        for (u32 m = 0; m < n_merges; m++) {
            UNROLL
            for (int i = 0; i < EACH; i++) {
                sum[i] = waiting[i][0] + sum[i];
                UNROLL
                for (int j = 0; j + 1 < ONE_SHOT_DEPTH; j++) {
                    waiting[i][j] = waiting[i][j + 1];
                }
            }
        }
        depth = depth + 1 - n_merges;
        UNROLL
        for (int i = 0; i < EACH; i++) {
            UNROLL
            for (int j = ONE_SHOT_DEPTH - 1; j > 0; j--) {
                waiting[i][j] = waiting[i][j - 1];
            }
            waiting[i][0] = sum[i];
        }
    }
};

// Adds the numbers at, at + 256, .. of all planes, up to the end of this block's part.
DEVICE void fold(const OneShot& ranks, const float* own, u64 stride, u32 side, u32 at, u32 n_here, float (&sum)[EACH]) {
    Tree tree = {};
    for (u32 first = 0; first < ranks.n_planes; first += AHEAD) {
        float ahead[AHEAD][EACH];
        UNROLL
        for (int k = 0; k < AHEAD; k++) {
            const u32 plane = first + k;
            if (plane < ranks.n_planes) {
                const u32 rank = ranks.rank[plane], number = ranks.number[plane];
                const float* from = rank == ranks.me ? own + number * stride
                                                     : part_of(ranks.buffers[rank], side) + number * ranks.per_block;
                UNROLL
                for (int i = 0; i < EACH; i++) {
                    ahead[k][i] = at + i * 256 < n_here ? from[at + i * 256] : 0.0f;
                }
            }
        }
        UNROLL
        for (int k = 0; k < AHEAD; k++) {
            const u32 plane = first + k;
            if (plane < ranks.n_planes) {
                tree.push(ahead[k], plane + 1 == ranks.n_planes ? tree.depth : ranks.merges[plane]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < EACH; i++) {
        sum[i] = tree.sum[i];
    }
}

KERNEL(256) sum_one_shot(float* planes, u64 stride, u32 n, BY_VALUE OneShot ranks, u32* control, u64 patience) {
    SHARED(u32, missing, 1);
    const u32 begin = blockIdx.x * ranks.per_block, n_here = min_of(ranks.per_block, n - begin);
    const u64 buffer = ranks.buffers[ranks.me];
    u64* counted = (u64*)buffer + blockIdx.x;
    const u64 count = *counted + 1;
    const u32 side = (u32)(count & 1);
    float *own = planes + begin, *shown = part_of(buffer, side);
    for (u32 plane = 0; plane < ranks.n_planes; plane++) {
        if (ranks.rank[plane] == ranks.me) {
            const u32 number = ranks.number[plane];
            for (u32 i = threadIdx.x; i < n_here; i += 256) {
                shown[number * ranks.per_block + i] = own[number * stride + i];
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const u32 absent = meet(ranks, count, control, patience);
        if (threadIdx.x == 0) {
            missing[0] = absent;
            *counted = count;
            if (absent != 0) {
                abort_sum(buffer, absent, control);
            }
        }
    }
    __syncthreads();
    if (missing[0] != 0) {
        return;
    }
    for (u32 at = threadIdx.x; at < n_here; at += EACH * 256) {
        float sum[EACH];
        fold(ranks, own, stride, side, at, n_here, sum);
        UNROLL
        for (int i = 0; i < EACH; i++) {
            if (at + i * 256 < n_here) {
                own[at + i * 256] = sum[i];
            }
        }
    }
}
