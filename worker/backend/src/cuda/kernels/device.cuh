// The operations of a device that kernels use, under names that nvcc, NVRTC and the emulator all support. The only
// place with inline PTX: each function with PTX has an emulated twin. Includes no header of CUDA.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef EMULATOR
#include "emulator.h"
#else
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// At least this many blocks share a multiprocessor.
#define KERNEL_SHARING(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define DEVICE static DEVICE_MEMBER
#define DEVICE_MEMBER __device__ __forceinline__
// Shared memory of a block: of a static size, or of the size that the launch gives.
#define SHARED(type, name, n) __shared__ __align__(16) type name[n]
#define SHARED_DYNAMIC(name) SHARED_DYNAMIC_ALIGNED(16, name)
#define SHARED_DYNAMIC_ALIGNED(n_bytes, name) extern __shared__ __align__(n_bytes) u8 name[]
#define UNROLL _Pragma("unroll")
#define PRAGMA(words) _Pragma(#words)
#define UNROLL_BY(n) PRAGMA(unroll n)
// For a struct that is passed by value: it can be indexed in place.
#define BY_VALUE const __grid_constant__
#endif

struct bf16 {
    u16 bits;
};

DEVICE u32 min_of(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
// The length of a row of bf16 that holds n numbers.
DEVICE u32 padded(u32 n) { return (n + 31) & ~31u; }

DEVICE float bits_to_float(u32 bits) {
#ifdef EMULATOR
    return emulator::cast<float>(bits);
#else
    return __uint_as_float(bits);
#endif
}

DEVICE u32 float_to_bits(float x) {
#ifdef EMULATOR
    return emulator::cast<u32>(x);
#else
    return __float_as_uint(x);
#endif
}

DEVICE double bits_to_double(u64 bits) {
#ifdef EMULATOR
    return emulator::cast<double>(bits);
#else
    return __longlong_as_double((long long)bits);
#endif
}

DEVICE u64 double_to_bits(double x) {
#ifdef EMULATOR
    return emulator::cast<u64>(x);
#else
    return (u64)__double_as_longlong(x);
#endif
}

DEVICE float minus_infinity() { return bits_to_float(0xff800000u); }

DEVICE float widen(bf16 x) { return bits_to_float((u32)x.bits << 16); }
DEVICE float low_bf16(u32 pair) { return bits_to_float(pair << 16); }

// Two numbers to the nearest bf16, ties to even; a NaN becomes 0x7fff. `low` is in the lower half.
DEVICE u32 pack_bf16(float low, float high) {
#ifdef EMULATOR
    return emulator::round_bf16(low) | emulator::round_bf16(high) << 16;
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

DEVICE bf16 narrow(float x) {
    bf16 out;
    out.bits = (u16)pack_bf16(x, 0.0f);
    return out;
}

// The f16 in the lower half of a word.
DEVICE float widen_f16(u32 bits) {
#ifdef EMULATOR
    return emulator::widen_f16(bits & 0xffffu);
#else
    float x;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "h"((u16)bits));
    return x;
#endif
}

// (x & mask) | bits, in one instruction.
DEVICE u32 and_or(u32 x, u32 mask, u32 bits) {
#ifdef EMULATOR
    return (x & mask) | bits;
#else
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(bits));
    return out;
#endif
}

// 16 bytes, which must be aligned.
struct __align__(16) Words4 {
    u32 w[4];
};
struct __align__(8) Words2 {
    u32 w[2];
};

// acc[16 x 8] += a[16 x 16] * b[16 x 8]. With g = lane / 4 and t = lane % 4, a lane holds
//   a[0], a[1]: rows g and g + 8 of a, columns 2t and 2t + 1; a[2], a[3]: the same rows, columns 2t + 8 and 2t + 9
//   b[0]: rows 2t and 2t + 1 of b, column g; b[1]: rows 2t + 8 and 2t + 9
//   acc[0], acc[1]: row g, columns 2t and 2t + 1; acc[2], acc[3]: row g + 8
DEVICE void multiply_tiles(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef EMULATOR
    emulator::multiply_tiles(acc, a0, a1, a2, a3, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// The place of element i in a row that lanes read by sixteen bytes: of each 32 elements lane t reads 4t .. 4t + 3 of
// both steps of sixteen, which are adjacent. In `multiply_tiles` the first two of a step are columns 2t and 2t + 1, the
// others 2t + 8 and 2t + 9. The sixteen may have any order of columns, as long as both operands have the same.
DEVICE u32 by_lane(u32 i) { return i / 32 * 32 + i / 4 % 4 * 8 + i / 16 % 2 * 4 + i % 4; }

// Begins to copy 16 bytes to shared memory. They have arrived after `copies_arrived` of their group and a barrier.
DEVICE void copy_async(void* shared, const void* global) {
#ifdef EMULATOR
    emulator::copy_async(shared, global);
#else
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#endif
}

// Ends a group of copies.
DEVICE void commit_copies() {
#ifdef EMULATOR
    emulator::commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most N of this thread's groups are under way.
template <int N>
DEVICE void copies_arrived() {
#ifdef EMULATOR
    emulator::copies_arrived(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- barriers in shared memory (sm_90) ------------------------------------------------------------------------------
// A phase of a barrier ends after `n` arrivals, and after the copies that it expects; the next phase begins at once.

#ifndef EMULATOR
DEVICE u32 in_shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }
#endif

DEVICE void make_barrier(u64* barrier, u32 n) {
#ifdef EMULATOR
    emulator::make_barrier(barrier, n);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(in_shared(barrier)), "r"(n) : "memory");
#endif
}

// Shows the barriers that this thread has made to copies. Other threads see them after a barrier of the block.
DEVICE void publish_barriers() {
#ifndef EMULATOR
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

DEVICE void arrive(u64* barrier) {
#ifdef EMULATOR
    emulator::arrive(barrier, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(in_shared(barrier)) : "memory");
#endif
}

// Arrives; the phase also waits for this many bytes of `copy_bulk`.
DEVICE void arrive_expecting(u64* barrier, u32 n_bytes) {
#ifdef EMULATOR
    emulator::arrive(barrier, n_bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(barrier)), "r"(n_bytes)
                 : "memory");
#endif
}

// Arrives once all `copy_async` of this thread have.
DEVICE void arrive_with_copies(u64* barrier) {
#ifdef EMULATOR
    emulator::arrive_with_copies(barrier);
#else
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(in_shared(barrier)) : "memory");
#endif
}

// Waits for the end of a phase: 0 for the first, third, .. of the barrier, 1 for the second, fourth, .. ; for 1 at once
// if none has ended.
DEVICE void wait_for_phase(u64* barrier, u32 phase) {
#ifdef EMULATOR
    emulator::wait_for_phase(barrier, phase);
#else
    u32 has_ended;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(has_ended)
            : "r"(in_shared(barrier)), "r"(phase)
            : "memory");
    } while (!has_ended);
#endif
}

// Begins to copy adjacent memory for a phase of the barrier. Addresses and size are multiples of 16.
DEVICE void copy_bulk(void* shared, const void* global, u32 n_bytes, u64* barrier) {
#ifdef EMULATOR
    emulator::copy_bulk(shared, global, n_bytes, barrier);
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     in_shared(shared)),
                 "l"(global), "r"(n_bytes), "r"(in_shared(barrier))
                 : "memory");
#endif
}

// ---- products of four warps (sm_90a) --------------------------------------------------------------------------------

// All warps of a block of 384 threads begin with 168 registers. Four warps give back all but 40, or take up to 232.
DEVICE void give_back_registers() {
#ifndef EMULATOR
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}
DEVICE void take_registers() {
#ifndef EMULATOR
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
}

// Precedes products whose operands are in registers that the warp has written.
DEVICE void begin_products() {
#ifndef EMULATOR
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Ends a group of products.
DEVICE void commit_products() {
#ifndef EMULATOR
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most the last group of this warp's products is under way.
DEVICE void earlier_products_done() {
#ifndef EMULATOR
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#endif
}

// Waits for all products into acc.
DEVICE void products_done(float (&acc)[32][4]) {
#ifdef EMULATOR
    (void)acc;
#else
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    UNROLL
    for (u32 i = 0; i < 128; i++) {
        // The compiler does not move reads of acc before the wait.
        asm volatile("" : "+f"(acc[i / 4][i % 4])::"memory");
    }
#endif
}

// The place of a chunk of 16 bytes among those of a tile of rows, four for each row.
DEVICE u32 place_of_chunk(u32 row, u32 chunk) { return row * 4 + (chunk ^ (row / 2 % 4)); }

#define FOUR_SUMS(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define SUMS(i)                                                                                                     \
    FOUR_SUMS(i), FOUR_SUMS(i + 1), FOUR_SUMS(i + 2), FOUR_SUMS(i + 3), FOUR_SUMS(i + 4), FOUR_SUMS(i + 5),         \
        FOUR_SUMS(i + 6), FOUR_SUMS(i + 7)

// acc[i] += a * the rows 8i .. 8i + 7, as `multiply_tiles` for each i, by four adjacent warps. Each warp has its own
// sixteen rows of a. `rows` is a tile of 256 rows of 32 elements in shared memory (`tile_rows`); `step` selects sixteen.
// Begins only: until `earlier_products_done` or `products_done`, neither acc, a nor the rows may change.
DEVICE void multiply_rows(float (&acc)[32][4], const u32 (&a)[4], const Words4* rows, u32 step) {
#ifdef EMULATOR
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (u32 i = 0; i < 32; i++) {
        const u32 low = rows[place_of_chunk(i * 8 + g, step * 2)].w[t];
        const u32 high = rows[place_of_chunk(i * 8 + g, step * 2 + 1)].w[t];
        multiply_tiles(acc[i], a[0], a[1], a[2], a[3], low, high);
    }
#else
    // Rows of 64 bytes, swizzled, eight of which are 512 bytes.
    const u64 descriptor = (u64)((in_shared(rows) + step * 32) >> 4 & 0x3fff) | 1ull << 16 | 32ull << 32 | 2ull << 62;
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));
#endif
}

// Begins to bring memory to the cache that all blocks share. The address and the size are multiples of 16.
DEVICE void prefetch(const void* from, u32 n_bytes) {
#ifdef EMULATOR
    emulator::prefetch(from, n_bytes);
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n_bytes));
#endif
}

// Weights are read once: they need not stay in the nearest cache.
DEVICE Words4 load_once(const Words4* from) {
#ifdef EMULATOR
    return *from;
#else
    Words4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
        : "l"(from));
    return x;
#endif
}

DEVICE Words2 load_once(const Words2* from) {
#ifdef EMULATOR
    return *from;
#else
    Words2 x;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(from));
    return x;
#endif
}

DEVICE u32 load_once(const u32* from) {
#ifdef EMULATOR
    return *from;
#else
    u32 x;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
#endif
}

// For all 32 lanes of a whole warp.
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE double shuffle_xor(double x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 votes(bool is) { return __ballot_sync(0xffffffffu, is); }
DEVICE u32 count_ones(u32 x) { return (u32)__popc(x); }

// Adds one to a count that threads of a block share, and returns its old value.
DEVICE u32 count_up(u32* at) {
#ifdef EMULATOR
    return (*at)++;
#else
    return atomicAdd(at, 1u);
#endif
}

// Ranks signal each other through memory that several devices reach. A rank that loads a stored value also sees all
// writes before that store, and those of the whole block if a barrier precedes the store.
DEVICE void store_release(u64* at, u64 value) {
#ifdef EMULATOR
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#else
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#endif
}

DEVICE void store_release(u32* at, u32 value) {
#ifdef EMULATOR
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#else
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
#endif
}

DEVICE u64 load_acquire(const u64* at) {
#ifdef EMULATOR
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#else
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
#endif
}

DEVICE u32 load_acquire(const u32* at) {
#ifdef EMULATOR
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#else
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
#endif
}

// Reads a clock that only goes forward.
DEVICE u64 nanoseconds() {
#ifdef EMULATOR
    return emulator::nanoseconds();
#else
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#endif
}

// Pauses between two loads of a flag that another block will write. On a device the load takes long enough.
DEVICE void wait_a_little() {
#ifdef EMULATOR
    emulator::wait_a_little();
#endif
}
