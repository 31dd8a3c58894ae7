//! The families of models. Each has a file with a constant that defines it; this file alone names all of them.

mod bamba;
mod bert;
mod chats;
mod cohere2;
mod definition;
mod experts;
mod falcon_h1;
mod gemma;
mod gemma4;
mod glm4;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granite4;
mod lfm2;
mod llama;
mod mamba;
mod mistral;
mod modern_bert;
mod nemotron_h;
mod olmo;
mod olmo_hybrid;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_next;
mod smollm3;
mod wrappers;

use definition::ChatForm;
pub use definition::{AttentionBias, FamilyDefinition, GgufVariant, LocalTheta, WindowPattern, WindowUse};
pub(crate) use wrappers::{is_wrapper, wrapped_family};

/// Makes the enum and its table from a family's name and its constant.
macro_rules! families {
    ($($family:ident = $definition:path,)*) => {
        /// An architecture: selects the readers of a config, a table of names and a form of decoder.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Family {
            $($family,)*
        }

        impl Family {
            /// All of them.
            pub const ALL: &[Family] = &[$(Family::$family,)*];

            pub(crate) fn definition(self) -> &'static FamilyDefinition {
                match self {
                    $(Family::$family => &$definition,)*
                }
            }
        }
    };
}

families! {
    Llama = llama::LLAMA,
    Mistral = mistral::MISTRAL,
    SmolLm3 = smollm3::SMOLLM3,
    Qwen2 = qwen2::QWEN2,
    Qwen3 = qwen3::QWEN3,
    Phi3 = phi3::PHI3,
    Mixtral = mistral::MIXTRAL,
    Qwen3Moe = qwen3::QWEN3_MOE,
    Gemma2 = gemma::GEMMA2,
    Gemma3 = gemma::GEMMA3,
    Gemma4 = gemma4::GEMMA4,
    Gpt2 = gpt2::GPT2,
    Olmo2 = olmo::OLMO2,
    Olmo3 = olmo::OLMO3,
    OlmoHybrid = olmo_hybrid::OLMO_HYBRID,
    Granite = granite::GRANITE,
    GraniteMoe = granite::GRANITE_MOE,
    GptOss = gpt_oss::GPT_OSS,
    Glm4 = glm4::GLM4,
    Glm4Moe = glm4::GLM4_MOE,
    Ministral = mistral::MINISTRAL,
    Ministral3 = mistral::MINISTRAL3,
    Cohere2 = cohere2::COHERE2,
    GptNeox = gpt_neox::GPT_NEOX,
    Qwen3Next = qwen3_next::QWEN3_NEXT,
    Qwen35 = qwen3_next::QWEN35,
    Qwen35Moe = qwen3_next::QWEN35_MOE,
    GraniteHybrid = granite4::GRANITE_HYBRID,
    Lfm2 = lfm2::LFM2,
    Lfm2Moe = lfm2::LFM2_MOE,
    Bamba = bamba::BAMBA,
    NemotronH = nemotron_h::NEMOTRON_H,
    FalconH1 = falcon_h1::FALCON_H1,
    Bert = bert::BERT,
    Roberta = bert::ROBERTA,
    MpNet = bert::MPNET,
    NomicBert = bert::NOMIC_BERT,
    NomicOwnKeys = bert::NOMIC_OWN_KEYS,
    ModernBert = modern_bert::MODERN_BERT,
    EmbeddingGemma = gemma::EMBEDDING_GEMMA,
}

/// The forms of chats that vocabularies show by their tokens. The first that matches counts.
const CHAT_FORMS: [&ChatForm; 5] =
    [&llama::CHATML, &llama::LLAMA3_CHAT, &gemma::GEMMA_CHAT, &phi3::PHI3_CHAT, &mistral::MISTRAL_CHAT];

impl Family {
    /// The name as its makers write it.
    pub fn name(self) -> &'static str {
        self.definition().name
    }

    /// The name that a GGUF has for it, where some families are one.
    pub fn architecture(self) -> &'static str {
        self.definition().architecture
    }

    /// Returns the first family whose definition has the property.
    pub(crate) fn find(has: impl Fn(&FamilyDefinition) -> bool) -> Option<Family> {
        Family::ALL.iter().copied().find(|family| has(family.definition()))
    }
}
