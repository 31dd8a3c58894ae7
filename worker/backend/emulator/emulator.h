// Runs CUDA kernels on the CPU: provides what `device.cuh` and the kernels need of a compiler and of a device. Each
// thread of a block is a fiber. The blocks of a launch run one after another, except for kernels that wait for others.
//
// A thread runs until it waits at a barrier or for its warp. Then the next thread of a fixed order runs: ascending,
// descending, shuffled, or one warp as far ahead of the others as possible. A missing barrier shows up as another
// result in another order. Shared memory is full of NaN when a block begins. Asynchronous copies are made only when
// the thread waits for them, or for the barrier in shared memory at which they arrive. Not emulated: caches and the order of writes to global memory, blocks that run at the same
// time, the sums inside a tensor core.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __align__(n) alignas(n)
#define KERNEL(threads) extern "C" void
#define KERNEL_SHARING(threads, blocks) extern "C" void
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define UNROLL
#define UNROLL_BY(n)
#define BY_VALUE const
#define SHARED(type, name, n)  \
    static char name##_place;  \
    type* name = static_cast<type*>(emulator::shared(&name##_place, sizeof(type) * (n)))
#define SHARED_DYNAMIC(name) u8* name = emulator::shared_dynamic()
#define SHARED_DYNAMIC_ALIGNED(n_bytes, name) SHARED_DYNAMIC(name)

struct Dim3 {
    unsigned x, y, z;
};

namespace emulator {

enum class State : uint8_t { Ready, AtBarrier, AtPhase, InWarp, Done };

// The exchange of a warp: each lane writes its part, and the last to arrive computes for all.
struct Warp {
    unsigned n_arrived = 0;
    int operation = 0;
    alignas(16) unsigned char in[32][48];
    alignas(16) unsigned char out[32][16];
};

struct Copy {
    void* to;
    const void* from;
    int group;
};

// Copies that arrive at a barrier in shared memory, together and as late as possible.
struct Delivery {
    std::vector<Copy> copies;
    size_t n_bytes_each, n_arrivals;
};

struct Fiber {
    void* stack_pointer;
    Dim3 thread;
    unsigned index, lane;
    Warp* warp;
    State state;
    int n_groups;
    std::vector<Copy> copies;
};

struct Block {
    Dim3 index, size, grid;
};

extern thread_local Fiber* fiber;
extern thread_local Block block;

// Ends the launch with an error that names the fault of the kernel.
[[noreturn]] void fail(const char* why);
void barrier(int place);
// Lets other threads run until the exchange of the warp is computed.
void wait_for_warp();
void release_warp(Warp& warp);
void* shared(const char* place, size_t n_bytes);
unsigned char* shared_dynamic();
void copy_async(void* to, const void* from);
void commit_copies();
void copies_arrived(int n_under_way);
void prefetch(const void* from, size_t n_bytes);
// Barriers in shared memory.
void make_barrier(unsigned long long* at, unsigned n);
void arrive(unsigned long long* at, unsigned n_bytes);
void arrive_with_copies(unsigned long long* at);
void copy_bulk(void* to, const void* from, size_t n_bytes, unsigned long long* at);
void wait_for_phase(unsigned long long* at, unsigned phase);
// A clock for kernels that wait for others, and a pause between two of their checks.
unsigned long long nanoseconds();
void wait_a_little();
void multiply_tiles(float (&acc)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1);

template <class To, class From>
static inline To cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline int leading_zeros(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
static inline int leading_zeros_long(unsigned long long x) { return x == 0 ? 64 : __builtin_clzll(x); }

static inline uint32_t round_bf16(float x) {
    uint32_t bits = cast<uint32_t>(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

static inline float widen_f16(uint32_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {
        float size = ldexpf((float)fraction, -24);
        return sign ? -size : size;
    }
    uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    return cast<float>(sign | wide << 23 | fraction << 13);
}

// All lanes of a warp bring `in`. Once all have arrived, `compute(warp)` writes the output of each lane.
template <class Out, class In, class Compute>
static inline Out meet(int operation, const In& in, Compute compute) {
    static_assert(sizeof(In) <= sizeof(Warp::in[0]) && sizeof(Out) <= sizeof(Warp::out[0]), "a slot");
    Warp& warp = *fiber->warp;
    if (warp.n_arrived == 0) {
        warp.operation = operation;
    } else if (warp.operation != operation) {
        fail("lanes of a warp are at different operations");
    }
    memcpy(warp.in[fiber->lane], &in, sizeof in);
    if (++warp.n_arrived == 32) {
        compute(warp);
        warp.n_arrived = 0;
        release_warp(warp);
    } else {
        wait_for_warp();
    }
    Out out;
    memcpy(&out, warp.out[fiber->lane], sizeof out);
    return out;
}

enum Operation { Shuffle = 1, Ballot, SyncWarp, MultiplyTiles };

template <class T>
struct Sent {
    T value;
    unsigned from;
};

template <class T>
static inline T shuffle(T value, unsigned from) {
    return meet<T>(Shuffle, Sent<T>{value, from & 31}, [](Warp& warp) {
        for (int lane = 0; lane < 32; lane++) {
            Sent<T> mine, theirs;
            memcpy(&mine, warp.in[lane], sizeof mine);
            memcpy(&theirs, warp.in[mine.from], sizeof theirs);
            memcpy(warp.out[lane], &theirs.value, sizeof(T));
        }
    });
}

static inline unsigned ballot(bool is) {
    return meet<unsigned>(Ballot, is, [](Warp& warp) {
        unsigned votes = 0;
        for (int lane = 0; lane < 32; lane++) votes |= (unsigned)warp.in[lane][0] << lane;
        for (int lane = 0; lane < 32; lane++) memcpy(warp.out[lane], &votes, sizeof votes);
    });
}

// Kernels are launched by name, with pointers to the arguments, as a driver does.
using Trampoline = void (*)(void** arguments);
struct Registered {
    Registered(const char* name, Trampoline call, std::vector<size_t> sizes, bool is_together);
};

template <class... A, size_t... I>
static inline void call(void (*kernel)(A...), void** p, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<A>*>(p[I])...);
}

template <class... A>
static inline void call(void (*kernel)(A...), void** p) {
    call(kernel, p, std::index_sequence_for<A...>{});
}

template <class... A>
static inline std::vector<size_t> sizes(void (*)(A...)) {
    return {sizeof(std::decay_t<A>)...};
}

}  // namespace emulator

#define REGISTERED(kernel, is_together)                     \
    static emulator::Registered kernel##_is_registered(     \
        #kernel, [](void** p) { emulator::call(&kernel, p); }, emulator::sizes(&kernel), is_together);
#define EMULATED(kernel) REGISTERED(kernel, false)
// For a kernel with blocks that wait for other launches: all run at the same time, each in an operating system thread.
#define EMULATED_TOGETHER(kernel) REGISTERED(kernel, true)

#define threadIdx (emulator::fiber->thread)
#define blockIdx (emulator::block.index)
#define blockDim (emulator::block.size)
#define gridDim (emulator::block.grid)
#define __syncthreads() emulator::barrier(__COUNTER__)
// The mask is unused: kernels always pass that of all lanes.
#define __shfl_xor_sync(mask, x, with) emulator::shuffle(x, emulator::fiber->lane ^ (unsigned)(with))
#define __shfl_sync(mask, x, lane) emulator::shuffle(x, (unsigned)(lane))
#define __ballot_sync(mask, is) emulator::ballot(is)
#define __popc(x) __builtin_popcount(x)
#define __clz(x) emulator::leading_zeros(x)
#define __clzll(x) emulator::leading_zeros_long(x)
#define __syncwarp() (void)emulator::meet<int>(emulator::SyncWarp, 0, [](emulator::Warp&) {})
