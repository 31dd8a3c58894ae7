//! Pages of the KV cache on disk: what is read from there equals a recompute, bit for bit, of every cache group, on
//! grids, in chunks, preempted and after losses. Damaged, cut, swapped and foreign pages are computed.

use crate::common::requests::{difference, tiny_requests};
use crate::common::watched::Seen;
use crate::common::{Answer, Replica, Setup, Workers, reference_model};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use types::Request;

/// Too few for the requests that run at the same time: some are preempted. The longest fits.
const CROWDED_BLOCKS: u32 = 50;

/// A folder that is removed at the end of a test.
struct DiskFolder(PathBuf);

impl DiskFolder {
    fn new(name: &str) -> DiskFolder {
        let folder = std::env::temp_dir().join(format!("lockstep-kv-disk-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        DiskFolder(folder)
    }

    /// The files of pages, in order.
    fn files(&self) -> Vec<PathBuf> {
        let entries = |folder: &PathBuf| -> Vec<PathBuf> {
            fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
        };
        let mut level = vec![self.0.join("pages")];
        for _ in 0..4 {
            level = level.iter().flat_map(entries).collect();
        }
        level.sort();
        level
    }

    /// Returns the number of pages, once no more are written for a second.
    async fn n_written(&self) -> usize {
        let (mut n, mut since) = (self.files().len(), Instant::now());
        while since.elapsed() < Duration::from_secs(1) {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let now = self.files().len();
            if now != n {
                (n, since) = (now, Instant::now());
            }
        }
        n
    }
}

impl Drop for DiskFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct DiskBench {
    name: String,
    base: Setup,
    requests: Vec<Request>,
    expected: Vec<Answer>,
}

impl DiskBench {
    async fn new(name: &str, activations: &'static str, kv_dtype: &'static str) -> DiskBench {
        let model = reference_model(name);
        let requests = tiny_requests(&model);
        let base = Setup::new(model, activations, kv_dtype);
        let mut replica = Replica::start(&base).await;
        let expected = replica.run_alone(&requests).await;
        replica.stop().await;
        DiskBench {
            name: name.into(),
            base: Setup { prefix_cache: true, fetch_micros: Some(60_000_000), ..base },
            requests,
            expected,
        }
    }

    /// Starts a replica on this folder, and checks that the requests have the bits that they have alone and cold.
    async fn same(&self, way: &str, folder: &DiskFolder, setup: Setup, breaks: &[u32]) -> Seen {
        let setup = Setup { kv_disk: Some(folder.0.clone()), ..setup };
        let mut replica = Replica::start(&setup).await;
        // The names of the folder's pages come after the first heartbeat at the latest.
        tokio::time::sleep(Duration::from_millis(300)).await;
        breaks.iter().for_each(|n| replica.break_at(*n));
        let answers = replica.run(&self.requests).await;
        let seen = replica.seen();
        replica.stop().await;
        let n_written = folder.n_written().await;
        println!("{} {way}: {n_written} files, {seen:?}", self.name);
        for (i, (got, expected)) in answers.iter().zip(&self.expected).enumerate() {
            assert!(got == expected, "{} {way}: request {i}: {}", self.name, difference(got, expected));
        }
        seen
    }

    /// Cold, and then again and again from what the first process left.
    async fn outlives_processes(&self, grid: (u16, u16)) {
        let (name, base) = (format!("{}-{}-{}", self.name, grid.0, grid.1), self.base.on(grid.0, grid.1));
        let folder = DiskFolder::new(&name);
        let cold = self.same("cold", &folder, base.clone(), &[]).await;
        assert!(cold.pages_stored > 100, "{cold:?}");
        let warm = self.same("from disk", &folder, base.clone(), &[]).await;
        assert!(warm.pages_fetched > 100 && warm.hit_tokens > cold.hit_tokens + 1000, "{cold:?} {warm:?}");
        let small = Setup { chunk_tokens_max: 7, ..base.clone() };
        let chunked = self.same("in chunks", &folder, small, &[]).await;
        assert!(chunked.pages_fetched > 100, "{chunked:?}");
        let lost = self.same("after losses", &folder, base, &[3, 9]).await;
        assert!(lost.loads == 3 && lost.pages_fetched > warm.pages_fetched, "{lost:?}");
    }
}

#[tokio::test]
async fn dense_pages_outlive_processes() {
    let bench = DiskBench::new("llama-f16-sharded", "int8", "f16").await;
    for grid in [(1, 1), (2, 1), (1, 2)] {
        bench.outlives_processes(grid).await;
    }
}

/// Each head is a file of its own, so pages are found where other ranks have it.
#[tokio::test]
async fn ranks_that_divide_heads_otherwise_find_the_pages() {
    for (name, activations) in [("llama-f16-sharded", "int8"), ("gemma3", "f32"), ("qwen3-next", "f32")] {
        let bench = DiskBench::new(name, activations, "f16").await;
        for (first, second) in [(1, 2), (2, 1)] {
            let folder = DiskFolder::new(&format!("{name}-heads-{first}"));
            let cold = bench.same(&format!("cold on tp {first}"), &folder, bench.base.on(first, 1), &[]).await;
            let warm = bench.same(&format!("on tp {second}"), &folder, bench.base.on(second, 1), &[]).await;
            assert!(warm.pages_fetched > 100 && warm.hit_tokens > cold.hit_tokens + 1000, "{cold:?} {warm:?}");
        }
    }
}

/// Workers in processes of their own, with the binary's loader around the model's.
#[tokio::test]
async fn pages_of_worker_processes_outlive_them() {
    let bench = DiskBench::new("llama-f16-sharded", "int8", "f16").await;
    let folder = DiskFolder::new("processes");
    let disk = Some(folder.0.clone());
    let setup = Setup { workers: Workers::Processes, kv_disk: disk, ..bench.base.on(1, 2) };
    let mut longest_hits = Vec::new();
    for _ in 0..2 {
        let mut replica = Replica::start(&setup).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let answers = replica.run(&bench.requests).await;
        longest_hits.push(replica.longest_hit());
        // A process that is killed writes no more.
        let n_written = folder.n_written().await;
        replica.stop().await;
        assert!(n_written > 100 && answers == bench.expected);
    }
    // No other prompt begins as the longest one does, so only the folder can have it, in whatever order requests run.
    let longest = bench.requests.iter().map(|request| request.prompt.len() as u32).max().unwrap();
    assert!(longest_hits[0] < longest - 100 && longest_hits[1] > longest - 20, "{longest_hits:?} of {longest}");
}

#[tokio::test]
async fn pages_of_eight_bits_outlive_processes() {
    DiskBench::new("llama-f32-tied", "f32", "int8").await.outlives_processes((1, 1)).await;
}

#[tokio::test]
async fn windowed_pages_outlive_processes() {
    let bench = DiskBench::new("gemma3", "f32", "f16").await;
    for grid in [(1, 1), (2, 1)] {
        bench.outlives_processes(grid).await;
    }
}

#[tokio::test]
async fn states_outlive_processes() {
    let bench = DiskBench::new("qwen3-next", "f32", "f16").await;
    for grid in [(1, 1), (1, 2)] {
        bench.outlives_processes(grid).await;
    }
}

#[tokio::test]
async fn preempted_requests_come_back_from_disk() {
    let bench = DiskBench::new("llama-f16-sharded", "int8", "f16").await;
    let folder = DiskFolder::new("preempted");
    let crowded = Setup { n_blocks: CROWDED_BLOCKS, ..bench.base.clone() };
    let seen = bench.same("crowded", &folder, crowded, &[]).await;
    assert!(seen.restarts > 0 && seen.pages_stored > 100, "{seen:?}");
}

/// A folder, and the files of its pages.
type FilesChange = fn(&DiskFolder, &[PathBuf]);

fn flip_bits(_: &DiskFolder, files: &[PathBuf]) {
    for path in files {
        let mut bytes = fs::read(path).unwrap();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    }
}

fn cut_short(_: &DiskFolder, files: &[PathBuf]) {
    for path in files {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    }
}

/// Each file takes the content of the one before it, and the first that of another.
fn swap(_: &DiskFolder, files: &[PathBuf]) {
    for at in (1..files.len()).rev() {
        fs::copy(&files[at - 1], &files[at]).unwrap();
    }
    fs::copy(&files[2], &files[0]).unwrap();
}

fn change_secret(folder: &DiskFolder, _: &[PathBuf]) {
    fs::write(folder.0.join("secret"), [7; 32]).unwrap();
}

#[tokio::test]
async fn damaged_pages_are_computed() {
    let bench = DiskBench::new("llama-f16-sharded", "int8", "f16").await;
    let changes: [(&str, FilesChange); 4] =
        [("flipped", flip_bits), ("cut", cut_short), ("swapped", swap), ("foreign", change_secret)];
    for (way, change) in changes {
        let folder = DiskFolder::new(way);
        let cold = bench.same("cold", &folder, bench.base.clone(), &[]).await;
        let files = folder.files();
        change(&folder, &files);
        let seen = bench.same(way, &folder, bench.base.clone(), &[]).await;
        assert!(files.len() > 100 && seen.pages_fetched > 50, "{way}: {seen:?}");
        assert!(seen.hit_tokens <= cold.hit_tokens + 500, "{way}: damaged pages are no hits: {cold:?} {seen:?}");
    }
}

#[tokio::test]
async fn a_folder_that_vanishes_or_is_full_fails_no_request() {
    let bench = DiskBench::new("llama-f16-sharded", "int8", "f16").await;
    let folder = DiskFolder::new("vanishes");
    bench.same("cold", &folder, bench.base.clone(), &[]).await;
    let setup = Setup { kv_disk: Some(folder.0.clone()), ..bench.base.clone() };
    let mut replica = Replica::start(&setup).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    fs::remove_dir_all(&folder.0).unwrap();
    // No page can be written where a folder is a file.
    fs::write(&folder.0, "").unwrap();
    let answers = replica.run(&bench.requests).await;
    let seen = replica.seen();
    replica.stop().await;
    fs::remove_file(&folder.0).unwrap();
    assert!(answers == bench.expected && seen.pages_fetched > 50, "{seen:?}");
}

/// A pipe that nothing writes to: a file that takes for ever to open.
#[tokio::test]
async fn a_disk_that_hangs_delays_no_request_beyond_its_deadline() {
    let bench = DiskBench::new("llama-f16-sharded", "int8", "f16").await;
    let folder = DiskFolder::new("hangs");
    bench.same("cold", &folder, bench.base.clone(), &[]).await;
    let files = folder.files();
    files.iter().for_each(|path| _ = fs::remove_file(path));
    assert!(Command::new("mkfifo").args(&files).status().unwrap().success());
    let begun = Instant::now();
    let setup = Setup { fetch_micros: None, ..bench.base.clone() };
    let seen = bench.same("hanging", &folder, setup, &[]).await;
    assert!(seen.pages_fetched > 50, "{seen:?}");
    // The first fetches have five seconds, since no cost is known, and later ones half a second.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}
