// A libnccl.so.2 over the fake driver. Ranks are threads or processes of one host, and find each other in a file of
// shared memory that the unique id names. Work runs in the order of its stream, piece by piece, and waits for ever if a
// peer is missing. Destroying or aborting a communicator blocks the caller until no graph uses it.
//
// Communicators do not block. A thread runs begun work as soon as peers that have never exchanged before have begun
// theirs; until then the communicator refuses more work. Environment variables add faults: each exchange waits for its
// peers in this way (FAKE_NCCL_CONNECTS), the call itself waits (FAKE_NCCL_BLOCKING), an abort does not return
// (FAKE_NCCL_HOLD). A thread that ends a communicator must have a device, or NCCL would open the first one for it. A
// configuration must have the size of its version, and default values in the fields that the host does not set.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "begin.h"

namespace {

enum Code { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
constexpr int PENDING = -1;
constexpr size_t PIECE = 16 << 10;

// The data from one rank to one other.
struct Box {
    std::atomic<uint32_t> n;  // 0: empty
    std::atomic<uint32_t> n_begun;  // exchanges with that rank, either way
    char bytes[PIECE];
};

struct Meeting {
    std::atomic<uint32_t> n_here;
    Box boxes[];
};

struct Comm {
    int rank, n_ranks;
    Meeting* meeting;
    std::string path;
    std::atomic<bool> is_over{false};
    std::atomic<int> error{SUCCESS};
    std::atomic<long> n_graphs{0};
    std::atomic<bool> is_pending{false};
    bool is_finalized = false;
    bool is_ready() { return !is_pending && meeting->n_here >= (uint32_t)n_ranks; }
    Box& box(int from, int to) { return meeting->boxes[from * n_ranks + to]; }
};

struct Transfer {
    Comm* comm;
    void* stream;
    bool is_sent;
    char* at;
    size_t n, n_done;
    int peer;
};

// The work that one group begins in one stream.
struct Work {
    std::vector<Transfer> transfers;
    // A copy within this rank, made when the stream reaches the work.
    char *copy_to = nullptr, *copy_from = nullptr;
    size_t n_copied = 0;
    bool fails = false;
    // The terms that ranks have sent, by rank. Their sum replaces this rank's own term.
    std::vector<std::vector<float>> terms;
    float* sum_to = nullptr;
};

// The text of the last error.
char last_error[256] = "";

int refuse(int code, const char* why) {
    snprintf(last_error, sizeof last_error, "%s", why);
    return code;
}

void must(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "fake NCCL: %s\n", what);
    abort();
}

thread_local int depth = 0;
thread_local std::vector<Work*> begun;
thread_local std::vector<void*> streams;
std::atomic<long> n_begun{0};

// Moves as many bytes as possible now. Returns whether all have moved.
bool move_on(Transfer& transfer) {
    Comm& comm = *transfer.comm;
    while (transfer.n_done < transfer.n) {
        Box& box = transfer.is_sent ? comm.box(comm.rank, transfer.peer) : comm.box(transfer.peer, comm.rank);
        uint32_t n_there = box.n.load(std::memory_order_acquire);
        if ((n_there == 0) != transfer.is_sent) return false;
        size_t left = transfer.n - transfer.n_done;
        if (transfer.is_sent) {
            size_t n = left < PIECE ? left : PIECE;
            memcpy(box.bytes, transfer.at + transfer.n_done, n);
            box.n.store((uint32_t)n, std::memory_order_release);
            transfer.n_done += n;
        } else {
            must(n_there <= left, "a rank sends more than is received");
            memcpy(transfer.at + transfer.n_done, box.bytes, n_there);
            box.n.store(0, std::memory_order_release);
            transfer.n_done += n_there;
        }
    }
    return true;
}

int run(void* it) {
    Work* work = static_cast<Work*>(it);
    if (work->copy_to) memmove(work->copy_to, work->copy_from, work->n_copied);
    work->copy_to = nullptr;
    bool is_done = true;
    // Transfers of one pair and direction run one after the other.
    std::map<std::pair<int, bool>, bool> waits;
    for (Transfer& transfer : work->transfers) {
        if (transfer.comm->is_over) return SUCCESS;
        bool& must_wait = waits[{transfer.peer, transfer.is_sent}];
        if (must_wait) continue;
        must_wait = work->fails || !move_on(transfer);
        is_done = is_done && !must_wait;
    }
    if (is_done && work->sum_to) {
        // From the last rank to the first: the same order on all ranks, but not that of the tree of leaves.
        size_t n = work->terms[0].size(), me = work->transfers[0].comm->rank;
        work->terms[me].assign(work->sum_to, work->sum_to + n);
        for (size_t i = 0; i < n; i++) {
            float sum = 0.0f;
            for (size_t rank = work->terms.size(); rank-- > 0;) sum += work->terms[rank][i];
            work->sum_to[i] = sum;
        }
    }
    return is_done ? (int)SUCCESS : PENDING;
}

void* fresh(void* it) {
    Work* own = new Work(*static_cast<Work*>(it));
    // Received terms go to the memory of this copy.
    for (Transfer& transfer : own->transfers) {
        if (own->sum_to && !transfer.is_sent) transfer.at = reinterpret_cast<char*>(own->terms[transfer.peer].data());
    }
    return own;
}

void add_graphs(void* it, long n) {
    auto& transfers = static_cast<Work*>(it)->transfers;
    if (!transfers.empty()) transfers[0].comm->n_graphs += n;
}

void kept(void* it) { add_graphs(it, 1); }
void gone(void* it) { add_graphs(it, -1); }

// Ends the work of the communicator at once, and waits until no graph uses it.
int end(Comm* comm) {
    must(has_device(), "a communicator ends in a thread without a device");
    comm->is_over = true;
    for (int waited = 0; comm->n_graphs > 0; waited++) {
        must(waited < 60000, "for a minute, a graph has used a communicator that is to end");
        usleep(1000);
    }
    const char* until = getenv("FAKE_NCCL_HOLD");
    while (until && access(until, F_OK) != 0) usleep(1000);
    trace("communicator ended");
    return SUCCESS;
}

Work* work_in(void* stream) {
    for (size_t i = 0; i < streams.size(); i++) {
        if (streams[i] == stream) return begun[i];
    }
    streams.push_back(stream);
    begun.push_back(new Work);
    return begun.back();
}

// The work of one group, and how many exchanges each peer must have begun before it.
struct Group {
    Comm* comm;
    std::vector<Work*> works;
    std::vector<void*> streams;
    std::map<int, uint32_t> due;
};

bool are_met(const Group& group) {
    for (auto [peer, n] : group.due) {
        if (group.comm->box(peer, group.comm->rank).n_begun < n) return false;
    }
    return true;
}

// Begins the work in its streams once all peers have begun theirs. Returns an error if it is aborted before.
int take_up(Group group, void* device) {
    while (!are_met(group)) {
        if (group.comm->is_over) return REMOTE_ERROR;
        usleep(50);
    }
    of_driver<int (*)(void*)>("cuCtxSetCurrent")(device);
    static const char* failing = getenv("FAKE_NCCL_FAIL");
    for (size_t i = 0; i < group.works.size(); i++) {
        Work* work = group.works[i];
        if (failing && ++n_begun == atol(failing)) {
            work->fails = true;
            group.comm->error = SYSTEM_ERROR;
        }
        if (of_driver<Begin>("fake_cuda_begin")(group.streams[i], run, work, fresh, kept, gone) != SUCCESS) {
            return SYSTEM_ERROR;
        }
    }
    return SUCCESS;
}

int hand_over() {
    Group group{nullptr, std::move(begun), std::move(streams), {}};
    begun.clear();
    streams.clear();
    std::set<int> peers;
    for (Work* work : group.works) {
        for (Transfer& transfer : work->transfers) {
            must(!group.comm || group.comm == transfer.comm, "one group of several communicators");
            group.comm = transfer.comm;
            peers.insert(transfer.peer);
        }
    }
    if (!group.comm) return SUCCESS;
    Comm* comm = group.comm;
    // Peers that have exchanged before are connected, unless each exchange is to connect anew.
    static bool is_connected_anew = getenv("FAKE_NCCL_CONNECTS");
    for (int peer : peers) {
        uint32_t n = ++comm->box(comm->rank, peer).n_begun;
        group.due[peer] = is_connected_anew ? n : 1;
    }
    void* device = nullptr;
    of_driver<int (*)(void**)>("cuCtxGetCurrent")(&device);
    comm->is_pending = true;
    auto take = [=] {
        int failed = take_up(group, device);
        if (failed && !comm->error) comm->error = failed;
        comm->is_pending = false;
        return failed;
    };
    if (getenv("FAKE_NCCL_BLOCKING")) return take();
    std::thread(take).detach();
    return IN_PROGRESS;
}

int transfer(void* at, size_t n, int type, int peer, Comm* comm, void* stream, bool is_sent) {
    if (!comm->is_ready()) return refuse(INVALID_ARGUMENT, "a communicator is used before it has begun its last work");
    if (type != 7 || peer < 0 || peer >= comm->n_ranks || peer == comm->rank) return INVALID_ARGUMENT;
    if (!is_memory(at, n * 4)) return INVALID_ARGUMENT;
    work_in(stream)->transfers.push_back({comm, stream, is_sent, static_cast<char*>(at), n * 4, 0, peer});
    return depth == 0 ? hand_over() : (int)SUCCESS;
}

}  // namespace

struct UniqueId {
    char bytes[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, blocks_min, blocks_max;
    const char* net;
    int share, traffic_class;
    const char* name;
    int rest[10];
};

constexpr int UNSET = -0x7fffffff - 1;

// Checks the size of the declared version, and the fields up to that size.
bool is_sound(const Config* config) {
    static const std::map<unsigned, size_t> sizes = {{2180, 48}, {2260, 48}, {2270, 72},
                                                     {2280, 80}, {2290, 88}, {2300, 96}};
    auto size = sizes.find(config->version / 10);
    if (config->magic != 0xcafebeef || size == sizes.end() || config->size != size->second) return false;
    if (config->blocking != 0 || config->cluster != UNSET || config->net || config->share != UNSET) return false;
    if (config->blocks_min > config->blocks_max || config->blocks_max == 0) return false;
    if (config->traffic_class != UNSET) return false;
    if (config->size <= offsetof(Config, name)) return true;
    for (size_t i = 0; i < (config->size - offsetof(Config, rest)) / sizeof(int); i++) {
        if (config->rest[i] != UNSET) return false;
    }
    return config->name && strncmp(config->name, "lockstep", 8) == 0;
}

#define CALL extern "C" __attribute__((visibility("default"))) int

CALL ncclGetVersion(int* version) {
    const char* text = getenv("FAKE_NCCL_VERSION");
    return *version = text ? atoi(text) : 23007, SUCCESS;
}

CALL ncclGetUniqueId(UniqueId* id) {
    static std::atomic<int> n{0};
    trace("id");
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/dev/shm/lockstep-fake-nccl-%d-%d", getpid(), n++);
    // A killed process may have had this number and left its file.
    unlink(id->bytes);
    return SUCCESS;
}

CALL ncclCommInitRankConfig(Comm** made, int n_ranks, UniqueId id, int rank, Config* config) {
    must(has_device(), "a communicator begins in a thread without a device");
    if (!is_sound(config)) return refuse(INVALID_ARGUMENT, "the configuration is invalid");
    if (rank < 0 || rank >= n_ranks) return INVALID_ARGUMENT;
    int file = open(id.bytes, O_RDWR | O_CREAT, 0600);
    size_t n = sizeof(Meeting) + sizeof(Box) * n_ranks * n_ranks;
    if (file < 0 || ftruncate(file, (off_t)n) != 0) return SYSTEM_ERROR;
    void* memory = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return SYSTEM_ERROR;
    *made = new Comm{rank, n_ranks, static_cast<Meeting*>(memory), id.bytes};
    const char* absent = getenv("FAKE_NCCL_ABSENT");
    if (!absent || atoi(absent) != rank) (*made)->meeting->n_here++;
    trace("communicator");
    const char* duplicate = getenv("FAKE_NCCL_DUPLICATE");
    if (duplicate && atoi(duplicate) == rank) {
        (*made)->error = refuse(INVALID_USAGE, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 41000");
    }
    return IN_PROGRESS;
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int code) {
    return code == INVALID_USAGE ? "invalid usage" : code == INVALID_ARGUMENT ? "invalid argument" : "an error";
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(Comm*) { return last_error; }

CALL ncclCommGetAsyncError(Comm* comm, int* state) {
    if (comm->error) return *state = comm->error, SUCCESS;
    bool are_all_here = comm->meeting->n_here >= (uint32_t)comm->n_ranks;
    // Once all ranks have joined, none needs the file's name.
    if (are_all_here) unlink(comm->path.c_str());
    *state = comm->is_ready() ? SUCCESS : IN_PROGRESS;
    return SUCCESS;
}

CALL ncclCommFinalize(Comm* comm) {
    must(has_device(), "a communicator is finalized in a thread without a device");
    if (comm->is_finalized || !comm->is_ready()) return refuse(INVALID_ARGUMENT, "it is finalized twice or too early");
    comm->is_finalized = true;
    return IN_PROGRESS;
}
// The communicator is not freed, because work may still use it.
CALL ncclCommDestroy(Comm* comm) { return end(comm); }
CALL ncclCommAbort(Comm* comm) {
    unlink(comm->path.c_str());
    return end(comm);
}

CALL ncclGroupStart() { return depth++, SUCCESS; }
CALL ncclGroupEnd() { return --depth == 0 ? hand_over() : (int)SUCCESS; }

CALL ncclSend(const void* from, size_t n, int type, int to, Comm* comm, void* stream) {
    return transfer(const_cast<void*>(from), n, type, to, comm, stream, true);
}

CALL ncclRecv(void* to, size_t n, int type, int from, Comm* comm, void* stream) {
    return transfer(to, n, type, from, comm, stream, false);
}

CALL ncclAllGather(const void* from, void* to, size_t n, int type, Comm* comm, void* stream) {
    depth++;
    char *mine = static_cast<char*>(const_cast<void*>(from)), *all = static_cast<char*>(to);
    int failed = SUCCESS;
    for (int peer = 0; peer < comm->n_ranks && !failed; peer++) {
        if (peer == comm->rank) continue;
        failed = transfer(mine, n, type, peer, comm, stream, true);
        if (!failed) failed = transfer(all + peer * n * 4, n, type, peer, comm, stream, false);
    }
    Work* work = work_in(stream);
    work->copy_to = all + comm->rank * n * 4;
    work->copy_from = mine;
    work->n_copied = n * 4;
    depth--;
    return failed ? failed : depth == 0 ? hand_over() : (int)SUCCESS;
}

CALL ncclAllReduce(const void* from, void* to, size_t n, int type, int op, Comm* comm, void* stream) {
    if (!comm->is_ready()) return refuse(INVALID_ARGUMENT, "a communicator is used before it has begun its last work");
    if (from != to || type != 7 || op != 0 || depth != 1 || n == 0) return INVALID_ARGUMENT;
    if (!is_memory(to, n * 4)) return INVALID_ARGUMENT;
    Work* work = work_in(stream);
    work->sum_to = static_cast<float*>(to);
    work->terms.assign(comm->n_ranks, std::vector<float>(n));
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        if (peer == comm->rank) continue;
        char* term = reinterpret_cast<char*>(work->terms[peer].data());
        work->transfers.push_back({comm, stream, true, static_cast<char*>(to), n * 4, 0, peer});
        work->transfers.push_back({comm, stream, false, term, n * 4, 0, peer});
    }
    return SUCCESS;
}
