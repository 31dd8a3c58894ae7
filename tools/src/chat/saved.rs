//! Conversations in files: as JSON, with their sampling. Knows no terminal.

use anyhow::{Context, bail, ensure};
use proto::v1::sampling::Defaults;
use proto::v1::{ChatMessage, Sampling};
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The largest file. No conversation that fits into a context is larger.
const FILE_BYTES_MAX: u64 = 64 << 20;

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SavedChat {
    /// The model of the conversation, for people: any model may continue it.
    pub model: String,
    pub messages: Vec<SavedMessage>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repeat_penalty: Option<f32>,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub seed: Option<u64>,
    pub max_tokens: Option<u32>,
    pub stop: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMessage {
    pub role: String,
    pub content: String,
}

impl SavedChat {
    pub fn of(model: &str, messages: &[ChatMessage], sampling: &Sampling) -> SavedChat {
        let message =
            |message: &ChatMessage| SavedMessage { role: message.role.clone(), content: message.content.clone() };
        SavedChat {
            model: model.to_owned(),
            messages: messages.iter().map(message).collect(),
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repeat_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            seed: sampling.seed,
            max_tokens: sampling.max_tokens,
            stop: sampling.stop.clone(),
        }
    }

    pub fn into_parts(self) -> (Vec<ChatMessage>, Sampling) {
        let message = |SavedMessage { role, content }| ChatMessage { role, content, ..ChatMessage::default() };
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            max_tokens: self.max_tokens,
            stop: self.stop,
            defaults: Defaults::LlamaCpp.into(),
            ..Sampling::default()
        };
        (self.messages.into_iter().map(message).collect(), sampling)
    }

    /// Writes a file that only its owner may read. It replaces a conversation of the same name.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let what = || format!("{} cannot be written", path.display());
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).with_context(what)?;
        let part = path.with_extension("part");
        let mut file =
            OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&part).with_context(what)?;
        file.write_all(format!("{:#}\n", serde_json::to_value(self)?).as_bytes()).with_context(what)?;
        file.sync_all().with_context(what)?;
        std::fs::rename(&part, path).with_context(what)?;
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).with_context(what)
    }

    pub fn read(path: &Path) -> anyhow::Result<SavedChat> {
        let what = || format!("{} cannot be loaded", path.display());
        let n_bytes = std::fs::metadata(path).with_context(what)?.len();
        ensure!(n_bytes <= FILE_BYTES_MAX, "{}: it is larger than {} MiB", what(), FILE_BYTES_MAX >> 20);
        let text = std::fs::read_to_string(path).with_context(what)?;
        let saved: SavedChat =
            serde_json::from_str(&text).with_context(|| format!("{}: it is not a conversation", what()))?;
        let is_known = |message: &SavedMessage| matches!(&*message.role, "system" | "user" | "assistant");
        match saved.messages.iter().find(|message| !is_known(message)) {
            Some(SavedMessage { role, .. }) => bail!("{}: unknown role {role:?}", what()),
            None => Ok(saved),
        }
    }
}

/// Returns the file of a name: in `folder` unless the name is a path.
pub fn chat_path(name: &str, folder: &Path) -> PathBuf {
    match name.contains('/') {
        true => PathBuf::from(name),
        false => folder.join(format!("{name}.json")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_loaded_again_and_what_is_none_is_refused() {
        let folder = std::env::temp_dir().join(format!("lockstep-saved-{}", std::process::id()));
        let message = ChatMessage { role: "user".into(), content: "a \"b\"\n再帰".into(), ..ChatMessage::default() };
        let sampling = Sampling {
            temperature: Some(0.25),
            seed: Some(u64::MAX),
            stop: vec!["#".into()],
            defaults: Defaults::LlamaCpp.into(),
            ..Sampling::default()
        };
        let path = chat_path("one", &folder);
        SavedChat::of("m", std::slice::from_ref(&message), &sampling).write(&path).unwrap();
        let (messages, loaded_sampling) = SavedChat::read(&path).unwrap().into_parts();
        assert_eq!((messages, loaded_sampling), (vec![message], sampling));
        for (text, part) in [
            ("no JSON", "not a conversation"),
            ("{\"messages\": [{\"role\": \"root\", \"content\": \"x\"}]}", "unknown role \"root\""),
            ("{\"mesages\": []}", "not a conversation"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", SavedChat::read(&path).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
        assert!(format!("{:#}", SavedChat::read(&folder.join("two.json")).unwrap_err()).contains("cannot be loaded"));
        assert_eq!(chat_path("./x", &folder), PathBuf::from("./x"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
