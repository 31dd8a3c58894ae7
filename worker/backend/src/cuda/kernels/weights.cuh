// Packed weights, as `kernels.cuh` lays them out: how a lane reads its part of sixteen rows of thirty-two elements.
//
// A kind has `Raw`, what a lane loads; `fetch`, which loads it; `widen`, which converts it to bf16; and `one`, a single
// weight. `first` is the index of a tile's first group among all groups; `group` counts from there. A group of a tile
// has DIGIT_BYTES and SCALE_BYTES.
#pragma once
#include "kernels.cuh"

// How `fetch` loads: from the device's memory, or from shared memory.
struct FromDevice {
    template <class T>
    static DEVICE_MEMBER T load(const T* from) { return load_once(from); }
};
struct FromShared {
    template <class T>
    static DEVICE_MEMBER T load(const T* from) { return *from; }
};

// Sixteen rows of thirty-two weights for the tensor cores: a[step][register], in the order of `multiply_tiles`.
struct Fragment {
    u32 a[2][4];
};

struct KindBf16 {
    static constexpr u32 DIGIT_BYTES = 1024, SCALE_BYTES = 0;
    struct Raw {
        Words4 steps[2];
    };

    template <class From = FromDevice>
    static DEVICE_MEMBER Raw fetch(const void* digits, const void*, u64 first, u64 group, u32, u32 lane) {
        const Words4* from = (const Words4*)digits + (first + group) * 64 + lane;
        Raw raw;
        raw.steps[0] = From::load(from);
        raw.steps[1] = From::load(from + 32);
        return raw;
    }

    static DEVICE_MEMBER Fragment widen(const Raw& raw) {
        Fragment out;
        UNROLL
        for (int step = 0; step < 2; step++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                out.a[step][i] = raw.steps[step].w[i];
            }
        }
        return out;
    }

    static DEVICE_MEMBER bf16 one(const void* digits, const void*, u64 first, u32 group, u32, u32 row, u32 element) {
        u32 lane = row % 8 * 4 + element / 4 % 4, word = element % 4 / 2 * 2 + row / 8;
        return ((const bf16*)digits)[(first + group) * 512 + (element / 16 * 128 + lane * 4 + word) * 2 + element % 2];
    }
};

// Rows in the matrix's own layout, because a library reads them too.
struct KindPlain : KindBf16 {
    template <class From = FromDevice>
    static DEVICE_MEMBER Raw fetch(const void* digits, const void*, u64 first, u64 group, u32 n_groups, u32 lane) {
        const Words2* from = (const Words2*)digits + (first * 16 + lane / 4 * n_groups + group) * 8 + lane % 4;
        Raw raw;
        UNROLL
        for (int i = 0; i < 4; i++) {
            Words2 of_step = From::load(from + i / 2 * (n_groups * 64) + i % 2 * 4);
            raw.steps[i % 2].w[i / 2] = of_step.w[0];
            raw.steps[i % 2].w[i / 2 + 2] = of_step.w[1];
        }
        return raw;
    }

    static DEVICE_MEMBER bf16 one(const void* digits, const void*, u64 first, u32 group, u32 n_groups, u32 row,
                                  u32 element) {
        return ((const bf16*)digits)[(first * 16 + row * n_groups + group) * 32 + element];
    }
};

// The pair (scale, minimum) in a word.
struct Scale {
    float scale, minimum;

    DEVICE_MEMBER explicit Scale(u32 pair) : scale(widen_f16(pair)), minimum(widen_f16(pair >> 16)) {}
    // The weight of the digit under `mask`, which begins at bit `place` and ends below bit 23: its bits make a float of
    // digit * 2^place, and the scale takes the power back, both exactly.
    DEVICE_MEMBER float of(u32 word, u32 mask, int place) const {
        const float power = bits_to_float((u32)(127 - place) << 23);
        return fmaf(scale * power, bits_to_float(and_or(word, mask, 0x4b000000u)) - 8388608.0f, minimum);
    }
};

// BITS: 8 or 4. HALVES: each sixteen elements have a scale of their own.
template <int BITS, bool HALVES>
struct KindQuantized {
    static constexpr u32 DIGIT_BYTES = BITS * 64, SCALE_BYTES = HALVES ? 128 : 64;
    // The words that hold eight digits.
    static constexpr int WORDS = BITS / 4;
    struct Digits {
        u32 rows[2][WORDS];
    };
    // Of a row and of the one eight below it; where each step of sixteen has a scale, those of the second step follow.
    struct Scales {
        u32 w[HALVES ? 4 : 2];
    };
    struct Raw {
        Digits digits;
        Scales scales;
    };

    template <class From>
    static DEVICE_MEMBER Scales fetch_scales(const void* scales, u64 at) {
        Scales out;
        if constexpr (HALVES) {
            Words4 words = From::load((const Words4*)scales + at);
            UNROLL
            for (int i = 0; i < 4; i++) {
                out.w[i] = words.w[i];
            }
        } else {
            Words2 words = From::load((const Words2*)scales + at);
            out.w[0] = words.w[0];
            out.w[1] = words.w[1];
        }
        return out;
    }

    template <class From = FromDevice>
    static DEVICE_MEMBER Raw fetch(const void* digits, const void* scales, u64 first, u64 group, u32, u32 lane) {
        const u64 at = first + group;
        Raw raw;
        if (BITS == 8) {
            Words4 words = From::load((const Words4*)digits + at * 32 + lane);
            UNROLL
            for (int i = 0; i < 4; i++) {
                raw.digits.rows[i / 2][i % WORDS] = words.w[i];
            }
        } else {
            Words2 words = From::load((const Words2*)digits + at * 32 + lane);
            raw.digits.rows[0][0] = words.w[0];
            raw.digits.rows[1][0] = words.w[1];
        }
        raw.scales = fetch_scales<From>(scales, at * 8 + lane / 4);
        return raw;
    }

    // Number i of eight. Digits are used where they stand, if that is below bit 23.
    static DEVICE_MEMBER float number(const Scale& scale, const u32 (&words)[WORDS], int i) {
        const int bit = i * BITS % 32, high = BITS == 4 ? 20 : 16, shift = bit < high ? 0 : high;
        return scale.of(words[i * BITS / 32] >> shift, ((1u << BITS) - 1) << (bit - shift), bit - shift);
    }

    static DEVICE_MEMBER Fragment widen(const Raw& raw) {
        Fragment out;
        UNROLL
        for (int row = 0; row < 2; row++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                Scale scale(raw.scales.w[HALVES ? i / 2 * 2 + row : row]);
                float low = number(scale, raw.digits.rows[row], 2 * i);
                float high = number(scale, raw.digits.rows[row], 2 * i + 1);
                out.a[i / 2][row + i % 2 * 2] = pack_bf16(low, high);
            }
        }
        return out;
    }

    static DEVICE_MEMBER bf16 one(const void* digits, const void* scales, u64 first, u32 group, u32, u32 row,
                                  u32 element) {
        const u64 at = first + group;
        u32 place = by_lane(element), lane = row % 8 * 4 + place / 8, h = row / 8;
        const u8* byte = (const u8*)digits + ((at * 32 + lane) * 2 + h) * BITS + place % 8 * BITS / 8;
        u32 digit = *byte >> (place % 8 * BITS % 8) & ((1u << BITS) - 1);
        Scale scale(((const Scales*)scales)[at * 8 + row % 8].w[HALVES ? element / 16 * 2 + h : h]);
        return narrow(scale.of(digit, 0xffu, 0));
    }
};

typedef KindQuantized<8, false> KindW8;
typedef KindQuantized<8, true> KindW8h;
typedef KindQuantized<4, false> KindW4;
typedef KindQuantized<4, true> KindW4h;

// ---- numbers of eight bits ----------------------------------------------------------------------------------------

// Widens the lowest eight bits of a word, except NaN. The factor corrects the bias of the exponent, for subnormal
// numbers too.
DEVICE float widen_f8(u32 bits) { return bits_to_float((bits & 0x80u) << 24 | (bits & 0x7fu) << 20) * 0x1p120f; }

// Rounds a number of at most 448 to the nearest, ties to even.
DEVICE u32 narrow_f8(float x) {
    const float size = fabsf(x), floor = 16384.0f;
    // Below 2^-6 numbers are 2^-9 apart, as those of a float are from `floor` on.
    u32 small = float_to_bits(size + floor) - float_to_bits(floor);
    u32 bits = float_to_bits(size);
    u32 large = ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
    return (float_to_bits(x) >> 24 & 0x80u) | (size < 0x1p-6f ? small : large);
}

// PLAIN: rows in the matrix's own layout, because a library reads them too.
template <bool PLAIN>
struct KindFloat8 {
    static constexpr u32 DIGIT_BYTES = 512, SCALE_BYTES = 64;
    struct Raw {
        Words2 rows[2];
        Words2 scales;
    };

    template <class From = FromDevice>
    static DEVICE_MEMBER Raw fetch(const void* digits, const void* scales, u64 first, u64 group, u32 n_groups,
                                   u32 lane) {
        const u64 at = first + group;
        Raw raw;
        if (PLAIN) {
            const u32* from = (const u32*)digits + (first * 16 + lane / 4 * n_groups + group) * 8 + lane % 4;
            UNROLL
            for (int i = 0; i < 4; i++) {
                raw.rows[i / 2].w[i % 2] = From::load(from + i / 2 * (n_groups * 64) + i % 2 * 4);
            }
        } else {
            Words4 words = From::load((const Words4*)digits + at * 32 + lane);
            UNROLL
            for (int i = 0; i < 4; i++) {
                raw.rows[i / 2].w[i % 2] = words.w[i];
            }
        }
        raw.scales = From::load((const Words2*)scales + at * 8 + lane / 4);
        return raw;
    }

    static DEVICE_MEMBER Fragment widen(const Raw& raw) {
        Fragment out;
        UNROLL
        for (int row = 0; row < 2; row++) {
            float scale = bits_to_float(raw.scales.w[row]);
            UNROLL
            for (int i = 0; i < 4; i++) {
                u32 pair = raw.rows[row].w[i / 2] >> (i % 2 * 16);
                out.a[i / 2][row + i % 2 * 2] = pack_bf16(widen_f8(pair) * scale, widen_f8(pair >> 8) * scale);
            }
        }
        return out;
    }

    static DEVICE_MEMBER bf16 one(const void* digits, const void* scales, u64 first, u32 group, u32 n_groups, u32 row,
                                  u32 element) {
        const u64 at = first + group;
        u32 place = by_lane(element);
        u64 in_tile = ((at * 32 + row % 8 * 4 + place / 8) * 2 + row / 8) * 8 + place % 8;
        u64 in_rows = (first * 16 + row * n_groups + group) * 32 + element;
        float scale = ((const float*)scales)[at * 16 + row % 8 * 2 + row / 8];
        return narrow(widen_f8(((const u8*)digits)[PLAIN ? in_rows : in_tile]) * scale);
    }
};

typedef KindFloat8<false> KindF8;
typedef KindFloat8<true> KindF8Plain;
