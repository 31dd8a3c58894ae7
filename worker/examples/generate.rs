//! Runs one prompt of token ids through a model's runner, without a coordinator, to inspect a model by hand.
//!
//! `cargo run -p worker --example generate -- MODEL [--activations f32] [--kv-dtype f32] [--threads 2] [--tokens 32]
//! [--tp 2] [--pp 2] 504 3575 ..`
//!
//! The ranks of a grid are threads of this process, each with `--threads` threads.

use checkpoint::Checkpoint;
use collective::Mesh;
use std::time::Instant;
use types::{
    Activations, BlockId, Epoch, Grid, KvDtype, Layout, NumericsMode, Rank, Request, RequestId, Sampling, Slice, Step,
    StepDone, StepId, Token, Want,
};
use worker::{Assignment, MeshSecret, ModelLoader, Runner};

const BATCH_TOKENS_MAX: u32 = 512;
const KV_BYTES: u64 = 1 << 30;

struct Args {
    model: String,
    activations: types::Activations,
    kv_dtype: types::KvDtype,
    threads: usize,
    n_tokens: u32,
    grid: Grid,
    prompt: Vec<Token>,
}

type Fault = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Fault> {
    let args = args()?;
    let assignment = assignment(&args)?;
    std::thread::scope(|scope| {
        let ranks = Mesh::in_process(&assignment.layout).into_iter().zip(0..);
        let (args, assignment) = (&args, &assignment);
        let threads: Vec<_> =
            ranks.map(|(rank, i)| scope.spawn(move || run(args, assignment, rank, Rank(i)))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a rank panicked")?)
    })
}

fn assignment(args: &Args) -> Result<Assignment, Fault> {
    let checkpoint = Checkpoint::open(args.model.as_ref())?;
    let context = args.prompt.len() as u32 + args.n_tokens;
    Ok(Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::even(args.grid, checkpoint.spec().n_layers)?,
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        model_path: args.model.clone().into(),
        activations: args.activations,
        kv_dtype: args.kv_dtype,
        mode: NumericsMode::Lockstep,
        n_blocks: vec![types::cache::blocks_for(context); checkpoint.spec().cache_groups().groups().len()],
        kv_bytes: KV_BYTES,
        context,
        batch_tokens_max: BATCH_TOKENS_MAX,
        running_max: 1,
        timeouts: worker::MeshTimeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        guesses: worker::GuessConfig::default(),
    })
}

/// Runs all ranks on the same steps; only the sampler prints.
fn run(args: &Args, assignment: &Assignment, collective: Mesh, rank: Rank) -> Result<(), Fault> {
    let begun = Instant::now();
    let is_sampler = collective.part().is_sampler();
    let spin = args.grid.n_ranks() == 1;
    let loader = ModelLoader { spin, ..ModelLoader::new(args.threads) };
    let (mut runner, ready) = loader.build_with(&Assignment { rank, ..assignment.clone() }, collective)?;
    eprintln!("rank {} loaded in {:.3} s: {ready:?}", rank.0, begun.elapsed().as_secs_f64());
    generate(&mut runner, args, assignment.n_blocks.len(), is_sampler)
}

fn generate(runner: &mut dyn Runner, args: &Args, n_groups: usize, is_sampler: bool) -> Result<(), Fault> {
    let sampling = Sampling { tokens_max: args.n_tokens, logprobs: Some(0), ..Sampling::default() };
    let request = Request { id: RequestId(1), prompt: args.prompt.clone(), sampling, ..Request::default() };
    let (mut step, mut done) = (Step { starts: vec![request], ..Step::default() }, StepDone::default());
    let (n_prompt, mut n_computed) = (args.prompt.len() as u32, 0);
    let (mut n_blocks, mut begun) = (0, Instant::now());
    while n_computed < n_prompt + args.n_tokens - 1 {
        let end = if n_computed < n_prompt { n_prompt.min(n_computed + BATCH_TOKENS_MAX) } else { n_computed + 1 };
        let want = if end < n_prompt { Want::Nothing } else { Want::Last };
        step.slices.push(Slice::new(RequestId(1), n_computed..end, want));
        let needed = types::cache::blocks_for(end);
        // No group frees blocks, and each group has its own pool.
        (0..n_groups).for_each(|_| step.blocks.extend((n_blocks..needed).map(BlockId)));
        runner.run(&step, &mut done)?;
        for out in done.slices.iter().flat_map(|slice| &slice.tokens) {
            println!("{} {:?}", out.token, out.logprob);
        }
        if n_computed < n_prompt && end == n_prompt {
            print_rate(is_sampler, "prefill", n_prompt, begun);
            begun = Instant::now();
        }
        (n_computed, n_blocks) = (end, needed);
        step.clear();
        step.id = StepId(step.id.0 + 1);
    }
    print_rate(is_sampler, "decode", args.n_tokens - 1, begun);
    Ok(())
}

fn print_rate(is_sampler: bool, what: &str, n_tokens: u32, begun: Instant) {
    if is_sampler {
        eprintln!("{what}: {:.1} tokens/s", f64::from(n_tokens) / begun.elapsed().as_secs_f64());
    }
}

fn args() -> Result<Args, Fault> {
    let mut words = std::env::args().skip(1);
    let mut args = Args {
        model: words.next().ok_or("the first argument is a model")?,
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        threads: 1,
        n_tokens: 32,
        grid: Grid::SOLO,
        prompt: Vec::new(),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--activations" => args.activations = value()?.parse()?,
            "--kv-dtype" => args.kv_dtype = value()?.parse()?,
            "--threads" => args.threads = value()?.parse()?,
            "--tokens" => args.n_tokens = value()?.parse()?,
            "--tp" => args.grid.tp = value()?.parse()?,
            "--pp" => args.grid.pp = value()?.parse()?,
            token => args.prompt.push(token.parse()?),
        }
    }
    if args.prompt.is_empty() || args.n_tokens == 0 { Err("the prompt must be token ids".into()) } else { Ok(args) }
}
