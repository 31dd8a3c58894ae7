//! Models from files of packed matrices: the same bytes, hashes and logits as from the checkpoint, and a damaged file
//! changes none of them.

use crate::folders::{EIGHT_BITS, FAMILIES, FEW_BITS, FOLDERS, GGUFS};
use crate::whole::{Rig, bits, log};
use backend::cpu::{Cpu, CpuConfig, Isa};
use checkpoint::Checkpoint;
use collective::CancelFlag;
use model::{LoadSource, Model, PackedKey, PackedMatrices, PassLimits};
use std::path::{Path, PathBuf};
use types::{Activations, Grid, KvDtype, Layout, PieceRun, Rank, RankPart};

const KEY: PackedKey = [7; 32];

/// A file that is removed at the end of the test.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new(test: &str) -> TemporaryFile {
        TemporaryFile(std::env::temp_dir().join(format!("lockstep-{test}-{}", std::process::id())))
    }

    fn open(&self) -> PackedMatrices {
        PackedMatrices::open(&self.0, KEY).unwrap()
    }

    /// Writes what a load packed.
    fn write(&self, packed: PackedMatrices) {
        let image = packed.into_image().unwrap();
        image.write(&mut std::fs::File::create(&self.0).unwrap(), &|| true).unwrap();
        assert_eq!(std::fs::metadata(&self.0).unwrap().len(), image.n_bytes());
    }

    fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(&self.0).unwrap();
        change(&mut bytes);
        std::fs::write(&self.0, bytes).unwrap();
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference")
}

fn checkpoint(name: &str) -> Checkpoint {
    let path = folder().join(name);
    Checkpoint::open(&if name.starts_with("gguf-") { path.join("model.gguf") } else { path }).unwrap()
}

fn device(threads: usize, activations: Activations) -> Cpu {
    Cpu::new(CpuConfig { threads, activations, isa: Isa::detect(), spin: false }).unwrap()
}

/// Everything that a load makes of the checkpoint: the weights in memory, and the hashes of their sources.
#[derive(PartialEq)]
struct LoadResult {
    weights: Vec<(String, Vec<u8>)>,
    runs: Vec<PieceRun>,
    weight_bytes: usize,
}

/// Also returns the bytes that were read from the checkpoint.
fn load(checkpoint: &Checkpoint, part: &RankPart, packed: Option<&PackedMatrices>) -> (LoadResult, u64) {
    let limits = PassLimits { rows_max: 8, outputs_max: 8, context: 64.min(checkpoint.spec().context) };
    let source = LoadSource { cancel: &CancelFlag::default(), packed };
    let model = Model::load_from(checkpoint, &device(2, Activations::Int8), part, limits, source).unwrap();
    let weights = model.packed().iter().map(|weight| (weight.name.clone(), weight.bytes.bytes().to_vec())).collect();
    let (runs, weight_bytes) = (model.piece_runs().to_vec(), model.weight_bytes());
    (LoadResult { weights, runs, weight_bytes }, model.read_bytes())
}

fn solo(checkpoint: &Checkpoint) -> RankPart {
    Layout::solo(checkpoint.spec().n_layers).part(Rank(0))
}

#[test]
fn every_part_of_every_model_is_the_same_from_a_file_and_no_matrix_is_read() {
    let file = TemporaryFile::new("packed-parts");
    for name in FOLDERS.into_iter().chain(EIGHT_BITS).chain(FEW_BITS).chain(FAMILIES).chain(GGUFS) {
        let checkpoint = checkpoint(name);
        let (n_layers, together) = (checkpoint.spec().n_layers, checkpoint.spec().joined_layers());
        let grids = [(1, 1), (2, 1), (1, 2), (7, 1)].into_iter().filter(|(_, pp)| *pp == 1 || together.is_empty());
        for (tp, pp) in grids {
            let Ok(layout) = Layout::even(Grid { tp, pp }, n_layers) else { continue };
            for rank in 0..layout.grid().n_ranks() {
                let part = layout.part(Rank(rank));
                let (expected, read_bytes) = load(&checkpoint, &part, None);
                let packed = PackedMatrices::new(KEY);
                let (first, _) = load(&checkpoint, &part, Some(&packed));
                let n_matrices = packed.counts().1;
                assert!(first == expected && n_matrices > 0, "{name}, tp {tp}, pp {pp}: packed");
                file.write(packed);
                let restored = file.open();
                let (second, read_again) = load(&checkpoint, &part, Some(&restored));
                assert_eq!(restored.counts(), (n_matrices, 0), "{name}: {:?}", restored.refused());
                assert!(second == expected, "{name}, tp {tp}, pp {pp}, rank {rank}");
                // What is left are vectors, which are a large part of a small share.
                assert!(read_again < read_bytes, "{name}: {read_again} of {read_bytes}");
                assert!(restored.into_image().is_none(), "a complete file is not written again");
            }
        }
    }
}

#[test]
fn logits_are_the_same_bits_from_a_file() {
    let file = TemporaryFile::new("packed-logits");
    let names = ["llama-f32-tied", "llama-bf16-odd", "fp8-block", "gptq-4", "mixtral", "qwen3-next", "gguf-k-llama3"];
    for (name, activations) in names.into_iter().flat_map(|name| [(name, Activations::F32), (name, Activations::Int8)])
    {
        let rig = |threads, packed: Option<&PackedMatrices>| {
            let device = device(threads, activations);
            let mut rig = Rig::with_packed(&folder(), name, device, KvDtype::F16, packed);
            let log = log(40, 3, rig.n_vocab);
            bits(&rig.in_chunks(&log, 17))
        };
        let expected = rig(1, None);
        let packed = PackedMatrices::new(KEY);
        assert!(rig(2, Some(&packed)) == expected, "{name}: packed");
        file.write(packed);
        let restored = file.open();
        assert!(rig(2, Some(&restored)) == expected, "{name}: restored");
        assert_eq!(restored.counts().1, 0);
    }
}

#[test]
fn a_flipped_bit_anywhere_is_found_and_the_file_is_replaced() {
    let (file, checkpoint) = (TemporaryFile::new("packed-flip"), checkpoint("gguf-k-llama3"));
    let part = solo(&checkpoint);
    let packed = PackedMatrices::new(KEY);
    let (expected, _) = load(&checkpoint, &part, Some(&packed));
    let n_matrices = packed.counts().1;
    file.write(packed);
    let sound = std::fs::read(&file.0).unwrap();
    let (mut n_head, mut n_matrix) = (0, 0);
    for at in (0..sound.len()).step_by(sound.len() / 150).chain([sound.len() - 1]) {
        file.change(|bytes| {
            bytes.clone_from(&sound);
            bytes[at] ^= 0x10;
        });
        let Ok(damaged) = PackedMatrices::open(&file.0, KEY) else {
            n_head += 1;
            continue;
        };
        let (loaded, _) = load(&checkpoint, &part, Some(&damaged));
        assert!(loaded == expected, "byte {at}");
        if damaged.refused().is_none() {
            // A byte between two matrices.
            assert_eq!((damaged.counts(), sound[at]), ((n_matrices, 0), 0));
            continue;
        }
        n_matrix += 1;
        assert_eq!(damaged.counts(), (n_matrices - 1, 1), "byte {at}: one matrix is packed again");
        file.write(damaged);
        assert!(std::fs::read(&file.0).unwrap().len() == sound.len());
        let replaced = file.open();
        assert!(load(&checkpoint, &part, Some(&replaced)).0 == expected && replaced.refused().is_none());
    }
    assert!(n_head > 0 && n_matrix > 50, "{n_head} {n_matrix}");
}

#[test]
fn a_short_file_another_version_and_another_key_are_refused() {
    let (file, checkpoint) = (TemporaryFile::new("packed-refused"), checkpoint("llama-f16-sharded"));
    let packed = PackedMatrices::new(KEY);
    load(&checkpoint, &solo(&checkpoint), Some(&packed));
    file.write(packed);
    let sound = std::fs::read(&file.0).unwrap();
    let refused = |change: &dyn Fn(&mut Vec<u8>), why: &str| {
        file.change(|bytes| {
            bytes.clone_from(&sound);
            change(bytes);
        });
        let error = PackedMatrices::open(&file.0, KEY).err().unwrap();
        assert!(error.contains(why), "{error}");
    };
    refused(&|bytes| bytes.truncate(bytes.len() - 1), "it ends at byte");
    refused(&|bytes| bytes.truncate(90), "its table");
    refused(&|bytes| bytes.truncate(9), "its head");
    refused(&|bytes| bytes.clear(), "its head");
    refused(&|bytes| bytes[0] ^= 1, "no file of packed matrices");
    refused(&|bytes| bytes[8] ^= 2, "its version is 3 and not 1");
    refused(&|bytes| bytes[12] ^= 1, "another key");
    refused(&|bytes| bytes[51] = 0xff, "its table has");
    refused(&|bytes| bytes[60] ^= 1, "differs from its hash");
    refused(&|bytes| bytes[90] ^= 1, "differs from its hash");
    std::fs::remove_file(&file.0).unwrap();
    assert!(PackedMatrices::open(&file.0, KEY).is_err());
}

/// A file whose key does not name the part, which the key's owner must prevent.
#[test]
fn matrices_of_another_part_are_packed_again() {
    let (file, checkpoint) = (TemporaryFile::new("packed-other"), checkpoint("llama-f16-sharded"));
    let layout = Layout::even(Grid { tp: 2, pp: 1 }, checkpoint.spec().n_layers).unwrap();
    let packed = PackedMatrices::new(KEY);
    load(&checkpoint, &layout.part(Rank(0)), Some(&packed));
    file.write(packed);
    let other = file.open();
    let (loaded, _) = load(&checkpoint, &layout.part(Rank(1)), Some(&other));
    assert!(loaded == load(&checkpoint, &layout.part(Rank(1)), None).0);
    assert!(other.counts().1 > 0 && other.refused().is_some());
}

#[test]
fn a_write_stops_when_it_is_cancelled() {
    let checkpoint = checkpoint("llama-f16-sharded");
    let packed = PackedMatrices::new(KEY);
    load(&checkpoint, &solo(&checkpoint), Some(&packed));
    let image = packed.into_image().unwrap();
    let error = image.write(&mut Vec::new(), &|| false).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Interrupted);
}
