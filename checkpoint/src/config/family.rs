//! The families of models, and what they are called.

/// An architecture: selects a table of names, and a form of decoder (`form` in the model crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    Llama,
    Mistral,
    SmolLm3,
    Qwen2,
    Qwen3,
    Phi3,
    Mixtral,
    Qwen3Moe,
    Gemma2,
    Gemma3,
    Gpt2,
    Olmo2,
    Olmo3,
    Granite,
    GraniteMoe,
    GptOss,
    Glm4,
    Glm4Moe,
    Ministral,
    Ministral3,
    Cohere2,
    GptNeox,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    GraniteHybrid,
    Lfm2,
}

impl Family {
    /// The name as its makers write it.
    pub fn name(self) -> &'static str {
        match self {
            Family::Llama => "Llama",
            Family::Mistral => "Mistral",
            Family::SmolLm3 => "SmolLM3",
            Family::Qwen2 => "Qwen2",
            Family::Qwen3 => "Qwen3",
            Family::Phi3 => "Phi-3",
            Family::Mixtral => "Mixtral",
            Family::Qwen3Moe => "Qwen3 MoE",
            Family::Gemma2 => "Gemma 2",
            Family::Gemma3 => "Gemma 3",
            Family::Gpt2 => "GPT-2",
            Family::Olmo2 => "OLMo 2",
            Family::Olmo3 => "OLMo 3",
            Family::Granite => "Granite",
            Family::GraniteMoe => "Granite MoE",
            Family::GptOss => "gpt-oss",
            Family::Glm4 => "GLM-4",
            Family::Glm4Moe => "GLM-4.5",
            Family::Ministral => "Ministral",
            Family::Ministral3 => "Ministral 3",
            Family::Cohere2 => "Cohere 2",
            Family::GptNeox => "GPT-NeoX",
            Family::Qwen3Next => "Qwen3-Next",
            Family::Qwen35 => "Qwen3.5",
            Family::Qwen35Moe => "Qwen3.5 MoE",
            Family::GraniteHybrid => "Granite 4",
            Family::Lfm2 => "LFM2",
        }
    }

    /// The name that a GGUF has for it, where some families are one.
    pub fn architecture(self) -> &'static str {
        match self {
            Family::Llama | Family::Mistral | Family::Mixtral => "llama",
            Family::SmolLm3 => "smollm3",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Phi3 => "phi3",
            Family::Qwen3Moe => "qwen3moe",
            Family::Gemma2 => "gemma2",
            Family::Gemma3 => "gemma3",
            Family::Gpt2 => "gpt2",
            Family::Olmo2 => "olmo2",
            Family::Olmo3 => "olmo3",
            Family::Granite => "granite",
            Family::GraniteMoe => "granitemoe",
            Family::GptOss => "gpt-oss",
            Family::Glm4 => "glm4",
            Family::Glm4Moe => "glm4moe",
            Family::Ministral => "ministral",
            Family::Ministral3 => "mistral3",
            Family::Cohere2 => "cohere2",
            Family::GptNeox => "gptneox",
            Family::Qwen3Next => "qwen3next",
            Family::Qwen35 => "qwen35",
            Family::Qwen35Moe => "qwen35moe",
            Family::GraniteHybrid => "granitehybrid",
            Family::Lfm2 => "lfm2",
        }
    }
}
