//! Guesses follow from the log alone, whatever was guessed before: on every model with recurrent layers, and with
//! windows.

use super::*;
use crate::assignment::Assignment;
use crate::load::draft_weights::DraftSpec;
use crate::runner::guesses::{DraftModelConfig, GuessConfig, GuessSource};
use backend::cpu::{Cpu, CpuConfig, Isa};
use checkpoint::Checkpoint;
use collective::CancelFlag;
use std::path::{Path, PathBuf};
use types::{Activations, Request, Sampling};

const CONTEXT: u32 = 400;

fn assignment(model_path: PathBuf, batch_tokens_max: u32) -> Assignment {
    let n_layers = Checkpoint::open(&model_path).unwrap().spec().n_layers;
    let draft_model = DraftModelConfig { path: model_path.clone(), kv_bytes: 0, cost: None, learns_cost: false };
    let guesses = GuessConfig { source: GuessSource::Off, n_max: 32, draft_model: Some(draft_model), mtp: None };
    Assignment { context: CONTEXT, batch_tokens_max, guesses, ..Assignment::solo(model_path, n_layers) }
}

/// The checkpoints of `tests/reference` whose cache groups are so.
fn models(are: impl Fn(&[CacheGroup]) -> bool) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference");
    let in_folder = |path: PathBuf| Some(path.join("model.gguf")).filter(|file| file.exists()).unwrap_or(path);
    let all = std::fs::read_dir(folder).unwrap().map(|entry| in_folder(entry.unwrap().path()));
    let is_so = |path: &PathBuf| {
        let opened = Checkpoint::open(path).ok();
        opened.is_some_and(|checkpoint| are(checkpoint.spec().cache_groups().groups()))
    };
    let mut found: Vec<PathBuf> = all.filter(is_so).collect();
    found.sort();
    found
}

fn recurrent() -> Vec<PathBuf> {
    models(|groups| groups.iter().any(CacheGroup::is_state))
}

struct Bench {
    weights: DraftWeights<Cpu>,
    n_vocab: u32,
}

impl Bench {
    fn open(model: &Path, batch_tokens_max: u32) -> Bench {
        let config = CpuConfig { threads: 1, activations: Activations::Int8, isa: Isa::detect(), spin: true };
        let n_vocab = Checkpoint::open(model).unwrap().spec().vocab;
        let spec = DraftSpec::of(&assignment(model.to_owned(), batch_tokens_max)).unwrap();
        let weights = DraftWeights::read(Cpu::new(config).unwrap(), spec, n_vocab, &CancelFlag::default()).unwrap();
        Bench { weights, n_vocab }
    }

    fn runner(&self, kv_bytes: u64, zero_kv: bool) -> DraftModelRunner<Cpu> {
        let limits = DraftLimits { kv_bytes, kv_dtype: KvDtype::F16, running_max: 4, zero_kv, cost: None };
        DraftModelRunner::new(&self.weights, limits).unwrap()
    }

    fn prompt(&self, id: u64, n: u32) -> Vec<Token> {
        (0..n).map(|i| (i * i * 7 + id as u32 * 31) % self.n_vocab).collect()
    }

    fn start(&self, runner: &mut DraftModelRunner<Cpu>, id: u64, prompt: &[Token]) {
        let temperature = [0.0, 1.0][id as usize % 2];
        let sampling = Sampling { temperature, seed: id, tokens_max: 300, ..Sampling::default() };
        let request = Request { id: RequestId(id), prompt: prompt.to_vec(), sampling, ..Request::default() };
        runner.begin(&Step { starts: vec![request], ..Step::default() }, &self.weights.device);
    }

    fn guess(&mut self, runner: &mut DraftModelRunner<Cpu>, id: u64, log: &[Token], n_max: usize) -> Vec<Token> {
        runner.requests.push(GuessRequest { id: RequestId(id), n_max });
        runner.guess(&mut self.weights, |_| Some(log)).unwrap();
        let guesses = runner.guesses().next().map(|(_, guesses)| guesses.to_vec());
        guesses.unwrap_or_default()
    }

    /// Returns what a cache without history guesses.
    fn guess_afresh(&mut self, id: u64, prompt: &[Token], log: &[Token], n_max: usize) -> Vec<Token> {
        let mut runner = self.runner(8 << 20, false);
        self.start(&mut runner, id, prompt);
        self.guess(&mut runner, id, log, n_max)
    }
}

/// Logs go on behind any number of the guesses, and differ from the next one.
fn check_after_wrong_guesses(model: &Path, zero_kv: bool) {
    let mut bench = Bench::open(model, 512);
    let mut runner = bench.runner(8 << 20, zero_kv);
    for id in 0..2 {
        let prompt = bench.prompt(id, 17);
        bench.start(&mut runner, id, &prompt);
        let mut log = prompt.clone();
        for round in 0..12 {
            let n_max = [1, 4, 17, 32][round % 4];
            let guesses = bench.guess(&mut runner, id, &log, n_max);
            assert_eq!(guesses.len(), n_max, "{} {round}", model.display());
            let afresh = bench.guess_afresh(id, &prompt, &log, n_max);
            assert!(guesses == afresh, "{} {round}: {guesses:?}, and not {afresh:?}", model.display());
            let n_same = (round * 5) % (n_max + 1);
            log.extend_from_slice(&guesses[..n_same]);
            log.push(guesses.get(n_same).map_or(1, |guess| (guess + 1) % bench.n_vocab));
        }
    }
}

#[test]
fn guesses_of_recurrent_models_follow_from_the_log_alone() {
    let models = recurrent();
    assert!(models.len() >= 20, "{models:?}");
    models.iter().for_each(|model| check_after_wrong_guesses(model, false));
}

#[test]
fn guesses_of_other_models_and_of_cleared_caches_follow_from_the_log_alone() {
    let windowed = models(|groups| groups.iter().any(|group| !group.is_state() && !group.keeps_all()));
    check_after_wrong_guesses(&windowed[0], false);
    let solo = recurrent();
    solo.iter().take(2).for_each(|model| check_after_wrong_guesses(model, true));
}

#[test]
fn a_log_that_went_back_is_computed_again() {
    for model in recurrent() {
        let mut bench = Bench::open(&model, 512);
        let mut runner = bench.runner(8 << 20, true);
        let prompt = bench.prompt(1, 90);
        bench.start(&mut runner, 1, &prompt);
        for n in [90, 40, 89, 17, 16, 64] {
            let afresh = bench.guess_afresh(1, &prompt, &prompt[..n], 5);
            assert!(bench.guess(&mut runner, 1, &prompt[..n], 5) == afresh, "{} {n}", model.display());
        }
    }
}

/// A log longer than a pass needs several steps, each of which may make it longer.
#[test]
fn a_long_log_is_caught_up_with_in_several_steps() {
    for model in recurrent().iter().take(3) {
        let mut bench = Bench::open(model, 512);
        let log = bench.prompt(1, 140);
        let expected = bench.guess_afresh(1, &log[..100], &log, 5);
        let mut narrow = Bench::open(model, 30);
        let mut runner = narrow.runner(8 << 20, false);
        narrow.start(&mut runner, 1, &log[..100]);
        let guessed: Vec<_> =
            (1..10).map(|i| narrow.guess(&mut runner, 1, &log[..(100 + 8 * i).min(140)], 5)).collect();
        let n_without = guessed.iter().take_while(|guesses| guesses.is_empty()).count();
        assert!((3..9).contains(&n_without) && guessed[8] == expected, "{}: {guessed:?}", model.display());
    }
}

/// A sequence that finds no memory has no guesses until another one ends or starts again.
#[test]
fn sequences_take_turns_where_there_is_little_memory() {
    for model in recurrent() {
        let mut bench = Bench::open(&model, 512);
        let mut runner = bench.runner(1, true);
        let prompts = [1, 2].map(|id| bench.prompt(id, 9));
        (1..).zip(&prompts).for_each(|(id, prompt)| bench.start(&mut runner, id, prompt));
        let [first, second] =
            [1, 2].map(|id| bench.guess_afresh(id, &prompts[id as usize - 1], &prompts[id as usize - 1], 4));
        assert!(bench.guess(&mut runner, 1, &prompts[0], 4) == first, "{}", model.display());
        assert!(bench.guess(&mut runner, 2, &prompts[1], 4).is_empty(), "{}", model.display());
        bench.start(&mut runner, 1, &prompts[0]);
        assert!(bench.guess(&mut runner, 2, &prompts[1], 4) == second, "{}", model.display());
        assert!(bench.guess(&mut runner, 1, &prompts[0], 4).is_empty(), "{}", model.display());
        runner.begin(&Step { ends: vec![RequestId(2)], ..Step::default() }, &bench.weights.device);
        assert!(bench.guess(&mut runner, 1, &prompts[0], 4) == first, "{}", model.display());
    }
}
