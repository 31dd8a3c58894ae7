//! A model's tokenizer and chat template as the files of a Hugging Face folder, in a ZIP archive, for programs that
//! tokenize for this model elsewhere. Knows nothing of clients.

use crate::error::{Error, Result};
use crate::small_files::read_bytes;
use crate::split::JoinedGguf;
use crate::{Checkpoint, WeightFiles};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The files that a folder may have, in the order of the archive.
const FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
];

/// An archive, and its checksum in hexadecimal digits.
#[derive(Clone, Debug)]
pub struct TextBundle {
    pub zip: Vec<u8>,
    pub sha256: String,
}

impl Checkpoint {
    /// Returns a folder's own files, with a `tokenizer.json` made from its vocabulary if it has none; for a GGUF, the
    /// equivalent files made from its metadata.
    pub fn text_bundle(&self) -> Result<TextBundle> {
        let files = match &self.weights {
            WeightFiles::Folder(_) => self.files_of_folder()?,
            WeightFiles::Gguf(parts) => self.files_of_gguf(parts)?,
        };
        let zip = zip_archive(&files).ok_or_else(|| {
            let what = "a tokenizer of more than 4 GiB".to_owned();
            Error::Unsupported { path: self.path.clone(), what }
        })?;
        let sha256 = types::Hex(&Sha256::digest(&zip)).to_string();
        Ok(TextBundle { zip, sha256 })
    }

    fn files_of_folder(&self) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let made = crate::tokenizer::json_of_folder(&self.path)?;
        let made = made.map(|tokenizer| Ok(("tokenizer.json", json_bytes(&tokenizer))));
        let there = FILES.into_iter().filter(|name| self.path.join(name).exists());
        made.into_iter().chain(there.map(|name| Ok((name, read_bytes(&self.path.join(name))?)))).collect()
    }

    fn files_of_gguf(&self, parts: &JoinedGguf) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let JoinedGguf { header, bytes: of_header, .. } = parts;
        let tokenizer = crate::tokenizer::json_of_gguf(header, of_header, &self.path)?;
        let template = header.text(of_header, "tokenizer.chat_template").map_err(Error::with_path(&self.path))?;
        let text = |which: &str| {
            let tokens = header.texts(of_header, "tokenizer.ggml.tokens").ok().flatten()?;
            let id = header.unsigned(&format!("tokenizer.ggml.{which}_token_id")).ok().flatten()?;
            tokens.get(usize::try_from(id).ok()?).map(|text| Value::from(*text))
        };
        let config = json!({
            "bos_token": text("bos"),
            "eos_token": text("eos"),
            "chat_template": template,
            "model_max_length": self.spec.context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        });
        Ok(vec![("tokenizer.json", json_bytes(&tokenizer)), ("tokenizer_config.json", json_bytes(&config))])
    }
}

fn json_bytes(json: &Value) -> Vec<u8> {
    json.to_string().into_bytes()
}

/// A ZIP archive whose entries are stored uncompressed. None where an offset exceeds its 32 bits.
///
/// `[header, name, bytes] for each file · [entry, name] for each file · end`
fn zip_archive(files: &[(&str, Vec<u8>)]) -> Option<Vec<u8>> {
    let (mut archive, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in files {
        let offset = u32::try_from(archive.len()).ok()?;
        let common = zip_entry_fields(name, bytes)?;
        archive.extend([b"PK\x03\x04", &common[..], name.as_bytes(), bytes].concat());
        // Made by version 2.0; no comment, first disk, no attributes.
        directory.extend([b"PK\x01\x02", &20u16.to_le_bytes()[..], &common, &[0; 10], &offset.to_le_bytes()].concat());
        directory.extend(name.as_bytes());
    }
    let n_files = u16::try_from(files.len()).ok()?.to_le_bytes();
    let (start, length) = (u32::try_from(archive.len()).ok()?, u32::try_from(directory.len()).ok()?);
    archive.extend(directory);
    archive
        .extend([b"PK\x05\x06", &[0; 4][..], &n_files, &n_files, &length.to_le_bytes(), &start.to_le_bytes()].concat());
    archive.extend([0; 2]);
    Some(archive)
}

/// The fields that a header and a directory entry share: version, flags, method, time, date, checksum, sizes, name,
/// extra.
fn zip_entry_fields(name: &str, bytes: &[u8]) -> Option<Vec<u8>> {
    // The first of January 1980, so that the same files make the same archive.
    const DATE: u16 = 1 << 5 | 1;
    let size = u32::try_from(bytes.len()).ok()?.to_le_bytes();
    let name = u16::try_from(name.len()).ok()?.to_le_bytes();
    let head = [20u16, 0, 0, 0, DATE].map(u16::to_le_bytes).concat();
    Some([&head[..], &crc32(bytes).to_le_bytes(), &size, &size, &name, &[0; 2]].concat())
}

/// ZIP's checksum: reflected, with the polynomial 0xEDB88320.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = crc32_table();
    !bytes.iter().fold(!0, |crc: u32, byte| crc >> 8 ^ TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize])
}

const fn crc32_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let (mut crc, mut bit) = (i as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Temporary;
    use std::path::{Path, PathBuf};

    fn reference(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(name)
    }

    #[test]
    fn the_checksum_is_zips() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    /// Reads the files of an archive by its directory.
    fn unpacked(zip: &[u8]) -> Vec<(String, Vec<u8>)> {
        let number = |at: usize, n: usize| (0..n).rev().fold(0, |all, i| all << 8 | usize::from(zip[at + i]));
        let end = zip.len() - 22;
        assert_eq!(&zip[end..end + 4], b"PK\x05\x06");
        let (n_files, mut at) = (number(end + 10, 2), number(end + 16, 4));
        assert_eq!(at + number(end + 12, 4), end);
        let mut files = Vec::new();
        for _ in 0..n_files {
            assert_eq!(&zip[at..at + 4], b"PK\x01\x02");
            let (crc, size, n_name, offset) =
                (number(at + 16, 4), number(at + 24, 4), number(at + 28, 2), number(at + 42, 4));
            let name = String::from_utf8(zip[at + 46..at + 46 + n_name].to_vec()).unwrap();
            assert_eq!((&zip[offset..offset + 4], number(offset + 22, 4)), (&b"PK\x03\x04"[..], size));
            let first = offset + 30 + n_name;
            let bytes = zip[first..first + size].to_vec();
            assert_eq!(crc32(&bytes) as usize, crc);
            files.push((name, bytes));
            at += 46 + n_name;
        }
        assert_eq!(at, end);
        files
    }

    #[test]
    fn a_folder_gives_its_own_files() {
        let folder = reference("qwen2");
        let bundle = Checkpoint::open(&folder).unwrap().text_bundle().unwrap();
        let files = unpacked(&bundle.zip);
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]);
        for (name, bytes) in &files {
            assert_eq!(bytes, &std::fs::read(folder.join(name)).unwrap(), "{name}");
        }
        assert_eq!(bundle.sha256.len(), 64);
    }

    #[test]
    fn what_a_gguf_would_have_gives_the_same_tokens() {
        let texts =
            ["Once upon a time, 1234 naïve  cafés\n\n  東京 🙂 it's", " leading", "x", "<s>in</s> <|im_end|> it"];
        for name in ["gguf-llama3", "gguf-mistral", "gguf-qwen2", "gguf-gpt2", "gguf-gemma2", "gguf-smollm3"] {
            let path = reference(name);
            let file = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
            let file = file.into_iter().find(|path| path.extension().is_some_and(|kind| kind == "gguf")).unwrap();
            let checkpoint = Checkpoint::open(&file).unwrap();
            let ours = checkpoint.tokenizer().unwrap();
            let files = unpacked(&checkpoint.text_bundle().unwrap().zip);
            let folder = Temporary::folder(&format!("bundle-{name}"));
            let json = folder.write("tokenizer.json", &files[0].1);
            let theirs = crate::Tokenizer::from_file(&json).unwrap_or_else(|error| panic!("{name}: {error}"));
            for text in texts {
                for add_special in [false, true] {
                    let ids = ours.encode(text, add_special).unwrap();
                    assert_eq!(theirs.encode(text, add_special).unwrap(), ids, "{name}: {text:?}");
                    assert_eq!(theirs.decode(&ids, true), ours.decode(&ids, true), "{name}: {text:?}");
                }
            }
            let config: Value = serde_json::from_slice(&files[1].1).unwrap();
            assert_eq!(config["chat_template"].is_string(), checkpoint.chat_template().unwrap().is_some(), "{name}");
        }
    }
}
