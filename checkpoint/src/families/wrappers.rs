//! The text models of models that also take images or sound: the types that configs have for them, and the values that
//! such configs omit.

use super::Family;

/// The end of the classes of such models.
const CLASS_END: &str = "ForConditionalGeneration";
/// Those whose text model is another: every position of a prompt attends to all of it.
const UNLIKE: [&str; 1] = ["PaliGemmaForConditionalGeneration"];

/// The text model under one type.
struct WrappedModel {
    model_type: &'static str,
    family: Family,
    /// The keys that makers leave out, with the defaults of transformers.
    defaults: &'static [(&'static str, u32)],
}

const WRAPPED: [WrappedModel; 10] = [
    WrappedModel {
        model_type: "gemma3_text",
        family: Family::Gemma3,
        defaults: &[
            ("vocab_size", 262_208),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("max_position_embeddings", 131_072),
            ("query_pre_attn_scalar", 256),
            ("sliding_window", 4096),
        ],
    },
    WrappedModel {
        model_type: "gemma4_text",
        family: Family::Gemma4,
        defaults: &[
            ("vocab_size", 262_144),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 30),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("max_position_embeddings", 131_072),
        ],
    },
    WrappedModel {
        model_type: "llama",
        family: Family::Llama,
        defaults: &[
            ("vocab_size", 32_000),
            ("hidden_size", 4096),
            ("intermediate_size", 11_008),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
        ],
    },
    WrappedModel {
        model_type: "mistral",
        family: Family::Mistral,
        defaults: &[
            ("vocab_size", 32_000),
            ("hidden_size", 4096),
            ("intermediate_size", 14_336),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 8),
        ],
    },
    // The positions of text are the same in all sections of their rope.
    own_type("qwen2_vl", Family::Qwen2),
    own_type("qwen2_vl_text", Family::Qwen2),
    own_type("qwen2_5_vl", Family::Qwen2),
    own_type("qwen2_5_vl_text", Family::Qwen2),
    own_type("qwen3_vl_text", Family::Qwen3),
    own_type("qwen3_vl_moe_text", Family::Qwen3Moe),
];

const fn own_type(model_type: &'static str, family: Family) -> WrappedModel {
    WrappedModel { model_type, family, defaults: &[] }
}

/// Whether models of this class wrap a text model.
pub fn is_wrapper(class: &str) -> bool {
    class.ends_with(CLASS_END) && !UNLIKE.contains(&class)
}

/// The family of a text model within another, and the values that its config may omit.
pub fn wrapped_family(model_type: &str) -> Option<(Family, &'static [(&'static str, u32)])> {
    match WRAPPED.iter().find(|of| of.model_type == model_type) {
        Some(of) => Some((of.family, of.defaults)),
        None => Some((Family::find(|of| of.config.model_type == model_type)?, &[])),
    }
}
