//! Damaged files: each opens as some model or is refused with a reason. No panic, no hang, and no memory of a size that
//! the file made up.

mod gguf;
mod safetensors;
mod template;
mod tokenizer;

use checkpoint::{Checkpoint, Conversation, Tokenizer};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Text with what tokenizers handle specially: words, digits, spaces, several scripts, control tokens.
const TEXT: &str = "It's 12345 hello\n\n  wörld 漢字 😀👨‍👩‍👧 <|im_start|><s> \u{301}\u{0}don't   \t<unk>▁x";

fn reference(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(path)
}

/// A folder that is deleted on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("lockstep-fuzz-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn copy(name: &str, from: &Path) -> Scratch {
        let scratch = Scratch::new(name);
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            std::fs::copy(entry.path(), scratch.0.join(entry.file_name())).unwrap();
        }
        scratch
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

/// Does everything that is ever done with a model's file. Returns whether it opened.
fn use_up(path: &Path) -> bool {
    let checkpoint = match Checkpoint::open(path) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    checkpoint.fingerprint().unwrap();
    checkpoint.quantization();
    // The spans of tensors are found without reading them; one tensor is read.
    let sizes = checkpoint.sizes();
    assert!(sizes.total() > 0);
    assert!(!checkpoint.tensor("model.norm.weight").unwrap().to_f32().unwrap().is_empty());
    let q = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight");
    if let Some((rows, scales)) = q.ok().and_then(|q| Some((q.rows(), q.scales?))) {
        let n_scales = (scales.first[0] + rows).div_ceil(scales.block[0]) * scales.per_row;
        assert!(n_scales * scales.dtype.block_bytes() <= scales.bytes.n_bytes(), "a scale for each row");
    }
    // What is made of several tensors is read wherever their shapes may have led to; it may be refused then.
    let down = checkpoint.tensor("model.layers.0.mlp.down_proj.weight");
    if let Some(down) = down.ok().filter(|down| down.n_bytes() <= 1 << 20) {
        let _refused = down.read();
    }
    if let Ok(tokenizer) = checkpoint.tokenizer() {
        tokenize(&tokenizer);
    }
    if let Ok(Some(template)) = checkpoint.chat_template() {
        let chat = Conversation::new(vec![json!({ "role": "user", "content": TEXT })]);
        let _refused = template.render(&chat, 0);
    }
    true
}

/// Ids that it gives are within its vocabulary, and any ids have some text.
fn tokenize(tokenizer: &Tokenizer) {
    for text in ["", TEXT] {
        let Ok(ids) = tokenizer.encode(text, true) else { continue };
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.n_vocab()));
        let mut stream = tokenizer.stream();
        let mut streamed: String = ids.iter().map(|id| stream.push(*id).to_owned()).collect();
        streamed.push_str(stream.finish());
        assert_eq!(streamed, tokenizer.decode(&ids, true));
    }
    tokenizer.decode(&[0, 1, u32::MAX], false);
}
