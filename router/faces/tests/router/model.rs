//! A model with one token for each byte: token 65 is the byte `A`. Its weights are zeros that no test reads.

use checkpoint::Checkpoint;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::OnceLock;

pub const START: u32 = 256;
pub const END: u32 = 257;
pub const VOCAB: u32 = 258;
pub const CONTEXT: u32 = 200;

const HIDDEN: usize = 32;
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}<|im_end|>\
     {% endfor %}{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}\
     {% if add_generation_prompt %}<|im_start|>{% endif %}";

pub fn text() -> router::ModelText {
    static READ: OnceLock<router::ModelText> = OnceLock::new();
    let read = READ.get_or_init(|| read_with("test", &[]));
    read.clone()
}

/// The tokens for filling in, behind those of every text: the first has the id `VOCAB`.
const FILLING: [&str; 4] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"];

/// The same model, with tokens for filling in between two texts.
#[allow(dead_code, reason = "only one of the two test crates uses it")]
pub fn coder() -> router::ModelText {
    read_with("coder", &FILLING)
}

fn read_with(name: &str, further: &[&str]) -> router::ModelText {
    let folder = std::env::temp_dir().join(format!("lockstep-router-{name}-{}", std::process::id()));
    write(&folder, further);
    let text = text_of(&Checkpoint::open(&folder).unwrap());
    std::fs::remove_dir_all(&folder).unwrap();
    text
}

fn text_of(checkpoint: &Checkpoint) -> router::ModelText {
    let text = router::ModelText::of(checkpoint).unwrap();
    router::ModelText { trusts_templates: true, ..text }
}

fn write(folder: &Path, further: &[&str]) {
    let n_vocab = VOCAB as usize + further.len();
    std::fs::create_dir_all(folder).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": n_vocab, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": END, "torch_dtype": "float32",
    });
    let generation = json!({ "eos_token_id": END, "do_sample": true, "temperature": 0.25, "top_k": 7 });
    let tokenizer_config = json!({ "chat_template": TEMPLATE, "eos_token": "<|im_end|>" });
    for (name, value) in [
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
        ("tokenizer.json", tokenizer(further)),
    ] {
        std::fs::write(folder.join(name), value.to_string()).unwrap();
    }
    std::fs::write(folder.join("model.safetensors"), weights(n_vocab)).unwrap();
}

fn tokenizer(further: &[&str]) -> Value {
    let vocab: Map<String, Value> = (0..=255u8).map(|byte| (byte_letter(byte).to_string(), byte.into())).collect();
    let added = |id: u32, text: &str| {
        json!({ "id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false })
    };
    let mut all = vec![added(START, "<|im_start|>"), added(END, "<|im_end|>")];
    all.extend(further.iter().zip(VOCAB..).map(|(text, id)| added(id, text)));
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": all,
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [] },
    })
}

/// The character of a byte in byte-level tokenizers: itself if printable, otherwise a letter above 255.
fn byte_letter(byte: u8) -> char {
    let printable = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if printable(&byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|byte| !printable(byte)).count() as u32;
    char::from_u32(256 + nth).unwrap()
}

fn weights(v: usize) -> Vec<u8> {
    let h = HIDDEN;
    let layer = "model.layers.0";
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![v, h]), ("model.norm.weight".into(), vec![h])];
    for name in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"] {
        shapes.push((format!("{layer}.{name}.weight"), vec![h, h]));
    }
    for name in ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] {
        shapes.push((format!("{layer}.{name}.weight"), vec![h, h]));
    }
    for name in ["input_layernorm", "post_attention_layernorm"] {
        shapes.push((format!("{layer}.{name}.weight"), vec![h]));
    }
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in shapes {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] }));
    }
    let mut header = Value::Object(header).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + end, 0);
    bytes
}
