//! The model to serve, and the name by which clients call it.

use clap::Args;
use serde::{Deserialize, Serialize};

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ModelSettings {
    /// Model: a .gguf file, a Hugging Face folder, a name from `lockstep models`, or a hub id such as Qwen/Qwen3-0.6B
    #[arg(index = 1, env = "LOCKSTEP_MODEL", default_value = "smollm2")]
    pub model: String,
    /// Name that clients use for the model [default: the model's own]
    #[arg(long, env = "LOCKSTEP_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,
}
