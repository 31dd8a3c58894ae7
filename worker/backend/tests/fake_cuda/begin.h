// The functions of the fake driver for the libraries over it. Each library finds them by name, as in a real driver.
#pragma once

#include <dlfcn.h>
#include <stddef.h>

// Begins work in a stream: see `fake_cuda_begin`.
using Begin = int (*)(void*, int (*)(void*), void*, void* (*)(void*), void (*)(void*), void (*)(void*));
using IsMemory = int (*)(const void*, size_t);

template <class F>
F of_driver(const char* name) {
    static void* driver = dlopen("libcuda.so", RTLD_NOW);
    return reinterpret_cast<F>(dlsym(driver, name));
}

inline bool is_memory(const void* at, size_t n) { return of_driver<IsMemory>("fake_cuda_is_memory")(at, n); }

inline bool has_device() { return of_driver<int (*)()>("fake_cuda_has_device")(); }
inline void trace(const char* what) { of_driver<int (*)(const char*)>("fake_cuda_trace")(what); }
