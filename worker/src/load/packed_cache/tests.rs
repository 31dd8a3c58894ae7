//! Tests which files the folder keeps, and when a load uses them.

use super::*;
use backend::cpu::{Cpu, CpuConfig, Isa};
use collective::CancelFlag;
use model::{LoadSource, Model, PassLimits};
use types::{Activations, Grid, Layout, Rank};

/// A model and a cache in a folder that is removed at the end of the test.
struct CacheFolder(PathBuf);

impl CacheFolder {
    fn new(test: &str) -> CacheFolder {
        let folder = std::env::temp_dir().join(format!("lockstep-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let from: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../tests/reference/llama-f16-sharded"].iter().collect();
        fs::create_dir_all(folder.join("model")).unwrap();
        for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
            fs::copy(entry.path(), folder.join("model").join(entry.file_name())).unwrap();
        }
        CacheFolder(folder)
    }

    fn cache(&self, bytes_max: u64) -> PackedCache {
        PackedCache::new(PackedCacheConfig { folder: self.0.join("packed"), bytes_max })
    }

    /// Loads a rank of two, and waits for its file. Returns the matrices from the file, and those that were packed.
    fn load(&self, cache: &PackedCache, rank: u16) -> (usize, usize) {
        let checkpoint = Checkpoint::open(&self.0.join("model")).unwrap();
        let config = CpuConfig { threads: 2, activations: Activations::F32, isa: Isa::detect(), spin: false };
        let layout = Layout::even(Grid { tp: 2, pp: 1 }, checkpoint.spec().n_layers).unwrap();
        let (part, device) = (layout.part(Rank(rank)), Cpu::new(config).unwrap());
        let packed = cache.open(&checkpoint, &part).unwrap();
        let source = LoadSource { cancel: &CancelFlag::default(), packed: Some(&packed) };
        let limits = PassLimits { rows_max: 8, outputs_max: 8, context: 64 };
        Model::load_from(&checkpoint, &device, &part, limits, source).unwrap();
        let counts = packed.counts();
        cache.store(packed);
        cache.wait_until_written();
        counts
    }

    /// The files of the cache, and their bytes together.
    fn files(&self) -> (Vec<String>, u64) {
        let entries: Vec<_> = fs::read_dir(self.0.join("packed")).into_iter().flatten().map(Result::unwrap).collect();
        let n_bytes = entries.iter().map(|entry| entry.metadata().unwrap().len()).sum();
        let mut names: Vec<_> = entries.iter().map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        (names, n_bytes)
    }

    fn age(&self, name: &str, seconds: u64) {
        let file = File::open(self.0.join("packed").join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    }
}

impl Drop for CacheFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_second_load_packs_nothing_until_a_file_of_the_model_changes() {
    let folder = CacheFolder::new("packed-cache-changes");
    let cache = folder.cache(1 << 30);
    let (none, n) = folder.load(&cache, 0);
    assert!(none == 0 && n > 0);
    assert_eq!(folder.load(&cache, 0), (n, 0));
    assert_eq!(folder.load(&cache.clone(), 0), (n, 0));
    assert_eq!(folder.load(&cache, 1), (0, n), "another rank's part");
    // Written to, although nothing that the fingerprint samples has changed.
    let shards = fs::read_dir(folder.0.join("model")).unwrap().map(|entry| entry.unwrap().path());
    let shard = shards.filter(|path| path.extension().is_some_and(|of| of == "safetensors")).min().unwrap();
    File::options().write(true).open(shard).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(folder.load(&cache, 0), (0, n), "another stamp");
    assert_eq!(folder.files().0.len(), 3);
}

#[test]
fn a_damaged_file_is_replaced() {
    let folder = CacheFolder::new("packed-cache-damage");
    let cache = folder.cache(1 << 30);
    let (_, n) = folder.load(&cache, 0);
    let path = folder.0.join("packed").join(&folder.files().0[0]);
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(folder.load(&cache, 0), (n - 1, 1));
    assert_eq!(folder.load(&cache, 0), (n, 0));
    fs::write(&path, b"LOCKPACK").unwrap();
    assert_eq!(folder.load(&cache, 0), (0, n));
    assert_eq!(folder.load(&cache, 0), (n, 0));
    assert_eq!(folder.files().0.len(), 1, "no unfinished file is left");
}

#[test]
fn rejected_weights_are_packed_again() {
    let folder = CacheFolder::new("packed-cache-rejected");
    let cache = folder.cache(1 << 30);
    let (_, n) = folder.load(&cache, 0);
    folder.load(&cache, 1);
    cache.forget_last();
    assert_eq!(folder.files().0.len(), 1);
    cache.forget_last();
    assert_eq!(folder.load(&cache, 1), (0, n));
    assert_eq!(folder.load(&cache, 0), (n, 0));
}

#[test]
fn the_file_used_longest_ago_makes_room() {
    let folder = CacheFolder::new("packed-cache-room");
    let cache = folder.cache(1 << 30);
    let (_, n) = folder.load(&cache, 0);
    let (names, one) = folder.files();
    // A copy under another key, and what a process left that ended.
    let packed = folder.0.join("packed");
    fs::copy(packed.join(&names[0]), packed.join("old.packed")).unwrap();
    fs::write(packed.join("gone.packed.part.1.0"), b"left").unwrap();
    fs::write(packed.join("new.packed.part.1.0"), b"is written").unwrap();
    fs::write(packed.join("notes.txt"), b"not ours").unwrap();
    folder.age(&names[0], 50);
    folder.age("old.packed", 9);
    folder.age("gone.packed.part.1.0", 601);
    // A use is younger than both.
    assert_eq!(folder.load(&cache, 0), (n, 0));
    assert_eq!(folder.load(&folder.cache(one * 9 / 4), 1), (0, n));
    let kept = folder.files().0;
    assert!(kept.len() == 4 && kept.contains(&names[0]), "{kept:?}");
    assert!(!kept.contains(&"old.packed".into()) && !kept.contains(&"gone.packed.part.1.0".into()), "{kept:?}");
    // A limit below one file keeps the others.
    assert_eq!(folder.load(&folder.cache(one / 2), 1).0, n);
    fs::remove_dir_all(&packed).unwrap();
    assert_eq!(folder.load(&folder.cache(one / 2), 1), (0, n));
    assert_eq!(folder.files().0.len(), 0, "a file beyond the limit is not written");
}
