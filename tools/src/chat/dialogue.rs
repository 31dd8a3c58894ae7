//! The conversation and the sampling, which stay the same from one question to the next, and the commands that change
//! them. Has no knowledge of terminal or server.

use super::ChatOptions;
use super::input::TypedInput;
use super::saved::{SavedChat, chat_path};
use crate::out;
use proto::v1;
use std::path::Path;

pub const SYSTEM: &str = "system";
pub const USER: &str = "user";
pub const ASSISTANT: &str = "assistant";

/// The parts of a request that stay the same from one question to the next.
pub struct Dialogue {
    pub sampling: v1::Sampling,
    pub messages: Vec<v1::ChatMessage>,
    /// Whether the prompt is completed as it is, without a chat template.
    pub raw: bool,
}

pub fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.into(), content: content.into(), ..v1::ChatMessage::default() }
}

impl Dialogue {
    pub fn new(options: &ChatOptions, seed: Option<u64>) -> Dialogue {
        let sampling = v1::Sampling {
            temperature: options.temperature,
            top_p: options.top_p,
            top_k: options.top_k,
            min_p: options.min_p,
            defaults: v1::sampling::Defaults::LlamaCpp.into(),
            seed,
            max_tokens: options.max_tokens,
            ..v1::Sampling::default()
        };
        let messages = options.system.iter().map(|text| message(SYSTEM, text)).collect();
        Dialogue { sampling, messages, raw: options.raw }
    }

    /// Carries out a command and returns the text to print. Conversations are kept in `chats`.
    pub fn execute(&mut self, input: TypedInput, model: &str, chats: &Path) -> String {
        match input {
            TypedInput::Wrong(why) => return format!("{why}\n"),
            TypedInput::Show => return self.show(model),
            TypedInput::Clear => self.messages.retain(|message| message.role == SYSTEM),
            TypedInput::Set(setting) => setting.apply(&mut self.sampling),
            TypedInput::System(text) => {
                self.messages.retain(|message| message.role != SYSTEM);
                let instructions = Some(text).filter(|text| !text.is_empty());
                self.messages.splice(0..0, instructions.map(|text| message(SYSTEM, &text)));
            }
            TypedInput::Save(name) => {
                let path = chat_path(&name, chats);
                let saved = SavedChat::of(model, &self.messages, &self.sampling).write(&path);
                return saved.map_or_else(
                    |error| format!("{}\n", out::error_text(&error)),
                    |()| format!("saved as {}\n", path.display()),
                );
            }
            TypedInput::Load(name) => return self.load(&chat_path(&name, chats)),
            TypedInput::Help
            | TypedInput::Question(_)
            | TypedInput::Leave
            | TypedInput::Verbose(_)
            | TypedInput::Model(_) => {}
        }
        String::new()
    }

    fn load(&mut self, path: &Path) -> String {
        match SavedChat::read(path) {
            Ok(saved) => {
                let held_with = format!("{} messages, model {}\n", saved.messages.len(), saved.model);
                (self.messages, self.sampling) = saved.into_parts();
                held_with
            }
            Err(error) => format!("{}\n", out::error_text(&error)),
        }
    }

    fn show(&self, model: &str) -> String {
        let v1::Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed, max_tokens, .. } =
            &self.sampling;
        let shown = |name: &str, value: Option<String>| {
            format!("{name:<18} {}\n", value.unwrap_or_else(|| "the model's default".into()))
        };
        let system = self.messages.iter().find(|message| message.role == SYSTEM);
        [
            shown("model", Some(model.to_owned())),
            shown("system", system.map(|message| message.content.clone())),
            shown("temperature", temperature.map(|value| value.to_string())),
            shown("top_k", top_k.map(|value| value.to_string())),
            shown("top_p", top_p.map(|value| value.to_string())),
            shown("min_p", min_p.map(|value| value.to_string())),
            shown("repeat_penalty", repetition_penalty.map(|value| value.to_string())),
            shown("presence_penalty", Some(self.sampling.presence_penalty.to_string())),
            shown("frequency_penalty", Some(self.sampling.frequency_penalty.to_string())),
            shown("seed", seed.map(|value| value.to_string())),
            shown("max_tokens", max_tokens.map(|value| value.to_string())),
            shown("stop", Some(format!("{:?}", self.sampling.stop))),
            shown("messages", Some(self.messages.len().to_string())),
        ]
        .concat()
    }
}
