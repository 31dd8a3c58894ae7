// A libcuda.so for machines without a GPU: the driver calls that the host makes, over host memory and the emulator of
// kernels. Built by mod.rs for tests; independent of models.
//
// Calls only begin work, as on a device: the work of a stream runs when a call waits for it. So code that writes or
// reads pinned memory too early gets wrong data. New memory is full of NaN, with guards on both sides. A copy fails if
// its memory was not allocated.
//
// Work may have to wait for other streams or other processes. Then a thread runs all streams in the background. Each
// query of an event runs one piece of work of every stream. A kernel that waits for others runs in threads of its own
// meanwhile. A kernel may reach another device's memory only after its context has enabled the access.
//
// While a thread records, calls return the same errors as a real driver's. A record has copies of arguments, but not of
// the memory that they point to. Memory in whole pieces of two MiB is a file that other processes may open.
//
// Calls that allocate or free memory wait for all work that their context has begun, in every stream. A real driver may
// do so: if a kernel there waits for a peer that waits in the same way, neither ends.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

extern "C" int emulator_launch(const char* name, const unsigned* grid, const unsigned* size, unsigned n_dynamic,
                               void** arguments, int order);
extern "C" const char* emulator_error();
extern "C" int emulator_parameters(const char* name, const size_t** sizes);
extern "C" int emulator_waits(const char* name);

namespace {

enum Code { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
            NOT_READY = 600,
            INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, LAUNCH_FAILED = 719,
            PEER_ACCESS_UNSUPPORTED = 217, PEER_ACCESS_ALREADY = 704,
            CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905,
            CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907 };

// The result of work that has to wait for others.
constexpr int PENDING = -1;
constexpr size_t GUARD = 256;
constexpr unsigned char GUARD_BYTE = 0xa5;
const char CUBIN[] = "fake cubin of ";

using Work = std::function<int()>;

struct Event {
    long n_recorded = 0, n_passed = 0;
    // Whether its last mark is in a capture and is not executed.
    bool is_captured = false;
    bool has_time = true;
};

struct Node {
    // The work of one replay.
    std::function<Work()> begin;
    std::function<void()> gone;
};

struct Graph {
    std::vector<Node> nodes;
};

// The nodes of a record live until no graph that was made from it exists.
struct Executable {
    std::shared_ptr<Graph> graph;
    size_t n_bytes;
};

struct Stream {
    // Unique in the life of the process.
    long id;
    void* context;
    // Counts of its work.
    long n_begun = 0, n_done = 0;
    std::deque<Work> work;
    std::shared_ptr<Graph> capture;
    bool is_invalid = false;
};

// Memory that other processes may open: a file without a name.
struct Shared {
    int file;
    size_t whole;
};

// The handle that another process opens it with.
struct Handle {
    int process, file;
    size_t whole;
    char unused[48];
};

struct Module {
    std::string unit;
};

struct Function {
    std::string name;
    // If the host has not loaded it, the first launch does.
    bool is_loaded = false;
};

long number(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

struct Driver {
    std::mutex mutex;
    std::map<uintptr_t, size_t> memory, pinned;
    std::map<uintptr_t, Shared> shared;
    // Memory of other processes, by its address in this one.
    std::map<uintptr_t, size_t> opened;
    // The context that memory belongs to, and pairs of contexts: the first may reach the memory of the second.
    std::map<uintptr_t, void*> owners;
    std::set<std::pair<void*, void*>> reached;
    std::vector<Stream*> streams;
    long n_streams = 0;
    size_t n_bytes = 0;
    // Whether a thread runs all streams in the background.
    bool is_running = false;
    // The first failure on the device; all later calls return it.
    int failed = SUCCESS;
    long n_devices = number("FAKE_CUDA_DEVICES", 1);
    long n_bytes_max = number("FAKE_CUDA_MIB", 2048) << 20;
    long order = number("FAKE_CUDA_ORDER", 0);
    // The launch, counted from 1, that fails; 0: none.
    long failing_launch = number("FAKE_CUDA_FAIL_LAUNCH", 0), n_launches = 0;
    // The launch that never ends, counted in the same way.
    long hanging_launch = number("FAKE_CUDA_HANG_LAUNCH", 0);
};

Driver& driver() {
    static Driver* it = new Driver;
    return *it;
}

thread_local void* context = nullptr;
// The stream that this thread records.
thread_local Stream* capturing = nullptr;

// Appends a call to the file that FAKE_CUDA_TRACE names, if any: a word or two in a line.
void trace(const char* what, const std::string& of = "") {
    static FILE* file = getenv("FAKE_CUDA_TRACE") ? fopen(getenv("FAKE_CUDA_TRACE"), "a") : nullptr;
    if (!file) return;
    fprintf(file, of.empty() ? "%s\n" : "%s %s\n", what, of.c_str());
    fflush(file);
}

bool is_in(const std::map<uintptr_t, size_t>& all, const void* at, size_t n) {
    uintptr_t start = reinterpret_cast<uintptr_t>(at);
    auto next = all.upper_bound(start);
    if (next == all.begin()) return false;
    auto found = std::prev(next);
    return start - found->first <= found->second && n <= found->second - (start - found->first);
}

int fail(int code, const char* why) {
    fprintf(stderr, "fake driver: %s\n", why);
    driver().failed = code;
    return code;
}

using Held = std::unique_lock<std::mutex>;

// Runs the next work of the stream. Returns false if it has to wait, or if there is none.
bool run_one(Stream& stream) {
    if (stream.work.empty()) return false;
    if (!driver().failed && stream.work.front()() == PENDING && !driver().failed) return false;
    stream.work.pop_front();
    stream.n_done++;
    return true;
}

// Runs all work that need not wait.
bool run_all() {
    bool has_moved = false;
    auto& streams = driver().streams;
    for (size_t i = 0; i < streams.size(); i++) {
        while (run_one(*streams[i])) has_moved = true;
    }
    return has_moved;
}

// Runs one piece of work of each stream.
bool run_some() {
    bool has_moved = false;
    auto& streams = driver().streams;
    for (size_t i = 0; i < streams.size(); i++) has_moved = run_one(*streams[i]) || has_moved;
    return has_moved;
}

// Runs the stream until `is_done`, and others if it has to wait for them. Without one, runs each a piece at a time.
template <class Done>
int run_until(Held& held, Stream* stream, Done is_done) {
    while (!driver().failed && !is_done()) {
        if (stream && run_one(*stream)) continue;
        if (stream ? run_all() : run_some()) continue;
        held.unlock();
        usleep(100);
        held.lock();
    }
    return driver().failed;
}

int finish(Held& held, Stream& stream) {
    return run_until(held, &stream, [&] { return stream.work.empty(); });
}

// Waits for all work that the streams of the calling thread's context have begun by now. According to NVIDIA's guide,
// allocating and freeing device memory synchronizes across all streams, and page-locked memory and the loading of a
// kernel may do so. Unmapping memory and unloading a module count as freeing. Meanwhile other threads may begin
// more: if their device has to wait for the caller's next kernel, this does not end.
int finish_context(Held& held) {
    std::map<long, long> due;
    for (Stream* stream : driver().streams) {
        if (stream->context == context) due[stream->id] = stream->n_begun;
    }
    return run_until(held, nullptr, [&] {
        for (Stream* stream : driver().streams) {
            auto found = due.find(stream->id);
            if (found != due.end() && stream->n_done < found->second) return false;
        }
        return true;
    });
}

// Begins each call except the few that need no context.
struct Call {
    Held held;
    int code;
    Call() : held(driver().mutex), code(context == nullptr ? INVALID_CONTEXT : driver().failed) {}
};

Stream& stream_of(void* stream) { return *static_cast<Stream*>(stream); }

// Runs `work` when the stream reaches it, or each time that a record of it is replayed.
int push(void* at, Work work) {
    // The legacy stream waits for all others, so the host must not use it.
    if (!at) return capturing ? (int)CAPTURE_IMPLICIT : (int)INVALID_HANDLE;
    Stream& stream = stream_of(at);
    if (!stream.capture) return stream.n_begun++, stream.work.push_back(work), SUCCESS;
    stream.capture->nodes.push_back({[=] { return work; }, [] {}});
    return SUCCESS;
}

// Refuses calls that may wait, allocate or free while this thread records.
int refuse_capture() {
    if (!capturing) return SUCCESS;
    capturing->is_invalid = true;
    return CAPTURE_UNSUPPORTED;
}

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) int
#define ENTER            \
    Call call;           \
    if (call.code) return call.code
#define ENTER_UNSAFE     \
    ENTER;               \
    if (int refused = refuse_capture()) return refused
// The same for calls that wait for the whole context. Also writes a line to the trace.
#define ENTER_WAITING(what) \
    ENTER_UNSAFE;           \
    trace(what);            \
    if (int failed = finish_context(call.held)) return failed

CALL cuInit(unsigned) { return driver().n_devices > 0 ? SUCCESS : NO_DEVICE; }
CALL cuDriverGetVersion(int* version) { return *version = (int)number("FAKE_CUDA_VERSION", 13000), SUCCESS; }
CALL cuDeviceGetCount(int* n) { return *n = (int)driver().n_devices, SUCCESS; }
CALL cuDeviceGet(int* device, int i) { return i < driver().n_devices ? (*device = i, SUCCESS) : INVALID_DEVICE; }
CALL cuDeviceTotalMem_v2(size_t* n, int) { return *n = driver().n_bytes_max, SUCCESS; }

CALL cuDeviceGetName(char* name, int n, int) {
    snprintf(name, n, "Emulated H100");
    return SUCCESS;
}

CALL cuDeviceGetAttribute(int* value, int attribute, int device) {
    static const std::map<int, int> known = {{16, 132}, {97, 227 << 10}, {75, 0}, {76, 0}, {33, 0}, {34, 0}, {50, 0}};
    auto found = known.find(attribute);
    if (found == known.end()) return INVALID_VALUE;
    // The architecture: 80 for sm_80.
    if (attribute == 75) return *value = (int)number("FAKE_CUDA_SM", 90) / 10, SUCCESS;
    if (attribute == 76) return *value = (int)number("FAKE_CUDA_SM", 90) % 10, SUCCESS;
    // Each device has its own bus, and so has each process that acts as another host.
    *value = attribute == 33 ? device + (int)number("FAKE_CUDA_BUS", 0) : found->second;
    return SUCCESS;
}

CALL cuDevicePrimaryCtxRetain(void** made, int device) {
    trace("retain");
    *made = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
    return SUCCESS;
}
CALL cuDevicePrimaryCtxRelease_v2(int) { return trace("release"), SUCCESS; }
CALL cuCtxSetCurrent(void* it) { return context = it, SUCCESS; }
CALL cuCtxGetCurrent(void** it) { return *it = context, SUCCESS; }

CALL cuMemGetInfo_v2(size_t* n_free, size_t* n_total) {
    ENTER;
    *n_total = driver().n_bytes_max;
    *n_free = *n_total - driver().n_bytes;
    return SUCCESS;
}

CALL cuGetErrorString(int code, const char** text) {
    *text = code == LAUNCH_FAILED ? "a kernel failed" : code == OUT_OF_MEMORY ? "out of memory" : "an error";
    return SUCCESS;
}

CALL cuGetErrorName(int code, const char** text) {
    static thread_local std::string name;
    name = "FAKE_" + std::to_string(code);
    *text = name.c_str();
    return SUCCESS;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

namespace {

constexpr size_t SHARED_PIECE = 2 << 20;

// Allocates memory between guards, filled with NaN.
char* allocate(size_t n) {
    bool is_shared = n % SHARED_PIECE == 0;
    size_t line = is_shared ? 4096 : 256, whole = (n + 2 * GUARD + line - 1) / line * line;
    void* memory = nullptr;
    int file = -1;
    if (is_shared) {
        file = memfd_create("fake-cuda", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, (off_t)whole) != 0) return nullptr;
        memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory == MAP_FAILED) return nullptr;
    } else {
        memory = aligned_alloc(256, whole);
        if (!memory) return nullptr;
    }
    memset(memory, GUARD_BYTE, whole);
    char* start = static_cast<char*>(memory) + GUARD;
    memset(start, 0xff, n);
    if (is_shared) driver().shared[reinterpret_cast<uintptr_t>(start)] = {file, whole};
    return start;
}

}  // namespace

CALL cuMemAlloc_v2(uintptr_t* at, size_t n) {
    ENTER_WAITING("allocate");
    if (n == 0) return INVALID_VALUE;
    if (driver().n_bytes + n > (size_t)driver().n_bytes_max) return OUT_OF_MEMORY;
    char* memory = allocate(n);
    if (!memory) return OUT_OF_MEMORY;
    *at = reinterpret_cast<uintptr_t>(memory);
    driver().memory[*at] = n;
    driver().owners[*at] = context;
    driver().n_bytes += n;
    return SUCCESS;
}

CALL cuMemFree_v2(uintptr_t at) {
    ENTER_WAITING("free");
    auto found = driver().memory.find(at);
    if (found == driver().memory.end()) return INVALID_VALUE;
    unsigned char* memory = reinterpret_cast<unsigned char*>(at);
    for (size_t i = 0; i < GUARD; i++) {
        if (memory[-1 - (long)i] != GUARD_BYTE || memory[found->second + i] != GUARD_BYTE) {
            fprintf(stderr, "fake driver: a kernel wrote outside an allocation of %zu bytes\n", found->second);
            abort();
        }
    }
    driver().n_bytes -= found->second;
    driver().memory.erase(found);
    driver().owners.erase(at);
    auto shared = driver().shared.find(at);
    if (shared == driver().shared.end()) return free(memory - GUARD), SUCCESS;
    munmap(memory - GUARD, shared->second.whole);
    close(shared->second.file);
    driver().shared.erase(shared);
    return SUCCESS;
}

CALL cuMemHostAlloc(void** at, size_t n, unsigned) {
    ENTER_WAITING("allocate");
    *at = malloc(n);
    if (!*at) return OUT_OF_MEMORY;
    driver().pinned[reinterpret_cast<uintptr_t>(*at)] = n;
    return SUCCESS;
}

CALL cuMemFreeHost(void* at) {
    ENTER_WAITING("free");
    if (driver().pinned.erase(reinterpret_cast<uintptr_t>(at)) == 0) return INVALID_VALUE;
    free(at);
    return SUCCESS;
}

CALL cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t n, void* stream) {
    ENTER;
    void* at = reinterpret_cast<void*>(to);
    if (!is_in(driver().memory, at, n)) return fail(INVALID_VALUE, "a copy to memory that was not allocated");
    trace("upload");
    if (is_in(driver().pinned, from, n)) return push(stream, [=] { return memcpy(at, from, n), SUCCESS; });
    if (stream && stream_of(stream).capture) return stream_of(stream).is_invalid = true, CAPTURE_UNSUPPORTED;
    // Memory that the system may move is read at once.
    std::string copy(static_cast<const char*>(from), n);
    return push(stream, [=] { return memcpy(at, copy.data(), n), SUCCESS; });
}

CALL cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t n, void* stream) {
    ENTER;
    const void* at = reinterpret_cast<const void*>(from);
    if (!is_in(driver().memory, at, n)) return fail(INVALID_VALUE, "a copy of memory that was not allocated");
    trace("download");
    if (stream && stream_of(stream).capture && !is_in(driver().pinned, to, n)) {
        return stream_of(stream).is_invalid = true, CAPTURE_UNSUPPORTED;
    }
    return push(stream, [=] { return memcpy(to, at, n), SUCCESS; });
}

CALL cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t n, void* stream) {
    ENTER;
    void *at = reinterpret_cast<void*>(to), *source = reinterpret_cast<void*>(from);
    if (!is_in(driver().memory, at, n) || !is_in(driver().memory, source, n)) {
        return fail(INVALID_VALUE, "a copy within memory that was not allocated");
    }
    return push(stream, [=] { return memmove(at, source, n), SUCCESS; });
}

struct Copy2D {
    size_t from_x, from_y;
    int from_type;
    const void* from_host;
    uintptr_t from;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void* to_host;
    uintptr_t to;
    void* to_array;
    size_t to_pitch, width, height;
};

// One side may be page-locked memory of the host.
CALL cuMemcpy2DAsync_v2(const Copy2D* requested, void* stream) {
    ENTER;
    Copy2D copy = *requested;
    bool from_host = copy.from_type == 1, to_host = copy.to_type == 1;
    if ((!from_host && copy.from_type != 2) || (!to_host && copy.to_type != 2) || (from_host && to_host) ||
        copy.from_x + copy.from_y + copy.to_x + copy.to_y != 0) {
        return fail(INVALID_VALUE, "a copy of columns other than of the device");
    }
    if (copy.width > copy.from_pitch || copy.width > copy.to_pitch) return fail(INVALID_VALUE, "rows that overlap");
    if (copy.from_pitch > INT32_MAX || copy.to_pitch > INT32_MAX) return fail(INVALID_VALUE, "rows too far apart");
    size_t last = copy.height - 1;
    char* from = from_host ? (char*)copy.from_host : (char*)copy.from;
    char* to = to_host ? (char*)copy.to_host : (char*)copy.to;
    if (!is_in(from_host ? driver().pinned : driver().memory, from, last * copy.from_pitch + copy.width) ||
        !is_in(to_host ? driver().pinned : driver().memory, to, last * copy.to_pitch + copy.width)) {
        return fail(INVALID_VALUE, "a copy of columns that were not allocated");
    }
    trace("columns");
    return push(stream, [=] {
        for (size_t row = 0; row < copy.height; row++) {
            memmove(to + row * copy.to_pitch, from + row * copy.from_pitch, copy.width);
        }
        return SUCCESS;
    });
}

CALL cuMemsetD8Async(uintptr_t to, unsigned char value, size_t n, void* stream) {
    ENTER;
    void* at = reinterpret_cast<void*>(to);
    if (!is_in(driver().memory, at, n)) return fail(INVALID_VALUE, "filling memory that was not allocated");
    return push(stream, [=] { return memset(at, value, n), SUCCESS; });
}

CALL cuMemsetD2D8Async(uintptr_t to, size_t pitch, unsigned char value, size_t width, size_t height, void* stream) {
    ENTER;
    char* at = reinterpret_cast<char*>(to);
    if (height == 0 || pitch > INT32_MAX || (height > 1 && width > pitch) ||
        !is_in(driver().memory, at, (height - 1) * pitch + width)) {
        return fail(INVALID_VALUE, "filling columns that were not allocated");
    }
    return push(stream, [=] {
        for (size_t row = 0; row < height; row++) memset(at + row * pitch, value, width);
        return SUCCESS;
    });
}

// ---- memory of others -----------------------------------------------------------------------------------------------

static_assert(sizeof(Handle) == 64, "the size of the driver's");

CALL cuDeviceCanAccessPeer(int* can, int device, int other) {
    if (device >= driver().n_devices || other >= driver().n_devices) return INVALID_DEVICE;
    return *can = device != other && number("FAKE_CUDA_PEERS", 1) != 0, SUCCESS;
}

CALL cuCtxEnablePeerAccess(void* other, unsigned flags) {
    ENTER;
    if (flags != 0 || other == context) return INVALID_VALUE;
    if (number("FAKE_CUDA_PEERS", 1) == 0) return PEER_ACCESS_UNSUPPORTED;
    return driver().reached.insert({context, other}).second ? SUCCESS : PEER_ACCESS_ALREADY;
}

CALL cuIpcGetMemHandle(Handle* handle, uintptr_t at) {
    ENTER;
    auto found = driver().shared.find(at);
    // The handle of a real driver would expose neighbouring memory too.
    if (found == driver().shared.end()) return INVALID_VALUE;
    return *handle = {getpid(), found->second.file, found->second.whole, {}}, SUCCESS;
}

CALL cuIpcOpenMemHandle_v2(uintptr_t* at, Handle handle, unsigned flags) {
    ENTER_UNSAFE;
    if (handle.process == getpid()) return INVALID_CONTEXT;
    if (flags != 1 || number("FAKE_CUDA_IPC", 1) == 0) return INVALID_VALUE;
    std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_HANDLE;
    void* memory = mmap(nullptr, handle.whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    *at = reinterpret_cast<uintptr_t>(memory) + GUARD;
    driver().opened[*at] = handle.whole;
    return SUCCESS;
}

CALL cuIpcCloseMemHandle(uintptr_t at) {
    ENTER_WAITING("free");
    auto found = driver().opened.find(at);
    if (found == driver().opened.end()) return INVALID_VALUE;
    munmap(reinterpret_cast<void*>(at - GUARD), found->second);
    return driver().opened.erase(found), SUCCESS;
}

// ---- streams and events ---------------------------------------------------------------------------------------------

CALL cuStreamCreate(void** made, unsigned) {
    ENTER_UNSAFE;
    Stream* stream = new Stream{driver().n_streams++, context};
    driver().streams.push_back(stream);
    *made = stream;
    return SUCCESS;
}

CALL cuStreamDestroy_v2(void* it) {
    ENTER_UNSAFE;
    finish(call.held, stream_of(it));
    auto& all = driver().streams;
    for (size_t i = 0; i < all.size(); i++) {
        if (all[i] == it) all.erase(all.begin() + i);
    }
    delete static_cast<Stream*>(it);
    return SUCCESS;
}

CALL cuStreamSynchronize(void* it) {
    ENTER_UNSAFE;
    if (stream_of(it).capture) return stream_of(it).is_invalid = true, CAPTURE_UNSUPPORTED;
    trace("wait");
    return finish(call.held, stream_of(it));
}

// CU_EVENT_DISABLE_TIMING
CALL cuEventCreate(void** made, unsigned flags) {
    Event* event = new Event;
    event->has_time = !(flags & 2);
    return *made = event, SUCCESS;
}

// The event is not freed, because streams may still wait for it.
CALL cuEventDestroy_v2(void*) { return SUCCESS; }

CALL cuEventRecord(void* it, void* stream) {
    ENTER;
    Event* event = static_cast<Event*>(it);
    if (stream && stream_of(stream).capture) return event->is_captured = true, SUCCESS;
    event->is_captured = false;
    long number = ++event->n_recorded;
    return push(stream, [=] { return event->n_passed = number, SUCCESS; });
}

CALL cuStreamWaitEvent(void* stream, void* it, unsigned) {
    ENTER;
    Event* event = static_cast<Event*>(it);
    // Recorded work and executed work cannot wait for each other.
    if (stream && (bool)stream_of(stream).capture != event->is_captured) {
        stream_of(stream).is_invalid = true;
        return CAPTURE_ISOLATION;
    }
    if (event->is_captured) return SUCCESS;
    long number = event->n_recorded;
    return push(stream, [=] { return event->n_passed >= number ? (int)SUCCESS : PENDING; });
}

// Each query runs one piece of work of every stream.
CALL cuEventQuery(void* it) {
    ENTER_UNSAFE;
    Event* event = static_cast<Event*>(it);
    if (event->is_captured) return CAPTURED_EVENT;
    trace("look");
    bool is_passed = event->n_passed >= event->n_recorded;
    for (size_t i = 0; i < driver().streams.size() && !is_passed; i++) run_one(*driver().streams[i]);
    return event->n_passed >= event->n_recorded ? SUCCESS : NOT_READY;
}

// Runs streams no further than the event requires.
CALL cuEventSynchronize(void* it) {
    ENTER_UNSAFE;
    Event* event = static_cast<Event*>(it);
    if (event->is_captured) return CAPTURED_EVENT;
    trace("wait");
    long number = event->n_recorded;
    return run_until(call.held, nullptr, [=] { return event->n_passed >= number; });
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

// Roughly the memory that a real driver uses for a record.
constexpr size_t GRAPH_BYTES = 64 << 10, NODE_BYTES = 1 << 10;

namespace {

void finished(Graph* graph) {
    for (Node& node : graph->nodes) node.gone();
    delete graph;
}

}  // namespace

CALL cuStreamBeginCapture_v2(void* it, int mode) {
    ENTER;
    if (!it) return CAPTURE_IMPLICIT;
    // 1: the capture restricts only this thread.
    if (mode != 1 || capturing || stream_of(it).capture) return INVALID_VALUE;
    trace("record");
    stream_of(it).capture = std::shared_ptr<Graph>(new Graph, finished);
    stream_of(it).is_invalid = false;
    capturing = &stream_of(it);
    return SUCCESS;
}

CALL cuStreamEndCapture(void* it, std::shared_ptr<Graph>** made) {
    ENTER;
    *made = nullptr;
    if (capturing != it) return CAPTURE_UNMATCHED;
    std::shared_ptr<Graph> graph = std::move(capturing->capture);
    bool is_invalid = capturing->is_invalid;
    capturing->capture.reset();
    capturing = nullptr;
    trace("recorded");
    if (is_invalid) return CAPTURE_INVALIDATED;
    *made = new std::shared_ptr<Graph>(graph);
    return SUCCESS;
}

CALL cuGraphGetNodes(std::shared_ptr<Graph>* graph, void**, size_t* n) {
    ENTER;
    return *n = (*graph)->nodes.size(), SUCCESS;
}

CALL cuGraphDestroy(std::shared_ptr<Graph>* graph) {
    ENTER;
    return delete graph, SUCCESS;
}

CALL cuGraphInstantiateWithFlags(Executable** made, std::shared_ptr<Graph>* graph, unsigned long long) {
    ENTER_UNSAFE;
    trace("instantiate");
    // This allocates device memory. NVIDIA does not document whether the allocation waits.
    if (number("FAKE_CUDA_GRAPHS_WAIT", 0)) {
        if (int failed = finish_context(call.held)) return failed;
    }
    size_t n_bytes = GRAPH_BYTES + NODE_BYTES * (*graph)->nodes.size();
    if (driver().n_bytes + n_bytes > (size_t)driver().n_bytes_max) return OUT_OF_MEMORY;
    driver().n_bytes += n_bytes;
    *made = new Executable{*graph, n_bytes};
    return SUCCESS;
}

CALL cuGraphUpload(Executable*, void*) {
    ENTER_UNSAFE;
    return SUCCESS;
}

// Replays under way continue, and their nodes are freed when they end. The call does not wait for them.
CALL cuGraphExecDestroy(Executable* executable) {
    ENTER_UNSAFE;
    driver().n_bytes -= executable->n_bytes;
    return delete executable, SUCCESS;
}

CALL cuGraphLaunch(Executable* executable, void* stream) {
    ENTER;
    trace("graph");
    if (stream && stream_of(stream).capture) return stream_of(stream).is_invalid = true, CAPTURE_UNSUPPORTED;
    for (Node& node : executable->graph->nodes) {
        if (int failed = push(stream, node.begin())) return failed;
    }
    return SUCCESS;
}

CALL cuEventElapsedTime_v2(float* millis, void* begin, void* end) {
    bool have_time = static_cast<Event*>(begin)->has_time && static_cast<Event*>(end)->has_time;
    return *millis = 1.0f, have_time ? SUCCESS : INVALID_HANDLE;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

CALL cuModuleLoadData(void** made, const void* image) {
    ENTER_WAITING("load");
    const char* text = static_cast<const char*>(image);
    long sm = number("FAKE_CUDA_SM", 90);
    std::string target = " for sm_" + std::to_string(sm) + (sm >= 90 ? "a" : "");
    if (strncmp(text, CUBIN, sizeof CUBIN - 1) != 0) return INVALID_IMAGE;
    std::string unit = text + sizeof CUBIN - 1;
    if (unit.size() < target.size() || unit.substr(unit.size() - target.size()) != target) return INVALID_IMAGE;
    *made = new Module{unit};
    return SUCCESS;
}

CALL cuModuleUnload(void* it) {
    ENTER_WAITING("unload");
    return delete static_cast<Module*>(it), SUCCESS;
}

CALL cuModuleGetFunction(void** made, void*, const char* name) {
    ENTER;
    const size_t* sizes;
    if (emulator_parameters(name, &sizes) < 0) return NOT_FOUND;
    // Never freed: the driver has no call that frees a function.
    *made = new Function{name};
    return SUCCESS;
}

CALL cuFuncLoad(void* it) {
    ENTER_UNSAFE;
    Function& function = *static_cast<Function*>(it);
    if (!function.is_loaded) {
        if (int failed = finish_context(call.held)) return failed;
    }
    return function.is_loaded = true, SUCCESS;
}

// Leaves room for static shared memory, which nearly every kernel has.
CALL cuFuncSetAttribute(void*, int, int value) { return value + 16 <= 227 << 10 ? SUCCESS : INVALID_VALUE; }

namespace {

struct Launch {
    std::string name;
    unsigned grid[3], block[3], n_shared;
    std::vector<std::string> values;
};

// Runs a kernel with its own copy of the arguments, which it may change. Returns the error, or an empty string.
std::string run_kernel(const Launch& launch, long order) {
    std::vector<std::string> own = launch.values;
    std::vector<void*> pointers;
    for (std::string& value : own) pointers.push_back(value.data());
    const char* name = launch.name.c_str();
    int failed = emulator_launch(name, launch.grid, launch.block, launch.n_shared, pointers.data(), (int)order);
    return failed ? launch.name + ": " + emulator_error() : "";
}

// Starts a thread that runs all streams from now on.
void keep_running() {
    if (driver().is_running) return;
    driver().is_running = true;
    std::thread([] {
        for (;; usleep(500)) {
            Held held(driver().mutex);
            run_all();
        }
    }).detach();
}

// The work of a kernel that waits for other kernels: it runs while the driver does other work.
Work beside(const Launch& launch, long order) {
    struct Running {
        bool has_begun = false;
        std::atomic<bool> has_ended{false};
        std::string error;
    };
    auto running = std::make_shared<Running>();
    return [=] {
        if (!running->has_begun) {
            running->has_begun = true;
            std::thread([=] {
                running->error = run_kernel(launch, order);
                running->has_ended = true;
            }).detach();
        }
        if (!running->has_ended) return PENDING;
        return running->error.empty() ? (int)SUCCESS : fail(LAUNCH_FAILED, running->error.c_str());
    };
}

// Whether all memory that the arguments name belongs to this context or is enabled for it.
bool reaches(const Launch& launch) {
    for (const std::string& value : launch.values) {
        for (size_t at = 0; at + sizeof(uintptr_t) <= value.size(); at += sizeof(uintptr_t)) {
            uintptr_t word;
            memcpy(&word, value.data() + at, sizeof word);
            auto owner = driver().owners.find(word);
            bool is_own = owner == driver().owners.end() || owner->second == context;
            if (!is_own && !driver().reached.count({context, owner->second})) return false;
        }
    }
    return true;
}

}  // namespace

CALL cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned n_shared, void* stream, void** arguments, void**) {
    ENTER;
    Function& of = *static_cast<Function*>(function);
    if (!of.is_loaded && !capturing) {
        trace("load");
        if (int failed = finish_context(call.held)) return failed;
        of.is_loaded = true;
    }
    Launch launch = {of.name, {gx, gy, gz}, {bx, by, bz}, n_shared, {}};
    const size_t* sizes;
    int n = emulator_parameters(launch.name.c_str(), &sizes);
    if (n < 0 || gx == 0 || gy == 0 || gz == 0) return fail(INVALID_VALUE, ("a launch of " + launch.name).c_str());
    for (int i = 0; i < n; i++) launch.values.emplace_back(static_cast<char*>(arguments[i]), sizes[i]);
    if (!reaches(launch)) return fail(LAUNCH_FAILED, (launch.name + " reaches for another device's memory").c_str());
    long order = driver().order;
    bool fails = ++driver().n_launches == driver().failing_launch;
    bool hangs = driver().n_launches == driver().hanging_launch;
    trace("launch", launch.name);
    if (emulator_waits(launch.name.c_str()) && stream) {
        keep_running();
        auto begin = [=] { return beside(launch, order); };
        if (!stream_of(stream).capture) return push(stream, begin());
        stream_of(stream).capture->nodes.push_back({begin, [] {}});
        return SUCCESS;
    }
    return push(stream, [=] {
        if (fails) return fail(LAUNCH_FAILED, "the launch that FAKE_CUDA_FAIL_LAUNCH selects");
        while (hangs) std::this_thread::sleep_for(std::chrono::seconds(1));
        std::string error = run_kernel(launch, order);
        return error.empty() ? (int)SUCCESS : fail(LAUNCH_FAILED, error.c_str());
    });
}

// ---- for a library that begins work of its own ----------------------------------------------------------------------

// Calls `work` until it returns something other than PENDING. In a record, each replay works on a copy that `fresh`
// makes. The recording calls `kept`; `gone` is called when no replay can follow.
CALL fake_cuda_begin(void* stream, int (*work)(void*), void* of, void* (*fresh)(void*), void (*kept)(void*),
                     void (*gone)(void*)) {
    ENTER;
    if (stream_of(stream).capture) {
        kept(of);
        auto begin = [=] {
            void* own = fresh(of);
            return Work([=] { return work(own); });
        };
        stream_of(stream).capture->nodes.push_back({begin, [=] { gone(of); }});
    } else {
        push(stream, [=] { return work(of); });
    }
    keep_running();
    return SUCCESS;
}

CALL fake_cuda_is_memory(const void* at, size_t n) { return is_in(driver().memory, at, n); }

// Whether the calling thread has a device; and a way to write a line to the trace.
CALL fake_cuda_has_device() { return context != nullptr; }
CALL fake_cuda_trace(const char* what) { return trace(what), SUCCESS; }
