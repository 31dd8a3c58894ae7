//! Models small enough to write down, whole and damaged in every way: they are read right or refused with a reason, and
//! never cause a panic.

use super::*;
use crate::error::ParseError;
use crate::gguf::Gguf;

mod configs;
mod documents;
mod folders;
mod ggufs;
mod hub;
mod templates;
mod tokenizers;

/// A metadata value as it is written.
pub(crate) enum Meta<'a> {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'a str),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

#[derive(Default)]
pub(crate) struct Writer {
    values: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, usize)>,
}

impl Writer {
    pub fn meta(mut self, key: &str, value: Meta<'_>) -> Writer {
        let mut bytes = Vec::new();
        match value {
            Meta::U32(n) => bytes.extend([&4u32.to_le_bytes()[..], &n.to_le_bytes()].concat()),
            Meta::F32(n) => bytes.extend([&6u32.to_le_bytes()[..], &n.to_le_bytes()].concat()),
            Meta::Bool(b) => bytes.extend([&7u32.to_le_bytes()[..], &[u8::from(b)]].concat()),
            Meta::Text(t) => bytes.extend([&8u32.to_le_bytes()[..], &text(t)].concat()),
            Meta::Texts(list) => {
                bytes.extend(array_head(8, list.len()));
                list.iter().for_each(|t| bytes.extend(text(t)));
            }
            Meta::I32s(list) => {
                bytes.extend(array_head(5, list.len()));
                list.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            }
            Meta::F32s(list) => {
                bytes.extend(array_head(6, list.len()));
                list.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            }
        }
        self.values.retain(|(known, _)| known != key);
        self.values.push((key.to_owned(), bytes));
        self
    }

    fn raw_meta(mut self, key: &str, bytes: &[u8]) -> Writer {
        self.values.push((key.to_owned(), bytes.to_vec()));
        self
    }

    /// `dims` in the file's order, the fastest first.
    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, n_bytes: usize) -> Writer {
        self.tensors.push((name.to_owned(), dims.to_vec(), kind, n_bytes));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            out.extend(text(key));
            out.extend(value);
        }
        let mut offset = 0u64;
        for (name, dims, kind, n_bytes) in &self.tensors {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + *n_bytes as u64).next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        let start = out.len();
        out.extend((0..offset as usize).map(|i| (i * 7 + 1) as u8));
        out.truncate(start + offset as usize);
        out
    }
}

fn text(t: &str) -> Vec<u8> {
    [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat()
}

fn array_head(kind: u32, n: usize) -> Vec<u8> {
    [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(n as u64).to_le_bytes()].concat()
}

/// The 256 bytes, a few merges, and the control tokens of a chat: 256 + 4 + 3 tokens.
fn vocabulary() -> (Vec<String>, Vec<i32>, Vec<String>) {
    let mut tokens = crate::tokenizer::test_alphabet();
    tokens.extend(["he", "ll", "hell", "Ġhell"].map(str::to_owned));
    let mut kinds = vec![1; tokens.len()];
    tokens.extend(["<|im_start|>", "<|im_end|>", "<tool>"].map(str::to_owned));
    kinds.extend([3, 3, 4]);
    let merges = ["h e", "l l", "he ll", "Ġ hell"].map(str::to_owned).into();
    (tokens, kinds, merges)
}

const TEMPLATE: &str = "{% for m in messages %}\
    {{ '<|im_start|>' + m['role'] + '\n' + m.content.strip() + '<|im_end|>\n' }}\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn tiny() -> Writer {
    let (tokens, kinds, merges) = vocabulary();
    let n = tokens.len() as u64;
    let mut writer = Writer::default()
        .meta("general.architecture", Meta::Text("llama"))
        .meta("general.name", Meta::Text("tiny"))
        .meta("llama.block_count", Meta::U32(2))
        .meta("llama.context_length", Meta::U32(128))
        .meta("llama.embedding_length", Meta::U32(64))
        .meta("llama.feed_forward_length", Meta::U32(96))
        .meta("llama.attention.head_count", Meta::U32(4))
        .meta("llama.attention.head_count_kv", Meta::U32(2))
        .meta("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5))
        .meta("llama.rope.freq_base", Meta::F32(10_000.0))
        .meta("tokenizer.ggml.model", Meta::Text("gpt2"))
        .meta("tokenizer.ggml.pre", Meta::Text("smollm"))
        .meta("tokenizer.ggml.add_bos_token", Meta::Bool(false))
        .meta("tokenizer.ggml.bos_token_id", Meta::U32(260))
        .meta("tokenizer.ggml.eos_token_id", Meta::U32(261))
        .meta("tokenizer.chat_template", Meta::Text(TEMPLATE))
        .meta("tokenizer.ggml.tokens", Meta::Texts(tokens))
        .meta("tokenizer.ggml.token_type", Meta::I32s(kinds))
        .meta("tokenizer.ggml.merges", Meta::Texts(merges))
        .tensor("token_embd.weight", &[64, n], 8, n as usize * 68)
        .tensor("output_norm.weight", &[64], 0, 256);
    for layer in 0..2 {
        for (name, cols, rows) in [("attn_q", 64, 64), ("attn_k", 64, 32), ("attn_v", 64, 32), ("attn_output", 64, 64)]
        {
            writer = writer.tensor(
                &format!("blk.{layer}.{name}.weight"),
                &[cols, rows],
                3,
                (cols * rows / 32 * 20) as usize,
            );
        }
        for (name, cols, rows) in [("ffn_gate", 64, 96), ("ffn_up", 64, 96), ("ffn_down", 96, 64)] {
            writer = writer.tensor(&format!("blk.{layer}.{name}.weight"), &[cols, rows], 1, (cols * rows * 2) as usize);
        }
        for name in ["attn_norm", "ffn_norm"] {
            writer = writer.tensor(&format!("blk.{layer}.{name}.weight"), &[64], 0, 256);
        }
    }
    writer
}

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 10,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}"#;

/// A file that is deleted on drop.
pub(crate) struct Temporary(pub PathBuf);

impl Temporary {
    pub fn folder(name: &str) -> Temporary {
        let path = std::env::temp_dir().join(format!("lockstep-checkpoint-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Temporary(path)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self.0.join(name)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Does everything that opening a GGUF does, on bytes.
fn read(bytes: &[u8]) -> std::result::Result<ModelSpec, ParseError> {
    ModelSpec::from_gguf(&Gguf::parse(bytes)?, bytes, "file")
}

fn refused(writer: Writer, expect: &str) {
    match read(&writer.bytes()) {
        Err(ParseError::Malformed(what) | ParseError::Unsupported(what)) => assert!(what.contains(expect), "{what}"),
        Ok(spec) => panic!("{spec:?} where {expect} was expected"),
    }
}

/// Reproducible random numbers, good enough to choose bytes.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}
