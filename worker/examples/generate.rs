//! Runs one prompt of token ids through a model's runner, without a coordinator: for looking at a model by hand.
//!
//! `cargo run -p worker --example generate -- MODEL [--activations f32] [--kv-dtype f32] [--threads 2] [--tokens 32]
//! 504 3575 ..`

use checkpoint::Checkpoint;
use std::time::Instant;
use types::{BlockId, Epoch, Layout, Rank, Request, RequestId, Sampling, Slice, Step, StepDone, StepId, Token, Want};
use worker::{Assignment, MeshSecret, ModelLoader, Runner};

const BATCH_TOKENS_MAX: u32 = 512;
const KV_BYTES: u64 = 256 << 20;

struct Args {
    model: String,
    activations: String,
    kv_dtype: String,
    threads: usize,
    n_tokens: u32,
    prompt: Vec<Token>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = args()?;
    let assignment = Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::solo(Checkpoint::open(args.model.as_ref())?.spec().n_layers),
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        model_path: args.model.clone().into(),
        activations: args.activations.clone(),
        kv_dtype: args.kv_dtype.clone(),
        kv_bytes: KV_BYTES,
        context: args.prompt.len() as u32 + args.n_tokens,
        batch_tokens_max: BATCH_TOKENS_MAX,
        running_max: 1,
    };
    let begun = Instant::now();
    let (mut runner, ready) = ModelLoader::new(args.threads).build(&assignment)?;
    eprintln!("loaded in {:.3} s: {ready:?}", begun.elapsed().as_secs_f64());
    generate(&mut runner, &args)
}

fn generate(runner: &mut dyn Runner, args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let sampling = Sampling { tokens_max: args.n_tokens, logprobs: Some(0), ..Sampling::default() };
    let request = Request { id: RequestId(1), prompt: args.prompt.clone(), sampling, ..Request::default() };
    let (mut step, mut done) = (Step { starts: vec![request], ..Step::default() }, StepDone::default());
    let (n_prompt, mut n_computed) = (args.prompt.len() as u32, 0);
    let (mut n_blocks, mut begun) = (0, Instant::now());
    while n_computed < n_prompt + args.n_tokens - 1 {
        let end = if n_computed < n_prompt { n_prompt.min(n_computed + BATCH_TOKENS_MAX) } else { n_computed + 1 };
        let want = if end < n_prompt { Want::Nothing } else { Want::Last };
        step.slices.push(Slice { id: RequestId(1), range: n_computed..end, n_draft: 0, want });
        let needed = types::cache::blocks_for(end);
        step.blocks.extend((n_blocks..needed).map(BlockId));
        runner.run(&step, &mut done)?;
        for out in &done.slices[0].tokens {
            println!("{} {:?}", out.token, out.logprob);
        }
        if n_computed < n_prompt && end == n_prompt {
            eprintln!("prefill: {:.1} tokens/s", f64::from(n_prompt) / begun.elapsed().as_secs_f64());
            begun = Instant::now();
        }
        (n_computed, n_blocks) = (end, needed);
        step.clear();
        step.id = StepId(step.id.0 + 1);
    }
    eprintln!("decode: {:.1} tokens/s", f64::from(args.n_tokens - 1) / begun.elapsed().as_secs_f64());
    Ok(())
}

fn args() -> Result<Args, Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let mut args = Args {
        model: words.next().ok_or("which model?")?,
        activations: "int8".into(),
        kv_dtype: "f16".into(),
        threads: 1,
        n_tokens: 32,
        prompt: Vec::new(),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--activations" => args.activations = value()?,
            "--kv-dtype" => args.kv_dtype = value()?,
            "--threads" => args.threads = value()?.parse()?,
            "--tokens" => args.n_tokens = value()?.parse()?,
            token => args.prompt.push(token.parse()?),
        }
    }
    if args.prompt.is_empty() || args.n_tokens == 0 { Err("a prompt of token ids, please".into()) } else { Ok(args) }
}
