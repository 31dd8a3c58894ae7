//! Folders with safetensors: headers with wrong shapes, types and offsets, configs and indices with other values.

use super::{Scratch, reference, use_up};
use crate::harness::{Random, Rounds, damage, mutate};
use serde_json::Value;
use std::path::Path;

const FOLDERS: [&str; 17] = [
    "llama-f16-sharded",
    "gemma3",
    "qwen3-moe",
    "phi3-long",
    "gpt2",
    "smollm3",
    "fp8-block",
    "fp8-channel",
    "awq",
    "gptq-4",
    "gptq-3",
    "gptq-act-order",
    "packed-4-zeros",
    "w8a8",
    "llm-int8",
    "nf4",
    "nvfp4",
];
const SMALL: [&str; 4] = ["config.json", "generation_config.json", "tokenizer_config.json", INDEX];
const INDEX: &str = "model.safetensors.index.json";

fn json_of(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// The header's JSON, mutated, or its bytes.
fn mutated(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut all = bytes.to_vec();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    if random.one_in(3) {
        damage(&mut all, 0, 8 + length, random);
        return all;
    }
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    (0..=random.below(3)).for_each(|_| mutate(&mut header, random));
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], &header, &bytes[8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize..]].concat()
}

struct Folder {
    scratch: Scratch,
    /// The names and contents of its weight files.
    weights: Vec<(String, Vec<u8>)>,
    small: Vec<(String, Value)>,
}

impl Folder {
    fn read(name: &str) -> Folder {
        let scratch = Scratch::copy(&format!("folder-{name}"), &reference(name));
        let names =
            std::fs::read_dir(&scratch.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let weights = names.filter(|name| name.ends_with(".safetensors"));
        let mut weights: Vec<_> =
            weights.map(|name| (name.clone(), std::fs::read(scratch.0.join(&name)).unwrap())).collect();
        weights.sort();
        let small = SMALL.iter().filter_map(|name| Some(((*name).to_owned(), json_of(&scratch.0.join(name))?)));
        Folder { small: small.collect(), weights, scratch }
    }

    fn round(&self, random: &mut Random) -> bool {
        if random.one_in(3) {
            let (name, bytes) = &self.weights[random.below(self.weights.len())];
            self.scratch.write(name, &mutated(bytes, random));
            let opened = use_up(&self.scratch.0);
            self.scratch.write(name, bytes);
            return opened;
        }
        let (name, value) = &self.small[random.below(self.small.len())];
        let mut other = value.clone();
        (0..=random.below(2)).for_each(|_| mutate(&mut other, random));
        self.scratch.write(name, other.to_string().as_bytes());
        let opened = use_up(&self.scratch.0);
        self.scratch.write(name, value.to_string().as_bytes());
        opened
    }
}

#[test]
fn safetensors() {
    let folders = FOLDERS.map(Folder::read);
    for folder in &folders {
        assert!(use_up(&folder.scratch.0), "sound as it is");
    }
    let mut rounds = Rounds::of("safetensors", 800);
    let mut n_opened = 0;
    while let Some(mut random) = rounds.next() {
        n_opened += u64::from(folders[random.below(folders.len())].round(&mut random));
    }
    assert!(!rounds.are_many() || (rounds.n() / 100..rounds.n() * 9 / 10).contains(&n_opened), "{n_opened} opened");
}
