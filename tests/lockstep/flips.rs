//! One flipped bit: in a file, in a fetched part, or in weights or K and V in a running worker's memory. The load, the
//! fetch, the scrub or an audit finds each, and later answers are the same as before; of K and V, a flip is found if it
//! changes a token. A few of each; `make flips` makes a hundred.

use crate::common::node::{Folder, Node, complete, field, post};
use crate::processes::{DOORS, MODEL, coordinator, router, serve};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const WEIGHTS: &str = "model.safetensors";

/// The number of flipped bits in each place.
fn n_flips() -> usize {
    std::env::var("LOCKSTEP_TEST_FLIPS").map_or(3, |n| n.parse().unwrap())
}

/// Pseudo-random numbers, the same ones in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// A tensor of a safetensors file: name, shape, and where its bytes lie.
type Placed = (String, Vec<usize>, std::ops::Range<usize>);

/// The file's bytes and its tensors.
fn tensors(file: &Path) -> (Vec<u8>, Vec<Placed>) {
    let bytes = std::fs::read(file).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let of = |(name, of): (&String, &Value)| {
        let numbers = |list: &Value| list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let at: Vec<usize> = numbers(&of["data_offsets"]);
        (name.clone(), numbers(&of["shape"]), 8 + n + at[0]..8 + n + at[1])
    };
    let all = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__").map(of).collect();
    (bytes, all)
}

fn flip(file: &File, at: u64, bit: u64) -> io::Result<()> {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&[byte[0] ^ (1 << bit)], at)
}

/// Flips a bit of a tensor of the file, and returns its position.
fn flip_in_file(path: &Path, dice: &mut Dice) -> (u64, u64) {
    let (_, tensors) = tensors(path);
    let (_, _, bytes) = &tensors[dice.below(tensors.len() as u64) as usize];
    let (at, bit) = (bytes.start as u64 + dice.below(bytes.len() as u64), dice.below(8));
    flip(&File::options().read(true).write(true).open(path).unwrap(), at, bit).unwrap();
    (at, bit)
}

fn copy(folder: &Folder) -> PathBuf {
    for entry in std::fs::read_dir(MODEL).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), folder.0.join(entry.file_name())).unwrap();
    }
    folder.0.join(WEIGHTS)
}

/// A worker's packed matrices in its memory: the beginning of each, and its bytes.
struct PackedMemory {
    memory: File,
    matrices: Vec<(u64, u64)>,
}

/// A tile of sixteen rows is packed along K: returns the first bytes of the matrix with these rows.
fn beginning(bytes: &[u8], k: usize) -> Vec<u8> {
    let element = |row: usize, column: usize| &bytes[4 * (row * k + column)..][..4];
    (0..8).flat_map(|column| (0..16).flat_map(move |row| element(row, column).to_vec())).collect()
}

impl PackedMemory {
    /// Returns None if this process may not write to the memory of another one.
    fn of(pid: u32) -> Option<PackedMemory> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).ok()?;
        let (file, tensors) = tensors(&Path::new(MODEL).join(WEIGHTS));
        let patterns = tensors.iter().filter_map(|(name, shape, at)| match shape[..] {
            [rows, k] if name.contains("layers") && rows.is_multiple_of(16) => {
                Some((beginning(&file[at.clone()], k), at.len() as u64))
            }
            _ => None,
        });
        let patterns: Vec<_> = patterns.collect();
        let mut matrices = Vec::new();
        for (start, len) in anonymous(pid) {
            let mut bytes = vec![0; len as usize];
            if memory.read_exact_at(&mut bytes, start).is_err() {
                continue;
            }
            for at in (0..bytes.len().saturating_sub(512)).step_by(64) {
                let found = patterns.iter().find(|(pattern, _)| bytes[at..].starts_with(pattern));
                matrices.extend(found.map(|(_, n_bytes)| (start + at as u64, *n_bytes)));
            }
        }
        Some(PackedMemory { memory, matrices })
    }

    fn flip_any(&self, dice: &mut Dice) -> (u64, u64) {
        let (start, len) = self.matrices[dice.below(self.matrices.len() as u64) as usize];
        let (at, bit) = (start + dice.below(len), dice.below(8));
        flip(&self.memory, at, bit).unwrap();
        (at, bit)
    }

    /// Makes one weight some hundred times as large, with one bit of its exponent.
    fn enlarge_one(&self) {
        let &(start, len) = self.matrices.last().unwrap();
        let mut bytes = vec![0; len as usize];
        self.memory.read_exact_at(&mut bytes, start).unwrap();
        let exponent = |at: usize| (u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) >> 23) & 0xff;
        let all = (0..bytes.len()).step_by(4);
        // The largest weight that lacks this bit.
        let at = all.filter(|at| exponent(*at) & 8 == 0).max_by_key(|at| exponent(*at)).unwrap();
        flip(&self.memory, start + at as u64 + 3, 2).unwrap();
    }
}

/// Flips a bit of a norm of this layer; returns at how many places it was found. A vector has the same bytes in memory
/// as in its file, and a freed copy from reading the file may still be in memory: the bit flips in each. Returns None
/// if this process may not write to the memory of another one.
fn flip_in_norm(pid: u32, layer: usize, dice: &mut Dice) -> Option<usize> {
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).ok()?;
    let (file, tensors) = tensors(&Path::new(MODEL).join(WEIGHTS));
    let of_layer = format!("layers.{layer}.");
    let norms: Vec<_> = tensors.iter().filter(|(name, ..)| name.contains(&of_layer) && name.contains("norm")).collect();
    let (_, _, at) = norms[dice.below(norms.len() as u64) as usize];
    let (pattern, byte, bit) = (&file[at.clone()], dice.below(at.len() as u64), dice.below(8));
    let mut n_places = 0;
    for (start, len) in anonymous(pid) {
        let mut bytes = vec![0; len as usize];
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue;
        }
        for at in (0..bytes.len().saturating_sub(pattern.len())).step_by(4) {
            if bytes[at..].starts_with(pattern) {
                flip(&memory, start + at as u64 + byte, bit).unwrap();
                n_places += 1;
            }
        }
    }
    Some(n_places)
}

/// The process's own memory, mapping by mapping.
fn anonymous(pid: u32) -> Vec<(u64, u64)> {
    const BYTES_MAX: u64 = 1 << 28;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let of = |line: &str| {
        let mut words = line.split_whitespace();
        let (place, rights, inode) = (words.next()?, words.next()?, words.nth(2)?);
        let (start, end) = place.split_once('-')?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap_or(0));
        (rights.starts_with("rw") && inode == "0" && end - start <= BYTES_MAX).then_some((start, end - start))
    };
    maps.lines().filter_map(of).collect()
}

fn not_run(what: &str) {
    let message = format!("NOT RUN: {what}: the memory of another process may not be written here\n");
    std::io::stderr().write_all(message.as_bytes()).unwrap();
}

fn page(http: &str, path: &str) -> String {
    ureq::get(format!("{http}{path}")).call().unwrap().body_mut().read_to_string().unwrap()
}

/// Sums the values of a metric's series whose labels contain these words.
fn metric(http: &str, name: &str, words: &[&str]) -> f64 {
    let page = page(http, "/metrics");
    let lines = page.lines().filter(|line| line.starts_with(name) && words.iter().all(|word| line.contains(word)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

fn policy(node: &mut Node) -> String {
    let http = node.http();
    node.until_ready(&http);
    let page: Value = serde_json::from_str(&page(&http, "/cluster")).unwrap();
    page["replicas"][0]["policy_digest"].as_str().unwrap().to_owned()
}

#[test]
fn a_flipped_bit_of_a_file_is_found_by_the_load() {
    let folder = Folder::new("flips-file");
    let (mut dice, whole) = (Dice(1), policy(&mut serve(&[])));
    for n in 0..n_flips() {
        let place = flip_in_file(&copy(&folder), &mut dice);
        let start = ["serve", folder.0.to_str().unwrap(), "--activations", "f32", "--inproc"];
        assert_ne!(policy(&mut Node::start(&[&start[..], &DOORS].concat())), whole, "flip {n}: {place:?}");
    }
}

#[test]
fn a_flipped_bit_of_a_fetched_part_is_found_by_the_fetch() {
    let folder = Folder::new("flips-fetched");
    let cache = folder.0.join("cache");
    let (_coordinator, address) = coordinator(MODEL, &[]);
    let fetch = ["worker", "--threads", "1", "--join", &address, "--fetch", "--cache", cache.to_str().unwrap()];
    let mut router = router(&address);
    let mut worker = Node::start_in(&folder.0, &fetch);
    let fetched = worker.until(&["fetching this rank's part"]);
    let (answers, mut dice) = (router.answers(), Dice(2));
    let file = PathBuf::from(field(&fetched, "folder")).join("llama-f32-tied").join(WEIGHTS);
    for n in 0..n_flips() {
        worker.kill();
        let place = flip_in_file(&file, &mut dice);
        worker = Node::start_in(&folder.0, &fetch);
        worker.until(&["damaged: they are fetched again"]);
        assert_eq!(router.answers(), answers, "flip {n}: {place:?}");
    }
}

#[test]
fn a_flipped_bit_of_packed_weights_is_found_by_the_scrub_and_the_tokens_are_the_same() {
    let mut dice = Dice(3);
    for n in 0..n_flips() {
        // A separate process for each flip, because freed memory may still contain a copy of the weights.
        let mut node = serve(&["--pp", "2", "--scrub", "0.5"]);
        let (http, answers, workers) = (node.http(), node.answers(), node.workers());
        let Some(packed) = PackedMemory::of(workers[n % 2]) else {
            return not_run("flips in packed weights");
        };
        assert!(packed.matrices.len() >= 7, "the matrices of a layer: {:?}", packed.matrices);
        let before = node.log_len();
        let place = packed.flip_any(&mut dice);
        let weight = found_and_mended(&mut node, before);
        assert!(weight.contains("layers."), "{weight}");
        assert_eq!(node.answers(), answers, "flip {n}: {place:?}");
        assert_eq!(metric(&http, "lockstep:ranks_lost_total", &["cause=\"memory\""]), 1.0);
        assert_eq!(node.workers(), workers, "no process had to end");
    }
}

/// Returns the weight that the scrub has found, once the replica continues without the damage.
fn found_and_mended(node: &mut Node, since: usize) -> String {
    let found = node.until_since(since, &["a weight in memory differs from what was loaded"]);
    let (rank, weight) = (field(&found, "rank"), field(&found, "weight").to_owned());
    assert!(!weight.contains("layers.") || weight.contains(&format!("layers.{rank}.")), "{found}");
    let lost = node.until_since(since, &["a worker is lost", "kind=\"memory\""]);
    assert!(lost.contains("the weight") && lost.contains("host="), "{lost}");
    node.until_since(since, &["the replica serves again"]);
    weight
}

#[test]
fn a_flipped_bit_of_a_norm_is_found_by_the_scrub_and_the_tokens_are_the_same() {
    let mut dice = Dice(5);
    for n in 0..n_flips() {
        let mut node = serve(&["--pp", "2", "--scrub", "0.5"]);
        let (answers, workers) = (node.answers(), node.workers());
        // Each stage is one layer. The first worker to join gets the first stage.
        let stage = n % 2;
        let holder = field(&node.until(&["received an assignment", &format!("rank={stage} ")]), "pid").parse().unwrap();
        let before = node.log_len();
        let Some(n_places) = flip_in_norm(holder, stage, &mut dice) else {
            return not_run("flips in norms");
        };
        assert!(n_places > 0, "the norm is in the worker's memory");
        let weight = found_and_mended(&mut node, before);
        assert!(weight.contains("norm.weight"), "{weight}");
        assert_eq!(node.answers(), answers, "flip {n}: {weight}");
        assert_eq!(node.workers(), workers, "no process had to end");
    }
}

/// A large change of a weight changes tokens. An audit finds only changes that change a token.
#[test]
fn a_flipped_bit_that_changes_tokens_is_found_by_an_audit_at_another_replica() {
    let mut node = serve(&["--replicas", "2", "--audit", "1"]);
    let http = node.http();
    node.until_ready(&http);
    let request = |n: usize| {
        let body = json!({ "prompt": format!("question {n}"), "max_tokens": 100, "ignore_eos": true, "seed": n });
        complete(&http, &body)
    };
    let n_audits = |outcome: &str| metric(&http, "lockstep:audits_total", &[&format!("outcome=\"{outcome}\"")]);
    let wait = |n: usize| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while n_audits("equal") + n_audits("different") < n as f64 {
            assert!(Instant::now() < deadline, "{}", page(&http, "/metrics"));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    request(0);
    wait(1);
    assert_eq!(n_audits("different"), 0.0);
    // A single rank is a thread of the server, so the weights of both replicas are in its memory.
    let Some(packed) = PackedMemory::of(node.pid()) else {
        return not_run("a flip that an audit finds");
    };
    packed.enlarge_one();
    for n in 1..100 {
        request(n);
        wait(n + 1);
        if n_audits("different") > 0.0 {
            break;
        }
    }
    let line = node.until(&["a rerun of an answer has other tokens"]);
    let (one, other) = (field(&line, "replica").to_owned(), field(&line, "other_replica").to_owned());
    assert!(one != other && line.contains("position=") && line.contains("on=\"cpu on "), "{line}");
    assert!(line.contains("third=\"equals the"), "one of the two replicas runs it again: {line}");
}

/// Returns the KV caches of a process: its large memory ranges that use huge pages.
fn kv_caches(pid: u32) -> Vec<(u64, u64)> {
    const AT_LEAST: u64 = 4 << 20;
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let (mut at, mut all) = (None, Vec::new());
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            at = u64::from_str_radix(start, 16).ok().zip(u64::from_str_radix(end, 16).ok());
        } else if first == "VmFlags:" && line.contains(" hg") {
            all.extend(at.filter(|(start, end)| end - start >= AT_LEAST).map(|(start, end)| (start, end - start)));
        }
    }
    all
}

/// Flips one bit of K or V of the only sequence: with `--zero-kv` all other KV memory is zero. The process is stopped
/// meanwhile. Returns None if no sequence has K and V.
fn flip_kv(pid: u32, dice: &mut Dice) -> Option<()> {
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let process = Pid::from_raw(pid.cast_signed()).unwrap();
    kill_process(process, Signal::STOP).unwrap();
    let mut used = Vec::new();
    for (start, len) in kv_caches(pid) {
        let mut bytes = vec![0; len as usize];
        memory.read_exact_at(&mut bytes, start).unwrap();
        used.extend(bytes.iter().enumerate().filter(|(_, byte)| **byte != 0).map(|(at, _)| start + at as u64));
    }
    let flipped = (!used.is_empty()).then(|| {
        let at = used[dice.below(used.len() as u64) as usize];
        flip(&memory, at, dice.below(8)).unwrap();
    });
    kill_process(process, Signal::CONT).unwrap();
    flipped
}

/// Returns a stream's tokens, and whether a bit has flipped in the middle of it. Without tokens it could not be
/// computed further.
fn disturbed(node: &Node, http: &str, request: &Value, dice: &mut Dice) -> (Option<Vec<Value>>, bool) {
    let mut stream_request = request.clone();
    stream_request["stream"] = true.into();
    let (mut tokens, mut n_events, mut has_flipped) = (Vec::new(), 0, false);
    for line in BufReader::new(post(http, &stream_request).into_body().into_reader()).lines().map(Result::unwrap) {
        let Some(event) = line.strip_prefix("data: ").filter(|event| *event != "[DONE]") else { continue };
        let event: Value = serde_json::from_str(event).unwrap();
        if !event["error"].is_null() {
            let why = event["error"]["message"].as_str().unwrap_or_default();
            assert!(has_flipped && why.contains("could not be computed"), "{event}");
            return (None, has_flipped);
        }
        tokens.extend(event["choices"][0]["token_ids"].as_array().into_iter().flatten().cloned());
        n_events += 1;
        if n_events == 20 {
            has_flipped = flip_kv(node.pid(), dice).is_some();
        }
    }
    (Some(tokens), has_flipped)
}

/// K and V have no hash. A flip to a value that is not finite ends its request immediately. An audit finds every flip
/// that changes a token, and cannot find the others. `make flips` prints the number of bits of each kind.
#[test]
fn a_flipped_bit_of_kv_is_found_by_an_audit_exactly_where_it_changes_a_token() {
    let mut node = serve(&["--replicas", "2", "--audit", "1", "--zero-kv", "--kv-memory", "64MiB"]);
    let http = node.http();
    node.until_ready(&http);
    if File::options().write(true).open(format!("/proc/{}/mem", node.pid())).is_err() {
        return not_run("flips in KV");
    }
    assert_eq!(kv_caches(node.pid()).len(), 2, "one for each replica");
    let n_audits = |outcome: &str| metric(&http, "lockstep:audits_total", &[&format!("outcome=\"{outcome}\"")]);
    let audited = |n: f64| {
        let deadline = Instant::now() + Duration::from_secs(60);
        // On a busy machine the other replica may be late, and the first one runs the answer again.
        while ["equal", "equal_in_place", "different"].map(n_audits).into_iter().sum::<f64>() < n {
            assert!(Instant::now() < deadline, "{}", page(&http, "/metrics"));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let (mut dice, mut n_requests) = (Dice(4), 0.0);
    let (mut n_flipped, mut n_failed, mut n_changed) = (0, 0, 0);
    for n in 0..4 * n_flips() {
        // Half of them are greedy and half drawn, because a draw is closer to a change.
        let temperature = f64::from(u8::from(n % 2 == 1));
        let body = json!({
            "prompt": format!("question {n}"), "max_tokens": 300, "ignore_eos": true, "seed": n,
            "temperature": temperature, "return_token_ids": true,
        });
        let whole = complete(&http, &body)[0]["token_ids"].as_array().unwrap().clone();
        n_requests += 1.0;
        audited(n_requests);
        let before = n_audits("different");
        let (tokens, has_flipped) = disturbed(&node, &http, &body, &mut dice);
        n_flipped += usize::from(has_flipped);
        let Some(tokens) = tokens else {
            n_failed += 1;
            continue;
        };
        n_requests += 1.0;
        audited(n_requests);
        let is_found = n_audits("different") > before;
        assert_eq!(tokens.len(), whole.len());
        assert_eq!(is_found, tokens != whole, "answer {n}, flipped: {has_flipped}");
        n_changed += usize::from(tokens != whole);
    }
    println!(
        "{n_flipped} bits of KV flipped: {n_failed} ended their request, {n_changed} changed a token, and an audit \
         found each of these"
    );
    assert!(n_flipped > 0);
}
