// Measures the peak throughput of this machine: GB/s that all threads read together, and billions of operations
// a second of 8-bit multiply-adds, each counted as two. `peaks THREADS` prints both.
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BYTES ((size_t)256 << 20)
#define ROUNDS 6
#define TURNS 40000000L

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

typedef struct {
    uint64_t *words;
    long kept;
} Part;

static void *read_all(void *given) {
    Part *part = given;
    uint64_t sums[8] = {0};
    for (size_t i = 0; i < BYTES / sizeof(uint64_t); i += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] ^= part->words[i + lane];
    for (int lane = 0; lane < 8; lane++) part->kept ^= (long)sums[lane];
    return NULL;
}

#if defined(__AVX512VNNI__)
#define PRODUCTS 64
typedef __m512i Lanes;
static inline Lanes product(Lanes sum, Lanes a, Lanes b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
#define PRODUCTS 32
typedef __m256i Lanes;
static inline Lanes product(Lanes sum, Lanes a, Lanes b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#elif defined(__AVX2__)
#define PRODUCTS 32
typedef __m256i Lanes;
static inline Lanes product(Lanes sum, Lanes a, Lanes b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
#endif

#ifdef PRODUCTS
static void *multiply(void *given) {
    Part *part = given;
    Lanes sums[8], a, b;
    memset(sums, 0, sizeof sums);
    memset(&a, 3, sizeof a);
    memset(&b, 5, sizeof b);
    for (long turn = 0; turn < TURNS / 8; turn++) {
        for (int i = 0; i < 8; i++) sums[i] = product(sums[i], a, b);
        // The operands must not be known, or the compiler would multiply once.
        __asm__ volatile("" : "+x"(a), "+x"(b));
    }
    for (int i = 1; i < 8; i++) {
        long lane;
        memcpy(&lane, &sums[i], sizeof lane);
        part->kept ^= lane;
    }
    return NULL;
}
#endif

static double fastest(void *(*work)(void *), Part *parts, int n_threads) {
    pthread_t threads[256];
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        double began = seconds();
        for (int i = 0; i < n_threads; i++) pthread_create(&threads[i], NULL, work, &parts[i]);
        for (int i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
        double took = seconds() - began;
        if (took < best) best = took;
    }
    return best;
}

int main(int argc, char **argv) {
    int n_threads = argc > 1 ? atoi(argv[1]) : 1;
    if (n_threads < 1 || n_threads > 256) return 2;
    Part *parts = calloc(n_threads, sizeof(Part));
    for (int i = 0; i < n_threads; i++) {
        parts[i].words = aligned_alloc(64, BYTES);
        if (!parts[i].words) return 1;
        memset(parts[i].words, i + 1, BYTES);
    }
    double read = (double)BYTES * n_threads / fastest(read_all, parts, n_threads) / 1e9;
    double products = 0;
#ifdef PRODUCTS
    products = 2.0 * PRODUCTS * TURNS * n_threads / fastest(multiply, parts, n_threads) / 1e9;
#endif
    long kept = 0;
    for (int i = 0; i < n_threads; i++) kept ^= parts[i].kept;
    printf("{\"read_gb_s\": %.1f, \"int8_gops\": %.0f}\n", read, products);
    return kept == 12345;
}
