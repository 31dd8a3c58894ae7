// Elementary functions and reductions over a row: the CPU's (`cpu/math.rs`, `cpu/lanes/mod.rs`), operation for operation.
#pragma once
#include "device.cuh"

// `if a > b { a } else { b }`: a NaN on either side gives b.
DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE float smaller(float a, float b) { return a < b ? a : b; }
DEVICE bool is_nan(float x) { return x != x; }

// 2^x for an integer in -126..=127.
DEVICE float pow2(float x) { return bits_to_float((u32)((int)x + 127) << 23); }

// e^r for a small r.
DEVICE float exp_polynomial(float r) {
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    return fmaf(p, r * r, r) + 1.0f;
}

// e^x within 2 ulp. Exactly 0 if x is too small, infinity if it is too large.
DEVICE float exp_of(float x) {
    // The constant comes first, so that a NaN in x is the result.
    x = smaller(89.0f, larger(-104.0f, x));
    if (is_nan(x)) {
        return x;
    }
    float n = rintf(x * 1.44269504f);
    float r = fmaf(n, -0.6933594f, x);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = exp_polynomial(r);
    // In two steps: 2^n itself may be out of range where e^x is not.
    float half = rintf(n * 0.5f);
    return p * pow2(half) * pow2(n - half);
}

// Whether `exp_normal` has the bits of `exp_of`: not where e^x is not a normal number, nor for a NaN.
DEVICE bool is_exp_normal(float x) { return x >= -86.0f; }

// e^x for x of at most 0.
DEVICE float exp_normal(float x) {
    // Adding 1.5 * 2^23 rounds to an integer, which its lowest bits hold.
    float shifted = x * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = fmaf(n, -0.6933594f, x);
    r = fmaf(n, 2.1219444e-4f, r);
    return bits_to_float(float_to_bits(exp_polynomial(r)) + (float_to_bits(shifted) << 23));
}

// The natural logarithm of a positive normal number, such as a sum of e^(x - largest), within 2 ulp.
DEVICE float ln_of(float x) {
    u32 bits = float_to_bits(x);
    float e = (float)(bits >> 23 & 0xffu) - 126.0f;
    float m = bits_to_float((bits & 0x007fffffu) | 0x3f000000u);
    // From [0.5, 1) to [sqrt(1/2), sqrt(2)), less one.
    bool is_low = m < 0.70710678118f;
    e = is_low ? e - 1.0f : e;
    float f = (is_low ? m + m : m) - 1.0f;
    float z = f * f;
    float p = 7.0376836e-2f;
    p = fmaf(p, f, -1.151461e-1f);
    p = fmaf(p, f, 1.1676999e-1f);
    p = fmaf(p, f, -1.2420141e-1f);
    p = fmaf(p, f, 1.4249323e-1f);
    p = fmaf(p, f, -1.6668058e-1f);
    p = fmaf(p, f, 2.0000715e-1f);
    p = fmaf(p, f, -2.4999994e-1f);
    p = fmaf(p, f, 3.333333e-1f);
    float y = fmaf(e, -2.1219444e-4f, p * f * z);
    y = fmaf(z, -0.5f, y);
    return fmaf(e, 0.6933594f, f + y);
}

// x / (1 + e^-x)
DEVICE float silu_of(float x) { return x / (1.0f + exp_of(0.0f - x)); }

DEVICE float tanh_of(float x) {
    float size = fabsf(x);
    float z = x * x;
    float p = -5.7049887e-3f;
    p = fmaf(p, z, 2.063909e-2f);
    p = fmaf(p, z, -5.3739716e-2f);
    p = fmaf(p, z, 1.3331442e-1f);
    p = fmaf(p, z, -3.333328e-1f);
    float small = fmaf(p * z, x, x);
    float large = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
    large = x < 0.0f ? 0.0f - large : large;
    return size < 0.625f ? small : large;
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
DEVICE float gelu_of(float x) {
    float inner = fmaf(x * x * x, 0.044715f, x) * 0.7978846f;
    return x * 0.5f * (1.0f + tanh_of(inner));
}

// At most 2e-7 off.
DEVICE float erf_of(float x) {
    float size = fabsf(x);
    float t = 1.0f / fmaf(size, 0.3275911f, 1.0f);
    float p = 1.0614054f;
    p = fmaf(p, t, -1.453152f);
    p = fmaf(p, t, 1.4214138f);
    p = fmaf(p, t, -0.28449674f);
    p = fmaf(p, t, 0.2548296f);
    float y = 1.0f - p * t * exp_of(0.0f - size * size);
    return x < 0.0f ? 0.0f - y : y;
}

// x / 2 * (1 + erf(x / sqrt(2)))
DEVICE float gelu_erf_of(float x) { return x * 0.5f * (1.0f + erf_of(x * 0.70710678f)); }

// (up + 1) * gate * sigmoid(alpha * gate), clamped
DEVICE float clamped_silu_of(float gate, float up, float alpha, float limit) {
    gate = smaller(limit, gate);
    up = smaller(limit, larger(0.0f - limit, up));
    return (up + 1.0f) * (gate / (1.0f + exp_of(0.0f - gate * alpha)));
}

// cap * tanh(x / cap)
DEVICE float soft_cap_of(float x, float cap) { return tanh_of(x / cap) * cap; }

// A row is reduced in sixteen lanes, lane j taking elements j, j + 16, ..; here they are the lanes of half a warp, and
// both halves may have a row of their own. The one tree: halves are added to halves.
DEVICE float tree_sum(float lane) {
    UNROLL
    for (int half = 8; half > 0; half /= 2) {
        lane = lane + shuffle_xor(lane, half);
    }
    return lane;
}

DEVICE float tree_largest(float lane) {
    UNROLL
    for (int half = 8; half > 0; half /= 2) {
        lane = larger(shuffle_xor(lane, half), lane);
    }
    return lane;
}
