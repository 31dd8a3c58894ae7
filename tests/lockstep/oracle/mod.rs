//! The oracle: the answers of every tiny checkpoint are recorded, and must not change. Each of 64 mixed requests is
//! answered alone on one rank, batched there, and batched on two grids; these agree with each other and with
//! `oracle/record.txt` beside this file, which no change of code may alter. Other tests compare a build with itself;
//! this one compares it with earlier builds, on any processor.
//!
//! `LOCKSTEP_ORACLE=write` writes the record. The full answers are left in `target/tmp/oracle`, one file per
//! checkpoint, so that two builds can be compared line by line.

mod record;
mod requests;

use crate::common;
use crate::common::requests::difference;
use crate::common::{Answer, Replica, Setup, reference_folder, reference_model};
use checkpoint::Checkpoint;
use record::Record;
use requests::REQUESTS;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex};
use types::{Goal, Request};

/// The default policy of a model.
const DEFAULT: Policy = Policy { activations: "int8", kv_dtype: "f16" };
/// Checkpoints for which other policies are tried too: f32 activations, with a cache of either type.
const OTHERS: [(&str, Policy); 8] = [
    ("fp8-block", Policy { activations: "f32", kv_dtype: "f32" }),
    ("gemma3", Policy { activations: "f32", kv_dtype: "f32" }),
    ("gguf-k-llama3", Policy { activations: "f32", kv_dtype: "f16" }),
    ("gguf-qwen3-moe", Policy { activations: "f32", kv_dtype: "f32" }),
    ("gpt2", Policy { activations: "f32", kv_dtype: "f32" }),
    ("llama-bf16-odd", Policy { activations: "f32", kv_dtype: "f32" }),
    ("llama-wide.gguf", Policy { activations: "int8", kv_dtype: "f32" }),
    ("mixtral", Policy { activations: "f32", kv_dtype: "f32" }),
];
/// In each list, the first grid on which a checkpoint can be cut counts; a file with one layer of one leaf stays whole.
/// On the first grid prompts are computed in chunks, and common beginnings are cached. The second has room for a few
/// requests, so that some are preempted.
const CHUNKED_GRIDS: [(u16, u16); 3] = [(2, 1), (1, 2), (1, 1)];
const CROWDED_GRIDS: [(u16, u16); 3] = [(2, 2), (1, 2), (1, 1)];
const CHUNK: u32 = 96;
const FEW_BLOCKS: u32 = 48;
/// Checkpoints that run at the same time.
const TOGETHER: usize = 2;
/// The most differences that are printed.
const PRINTED_MAX: usize = 40;

#[derive(Clone, Copy)]
struct Policy {
    activations: &'static str,
    kv_dtype: &'static str,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_what_they_were() {
    let (answered, mut broken) = answer_all().await;
    if std::env::var_os("LOCKSTEP_ORACLE").is_some_and(|what| what == "write") {
        assert!(broken.is_empty(), "grids differ:\n{}", first_lines(&broken));
        return record::write(&answered);
    }
    broken.extend(differences(&answered, &record::read()));
    assert!(broken.is_empty(), "{} answers have changed:\n{}", broken.len(), first_lines(&broken));
}

fn first_lines(broken: &[String]) -> String {
    broken[..broken.len().min(PRINTED_MAX)].join("\n")
}

/// Checkpoints whose lines differ, or are missing on either side.
fn differences(answered: &Record, recorded: &Record) -> Vec<String> {
    let mut names: Vec<&String> = answered.keys().chain(recorded.keys()).collect();
    names.sort();
    names.dedup();
    let of_name = |name: &&String| -> Vec<String> {
        let (Some(got), Some(expected)) = (answered.get(*name), recorded.get(*name)) else {
            return vec![format!("{name}: is recorded, or is in tests/reference, and not both")];
        };
        let lines = got.iter().zip(expected).filter(|(got, expected)| got != expected);
        let mut found: Vec<_> = lines.map(|(got, expected)| format!("{name}: {got}, not {expected}")).collect();
        found.extend((got.len() != expected.len()).then(|| format!("{name}: has other lines")));
        found
    };
    names.iter().flat_map(of_name).collect()
}

/// Every committed checkpoint: a folder with weights, or a single GGUF.
fn checkpoints() -> Vec<String> {
    let entries = std::fs::read_dir(reference_folder("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let has = |name: &str, file: &str| reference_folder(name).join(file).is_file();
    let is_model = |name: &String| name.ends_with(".gguf") || has(name, "config.json") || has(name, "model.gguf");
    let mut names: Vec<String> = names.filter(is_model).collect();
    names.sort();
    names
}

/// The present record, and where a grid differs from the single rank.
async fn answer_all() -> (Record, Vec<String>) {
    let mut work: VecDeque<(String, Policy)> = checkpoints().into_iter().map(|name| (name, DEFAULT)).collect();
    work.extend(OTHERS.map(|(name, policy)| (name.to_string(), policy)));
    let work = Arc::new(Mutex::new(work));
    let answer = |work: Arc<Mutex<VecDeque<(String, Policy)>>>| async move {
        let mut cases = Vec::new();
        loop {
            let Some((name, policy)) = work.lock().unwrap().pop_front() else { return cases };
            cases.push(Case::answer(&name, policy).await);
        }
    };
    let tasks: Vec<_> = (0..TOGETHER).map(|_| tokio::spawn(answer(work.clone()))).collect();
    let (mut record, mut broken) = (Record::new(), Vec::new());
    for task in tasks {
        for case in task.await.unwrap() {
            broken.extend(case.broken);
            record.insert(case.name, case.lines);
        }
    }
    (record, broken)
}

/// A checkpoint under a policy, and its results.
struct Case {
    name: String,
    requests: Vec<Request>,
    expected: Vec<Answer>,
    lines: Vec<String>,
    broken: Vec<String>,
}

impl Case {
    async fn answer(name: &str, policy: Policy) -> Case {
        let model = reference_model(name);
        let checkpoint = Checkpoint::open(&model).unwrap();
        let (vocab, context) = (checkpoint.spec().vocab, checkpoint.spec().context);
        let requests = match checkpoint.spec().encoder {
            None => requests::requests(vocab, context),
            Some(_) => requests::texts(vocab, context),
        };
        let base = Setup::new(model, policy.activations, policy.kv_dtype).on(1, 1);
        let name = format!("{name} {} {}", policy.activations, policy.kv_dtype);
        let mut case = Case { name, requests, expected: Vec::new(), lines: Vec::new(), broken: Vec::new() };
        case.alone(&base).await;
        case.in_company("together", &base).await;
        let first = |grids: &[(u16, u16)]| {
            let mut setups = grids.iter().map(|(tp, pp)| base.on(*tp, *pp));
            setups.find(|setup| setup.layout().is_ok()).expect("one rank holds all of it")
        };
        let chunked = Setup { chunk_tokens_max: CHUNK, prefix_cache: true, ..first(&CHUNKED_GRIDS) };
        case.in_company("in chunks", &chunked).await;
        let crowded = Setup { n_blocks: FEW_BLOCKS, prefix_cache: true, ..first(&CROWDED_GRIDS) };
        case.in_company("crowded", &crowded).await;
        case.lines.extend(case.expected.iter().enumerate().map(|(i, answer)| record::answer_line(i, answer)));
        case.keep_in_full();
        case
    }

    /// Each request alone on one rank: the reference for everything else.
    async fn alone(&mut self, base: &Setup) {
        let mut replica = Replica::start(base).await;
        self.expected = replica.run_alone(&self.requests).await;
        let seen = replica.seen();
        let n_together = if self.draws() { seen.drawing_max } else { seen.running_max };
        assert_eq!(n_together, 1, "{}: each ran alone", self.name);
        replica.stop().await;
        assert_eq!(self.expected.len(), REQUESTS);
        for (request, answer) in self.requests.iter().zip(&self.expected) {
            assert_eq!(answer.drawn.is_empty(), request.goal == Goal::Pool, "{}", self.name);
        }
        self.lines.push(record::grid_line("1x1 alone", &self.expected));
    }

    async fn in_company(&mut self, way: &str, setup: &Setup) {
        let way = format!("{}x{} {way}", setup.grid.tp, setup.grid.pp);
        let mut replica = Replica::start(setup).await;
        let answers = replica.run(&self.requests).await;
        let seen = replica.seen();
        replica.stop().await;
        let name = &self.name;
        println!("{name}, {way}: {seen:?}");
        let n_together = if self.draws() { seen.drawing_max } else { seen.running_max };
        assert!(n_together > 2, "{name}: {n_together} in a step");
        for (i, (got, expected)) in answers.iter().zip(&self.expected).enumerate().filter(|(_, (a, b))| a != b) {
            let (sampling, what) = (&self.requests[i].sampling, difference(got, expected));
            self.broken.push(format!("{name}, {way}: request {i} ({sampling:?}): {what}"));
        }
        self.lines.push(record::grid_line(&way, &answers));
    }

    /// Whether some request draws tokens: an encoder's do not.
    fn draws(&self) -> bool {
        self.requests.iter().any(|request| request.goal != Goal::Pool)
    }

    fn keep_in_full(&self) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("oracle");
        std::fs::create_dir_all(&folder).unwrap();
        let mut text = String::new();
        for (i, (request, answer)) in self.requests.iter().zip(&self.expected).enumerate() {
            text.push_str(&format!("{i:02} {request:?}\n"));
            let rows = answer.drawn.iter().map(|row| format!("  drawn {row:x?}\n"));
            let rows = rows.chain(answer.scored.iter().map(|row| format!("  scored {row:x?}\n")));
            text.extend(rows);
            text.push_str(&format!("  pooled {:x?}, {:?}\n", answer.pooled, answer.finish));
        }
        std::fs::write(folder.join(self.name.replace(' ', "-") + ".txt"), text).unwrap();
    }
}

/// One changed bit changes the record, which names the request.
#[test]
fn one_bit_is_seen() {
    let row = |logprob| common::Drawn { token: 7, logprob: Some(logprob), top: vec![(9, 2)] };
    let answer = |logprob| Answer { drawn: vec![row(logprob)], finish: Some(types::Finish::Stop), ..Answer::default() };
    let lines = |logprob| {
        let answers = [answer(4), answer(logprob)];
        let each = answers.iter().enumerate().map(|(i, answer)| record::answer_line(i, answer));
        each.chain([record::grid_line("1x1", &answers)]).collect()
    };
    let recorded = Record::from([("a".to_string(), lines(4)), ("b".to_string(), lines(4))]);
    let same = recorded.clone();
    assert_eq!(differences(&same, &recorded), Vec::<String>::new());
    let other = Record::from([("a".to_string(), lines(4)), ("b".to_string(), lines(5))]);
    let found = differences(&other, &recorded);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("b: 01 ") && found[1].starts_with("b: 1x1 "), "{found:?}");
    assert_eq!(differences(&Record::from([("a".to_string(), lines(4))]), &recorded).len(), 1);
}
