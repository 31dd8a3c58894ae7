//! The table of all kernels: the unit of each, and its name in a compiled module. Code that runs a kernel uses its
//! number here; names matter only when modules are loaded.

use super::compiler::{Program, SourceText};
use super::weights::WeightKind;

macro_rules! text {
    ($name:literal) => {
        SourceText { name: $name, text: include_str!(concat!("kernels/", $name)) }
    };
}

pub(super) const HEADERS: &[SourceText] = &[
    text!("kernels.cuh"),
    text!("device.cuh"),
    text!("math.cuh"),
    text!("products.cuh"),
    text!("rows.cuh"),
    text!("weights.cuh"),
];

/// Only fusions in the source are made: the bits are those of the emulator.
const OPTIONS: &[&str] = &["-std=c++17", "-fmad=false", "-default-device"];

/// A unit, and its kernels.
pub(super) struct Unit {
    pub main: SourceText,
    pub kernels: &'static [Kernel],
}

impl Unit {
    pub fn program(&self) -> Program {
        Program { main: self.main, headers: HEADERS, options: OPTIONS }
    }
}

/// Units in any order, each with its kernels: the enum counts them in the order of this table.
macro_rules! kernels {
    ($($unit:literal: { $($kernel:ident = $name:literal,)* })*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Kernel {
            $($($kernel,)*)*
        }

        impl Kernel {
            /// Returns its name in the source.
            pub const fn name(self) -> &'static str {
                match self {
                    $($(Kernel::$kernel => $name,)*)*
                }
            }
        }

        pub(super) const UNITS: &[Unit] =
            &[$(Unit { main: text!($unit), kernels: &[$(Kernel::$kernel),*] }),*];
    };
}

kernels! {
    "rows.cu": {
        RoundRows = "round_rows",
        WidenRows = "widen_rows",
        GatherRows = "gather_rows",
        AddRows = "add_rows",
        AddBias = "add_bias",
        SiluMul = "silu_mul",
        GeluMul = "gelu_mul",
        GeluRows = "gelu_rows",
        ScaleRows = "scale_rows",
        SoftCapRows = "soft_cap_rows",
        GeluErfRows = "gelu_erf_rows",
        ClampedSiluMul = "clamped_silu_mul",
        ScaleQueries = "scale_queries",
        CopyColumns = "copy_columns",
        AddExpertBias = "add_expert_bias",
        EmbedBf16 = "embed_bf16",
        EmbedPlain = "embed_plain",
        EmbedW8 = "embed_w8",
        EmbedW8h = "embed_w8h",
        EmbedW4 = "embed_w4",
        EmbedW4h = "embed_w4h",
        EmbedF8 = "embed_f8",
        EmbedF8plain = "embed_f8plain",
        QuantizeRows = "quantize_rows",
        ScaleProduct = "scale_product",
        WidenWeights = "widen_weights",
    }
    "norms.cu": {
        RmsNorm = "rms_norm",
        AddRmsNorm = "add_rms_norm",
        LayerNorm = "layer_norm",
        NormColumns = "norm_columns",
        NormHeads = "norm_heads",
    }
    "linear.cu": {
        LinearBf16R8 = "linear_bf16_r8",
        LinearBf16R16 = "linear_bf16_r16",
        LinearBf16R32 = "linear_bf16_r32",
        LinearBf16R64 = "linear_bf16_r64",
        LinearPlainR8 = "linear_plain_r8",
        LinearPlainR16 = "linear_plain_r16",
        LinearPlainR32 = "linear_plain_r32",
        LinearPlainR64 = "linear_plain_r64",
        LinearW8R8 = "linear_w8_r8",
        LinearW8R16 = "linear_w8_r16",
        LinearW8R32 = "linear_w8_r32",
        LinearW8R64 = "linear_w8_r64",
        LinearW8hR8 = "linear_w8h_r8",
        LinearW8hR16 = "linear_w8h_r16",
        LinearW8hR32 = "linear_w8h_r32",
        LinearW8hR64 = "linear_w8h_r64",
        LinearW4R8 = "linear_w4_r8",
        LinearW4R16 = "linear_w4_r16",
        LinearW4R32 = "linear_w4_r32",
        LinearW4R64 = "linear_w4_r64",
        LinearW4hR8 = "linear_w4h_r8",
        LinearW4hR16 = "linear_w4h_r16",
        LinearW4hR32 = "linear_w4h_r32",
        LinearW4hR64 = "linear_w4h_r64",
        LinearF8R8 = "linear_f8_r8",
        LinearF8R16 = "linear_f8_r16",
        LinearF8R32 = "linear_f8_r32",
        LinearF8R64 = "linear_f8_r64",
        LinearF8plainR8 = "linear_f8plain_r8",
        LinearF8plainR16 = "linear_f8plain_r16",
        LinearF8plainR32 = "linear_f8plain_r32",
        LinearF8plainR64 = "linear_f8plain_r64",
        LinearGroupedBf16 = "linear_grouped_bf16",
        LinearGroupedPlain = "linear_grouped_plain",
        LinearGroupedW8 = "linear_grouped_w8",
        LinearGroupedW8h = "linear_grouped_w8h",
        LinearGroupedW4 = "linear_grouped_w4",
        LinearGroupedW4h = "linear_grouped_w4h",
        LinearGroupedF8 = "linear_grouped_f8",
        LinearGroupedF8plain = "linear_grouped_f8plain",
        FoldPlanes = "fold_planes",
        FoldSplit = "fold_split",
    }
    "wide.cu": {
        LinearBf16R128 = "linear_bf16_r128",
        LinearPlainR128 = "linear_plain_r128",
        LinearW8R128 = "linear_w8_r128",
        LinearW8hR128 = "linear_w8h_r128",
        LinearW4R128 = "linear_w4_r128",
        LinearW4hR128 = "linear_w4h_r128",
        LinearF8R128 = "linear_f8_r128",
        LinearF8plainR128 = "linear_f8plain_r128",
    }
    "warpgroups.cu": {
        TileRows = "tile_rows",
        LinearBf16R256 = "linear_bf16_r256",
        LinearW8R256 = "linear_w8_r256",
        LinearW8hR256 = "linear_w8h_r256",
        LinearW4R256 = "linear_w4_r256",
        LinearW4hR256 = "linear_w4h_r256",
        LinearF8R256 = "linear_f8_r256",
    }
    "attention.cu": {
        RopeStore = "rope_store",
        AttendD32Q16 = "attend_d32_q16",
        AttendD64Q16 = "attend_d64_q16",
        AttendD96Q16 = "attend_d96_q16",
        AttendD128Q16 = "attend_d128_q16",
        AttendD160Q16 = "attend_d160_q16",
        AttendD192Q16 = "attend_d192_q16",
        AttendD224Q16 = "attend_d224_q16",
        AttendD256Q16 = "attend_d256_q16",
        AttendD32Q64 = "attend_d32_q64",
        AttendD64Q64 = "attend_d64_q64",
        AttendD96Q64 = "attend_d96_q64",
        AttendD128Q64 = "attend_d128_q64",
        AttendD160Q32 = "attend_d160_q32",
        AttendD192Q32 = "attend_d192_q32",
        AttendD224Q32 = "attend_d224_q32",
        AttendD256Q32 = "attend_d256_q32",
        AttendSplitD32Q16 = "attend_split_d32_q16",
        AttendSplitD64Q16 = "attend_split_d64_q16",
        AttendSplitD96Q16 = "attend_split_d96_q16",
        AttendSplitD128Q16 = "attend_split_d128_q16",
        AttendSplitD160Q16 = "attend_split_d160_q16",
        AttendSplitD192Q16 = "attend_split_d192_q16",
        AttendSplitD224Q16 = "attend_split_d224_q16",
        AttendSplitD256Q16 = "attend_split_d256_q16",
        AttendMerge = "attend_merge",
    }
    "experts.cu": {
        Route = "route",
        RouteSigmoid = "route_sigmoid",
        GroupChoices = "group_choices",
        FoldExperts = "fold_experts",
    }
    "one_shot.cu": {
        SumOneShot = "sum_one_shot",
    }
    "sample.cu": {
        Draw = "draw",
        DrawFiltered = "draw_filtered",
        TakeDrawn = "take_drawn",
    }
}

impl Kernel {
    /// Returns the products with 8, 16, 32, 64 and 128 rows for each block.
    pub const fn linear(kind: WeightKind) -> [Kernel; 5] {
        use Kernel as K;
        match kind {
            WeightKind::Bf16 => {
                [K::LinearBf16R8, K::LinearBf16R16, K::LinearBf16R32, K::LinearBf16R64, K::LinearBf16R128]
            }
            WeightKind::Plain => {
                [K::LinearPlainR8, K::LinearPlainR16, K::LinearPlainR32, K::LinearPlainR64, K::LinearPlainR128]
            }
            WeightKind::W8 => [K::LinearW8R8, K::LinearW8R16, K::LinearW8R32, K::LinearW8R64, K::LinearW8R128],
            WeightKind::W8h => [K::LinearW8hR8, K::LinearW8hR16, K::LinearW8hR32, K::LinearW8hR64, K::LinearW8hR128],
            WeightKind::W4 => [K::LinearW4R8, K::LinearW4R16, K::LinearW4R32, K::LinearW4R64, K::LinearW4R128],
            WeightKind::W4h => [K::LinearW4hR8, K::LinearW4hR16, K::LinearW4hR32, K::LinearW4hR64, K::LinearW4hR128],
            WeightKind::F8 => [K::LinearF8R8, K::LinearF8R16, K::LinearF8R32, K::LinearF8R64, K::LinearF8R128],
            WeightKind::F8Plain => [
                K::LinearF8plainR8,
                K::LinearF8plainR16,
                K::LinearF8plainR32,
                K::LinearF8plainR64,
                K::LinearF8plainR128,
            ],
        }
    }

    /// Returns the product of tiles of 256 rows, on Hopper.
    pub const fn tiled(kind: WeightKind) -> Option<Kernel> {
        match kind {
            WeightKind::Bf16 => Some(Kernel::LinearBf16R256),
            WeightKind::W8 => Some(Kernel::LinearW8R256),
            WeightKind::W8h => Some(Kernel::LinearW8hR256),
            WeightKind::W4 => Some(Kernel::LinearW4R256),
            WeightKind::W4h => Some(Kernel::LinearW4hR256),
            WeightKind::F8 => Some(Kernel::LinearF8R256),
            WeightKind::Plain | WeightKind::F8Plain => None,
        }
    }

    /// Returns the products of experts, each with the rows that chose it.
    pub const fn grouped(kind: WeightKind) -> Kernel {
        match kind {
            WeightKind::Bf16 => Kernel::LinearGroupedBf16,
            WeightKind::Plain => Kernel::LinearGroupedPlain,
            WeightKind::W8 => Kernel::LinearGroupedW8,
            WeightKind::W8h => Kernel::LinearGroupedW8h,
            WeightKind::W4 => Kernel::LinearGroupedW4,
            WeightKind::W4h => Kernel::LinearGroupedW4h,
            WeightKind::F8 => Kernel::LinearGroupedF8,
            WeightKind::F8Plain => Kernel::LinearGroupedF8plain,
        }
    }

    /// Rows of a table.
    pub const fn embed(kind: WeightKind) -> Kernel {
        match kind {
            WeightKind::Bf16 => Kernel::EmbedBf16,
            WeightKind::Plain => Kernel::EmbedPlain,
            WeightKind::W8 => Kernel::EmbedW8,
            WeightKind::W8h => Kernel::EmbedW8h,
            WeightKind::W4 => Kernel::EmbedW4,
            WeightKind::W4h => Kernel::EmbedW4h,
            WeightKind::F8 => Kernel::EmbedF8,
            WeightKind::F8Plain => Kernel::EmbedF8plain,
        }
    }

    /// Returns attention with heads of this dimension, for a block with few queries or with many.
    pub const fn attend(head_dim: usize, is_few: bool) -> Kernel {
        let [few, many] = match head_dim {
            32 => [Kernel::AttendD32Q16, Kernel::AttendD32Q64],
            64 => [Kernel::AttendD64Q16, Kernel::AttendD64Q64],
            96 => [Kernel::AttendD96Q16, Kernel::AttendD96Q64],
            128 => [Kernel::AttendD128Q16, Kernel::AttendD128Q64],
            160 => [Kernel::AttendD160Q16, Kernel::AttendD160Q32],
            192 => [Kernel::AttendD192Q16, Kernel::AttendD192Q32],
            224 => [Kernel::AttendD224Q16, Kernel::AttendD224Q32],
            _ => [Kernel::AttendD256Q16, Kernel::AttendD256Q32],
        };
        if is_few { few } else { many }
    }

    /// The same for a tile of positions, which has few queries.
    pub const fn attend_split(head_dim: usize) -> Kernel {
        match head_dim {
            32 => Kernel::AttendSplitD32Q16,
            64 => Kernel::AttendSplitD64Q16,
            96 => Kernel::AttendSplitD96Q16,
            128 => Kernel::AttendSplitD128Q16,
            160 => Kernel::AttendSplitD160Q16,
            192 => Kernel::AttendSplitD192Q16,
            224 => Kernel::AttendSplitD224Q16,
            _ => Kernel::AttendSplitD256Q16,
        }
    }
}
