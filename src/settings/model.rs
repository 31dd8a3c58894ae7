//! The model to serve, and its name for clients.

use super::store::one_or_many;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Stands for any name.
const ANY: &str = "*";

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ModelSettings {
    /// Model: a .gguf file, a Hugging Face folder, a name from `lockstep models`, or a hub id such as Qwen/Qwen3-0.6B
    #[arg(index = 1, env = "LOCKSTEP_MODEL", default_value = "smollm2")]
    pub model: String,
    /// Name that clients use for the model; give several, separated by commas, to answer to all of them with the first
    /// [default: the model's own, and the hub id]; * answers to any name
    #[arg(long, env = "LOCKSTEP_SERVED_MODEL_NAME", value_name = "NAME", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub served_model_name: Option<Vec<String>>,
}

impl ModelSettings {
    /// Returns the name in replies, if it was given.
    pub fn served_name(&self) -> Option<&str> {
        self.served_model_name.as_ref()?.iter().find(|name| *name != ANY).map(String::as_str)
    }

    /// Returns the name in replies: the model's own, unless one was given. Clients may then also use the hub id or the
    /// name of the catalogue that the model was located by.
    pub fn served_name_or(&mut self, own: String) -> String {
        let names = self.served_model_name.get_or_insert_default();
        if let Some(name) = names.iter().find(|name| *name != ANY) {
            return name.clone();
        }
        names.push(own.clone());
        if self.model != own && !Path::new(&self.model).exists() {
            names.push(self.model.clone());
        }
        own
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

    #[test]
    fn hub_id_is_a_second_name_and_a_path_is_not() {
        let names = |model: &str, given: Option<&str>| {
            let given = given.map(|name| vec![name.to_owned()]);
            let mut settings = ModelSettings { model: model.into(), served_model_name: given };
            settings.served_name_or("own".into());
            settings.served_model_name.unwrap()
        };
        assert_eq!(names("org/own", None), ["own", "org/own"]);
        assert_eq!(names("own", None), ["own"]);
        assert_eq!(names("/", None), ["own"]);
        assert_eq!(names("org/own", Some("a")), ["a"]);
        assert_eq!(names("org/own", Some("*")), ["*", "own", "org/own"]);
    }
}
