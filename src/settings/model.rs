//! The model to serve, and the name by which clients call it.

use super::store::one_or_many;
use clap::Args;
use serde::{Deserialize, Serialize};

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ModelSettings {
    /// Model: a .gguf file, a Hugging Face folder, a name from `lockstep models`, or a hub id such as Qwen/Qwen3-0.6B
    #[arg(index = 1, env = "LOCKSTEP_MODEL", default_value = "smollm2")]
    pub model: String,
    /// Name that clients use for the model; give several, separated by commas, to answer to all of them with the first
    /// [default: the model's own]
    #[arg(long, env = "LOCKSTEP_SERVED_MODEL_NAME", value_name = "NAME", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub served_model_name: Option<Vec<String>>,
}

impl ModelSettings {
    /// The name that replies carry, if it was given.
    pub fn served_name(&self) -> Option<&str> {
        self.served_model_name.as_ref()?.first().map(String::as_str)
    }

    /// The name that replies carry: the model's own, unless it was given.
    pub fn named(&mut self, own: String) -> String {
        let names = self.served_model_name.get_or_insert_default();
        if names.is_empty() {
            names.push(own);
        }
        names[0].clone()
    }
}
