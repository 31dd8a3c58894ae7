//! The model to serve, and the name by which clients call it.

use clap::Args;
use serde::{Deserialize, Serialize};

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ModelSettings {
    /// A .gguf file, a Hugging Face folder, a catalogue name or a hub id
    #[arg(index = 1, env = "LOCKSTEP_MODEL", default_value = "smollm2")]
    pub model: String,
    /// The name that clients call the model by [default: the model's own]
    #[arg(long, env = "LOCKSTEP_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,
}
