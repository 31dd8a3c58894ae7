//! The model to serve, and its name for clients.

use super::store::one_or_many;
use clap::Args;
use serde::{Deserialize, Serialize};

/// Stands for any name.
const ANY: &str = "*";

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ModelSettings {
    /// Model: a .gguf file, a Hugging Face folder, a name from `lockstep models`, or a hub id such as Qwen/Qwen3-0.6B
    #[arg(index = 1, env = "LOCKSTEP_MODEL", default_value = "smollm2")]
    pub model: String,
    /// Name that clients use for the model; give several, separated by commas, to answer to all of them with the first
    /// [default: the model's own]; * answers to any name
    #[arg(long, env = "LOCKSTEP_SERVED_MODEL_NAME", value_name = "NAME", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub served_model_name: Option<Vec<String>>,
}

impl ModelSettings {
    /// Returns the name in replies, if it was given.
    pub fn served_name(&self) -> Option<&str> {
        self.served_model_name.as_ref()?.iter().find(|name| *name != ANY).map(String::as_str)
    }

    /// Returns the name in replies: the model's own, unless one was given.
    pub fn served_name_or(&mut self, own: String) -> String {
        let names = self.served_model_name.get_or_insert_default();
        match names.iter().find(|name| *name != ANY) {
            Some(name) => name.clone(),
            None => {
                names.push(own.clone());
                own
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_is_no_name_to_reply_with() {
        let named = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            ModelSettings { model: "m".into(), served_model_name: Some(names) }.served_name_or("own".into())
        };
        assert_eq!(
            (named(&["*", "a"]), named(&["a", "*"]), named(&["*"]), named(&[])),
            ("a".into(), "a".into(), "own".into(), "own".to_owned())
        );
    }
}
