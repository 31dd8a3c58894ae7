//! GGUFs of every family with changed header fields: counts, lengths, types, sizes, offsets, names.

use super::{Scratch, reference, use_up};
use crate::harness::{Random, Rounds, damage};
use std::path::Path;

const FIXTURES: [&str; 10] = [
    "gguf-phi3/model.gguf",
    "gguf-qwen2/model.gguf",
    "gguf-mixtral/model.gguf",
    "gguf-gpt2/model.gguf",
    "gguf-smollm3/model.gguf",
    "gguf-llama3/model.gguf",
    "gguf-mistral/model.gguf",
    "gguf-qwen3-yarn/model.gguf",
    "gguf-gemma2/model.gguf",
    "gguf-gemma3/model.gguf",
];

/// The position and width of a whole number in a header.
#[derive(Clone, Copy)]
struct Field {
    at: usize,
    n_bytes: usize,
}

struct Fixture {
    bytes: Vec<u8>,
    fields: Vec<Field>,
    /// The positions of text keys and values.
    texts: Vec<(usize, usize)>,
    header: usize,
}

/// Walks a valid header, and records its fields.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    fields: Vec<Field>,
    texts: Vec<(usize, usize)>,
}

impl Walk<'_> {
    fn number(&mut self, n_bytes: usize) -> u64 {
        let mut number = [0; 8];
        number[..n_bytes].copy_from_slice(&self.bytes[self.at..self.at + n_bytes]);
        self.fields.push(Field { at: self.at, n_bytes });
        self.at += n_bytes;
        u64::from_le_bytes(number)
    }

    fn text(&mut self, is_noted: bool) {
        let n_fields = self.fields.len();
        let length = self.number(8) as usize;
        if is_noted {
            self.texts.push((self.at, length));
        } else {
            // Thousands of tokens would crowd out all other fields.
            self.fields.truncate(n_fields);
        }
        self.at += length;
    }

    fn value(&mut self, kind: u64) {
        let n_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 => return self.text(true),
            9 => return self.list(),
            _ => 8,
        };
        self.number(n_bytes);
    }

    fn list(&mut self) {
        let (kind, n) = (self.number(4), self.number(8));
        let n_fields = self.fields.len();
        for i in 0..n {
            match kind {
                8 => self.text(i < 4),
                other => self.value(other),
            }
        }
        self.fields.truncate(n_fields + 8);
    }

    fn header(&mut self) {
        self.number(4);
        let (n_tensors, n_values) = (self.number(8), self.number(8));
        for _ in 0..n_values {
            self.text(true);
            let kind = self.number(4);
            self.value(kind);
        }
        for _ in 0..n_tensors {
            self.text(true);
            let n_dims = self.number(4);
            for _ in 0..n_dims {
                self.number(8);
            }
            self.number(4);
            self.number(8);
        }
    }
}

impl Fixture {
    fn read(path: &Path) -> Fixture {
        let bytes = std::fs::read(path).unwrap();
        let mut walk = Walk { bytes: &bytes, at: 4, fields: Vec::new(), texts: Vec::new() };
        walk.header();
        let (header, fields, texts) = (walk.at, walk.fields, walk.texts);
        Fixture { bytes, fields, texts, header }
    }

    fn mutated(&self, random: &mut Random) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for _ in 0..=random.below(3) {
            match random.below(8) {
                0 => damage(&mut bytes, 0, self.header, random),
                1 | 2 => self.change_text(&mut bytes, random),
                _ => self.change_field(&mut bytes, random),
            }
        }
        bytes
    }

    fn change_field(&self, bytes: &mut [u8], random: &mut Random) {
        let Field { at, n_bytes } = self.fields[random.below(self.fields.len())];
        let Some(field) = bytes.get_mut(at..at + n_bytes) else { return };
        let mut number = [0; 8];
        number[..n_bytes].copy_from_slice(field);
        let now = u64::from_le_bytes(number);
        let next = match random.below(8) {
            0 => 0,
            1 => 1,
            2 => u64::MAX >> random.below(64),
            3 => 1 << random.below(64),
            4 => now.wrapping_add(1),
            5 => now.wrapping_sub(1),
            6 => now.wrapping_mul(2),
            _ => random.below(48) as u64,
        };
        field.copy_from_slice(&next.to_le_bytes()[..n_bytes]);
    }

    /// Replaces a text by another of the same length: a known word, an unknown one, or invalid UTF-8.
    fn change_text(&self, bytes: &mut [u8], random: &mut Random) {
        let (at, length) = self.texts[random.below(self.texts.len())];
        let (from, _) = self.texts[random.below(self.texts.len())];
        if at + length > bytes.len() || from + length > bytes.len() || length == 0 {
            return;
        }
        match random.below(3) {
            0 => bytes.copy_within(from..from + length, at),
            1 => bytes[at + random.below(length)] = 0xFF,
            _ => bytes[at + random.below(length)] = b"{%}.-0_a"[random.below(8)],
        }
    }
}

#[test]
fn gguf() {
    let fixtures = FIXTURES.map(|path| Fixture::read(&reference(path)));
    let scratch = Scratch::new("gguf");
    for fixture in &fixtures {
        assert!(use_up(&scratch.write("model.gguf", &fixture.bytes)), "sound as it is");
    }
    let mut rounds = Rounds::of("gguf", 1500);
    let mut n_opened = 0;
    while let Some(mut random) = rounds.next() {
        let fixture = &fixtures[random.below(fixtures.len())];
        let path = scratch.write("model.gguf", &fixture.mutated(&mut random));
        n_opened += u64::from(use_up(&path));
    }
    // If all were refused, the code behind the header would never be reached; if none, nothing would be damaged.
    assert!(!rounds.are_many() || (rounds.n() / 100..rounds.n() * 9 / 10).contains(&n_opened), "{n_opened} opened");
}
