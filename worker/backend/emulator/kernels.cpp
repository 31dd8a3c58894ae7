// All kernels by name. Compiled once for each .cu, as `KERNELS`, because each is a unit of its own.
#include KERNELS

#define KIND(kind)                     \
    EMULATED(linear_##kind##_r8)       \
    EMULATED(linear_##kind##_r16)      \
    EMULATED(linear_##kind##_r32)      \
    EMULATED(linear_##kind##_r64)      \
    EMULATED(linear_grouped_##kind)

#if defined(IS_attention)
EMULATED(rope_store)
EMULATED(attend_merge)
#define HEADS(D, MANY)                 \
    EMULATED(attend_d##D##_q16)        \
    EMULATED(attend_d##D##_q##MANY)    \
    EMULATED(attend_split_d##D##_q16)
HEADS(32, 64)
HEADS(64, 64)
HEADS(96, 64)
HEADS(128, 64)
HEADS(160, 32)
HEADS(192, 32)
HEADS(224, 32)
HEADS(256, 32)
#elif defined(IS_experts)
EMULATED(route)
EMULATED(group_choices)
EMULATED(fold_experts)
#elif defined(IS_linear)
KIND(bf16)
KIND(plain)
KIND(w8)
KIND(w8h)
KIND(w4)
KIND(w4h)
EMULATED(fold_planes)
#elif defined(IS_norms)
EMULATED(rms_norm)
EMULATED(add_rms_norm)
EMULATED(layer_norm)
EMULATED(norm_heads)
#elif defined(IS_one_shot)
EMULATED_TOGETHER(sum_one_shot)
#elif defined(IS_rows)
EMULATED(round_rows)
EMULATED(widen_rows)
EMULATED(gather_rows)
EMULATED(add_rows)
EMULATED(add_bias)
EMULATED(silu_mul)
EMULATED(gelu_mul)
EMULATED(gelu_rows)
EMULATED(scale_rows)
EMULATED(soft_cap_rows)
EMULATED(embed_bf16)
EMULATED(embed_plain)
EMULATED(embed_w8)
EMULATED(embed_w8h)
EMULATED(embed_w4)
EMULATED(embed_w4h)
#elif defined(IS_sample)
EMULATED(draw)
EMULATED(draw_filtered)
EMULATED(take_drawn)
#endif
