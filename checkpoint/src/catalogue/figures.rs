//! The shapes of models that need not be on this machine: the figures of their `config.json`, from the makers'
//! repositories on the hub. Data alone: other code derives sizes from it.

/// The figures of one `config.json`.
#[derive(Clone, Copy, Debug)]
pub struct ConfigFigures {
    pub architecture: &'static str,
    pub hidden: u32,
    pub n_layers: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub inner: u32,
    pub vocab: u32,
    pub context: u32,
    pub is_tied: bool,
    /// The architecture decides which layers have one.
    pub window: Option<u32>,
    /// The number of experts, how many a token uses, and the width of one.
    pub experts: Option<(u32, u32, u32)>,
}

const LLAMA: ConfigFigures = ConfigFigures {
    architecture: "LlamaForCausalLM",
    hidden: 4096,
    n_layers: 32,
    n_heads: 32,
    n_kv_heads: 8,
    head_dim: 128,
    inner: 14_336,
    vocab: 128_256,
    context: 131_072,
    is_tied: false,
    window: None,
    experts: None,
};
const QWEN3: ConfigFigures =
    ConfigFigures { architecture: "Qwen3ForCausalLM", vocab: 151_936, context: 40_960, ..LLAMA };
const QWEN3_MOE: ConfigFigures = ConfigFigures { architecture: "Qwen3MoeForCausalLM", n_kv_heads: 4, ..QWEN3 };
const MIXTRAL: ConfigFigures =
    ConfigFigures { architecture: "MixtralForCausalLM", vocab: 32_000, context: 32_768, ..LLAMA };
const QWEN2: ConfigFigures =
    ConfigFigures { architecture: "Qwen2ForCausalLM", vocab: 152_064, context: 32_768, ..LLAMA };
const SMOLLM2: ConfigFigures = ConfigFigures { head_dim: 64, vocab: 49_152, context: 8192, is_tied: true, ..LLAMA };
const GEMMA3: ConfigFigures = ConfigFigures {
    architecture: "Gemma3ForCausalLM",
    head_dim: 256,
    vocab: 262_208,
    is_tied: true,
    window: Some(1024),
    ..LLAMA
};
const PHI3: ConfigFigures = ConfigFigures { architecture: "Phi3ForCausalLM", ..LLAMA };

pub const LLAMA3_2_1B: ConfigFigures =
    ConfigFigures { hidden: 2048, n_layers: 16, head_dim: 64, inner: 8192, is_tied: true, ..LLAMA };
pub const LLAMA3_2_3B: ConfigFigures =
    ConfigFigures { hidden: 3072, n_layers: 28, n_heads: 24, inner: 8192, is_tied: true, ..LLAMA };
pub const LLAMA3_1_8B: ConfigFigures = LLAMA;
pub const LLAMA3_70B: ConfigFigures = ConfigFigures { hidden: 8192, n_layers: 80, n_heads: 64, inner: 28_672, ..LLAMA };
pub const LLAMA3_1_405B: ConfigFigures =
    ConfigFigures { hidden: 16_384, n_layers: 126, n_heads: 128, inner: 53_248, ..LLAMA };
pub const MISTRAL_7B: ConfigFigures = ConfigFigures { vocab: 32_768, context: 32_768, ..LLAMA };
pub const MISTRAL_NEMO_12B: ConfigFigures = ConfigFigures { hidden: 5120, n_layers: 40, vocab: 131_072, ..LLAMA };
pub const QWEN2_5_0_5B: ConfigFigures = ConfigFigures {
    hidden: 896,
    n_layers: 24,
    n_heads: 14,
    n_kv_heads: 2,
    head_dim: 64,
    inner: 4864,
    vocab: 151_936,
    is_tied: true,
    ..QWEN2
};
pub const QWEN2_5_1_5B: ConfigFigures = ConfigFigures {
    hidden: 1536,
    n_layers: 28,
    n_heads: 12,
    n_kv_heads: 2,
    inner: 8960,
    vocab: 151_936,
    is_tied: true,
    ..QWEN2
};
pub const QWEN2_5_7B: ConfigFigures =
    ConfigFigures { hidden: 3584, n_layers: 28, n_heads: 28, n_kv_heads: 4, inner: 18_944, ..QWEN2 };
pub const QWEN2_5_72B: ConfigFigures =
    ConfigFigures { hidden: 8192, n_layers: 80, n_heads: 64, inner: 29_568, ..QWEN2 };
pub const QWEN3_0_6B: ConfigFigures =
    ConfigFigures { hidden: 1024, n_layers: 28, n_heads: 16, inner: 3072, is_tied: true, ..QWEN3 };
pub const QWEN3_1_7B: ConfigFigures =
    ConfigFigures { hidden: 2048, n_layers: 28, n_heads: 16, inner: 6144, is_tied: true, ..QWEN3 };
pub const QWEN3_4B: ConfigFigures = ConfigFigures { hidden: 2560, n_layers: 36, inner: 9728, is_tied: true, ..QWEN3 };
pub const QWEN3_8B: ConfigFigures = ConfigFigures { n_layers: 36, inner: 12_288, ..QWEN3 };
pub const QWEN3_14B: ConfigFigures = ConfigFigures { hidden: 5120, n_layers: 40, n_heads: 40, inner: 17_408, ..QWEN3 };
pub const QWEN3_32B: ConfigFigures = ConfigFigures { hidden: 5120, n_layers: 64, n_heads: 64, inner: 25_600, ..QWEN3 };
pub const QWEN3_30B: ConfigFigures =
    ConfigFigures { hidden: 2048, n_layers: 48, inner: 6144, experts: Some((128, 8, 768)), ..QWEN3_MOE };
pub const QWEN3_235B: ConfigFigures =
    ConfigFigures { n_layers: 94, n_heads: 64, inner: 12_288, experts: Some((128, 8, 1536)), ..QWEN3_MOE };
pub const MIXTRAL_8X7B: ConfigFigures = ConfigFigures { experts: Some((8, 2, 14_336)), ..MIXTRAL };
pub const MIXTRAL_8X22B: ConfigFigures = ConfigFigures {
    hidden: 6144,
    n_layers: 56,
    n_heads: 48,
    inner: 16_384,
    vocab: 32_768,
    context: 65_536,
    experts: Some((8, 2, 16_384)),
    ..MIXTRAL
};
pub const SMOLLM2_135M: ConfigFigures =
    ConfigFigures { hidden: 576, n_layers: 30, n_heads: 9, n_kv_heads: 3, inner: 1536, ..SMOLLM2 };
pub const SMOLLM2_360M: ConfigFigures =
    ConfigFigures { hidden: 960, n_heads: 15, n_kv_heads: 5, inner: 2560, ..SMOLLM2 };
pub const SMOLLM2_1_7B: ConfigFigures =
    ConfigFigures { hidden: 2048, n_layers: 24, n_kv_heads: 32, inner: 8192, ..SMOLLM2 };
pub const SMOLLM3_3B: ConfigFigures = ConfigFigures {
    architecture: "SmolLM3ForCausalLM",
    hidden: 2048,
    n_layers: 36,
    n_heads: 16,
    n_kv_heads: 4,
    inner: 11_008,
    context: 65_536,
    is_tied: true,
    ..LLAMA
};
pub const GEMMA3_1B: ConfigFigures = ConfigFigures {
    hidden: 1152,
    n_layers: 26,
    n_heads: 4,
    n_kv_heads: 1,
    inner: 6912,
    vocab: 262_144,
    context: 32_768,
    window: Some(512),
    ..GEMMA3
};
pub const GEMMA3_4B: ConfigFigures =
    ConfigFigures { hidden: 2560, n_layers: 34, n_heads: 8, n_kv_heads: 4, inner: 10_240, ..GEMMA3 };
pub const GEMMA3_12B: ConfigFigures =
    ConfigFigures { hidden: 3840, n_layers: 48, n_heads: 16, inner: 15_360, ..GEMMA3 };
pub const PHI4_MINI: ConfigFigures =
    ConfigFigures { hidden: 3072, n_heads: 24, inner: 8192, vocab: 200_064, is_tied: true, ..PHI3 };
pub const PHI4_14B: ConfigFigures = ConfigFigures {
    hidden: 5120,
    n_layers: 40,
    n_heads: 40,
    n_kv_heads: 10,
    inner: 17_920,
    vocab: 100_352,
    context: 16_384,
    ..PHI3
};
pub const GRANITE3_3_2B: ConfigFigures = ConfigFigures {
    architecture: "GraniteForCausalLM",
    hidden: 2048,
    n_layers: 40,
    head_dim: 64,
    inner: 8192,
    vocab: 49_159,
    is_tied: true,
    ..LLAMA
};
pub const OLMO2_7B: ConfigFigures = ConfigFigures {
    architecture: "Olmo2ForCausalLM",
    n_kv_heads: 32,
    inner: 11_008,
    vocab: 100_352,
    context: 4096,
    ..LLAMA
};
pub const GPT_OSS_20B: ConfigFigures = ConfigFigures {
    architecture: "GptOssForCausalLM",
    hidden: 2880,
    n_layers: 24,
    n_heads: 64,
    head_dim: 64,
    inner: 2880,
    vocab: 201_088,
    window: Some(128),
    experts: Some((32, 4, 2880)),
    ..LLAMA
};
