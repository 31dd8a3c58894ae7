//! Malicious files: rejected with an error, by code that cannot run them. Attacks over the network are in
//! `router/faces/tests/router/advisories.rs`, which lists the others too.

use checkpoint::Checkpoint;
use std::path::{Path, PathBuf};

const MODEL: &str = "tests/reference/llama-f32-tied";
/// A pickle that would call `os.system` when it is loaded.
const PICKLE: &[u8] = b"\x80\x02cos\nsystem\nq\x00X\x0b\x00\x00\x00touch owned\x85q\x01Rq\x02.";

struct Folder(PathBuf);

impl Folder {
    /// A copy of a small model, without its weights.
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("lockstep-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        for file in ["config.json", "tokenizer.json"] {
            std::fs::copy(Path::new(MODEL).join(file), path.join(file)).unwrap();
        }
        Folder(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

#[track_caller]
fn check_refused(path: &Path) {
    let error = Checkpoint::open(path).err().unwrap_or_else(|| panic!("{} was opened", path.display()));
    assert!(!error.to_string().is_empty());
    assert!(!Path::new("owned").exists() && !path.with_file_name("owned").exists());
}

/// Weights that run code when they are read, under every file name that they might have.
#[test]
fn weights_that_are_programs_are_refused() {
    let folder = Folder::new("pickles");
    for name in ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"] {
        check_refused(&folder.write(name, PICKLE));
        // The only weights in the folder.
        check_refused(&folder.0);
    }
    check_refused(&folder.write("model.gguf", PICKLE));
    folder.write("model.safetensors", PICKLE);
    check_refused(&folder.0);
    let index = br#"{"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}"#;
    std::fs::remove_file(folder.0.join("model.safetensors")).unwrap();
    folder.write("model.safetensors.index.json", index);
    check_refused(&folder.0);
}

/// Impossible counts and lengths in a GGUF's header are rejected before such an amount of memory is allocated.
#[test]
fn headers_that_promise_too_much_are_refused() {
    let folder = Folder::new("headers");
    let head = |n_tensors: u64, n_values: u64, rest: &[u8]| {
        let counts = [n_tensors.to_le_bytes(), n_values.to_le_bytes()].concat();
        [&b"GGUF"[..], &3u32.to_le_bytes(), &counts, rest].concat()
    };
    let huge = u64::MAX.to_le_bytes();
    let named = |kind: u32, rest: &[u8]| [&1u64.to_le_bytes()[..], b"k", &kind.to_le_bytes(), rest].concat();
    let list = |kind: u32, n: u64| [&kind.to_le_bytes()[..], &n.to_le_bytes()].concat();
    for bytes in [
        head(u64::MAX, 0, &[]),
        head(0, u64::MAX, &[]),
        head(1 << 62, 1 << 62, &[0; 64]),
        head(0, 1, &huge),
        head(0, 1, &named(8, &huge)),
        head(0, 1, &named(9, &list(4, 1 << 62))),
        head(0, 1, &named(9, &list(8, u64::MAX / 8))),
        // Nested lists.
        head(0, 1, &named(9, &list(9, 1).repeat(100_000))),
        head(1, 0, &[&1u64.to_le_bytes()[..], b"t", &u32::MAX.to_le_bytes(), &[255; 64]].concat()),
        head(1, 0, &[&1u64.to_le_bytes()[..], b"t", &4u32.to_le_bytes(), &[255; 64]].concat()),
    ] {
        check_refused(&folder.write("model.gguf", &bytes));
    }
}
