// A libcublasLt.so.13 over the fake driver: products of bf16, or of numbers of eight bits, into f32. Each shape has one
// algorithm. Products run in a stream like the driver's own work. The library checks its arguments as the real one
// does. Where the real one would compute something else or nothing, this one aborts the process: an algorithm that is
// used for another shape, an address that is aligned worse than declared, memory that was not allocated. The host may
// request the algorithm of a shape only once: a second request means that the host did not keep the first.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <set>
#include <string>
#include <vector>

#include "begin.h"

namespace {

enum Code { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
constexpr size_t WORKSPACE = 4096;
constexpr uint64_t BF16 = 14, E4M3 = 28;

struct Desc {
    int compute, scale, turns_a = 0, turns_b = 0;
};

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
};

struct Preference {
    uint64_t workspace = 0;
    uint32_t alignments[4] = {256, 256, 256, 256};
};

struct Algorithm {
    uint64_t m, n, k, ld, ld_out, alignments, type, reserved;
};

struct Found {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

struct Handle {
    std::set<std::string> requested;
};

void must(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "fake cuBLASLt: %s\n", what);
    abort();
}

float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float out;
    memcpy(&out, &word, 4);
    return out;
}

// A sign, four bits of exponent, three of fraction; the largest code is NaN.
float widen_e4m3(uint8_t bits) {
    int exponent = bits >> 3 & 15;
    float fraction = (bits & 7) / 8.0f;
    float size = exponent == 0 ? ldexpf(fraction, -6) : ldexpf(1 + fraction, exponent - 7);
    if ((bits & 0x7f) == 0x7f) size = NAN;
    return bits & 0x80 ? -size : size;
}

struct Work {
    Algorithm algo;
    const void *a, *b;
    float* d;
    char* workspace;
};

float number_at(const void* numbers, const Algorithm& algo, uint64_t i) {
    return algo.type == BF16 ? widen(static_cast<const uint16_t*>(numbers)[i])
                            : widen_e4m3(static_cast<const uint8_t*>(numbers)[i]);
}

// Four sums, each from the end to the beginning: an order that no kernel uses.
int run(void* it) {
    Work* work = static_cast<Work*>(it);
    const Algorithm& algo = work->algo;
    memset(work->workspace, 0xff, WORKSPACE);
    for (uint64_t column = 0; column < algo.n; column++) {
        for (uint64_t row = 0; row < algo.m; row++) {
            float sums[4] = {};
            for (uint64_t i = algo.k; i-- > 0;) {
                float a = number_at(work->a, algo, row * algo.ld + i);
                sums[i % 4] += a * number_at(work->b, algo, column * algo.ld + i);
            }
            work->d[column * algo.ld_out + row] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
    }
    return SUCCESS;
}

void* fresh(void* it) { return new Work(*static_cast<Work*>(it)); }
void nothing(void*) {}

uint64_t alignments_of(const uint32_t (&each)[4]) {
    return each[0] | (uint64_t)each[1] << 16 | (uint64_t)each[2] << 32 | (uint64_t)each[3] << 48;
}

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) int

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 130100; }
CALL cublasLtCreate(Handle** made) { return *made = new Handle, SUCCESS; }
CALL cublasLtDestroy(Handle* it) { return delete it, SUCCESS; }

CALL cublasLtMatmulDescCreate(Desc** made, int compute, int scale) {
    return *made = new Desc{compute, scale}, SUCCESS;
}
CALL cublasLtMatmulDescDestroy(Desc* it) { return delete it, SUCCESS; }

CALL cublasLtMatmulDescSetAttribute(Desc* desc, int attribute, const void* value, size_t n) {
    if (n != sizeof(int) || (attribute != 3 && attribute != 4)) return INVALID_VALUE;
    memcpy(attribute == 3 ? &desc->turns_a : &desc->turns_b, value, n);
    return SUCCESS;
}

CALL cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    return *made = new Layout{type, rows, cols, ld}, SUCCESS;
}
CALL cublasLtMatrixLayoutDestroy(Layout* it) { return delete it, SUCCESS; }

CALL cublasLtMatmulPreferenceCreate(Preference** made) { return *made = new Preference, SUCCESS; }
CALL cublasLtMatmulPreferenceDestroy(Preference* it) { return delete it, SUCCESS; }

CALL cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t n) {
    if (attribute == 1 && n == 8) return memcpy(&preference->workspace, value, n), SUCCESS;
    if (attribute >= 5 && attribute <= 8 && n == 4) return memcpy(&preference->alignments[attribute - 5], value, n), 0;
    return INVALID_VALUE;
}

CALL cublasLtMatmulAlgoGetHeuristic(Handle* handle, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d,
                                    Preference* preference, int n_wanted, Found* found, int* n_found) {
    *n_found = 0;
    if (getenv("FAKE_CUBLASLT_HAS_NO_WAY")) return NOT_SUPPORTED;
    must(n_wanted >= 1 && preference->workspace >= WORKSPACE, "no workspace to compute in");
    // CUBLAS_COMPUTE_32F with f32 scales; bf16 into f32.
    must(desc->compute == 68 && desc->scale == 0, "sums other than in f32");
    uint64_t type = a->type;
    must((type == BF16 || type == E4M3) && b->type == a->type && c->type == 0 && d->type == 0, "other types");
    must(desc->turns_a == 1 && desc->turns_b == 0, "other than A turned and B as it is");
    must(a->rows == b->rows && a->cols == d->rows && b->cols == d->cols, "matrices that do not fit");
    must(c->rows == d->rows && c->cols == d->cols && c->ld == d->ld, "C is not like D");
    must(a->ld == b->ld && a->ld >= (int64_t)a->rows && d->ld >= (int64_t)d->rows, "rows that overlap");
    if (type == E4M3) {
        // Numbers of eight bits require all sizes and addresses on sixteen bytes.
        must(a->rows % 16 == 0 && d->rows % 16 == 0 && a->ld % 16 == 0 && d->ld % 4 == 0, "a matrix of odd rows");
        for (uint32_t alignment : preference->alignments) must(alignment >= 16, "an address that is not on 16 bytes");
        if (getenv("FAKE_CUBLASLT_HAS_NO_F8")) return NOT_SUPPORTED;
    }
    memset(found, 0, sizeof *found);
    found->algorithm = {d->rows, d->cols, a->rows, (uint64_t)a->ld, (uint64_t)d->ld,
                        alignments_of(preference->alignments), type, 0};
    std::string key(reinterpret_cast<char*>(&found->algorithm), sizeof(Algorithm));
    must(handle->requested.insert(key).second, "the host requests the algorithm of a shape again");
    found->workspace = WORKSPACE;
    return *n_found = 1, SUCCESS;
}

CALL cublasLtMatmul(Handle* handle, Desc* desc, const float* alpha, const void* a, Layout* of_a, const void* b,
                    Layout* of_b, const float* beta, const void* c, Layout*, void* d, Layout* of_d,
                    const Algorithm* algo, void* workspace, size_t n_workspace, void* stream) {
    if (getenv("FAKE_CUBLASLT_FAILS")) return EXECUTION_FAILED;
    if (algo->type == E4M3 && getenv("FAKE_CUBLASLT_REFUSES_F8")) return NOT_SUPPORTED;
    std::string key(reinterpret_cast<const char*>(algo), sizeof *algo);
    must(handle->requested.count(key), "an algorithm that this handle did not return");
    must(desc->turns_a == 1 && *alpha == 1.0f && *beta == 0.0f && c == d, "other than D = A' B");
    must(algo->m == of_d->rows && algo->n == of_d->cols && algo->k == of_a->rows, "an algorithm for another shape");
    must((int64_t)algo->ld == of_a->ld && of_a->ld == of_b->ld && (int64_t)algo->ld_out == of_d->ld, "other rows");
    const void* all[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        uint64_t alignment = algo->alignments >> (16 * i) & 0xffff;
        must(reinterpret_cast<uintptr_t>(all[i]) % alignment == 0, "an address is aligned worse than declared");
    }
    must(algo->type == (uint64_t)of_a->type && of_b->type == of_a->type, "an algorithm for another type");
    const uint64_t size = algo->type == BF16 ? 2 : 1;
    must(is_memory(a, ((algo->m - 1) * algo->ld + algo->k) * size), "weights in memory that was not allocated");
    must(is_memory(b, ((algo->n - 1) * algo->ld + algo->k) * size), "rows in memory that was not allocated");
    must(is_memory(d, ((algo->n - 1) * algo->ld_out + algo->m) * 4), "no room for the product");
    must(n_workspace >= WORKSPACE && is_memory(workspace, n_workspace), "no workspace");
    Work* work = new Work{*algo, a, b, static_cast<float*>(d), static_cast<char*>(workspace)};
    return of_driver<Begin>("fake_cuda_begin")(stream, run, work, fresh, nothing, nothing);
}
