//! Measures the time of a step by its rows, which is the cost of drafts. Each step computes the last positions of one
//! sequence, all with logits, like a step that verifies drafts.
//!
//! `cargo run -p worker --example rows -- MODEL [threads]`

use checkpoint::Checkpoint;
use std::time::{Duration, Instant};
use types::cache::blocks_for;
use types::{
    Activations, BlockId, Epoch, KvDtype, Layout, NumericsMode, Rank, Request, RequestId, Sampling, Slice, Step,
    StepDone, StepId, Token, Want,
};
use worker::{Assignment, GuessConfig, MeshSecret, MeshTimeouts, ModelLoader, Runner};

type Fault = Box<dyn std::error::Error + Send + Sync>;

const CONTEXT: u32 = 512;
const N_PROMPT: u32 = 32;
const ROUNDS: u32 = 5;
/// Numbers of sequences with one row each, and with several rows each.
const BATCHES: [u32; 4] = [1, 4, 8, 32];
const ROWS: [u32; 7] = [1, 2, 3, 4, 5, 9, 17];

fn main() -> Result<(), Fault> {
    let mut words = std::env::args().skip(1);
    let model = words.next().ok_or("the first argument is a model")?;
    let threads: usize = words.next().map_or(Ok(1), |word| word.parse())?;
    let checkpoint = Checkpoint::open(model.as_ref())?;
    let assignment = assignment(&model, &checkpoint);
    let (mut runner, _) = ModelLoader::new(threads).build(&assignment)?;
    for n_sequences in BATCHES {
        let one = measure(&mut runner, n_sequences, 1)?;
        println!("{n_sequences} sequences: {:.2} ms with a row each", one.as_secs_f64() * 1e3);
        for n_rows in ROWS.into_iter().filter(|n_rows| n_sequences * n_rows <= 64) {
            let time = measure(&mut runner, n_sequences, n_rows)?;
            println!("  {n_rows} rows each: {:.2} times that", time.as_secs_f64() / one.as_secs_f64());
        }
    }
    Ok(())
}

fn assignment(model: &str, checkpoint: &Checkpoint) -> Assignment {
    let n_groups = checkpoint.spec().cache_groups().groups().len();
    Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::solo(checkpoint.spec().n_layers),
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        model_path: model.into(),
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        mode: NumericsMode::Lockstep,
        n_blocks: vec![blocks_for(CONTEXT) * 32; n_groups],
        kv_bytes: 8 << 30,
        context: CONTEXT,
        batch_tokens_max: 4096,
        running_max: 32,
        timeouts: MeshTimeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        guesses: GuessConfig::default(),
    }
}

/// Returns the median time of a step in which each of the sequences has `n_rows` rows.
fn measure(runner: &mut dyn Runner, n_sequences: u32, n_rows: u32) -> Result<Duration, Fault> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        begin(runner, n_sequences)?;
        for round in 0..8 {
            let step = rows(n_sequences, N_PROMPT + round * n_rows, n_rows);
            let begun = Instant::now();
            runner.run(&step, &mut StepDone::default())?;
            times.push(begun.elapsed());
        }
    }
    times.sort();
    Ok(times[times.len() / 2])
}

fn blocks_of(id: u32) -> impl Iterator<Item = BlockId> {
    (0..blocks_for(CONTEXT)).map(move |i| BlockId(id * blocks_for(CONTEXT) + i))
}

/// Starts prompts that are long enough for all rows, and computes their first part.
fn begin(runner: &mut dyn Runner, n_sequences: u32) -> Result<(), Fault> {
    let request = |id: u32| Request {
        id: RequestId(u64::from(id)),
        prompt: (0..CONTEXT).map(|i| (i * i * 7 + id * 31) % 1000).collect::<Vec<Token>>(),
        sampling: Sampling { tokens_max: 1, ..Sampling::default() },
        ..Request::default()
    };
    let mut step = Step { starts: (0..n_sequences).map(request).collect(), ..Step::default() };
    for id in 0..n_sequences {
        step.slices.push(Slice::new(RequestId(u64::from(id)), 0..N_PROMPT, Want::Nothing));
        step.blocks.extend(blocks_of(id).take(blocks_for(N_PROMPT) as usize));
    }
    Ok(runner.run(&step, &mut StepDone::default())?)
}

/// Returns a step that scores all rows but the last of each sequence: their logits are computed, as behind drafts.
fn rows(n_sequences: u32, start: u32, n_rows: u32) -> Step {
    let mut step = Step { id: StepId(1), ..Step::default() };
    for id in 0..n_sequences {
        let want = Want::All { top_n: 0 };
        step.slices.push(Slice::new(RequestId(u64::from(id)), start..start + n_rows, want));
        let (from, to) = (blocks_for(start) as usize, blocks_for(start + n_rows) as usize);
        step.blocks.extend(blocks_of(id).take(to).skip(from));
    }
    step
}
