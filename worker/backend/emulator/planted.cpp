// Kernels with a bug each that the emulator must catch, and one without. Threads of two warps, or of one, exchange
// numbers.
#include "../src/cuda/kernels/device.cuh"

// out[i] = in[n - 1 - i], through shared memory.
KERNEL(64) planted_nothing(const u32* in, u32* out) {
    SHARED(u32, numbers, 64);
    numbers[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = numbers[63 - threadIdx.x];
}

KERNEL(64) planted_missing_barrier(const u32* in, u32* out) {
    SHARED(u32, numbers, 64);
    numbers[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = numbers[63 - threadIdx.x];
}

KERNEL(32) planted_missing_meeting(const u32* in, u32* out) {
    SHARED(u32, numbers, 32);
    numbers[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = numbers[31 - threadIdx.x];
}

KERNEL(64) planted_barrier_for_some(const u32* in, u32* out) {
    if (threadIdx.x < 40) {
        __syncthreads();
    }
    out[threadIdx.x] = in[threadIdx.x];
}

KERNEL(64) planted_two_barriers(const u32* in, u32* out) {
    if (threadIdx.x % 2 == 0) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = in[threadIdx.x];
}

KERNEL(64) planted_missing_wait(const u32* in, u32* out) {
    SHARED(Words4, numbers, 16);
    if (threadIdx.x < 16) {
        copy_async(numbers + threadIdx.x, (const Words4*)in + threadIdx.x);
    }
    commit_copies();
    __syncthreads();
    out[threadIdx.x] = ((const u32*)numbers)[63 - threadIdx.x];
    copies_arrived<0>();
}

// Two groups of copies, of which it waits for one.
KERNEL(64) planted_short_wait(const u32* in, u32* out) {
    SHARED(Words4, numbers, 16);
    for (u32 half = 0; half < 2; half++) {
        if (threadIdx.x / 8 == half) {
            copy_async(numbers + threadIdx.x, (const Words4*)in + threadIdx.x);
        }
        commit_copies();
    }
    copies_arrived<1>();
    __syncthreads();
    out[threadIdx.x] = ((const u32*)numbers)[63 - threadIdx.x];
    copies_arrived<0>();
}

KERNEL(64) planted_copy_left_behind(const u32* in, u32* out) {
    SHARED(Words4, numbers, 64);
    copy_async(numbers + threadIdx.x, (const Words4*)in);
    commit_copies();
    out[threadIdx.x] = in[threadIdx.x];
}

KERNEL(64) planted_crooked_copy(const u32* in, u32* out) {
    SHARED(Words4, numbers, 64);
    copy_async(numbers + threadIdx.x, in + 1);
    copies_arrived<0>();
    out[threadIdx.x] = in[threadIdx.x];
}

KERNEL(32) planted_lane_that_left(const u32* in, u32* out) {
    if (threadIdx.x == 31) {
        return;
    }
    out[threadIdx.x] = shuffle_xor(in[threadIdx.x], 1);
}

KERNEL(32) planted_two_meetings(const u32* in, u32* out) {
    out[threadIdx.x] = threadIdx.x < 16 ? shuffle_xor(in[threadIdx.x], 1) : votes(in[threadIdx.x] > 3);
}

EMULATED(planted_nothing)
EMULATED(planted_missing_barrier)
EMULATED(planted_missing_meeting)
EMULATED(planted_barrier_for_some)
EMULATED(planted_two_barriers)
EMULATED(planted_missing_wait)
EMULATED(planted_short_wait)
EMULATED(planted_copy_left_behind)
EMULATED(planted_crooked_copy)
EMULATED(planted_lane_that_left)
EMULATED(planted_two_meetings)
