//! The folder for pages of the KV cache: `DIR:BYTES`.

use super::bytes::ByteSize;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct KvDiskChoice {
    pub folder: PathBuf,
    pub bytes_max: ByteSize,
}

impl FromStr for KvDiskChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<KvDiskChoice, String> {
        let parts = text.rsplit_once(':').filter(|(folder, _)| !folder.is_empty());
        let (folder, bytes) = parts.ok_or("give a folder and its size, such as /var/cache/kv:100GiB")?;
        let bytes_max: ByteSize = bytes.parse()?;
        if bytes_max.0 == 0 {
            return Err("the folder's size must be at least 1 byte".into());
        }
        Ok(KvDiskChoice { folder: folder.into(), bytes_max })
    }
}

impl TryFrom<String> for KvDiskChoice {
    type Error = String;

    fn try_from(text: String) -> Result<KvDiskChoice, String> {
        text.parse()
    }
}

impl From<KvDiskChoice> for String {
    fn from(choice: KvDiskChoice) -> String {
        choice.to_string()
    }
}

impl fmt::Display for KvDiskChoice {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}:{}", self.folder.display(), self.bytes_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_and_its_size_are_read() {
        let parse = |text: &str| text.parse::<KvDiskChoice>();
        let choice = parse("/a:b/kv:3GiB").unwrap();
        assert_eq!((choice.folder.to_str(), choice.bytes_max.0), (Some("/a:b/kv"), 3 << 30));
        assert_eq!(choice.to_string(), "/a:b/kv:3GiB");
        for (text, why) in [("/kv", "such as"), (":1GiB", "such as"), ("/kv:0", "at least"), ("/kv:x", "whole number")]
        {
            assert!(parse(text).is_err_and(|error| error.contains(why)), "{text}");
        }
    }
}
