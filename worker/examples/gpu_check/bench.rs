//! How fast a model of Llama-3.1-8B's shape decodes with random weights, beside what the device copies: a step reads
//! every weight once, so copying speed is the floor. The products of a prefill beside the largest that cuBLASLt makes.
//! All of it under `lockstep` and under `fast`.

mod products;

use crate::Finding;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Instant;
use types::cache::blocks_for;
use types::{BlockId, Epoch, Layout, Pace, Rank, Request, RequestId, Sampling, Slice, Step, StepDone, StepId, Want};
use worker::{Assignment, MeshSecret, ModelLoader, Place, Repeats, Runner, Timeouts, Upcoming};

/// What is measured.
#[derive(Clone, Copy)]
pub struct Shape {
    n_layers: u32,
    hidden: usize,
    inner: usize,
    kv: usize,
    head_dim: usize,
    vocab: usize,
    prompt: u32,
    n_tokens: u32,
    /// Of the buffers that are copied.
    copied_rows: usize,
    /// Rows and columns of the product that tells the device's peak.
    peak: usize,
}

/// Llama-3.1-8B's.
pub const LLAMA: Shape = Shape {
    n_layers: 32,
    hidden: 4096,
    inner: 14336,
    kv: 1024,
    head_dim: 128,
    vocab: 128_256,
    prompt: 512,
    n_tokens: 64,
    copied_rows: 1 << 16,
    peak: 8192,
};
/// To see whether the measuring works, where time means nothing.
pub const TINY: Shape = Shape {
    n_layers: 1,
    hidden: 64,
    inner: 96,
    kv: 32,
    head_dim: 32,
    vocab: 160,
    prompt: 16,
    n_tokens: 4,
    copied_rows: 16,
    peak: 64,
};

const CONTEXT: u32 = 2048;
const BATCH_TOKENS_MAX: u32 = 512;
/// Sequences that decode together.
const BATCHES: [u64; 3] = [1, 8, 32];

/// What is measured of both, where both can be.
fn paces() -> (Vec<Pace>, Option<Finding>) {
    match worker::lt_version() {
        Ok(_) => (vec![Pace::Lockstep, Pace::Fast], None),
        Err(why) => (vec![Pace::Lockstep], Some(crate::skipped("everything under fast", &why))),
    }
}

pub fn measure(shape: Shape, cache: &Path) -> Result<Vec<Finding>, String> {
    let copied = copy_speed(shape, cache)?;
    let (paces, lacking) = paces();
    let mut findings = vec![finding("copy", json!({ "bytes_per_second": copied }))];
    findings.extend(lacking);
    findings.extend(products::measure(shape, &paces, cache)?);
    let folder = std::env::temp_dir().join(format!("lockstep-random-{}", std::process::id()));
    let made = model(&folder, shape).map_err(|error| error.to_string());
    let measured: Result<Vec<Vec<Decoded>>, String> =
        made.and_then(|()| paces.iter().map(|pace| decoded(shape, *pace, &folder, cache)).collect());
    // What is left of a temporary folder is nobody's loss.
    let _gone = std::fs::remove_dir_all(&folder);
    let measured = measured?;
    for (pace, decoded) in paces.iter().zip(&measured) {
        findings.extend(decoded.iter().map(|decoded| decoded.finding(*pace, copied)));
    }
    if let [lockstep, fast] = &measured[..] {
        let beside = lockstep.iter().zip(fast).map(|(lockstep, fast)| lockstep.beside(fast));
        findings.push(finding("lockstep's share of fast's speed", Value::Array(beside.collect())));
    }
    Ok(findings)
}

/// A model at one pace: all batches.
fn decoded(shape: Shape, pace: Pace, folder: &Path, cache: &Path) -> Result<Vec<Decoded>, String> {
    let begun = Instant::now();
    let assignment = Assignment { pace, ..assignment(folder, shape) };
    let place = Place::Cuda { ordinal: 0, cache: Some(cache.to_owned()) };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let loader = ModelLoader { place, spin: false, ..ModelLoader::new(threads) };
    let (mut runner, ready) = loader.build(&assignment).map_err(|error| error.to_string())?;
    eprintln!("{}: {} bytes in {:.1} s", pace.name(), ready.weight_bytes, begun.elapsed().as_secs_f64());
    // An embedding is looked up, not read.
    let read = ready.weight_bytes as f64 - (shape.vocab * shape.hidden * 2) as f64;
    BATCHES.into_iter().map(|n| decode(&mut runner, shape, n, read)).collect()
}

/// So many sequences that decode together.
struct Decoded {
    n: u64,
    /// In seconds.
    step: f64,
    prefill_tokens_per_second: f64,
    bytes_per_second: f64,
    /// Of the time of the steps, that in which the device had nothing to do.
    idle_share: f64,
    graphs_replayed: u64,
}

impl Decoded {
    fn finding(&self, pace: Pace, copied: f64) -> Finding {
        let told = json!({
            "tokens_per_second": self.n as f64 / self.step,
            "step_millis": self.step * 1e3,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "weights_read_per_second_of_copy": self.bytes_per_second / copied,
            "device_idle_between_steps": self.idle_share,
            "graphs_replayed": self.graphs_replayed,
        });
        finding(&format!("{}: {} sequences decode", pace.name(), self.n), told)
    }

    fn beside(&self, fast: &Decoded) -> Value {
        let prefill = self.prefill_tokens_per_second / fast.prefill_tokens_per_second;
        json!({ "sequences": self.n, "decode": fast.step / self.step, "prefill": prefill })
    }
}

fn finding(name: &str, told: Value) -> Finding {
    Finding { name: name.into(), is_good: true, told }
}

/// Bytes read and written each second, the best of several.
fn copy_speed(shape: Shape, cache: &Path) -> Result<f64, String> {
    use backend::Memory;
    const TIMES: usize = 8;
    let (n_rows, cols) = (shape.copied_rows, shape.hidden);
    let cuda = crate::cuda(cache, Pace::Lockstep)?;
    let buffer = || cuda.buffer(n_rows, cols).map_err(|error| error.to_string());
    let (from, mut to) = (buffer()?, buffer()?);
    let mut best = 0.0f64;
    for _ in 0..5 {
        let seconds = cuda.seconds(|| (0..TIMES).for_each(|_| cuda.copy_rows(&from, &mut to, n_rows)));
        let seconds = seconds.map_err(|error| error.to_string())?;
        best = best.max((2 * TIMES * n_rows * cols * 4) as f64 / seconds);
    }
    Ok(best)
}

fn assignment(model: &Path, shape: Shape) -> Assignment {
    let running_max = BATCHES[BATCHES.len() - 1] as u32;
    let n_blocks = running_max * blocks_for(shape.prompt + shape.n_tokens);
    Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::solo(shape.n_layers),
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        timeouts: Timeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        model_path: model.to_owned(),
        activations: "bf16".into(),
        kv_dtype: "bf16".into(),
        pace: Pace::Lockstep,
        n_blocks: vec![n_blocks],
        kv_bytes: 64 << 30,
        context: CONTEXT,
        batch_tokens_max: BATCH_TOKENS_MAX,
        running_max,
    }
}

/// Steps that are there before their turn, as a coordinator sends them.
struct Given<'a>(&'a VecDeque<Step>);

impl Upcoming for Given<'_> {
    fn next(&mut self) -> Option<&Step> {
        self.0.front()
    }
}

/// So many sequences, each with a prompt, and the time of their steps from then on.
fn decode(runner: &mut dyn Runner, shape: Shape, n: u64, read: f64) -> Result<Decoded, String> {
    let Shape { prompt: n_prompt, n_tokens, vocab, .. } = shape;
    let mut done = StepDone::default();
    let mut run = |step: &Step| runner.run(step, &mut done).map_err(|error| error.to_string());
    let begun = Instant::now();
    for i in 0..n {
        let prompt = (0..n_prompt).map(|j| (j * 37 + i as u32 * 101) % vocab as u32).collect();
        let sampling = Sampling { tokens_max: n_tokens, ..Sampling::default() };
        let request = Request { id: RequestId(i), prompt, sampling, ..Request::default() };
        run(&Step {
            starts: vec![request],
            slices: vec![Slice { id: RequestId(i), range: 0..n_prompt, n_draft: 0, want: Want::Last }],
            blocks: (0..blocks_for(n_prompt)).map(|b| BlockId(b * n as u32 + i as u32)).collect(),
            ..Step::default()
        })?;
    }
    let prefill = begun.elapsed().as_secs_f64();
    let step = |at: u32| {
        let slice = |i| Slice { id: RequestId(i), range: at..at + 1, n_draft: 0, want: Want::Last };
        let is_new = at.is_multiple_of(16);
        let blocks = (0..n as u32).filter(|_| is_new).map(|i| BlockId(at / 16 * n as u32 + i)).collect();
        Step { id: StepId(at.into()), slices: (0..n).map(slice).collect(), blocks, ..Step::default() }
    };
    let mut given: VecDeque<Step> = (n_prompt..n_prompt + n_tokens - 1).map(step).collect();
    let (mut steps, before): (Vec<f64>, Repeats) = (Vec::new(), runner.repeats());
    while let Some(step) = given.pop_front() {
        let begun = Instant::now();
        runner.run_with(&step, &mut Given(&given), &mut done).map_err(|error| error.to_string())?;
        steps.push(begun.elapsed().as_secs_f64());
    }
    let passes = runner.repeats();
    let (idle, busy) = (passes.idle_micros - before.idle_micros, passes.busy_micros - before.busy_micros);
    let ends = Step { ends: (0..n).map(RequestId).collect(), ..Step::default() };
    runner.run(&ends, &mut done).map_err(|error| error.to_string())?;
    steps.sort_by(f64::total_cmp);
    let step = steps[steps.len() / 2];
    let prefill_tokens_per_second = (n * u64::from(n_prompt)) as f64 / prefill;
    let idle_share = idle as f64 / ((idle + busy) as f64).max(1.0);
    let graphs_replayed = passes.replayed - before.replayed;
    Ok(Decoded { n, step, prefill_tokens_per_second, bytes_per_second: read / step, idle_share, graphs_replayed })
}

/// A folder with random weights, as Hugging Face's are.
fn model(folder: &Path, shape: Shape) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": shape.n_layers,
        "vocab_size": shape.vocab, "num_attention_heads": shape.hidden / shape.head_dim,
        "num_key_value_heads": shape.kv / shape.head_dim, "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    weights(&folder.join("model.safetensors"), &shapes(shape))
}

fn shapes(shape: Shape) -> Vec<(String, Vec<usize>)> {
    let Shape { n_layers, hidden, inner, kv, vocab, .. } = shape;
    let layer = move |i: u32| {
        let of = move |name: &str, shape: &[usize]| (format!("model.layers.{i}.{name}.weight"), shape.to_vec());
        [
            of("input_layernorm", &[hidden]),
            of("self_attn.q_proj", &[hidden, hidden]),
            of("self_attn.k_proj", &[kv, hidden]),
            of("self_attn.v_proj", &[kv, hidden]),
            of("self_attn.o_proj", &[hidden, hidden]),
            of("post_attention_layernorm", &[hidden]),
            of("mlp.gate_proj", &[inner, hidden]),
            of("mlp.up_proj", &[inner, hidden]),
            of("mlp.down_proj", &[hidden, inner]),
        ]
    };
    let of = |name: &str, shape: &[usize]| (format!("{name}.weight"), shape.to_vec());
    let outer =
        [("model.embed_tokens", &[vocab, hidden][..]), ("model.norm", &[hidden]), ("lm_head", &[vocab, hidden])];
    let outer = outer.map(|(name, shape)| of(name, shape));
    outer.into_iter().chain((0..n_layers).flat_map(layer)).collect()
}

fn weights(path: &Path, shapes: &[(String, Vec<usize>)]) -> io::Result<()> {
    let mut at = 0;
    let entries = shapes.iter().map(|(name, shape)| {
        let start = at;
        at += shape.iter().product::<usize>() * 2;
        (name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, at] }))
    });
    let header = Value::Object(entries.collect()).to_string();
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let mut file = BufWriter::with_capacity(16 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for (_, shape) in shapes {
        let n = shape.iter().product::<usize>();
        for _ in 0..n / 4 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Four bf16 of either sign: around 1 for norms, around 1/64 for matrices.
            let exponent = if shape.len() == 1 { 0x3f80_3f80_3f80_3f80 } else { 0x3c80_3c80_3c80_3c80 };
            let signs = if shape.len() == 1 { 0 } else { state & 0x8000_8000_8000_8000 };
            file.write_all(&(exponent | signs | state & 0x007f_007f_007f_007f).to_le_bytes())?;
        }
    }
    file.flush()
}
