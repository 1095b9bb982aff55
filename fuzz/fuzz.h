#pragma once

// What the fuzz targets share: checks that stop the fuzzer, failed assertions of ggml as exceptions, choices out of an input.

#include "ggml.h"
#include "ggml-flash-attn-back.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>

#define CHECK(x) \
    do { \
        if (!(x)) { \
            fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #x); \
            abort(); \
        } \
    } while (0)

// a failed assertion of ggml, instead of the end of the process
struct refusal {
    std::string text;
};

[[noreturn]] inline void throw_refusal(const char * text) {
    throw refusal{ text };
}

// whether f runs to its end; if not, the operator's own assertion stopped it, with words
template <typename F>
bool accepted(const F & f) {
    try {
        f();
        return true;
    } catch (const refusal & r) {
        const bool bare = r.text.find("GGML_ASSERT(") != std::string::npos && r.text.find(" && \"") == std::string::npos;
        if (bare || r.text.find("ggml-flash-attn-back.c:") == std::string::npos) {
            fprintf(stderr, "not refused in words: %s\n", r.text.c_str());
            abort();
        }
        return false;
    }
}

template <typename T, size_t n>
T pick(FuzzedDataProvider & in, const T (&of)[n]) {
    return of[in.ConsumeIntegralInRange<size_t>(0, n - 1)];
}
