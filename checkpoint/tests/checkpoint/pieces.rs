//! A model's hashes cover every byte of every weight, by the weight's name, and no other byte.

use checkpoint::{Checkpoint, spans};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use types::{PieceRun, WeightsRoot};

/// A copy of a model that is deleted on drop.
struct Copy {
    folder: PathBuf,
    model: PathBuf,
}

impl Copy {
    fn of(model: &Path, name: &str) -> Copy {
        let folder = std::env::temp_dir().join(format!("lockstep-pieces-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        for file in spans::of_model(model).unwrap() {
            let copy = folder.join(&file.name);
            std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
            std::fs::copy(&file.path, copy).unwrap();
        }
        let model = if model.is_dir() { folder.clone() } else { folder.join(model.file_name().unwrap()) };
        Copy { folder, model }
    }

    fn hashes(&self) -> Vec<PieceRun> {
        self.hashes_unless_refused().unwrap()
    }

    fn hashes_unless_refused(&self) -> checkpoint::Result<Vec<PieceRun>> {
        Checkpoint::open(&self.model)?.hash_weights()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.folder);
    }
}

/// All committed models, by name.
fn models() -> Vec<(String, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference");
    let model = |path: PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let gguf = path.join("model.gguf");
        let is_model = path.join("config.json").exists() || path.extension().is_some_and(|e| e == "gguf");
        match gguf.exists() {
            true => Some((name, gguf)),
            false => is_model.then_some((name, path)),
        }
    };
    let mut models: Vec<_> =
        std::fs::read_dir(folder).unwrap().filter_map(|entry| model(entry.unwrap().path())).collect();
    models.sort();
    assert!(models.len() > 40, "{models:?}");
    models
}

/// Inverts a bit of a byte.
fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

fn root(runs: &[PieceRun]) -> WeightsRoot {
    WeightsRoot::of(runs.iter().map(|run| (run.weight.as_str(), &run.hashes[..])))
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Inverts one byte in every weight of every committed model.
#[test]
fn a_byte_of_any_weight_changes_the_root() {
    let mut random = Random(2_026);
    let mut n_bytes = 0;
    for (name, path) in models() {
        // A changed bit of a table's names and factors may be rounded away: the hash covers the numbers.
        let is_named = ["nf4", "fp4", "nvfp4"].contains(&name.as_str());
        if is_named || !Checkpoint::open(&path).unwrap().unread_tensors().is_empty() {
            continue;
        }
        let copy = Copy::of(&path, &name);
        let before = copy.hashes();
        for file in spans::of_model(&copy.model).unwrap() {
            for span in file.spans {
                let at = span.bytes.start + random.below(span.bytes.end - span.bytes.start);
                flip(&file.path, at);
                n_bytes += 1;
                // A field that describes how others are read is refused where it has another meaning.
                let Ok(after) = copy.hashes_unless_refused() else {
                    assert!(["gptq", "packed", "llm-int8"].iter().any(|format| name.starts_with(format)), "{name}");
                    flip(&file.path, at);
                    continue;
                };
                assert_ne!(root(&after), root(&before), "{name}: byte {at} of {}", file.path.display());
                let differ = before.iter().zip(&after).filter(|(before, after)| before != after).count();
                // A tensor in the file may be several weights, and the byte is in one of them; scales are read with
                // each.
                assert!((1..=3).contains(&differ), "{name}: {differ} weights differ by byte {at}");
                let checkpoint = Checkpoint::open(&copy.model).unwrap();
                assert!(checkpoint.first_difference(&before, &|| false).unwrap().is_some());
                flip(&file.path, at);
            }
        }
        assert_eq!(copy.hashes(), before, "{name}");
        assert_eq!(Checkpoint::open(&copy.model).unwrap().first_difference(&before, &|| false).unwrap(), None);
    }
    assert!(n_bytes > 500, "{n_bytes}");
}

/// Headers, texts and the bytes between tensors belong to no weight.
#[test]
fn a_byte_of_no_weight_changes_nothing() {
    for (name, path) in models() {
        let copy = Copy::of(&path, &format!("none-{name}"));
        let before = copy.hashes();
        for file in spans::of_model(&copy.model).unwrap() {
            let ends = file.spans.iter().map(|span| span.bytes.end);
            let starts = file.spans.iter().skip(1).map(|span| span.bytes.start);
            for (gap, next) in ends.zip(starts).filter(|(gap, next)| gap < next) {
                flip(&file.path, gap + (next - gap) / 2);
            }
        }
        assert_eq!(copy.hashes(), before, "{name}");
    }
}

/// The same weights in one file or in several, in any order, have the same root.
#[test]
fn a_root_knows_no_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference");
    let runs = Checkpoint::open(&folder.join("llama-f16-sharded")).unwrap().hash_weights().unwrap();
    assert!(runs.windows(2).all(|two| two[0].weight < two[1].weight));
    assert!(runs.iter().all(|run| run.first == 0 && run.hashes.len() == run.n_pieces as usize));
    let tied = Checkpoint::open(&folder.join("llama-f32-tied")).unwrap().hash_weights().unwrap();
    assert!(tied.iter().all(|run| run.weight != "lm_head.weight"), "a head that is the embedding counts once");
}
