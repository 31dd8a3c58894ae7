// The fibers of a block, their barriers, and launches by name. Independent of the kernels.
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>

#if defined(__x86_64__)
extern "C" void emulator_switch(void** save, void* to);
#endif

namespace emulator {

thread_local Fiber* fiber;
thread_local Block block;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;
// The most shared memory that a block of an H100 may have.
constexpr size_t SHARED_BYTES = 227 << 10;

struct Kernel {
    Trampoline call;
    std::vector<size_t> sizes;
    bool is_together;
};

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

struct Free {
    void operator()(void* memory) const { free(memory); }
};
using Stack = std::unique_ptr<char, Free>;

// One launch at a time for each thread of the operating system.
struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Stack> stacks;
    // `order[place[i]]` is fiber i.
    std::vector<unsigned> order, place;
    // Always the first in order that can run, so that a warp gets as far ahead of the others as barriers let it.
    bool is_eager = false;
    size_t first_ready = 0;
    unsigned n_running = 0, n_waiting = 0;
    int barrier_place = 0;
    void* main = nullptr;
    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    std::string error;
    unsigned char* memory = nullptr;
    size_t n_shared = 0, n_dynamic = 0;
    std::map<const char*, size_t> placed;
    std::map<unsigned long long*, std::vector<Delivery>> deliveries;

    Machine() : memory(static_cast<unsigned char*>(aligned_alloc(1024, SHARED_BYTES))) {}
    ~Machine() { free(memory); }
};

thread_local Machine machine;

void run_fiber();

#if defined(__x86_64__)
asm(R"(.text
.globl emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

// A stack on which `run_fiber` is about to begin, with the six registers that a switch takes from it.
void* fresh(char* stack, unsigned) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&run_fiber);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    return top;
}
#else
}  // namespace
}  // namespace emulator
#include <ucontext.h>
namespace emulator {
namespace {
thread_local std::vector<ucontext_t> contexts(1025);

void emulator_switch(void** save, void* to) {
    // The main context is the last, and is not known before it is first left.
    if (*save == nullptr) *save = &contexts.back();
    swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(to));
}

void* fresh(char* stack, unsigned i) {
    ucontext_t& context = contexts[i];
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, run_fiber, 0);
    return &context;
}
#endif

[[noreturn]] void leave() {
    void* nowhere = nullptr;
#if !defined(__x86_64__)
    nowhere = fiber->stack_pointer;
#endif
    emulator_switch(&nowhere, machine.main);
    abort();
}

void run(Fiber& next) {
    Fiber& last = *fiber;
    if (&next == &last) return;
    fiber = &next;
    emulator_switch(&last.stack_pointer, next.stack_pointer);
}

// Runs the next thread in order that can run. An eager machine searches from `first_ready`: all before it are waiting.
void run_others() {
    size_t n = machine.fibers.size(), start = machine.is_eager ? machine.first_ready : machine.place[fiber->index] + 1;
    for (size_t i = start; i < (machine.is_eager ? n : start + n); i++) {
        Fiber& next = machine.fibers[machine.order[i < n ? i : i - n]];
        if (next.state == State::Ready) {
            machine.first_ready = i + 1;
            return run(next);
        }
    }
    fail("no thread can run: some wait at a barrier or for their warp, others have returned or wait elsewhere");
}

void run_fiber() {
    machine.kernel->call(machine.arguments);
    if (!fiber->copies.empty()) fail("a thread returned before its copies had arrived");
    fiber->state = State::Done;
    if (--machine.n_running == 0) leave();
    run_others();
    abort();
}

// 0 ascending, 1 descending, any other a seed: all threads shuffled if it is even, else warps, and lanes within each.
void arrange(unsigned n, int order) {
    machine.order.resize(n);
    machine.place.resize(n);
    machine.is_eager = order > 1 && order % 2 == 1;
    uint64_t state = static_cast<uint64_t>(order) * 0x9e3779b97f4a7c15ull;
    auto shuffle = [&state](unsigned* from, unsigned n) {
        for (unsigned i = n; i > 1; i--) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            std::swap(from[i - 1], from[(state >> 33) % i]);
        }
    };
    for (unsigned i = 0; i < n; i++) machine.order[i] = order == 1 ? n - 1 - i : i;
    if (machine.is_eager) {
        std::vector<unsigned> warps(n / 32);
        for (unsigned i = 0; i < n / 32; i++) warps[i] = i;
        shuffle(warps.data(), n / 32);
        for (unsigned i = 0; i < n; i++) machine.order[i] = warps[i / 32] * 32 + i % 32;
        for (unsigned i = 0; i < n; i += 32) shuffle(&machine.order[i], 32);
    } else if (order > 1) {
        shuffle(machine.order.data(), n);
    }
    for (unsigned i = 0; i < n; i++) machine.place[machine.order[i]] = i;
}

void run_block(unsigned n, int order) {
    machine.fibers.assign(n, Fiber());
    machine.warps.assign((n + 31) / 32, Warp());
    while (machine.stacks.size() < n) machine.stacks.emplace_back(static_cast<char*>(aligned_alloc(64, STACK_BYTES)));
    arrange(n, order);
    for (unsigned i = 0; i < n; i++) {
        Fiber& f = machine.fibers[i];
        f.index = i;
        f.lane = i % 32;
        f.warp = &machine.warps[i / 32];
        f.state = State::Ready;
        f.thread = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
        f.stack_pointer = fresh(machine.stacks[i].get(), i);
    }
    machine.n_running = n;
    machine.n_waiting = 0;
    machine.first_ready = 0;
    machine.placed.clear();
    machine.deliveries.clear();
    machine.n_shared = machine.n_dynamic;
    memset(machine.memory, 0xff, SHARED_BYTES);
    fiber = &machine.fibers[machine.order[0]];
    machine.main = nullptr;
    emulator_switch(&machine.main, fiber->stack_pointer);
    fiber = nullptr;
}

}  // namespace

void fail(const char* why) {
    char where[160];
    snprintf(where, sizeof where, "; block (%u, %u, %u), thread %u", block.index.x, block.index.y, block.index.z,
             fiber->index);
    machine.error = std::string(why) + where;
    leave();
}

void barrier(int place) {
    if (machine.n_waiting > 0 && machine.barrier_place != place) fail("threads of a block are at different barriers");
    machine.barrier_place = place;
    fiber->state = State::AtBarrier;
    if (++machine.n_waiting == machine.fibers.size()) {
        machine.n_waiting = 0;
        machine.first_ready = 0;
        for (Fiber& f : machine.fibers) f.state = State::Ready;
    }
    run_others();
}

void wait_for_warp() {
    fiber->state = State::InWarp;
    run_others();
}

void release_warp(Warp& warp) {
    Fiber* first = fiber - fiber->lane;
    machine.first_ready = 0;
    for (int lane = 0; lane < 32; lane++) {
        if (first[lane].warp == &warp) first[lane].state = State::Ready;
    }
}

void* shared(const char* place, size_t n_bytes) {
    auto found = machine.placed.find(place);
    if (found == machine.placed.end()) {
        size_t start = (machine.n_shared + 127) / 128 * 128;
        if (start + n_bytes > SHARED_BYTES) fail("the block has no shared memory left");
        machine.n_shared = start + n_bytes;
        found = machine.placed.emplace(place, start).first;
    }
    return machine.memory + found->second;
}

unsigned char* shared_dynamic() { return machine.memory; }

void copy_async(void* to, const void* from) {
    auto address = [](const void* at) { return reinterpret_cast<uintptr_t>(at); };
    if ((address(to) | address(from)) & 15) fail("a copy of 16 bytes is not aligned");
    fiber->copies.push_back({to, from, fiber->n_groups});
}

void prefetch(const void* from, size_t n_bytes) {
    if ((reinterpret_cast<uintptr_t>(from) | n_bytes) & 15) fail("a prefetch is not aligned to 16 bytes");
}

void commit_copies() { fiber->n_groups++; }

void copies_arrived(int n_under_way) {
    auto& copies = fiber->copies;
    size_t n = 0;
    for (; n < copies.size() && copies[n].group < fiber->n_groups - n_under_way; n++) {
        memcpy(copies[n].to, copies[n].from, 16);
    }
    copies.erase(copies.begin(), copies.begin() + n);
}

namespace {

// A barrier in the eight bytes of a device's.
struct Barrier {
    uint8_t n, n_missing;
    bool is_odd;  // the phase that has not ended is the second, the fourth, ..
    uint8_t is_made;
    int32_t n_bytes;  // expected and not yet copied
};
constexpr uint8_t MADE = 0x5a;

Barrier& barrier_at(unsigned long long* at) {
    static_assert(sizeof(Barrier) == sizeof *at, "as on a device");
    Barrier& barrier = *reinterpret_cast<Barrier*>(at);
    if (barrier.is_made != MADE) fail("a barrier in shared memory is used before it is made");
    return barrier;
}

void wake_waiting() {
    machine.first_ready = 0;
    for (Fiber& f : machine.fibers) {
        if (f.state == State::AtPhase) f.state = State::Ready;
    }
}

void end_phase_if_complete(Barrier& barrier) {
    if (barrier.n_missing > 0 || barrier.n_bytes != 0) return;
    barrier.n_missing = barrier.n;
    barrier.is_odd = !barrier.is_odd;
    wake_waiting();
}

void count_arrivals(Barrier& barrier, size_t n) {
    if (n > barrier.n_missing) fail("more arrivals at a barrier in shared memory than it counts");
    barrier.n_missing -= (uint8_t)n;
}

void deliver(unsigned long long* at) {
    std::vector<Delivery> deliveries = std::move(machine.deliveries[at]);
    machine.deliveries[at].clear();
    for (Delivery& delivery : deliveries) {
        Barrier& barrier = barrier_at(at);
        for (Copy& copy : delivery.copies) memcpy(copy.to, copy.from, delivery.n_bytes_each);
        if (delivery.n_arrivals == 0) barrier.n_bytes -= (int32_t)delivery.n_bytes_each;
        count_arrivals(barrier, delivery.n_arrivals);
        end_phase_if_complete(barrier);
    }
}

}  // namespace

void make_barrier(unsigned long long* at, unsigned n) {
    Barrier barrier = {(uint8_t)n, (uint8_t)n, false, MADE, 0};
    if (n == 0 || n > 255) fail("a barrier in shared memory of too few or too many threads");
    memcpy(at, &barrier, sizeof barrier);
}

void arrive(unsigned long long* at, unsigned n_bytes) {
    Barrier& barrier = barrier_at(at);
    barrier.n_bytes += (int32_t)n_bytes;
    count_arrivals(barrier, 1);
    end_phase_if_complete(barrier);
}

void arrive_with_copies(unsigned long long* at) {
    barrier_at(at);
    machine.deliveries[at].push_back({std::move(fiber->copies), 16, 1});
    fiber->copies.clear();
    wake_waiting();
}

void copy_bulk(void* to, const void* from, size_t n_bytes, unsigned long long* at) {
    auto address = [](const void* at) { return reinterpret_cast<uintptr_t>(at); };
    if ((address(to) | address(from) | n_bytes) & 15) fail("a copy is not aligned to 16 bytes");
    barrier_at(at);
    machine.deliveries[at].push_back({{{to, from, 0}}, n_bytes, 0});
    wake_waiting();
}

void wait_for_phase(unsigned long long* at, unsigned phase) {
    for (;;) {
        if (barrier_at(at).is_odd != (phase != 0)) return;
        deliver(at);
        if (barrier_at(at).is_odd != (phase != 0)) return;
        fiber->state = State::AtPhase;
        run_others();
    }
}

namespace {

struct Operands {
    float acc[4];
    unsigned a[4], b[2];
};

struct Product {
    float acc[4];
};

float half_of(unsigned pair, int which) { return cast<float>(which ? pair & 0xffff0000u : pair << 16); }

void multiply_all(Warp& warp) {
    float a[16][16], b[8][16];
    Operands all[32];
    for (int lane = 0; lane < 32; lane++) {
        Operands& x = all[lane];
        memcpy(&x, warp.in[lane], sizeof x);
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 4; j++) a[g + j % 2 * 8][2 * t + j / 2 * 8 + i] = half_of(x.a[j], i);
            for (int j = 0; j < 2; j++) b[g][2 * t + j * 8 + i] = half_of(x.b[j], i);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        Product out;
        for (int i = 0; i < 4; i++) {
            const float *row = a[lane / 4 + i / 2 * 8], *column = b[2 * (lane % 4) + i % 2];
            float sum = all[lane].acc[i];
            // Products of two bf16 are exact, so this is one rounding for each term.
            for (int k = 0; k < 16; k++) sum += row[k] * column[k];
            out.acc[i] = sum;
        }
        memcpy(warp.out[lane], &out, sizeof out);
    }
}

}  // namespace

void multiply_tiles(float (&acc)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    Operands in = {{acc[0], acc[1], acc[2], acc[3]}, {a0, a1, a2, a3}, {b0, b1}};
    Product out = meet<Product>(MultiplyTiles, in, multiply_all);
    memcpy(acc, out.acc, sizeof out.acc);
}

unsigned long long nanoseconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return (unsigned long long)std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void wait_a_little() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

Registered::Registered(const char* name, Trampoline call, std::vector<size_t> sizes, bool is_together) {
    kernels()[name] = {call, std::move(sizes), is_together};
}

namespace {

struct Launch {
    const Kernel* kernel;
    void** arguments;
    Dim3 grid, size;
    unsigned n_dynamic;
    int order;
};

// Runs a block in the calling thread. Returns the error, or an empty string.
std::string run_in(const Launch& launch, uint64_t at) {
    machine.error.clear();
    machine.kernel = launch.kernel;
    machine.arguments = launch.arguments;
    machine.n_dynamic = launch.n_dynamic;
    Dim3 grid = launch.grid;
    block.size = launch.size;
    block.grid = grid;
    uint64_t x = at % grid.x, y = at / grid.x % grid.y, z = at / grid.x / grid.y;
    block.index = {(unsigned)x, (unsigned)y, (unsigned)z};
    run_block(launch.size.x * launch.size.y * launch.size.z, launch.order);
    return machine.error;
}

std::string run_one_by_one(const Launch& launch, uint64_t n_blocks) {
    std::string error;
    // Blocks may run in any order too.
    for (uint64_t i = 0; i < n_blocks && error.empty(); i++) {
        error = run_in(launch, launch.order == 1 ? n_blocks - 1 - i : i);
    }
    return error;
}

std::string run_together(const Launch& launch, uint64_t n_blocks) {
    std::vector<std::string> errors(n_blocks);
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < n_blocks; i++) threads.emplace_back([&, i] { errors[i] = run_in(launch, i); });
    for (std::thread& thread : threads) thread.join();
    for (std::string& error : errors) {
        if (!error.empty()) return error;
    }
    return "";
}

}  // namespace

}  // namespace emulator

extern "C" {

// Launches a kernel, with pointers to its arguments. Returns 0, or 1 with the reason in `emulator_error`.
int emulator_launch(const char* name, const unsigned* grid, const unsigned* size, unsigned n_dynamic, void** arguments,
                    int order) {
    using namespace emulator;
    machine.error.clear();
    auto found = kernels().find(name);
    unsigned n = size[0] * size[1] * size[2];
    bool is_empty = n == 0 || grid[0] == 0 || grid[1] == 0 || grid[2] == 0;
    if (found == kernels().end()) machine.error = std::string("unknown kernel ") + name;
    else if (is_empty || n > 1024 || n % 32 != 0) machine.error = "an empty or too large launch, or a partial warp";
    else if (n_dynamic > SHARED_BYTES) machine.error = "a block has less shared memory than the launch requires";
    if (!machine.error.empty()) return 1;
    Dim3 in_grid = {grid[0], grid[1], grid[2]}, in_block = {size[0], size[1], size[2]};
    Launch launch = {&found->second, arguments, in_grid, in_block, n_dynamic, order};
    uint64_t n_blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    machine.error = (launch.kernel->is_together ? run_together : run_one_by_one)(launch, n_blocks);
    return machine.error.empty() ? 0 : 1;
}

// Whether a kernel's blocks wait for those of other launches.
int emulator_waits(const char* name) {
    auto found = emulator::kernels().find(name);
    return found != emulator::kernels().end() && found->second.is_together;
}

// The error of the last launch of this thread.
const char* emulator_error() { return emulator::machine.error.c_str(); }

// How many arguments a kernel has, and their sizes; -1 if there is no such kernel.
int emulator_parameters(const char* name, const size_t** sizes) {
    auto found = emulator::kernels().find(name);
    if (found == emulator::kernels().end()) return -1;
    *sizes = found->second.sizes.data();
    return (int)found->second.sizes.size();
}

// The i-th kernel's name in order, or null.
const char* emulator_kernel(unsigned i) {
    for (auto& [name, kernel] : emulator::kernels()) {
        if (i-- == 0) return name.c_str();
    }
    return nullptr;
}
}
