//! The sampling that a model's makers recommend: from `generation_config.json` or a GGUF's metadata.

use crate::error::ParseError;
use crate::gguf::Gguf;
use serde_json::Value;

/// The sampling that the model's makers recommend, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// The last so many tokens that penalties look at.
    pub penalty_window: Option<u32>,
}

impl SamplingDefaults {
    pub(crate) fn from_generation_config(generation: &Value) -> SamplingDefaults {
        let number = |key: &str| generation.get(key).and_then(Value::as_f64).map(|number| number as f32);
        // Without `do_sample` the other fields have no effect.
        if generation.get("do_sample").and_then(Value::as_bool) != Some(true) {
            return SamplingDefaults::default();
        }
        SamplingDefaults {
            temperature: number("temperature"),
            top_p: number("top_p"),
            top_k: generation.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok()),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
            penalty_window: None,
        }
    }

    /// The sampling that a file recommends: llama.cpp's keys `general.sampling.*`.
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<SamplingDefaults, ParseError> {
        let number = |name: &str| Ok(gguf.float(&sampling_key(name))?.map(|number| number as f32));
        // Zero and less are llama.cpp's words for no filter, and for the whole log.
        let whole = |name: &str| {
            let n = gguf.signed(&sampling_key(name))?;
            Ok(n.map(|n| u32::try_from(n.max(0)).unwrap_or(u32::MAX)))
        };
        Ok(SamplingDefaults {
            temperature: number("temp")?,
            top_p: number("top_p")?,
            top_k: whole("top_k")?,
            min_p: number("min_p")?,
            repetition_penalty: number("penalty_repeat")?,
            penalty_window: whole("penalty_last_n")?,
        })
    }
}

fn sampling_key(name: &str) -> String {
    format!("general.sampling.{name}")
}
