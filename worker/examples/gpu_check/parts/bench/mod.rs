//! The part `bench`: a model of Llama-3.1-8B's shape with random weights, and its main operations. Decoding one
//! sequence reads every weight once, so copying speed is the limit; a prefill's products are compared with cuBLASLt's
//! largest. Each figure is the median of rounds, with the least and the most; figures that are compared are measured in
//! turns.

mod attention;
mod course;
mod decode;
mod file;
mod products;
mod throughput;

use super::{Done, Finding, FindingSink, Group, Options, cuda};
use backend::Memory;
use backend::cuda::{Buffer, Cuda};
use serde_json::{Value, json};
use types::NumericsMode;

const ROUNDS: usize = 5;

/// The sizes of the measurements.
#[derive(Clone, Copy)]
pub struct Shape {
    n_layers: u32,
    hidden: usize,
    inner: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    prompt: u32,
    /// Numbers of sequences that decode together.
    batches: &'static [u32],
    /// Steps of a round.
    steps: usize,
    /// Rows of a prefill's products.
    rows: usize,
    /// Rows of the buffers that are copied.
    copied_rows: usize,
    /// Rows and columns of the product that measures the device's peak.
    peak: usize,
    /// For attention: rows of a prompt; sequences, and positions of each.
    attended: [usize; 3],
    /// For throughput: sequences at a time, prompt tokens and output tokens of each.
    load: [u32; 3],
}

/// Llama-3.1-8B's sizes.
const LLAMA: Shape = Shape {
    n_layers: 32,
    hidden: 4096,
    inner: 14336,
    n_heads: 32,
    n_kv_heads: 8,
    head_dim: 128,
    vocab: 128_256,
    prompt: 512,
    batches: &[1, 8, 32],
    steps: 32,
    rows: 2048,
    copied_rows: 1 << 16,
    peak: 8192,
    attended: [8192, 64, 4096],
    load: [128, 1000, 1000],
};
/// For a test of the measurements themselves, in which times are not comparable.
const TINY: Shape = Shape {
    n_layers: 1,
    hidden: 64,
    inner: 96,
    n_heads: 2,
    n_kv_heads: 1,
    head_dim: 32,
    vocab: 160,
    prompt: 6,
    batches: &[1, 3],
    steps: 2,
    rows: 40,
    copied_rows: 16,
    peak: 64,
    attended: [20, 3, 18],
    load: [3, 5, 4],
};

impl Shape {
    fn of(options: &Options) -> Shape {
        if options.is_tiny { TINY } else { LLAMA }
    }

    fn kv(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
}

/// Returns the groups; whole models come first.
pub fn groups(_: &Options) -> Vec<Group> {
    let group = |name: &str, work: fn(&Options, FindingSink<'_>) -> Done| Group::new("bench", name, work);
    let throughput = |mode: NumericsMode| {
        let name = format!("throughput under {}", mode.name());
        let measure = move |options: &Options, report: FindingSink<'_>| throughput::measure(options, mode, report);
        Group::new("bench", name, measure).within(120).in_process("throughput")
    };
    vec![
        Group::opened("bench"),
        group("copies", copies),
        group("decode", decode::measure).within(150),
        throughput(NumericsMode::Fast),
        throughput(NumericsMode::Lockstep),
        group("products", products::measure).in_process("operations"),
        group("attention", attention::measure).in_process("operations"),
    ]
}

/// The results of rounds, in ascending order.
pub struct Spread(Vec<f64>);

impl Spread {
    fn of(mut rounds: Vec<f64>) -> Spread {
        rounds.sort_by(f64::total_cmp);
        Spread(rounds)
    }

    fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or(0.0)
    }

    fn to_json(&self) -> Value {
        let (least, most) = (self.0.first().copied().unwrap_or(0.0), self.0.last().copied().unwrap_or(0.0));
        json!({ "median": self.median(), "least": least, "most": most, "rounds": self.0.len() })
    }
}

/// Divides the rounds of one figure by those of another.
fn shares(of: &[f64], by: &[f64]) -> Spread {
    Spread::of(of.iter().zip(by).map(|(of, by)| of / by).collect())
}

fn text(error: backend::Error) -> String {
    error.to_string()
}

/// Two buffers, one of which is copied to the other.
struct Copies {
    cuda: Cuda,
    from: Buffer,
    to: Buffer,
    n_rows: usize,
}

impl Copies {
    fn new(options: &Options) -> Result<Copies, String> {
        let (cuda, Shape { copied_rows: n_rows, hidden, .. }) =
            (cuda(options, NumericsMode::Lockstep)?, Shape::of(options));
        let mut from = cuda.buffer(n_rows, hidden).map_err(text)?;
        // Not zeros, which some memories move faster.
        for row in (0..n_rows).step_by(16) {
            let numbers: Vec<f32> = (0..16 * hidden).map(|i| ((row * 31 + i) * 37 % 1009) as f32 / 7.0).collect();
            cuda.write(&mut from, row, &numbers);
        }
        let to = cuda.buffer(n_rows, hidden).map_err(text)?;
        Ok(Copies { cuda, from, to, n_rows })
    }

    /// Returns the bytes read and written per second.
    fn round(&mut self) -> Result<f64, String> {
        const TIMES: usize = 8;
        let Copies { cuda, from, to, n_rows } = self;
        let seconds = cuda.seconds(|| (0..TIMES).for_each(|_| cuda.copy_rows(from, to, *n_rows)));
        Ok((2 * TIMES * *n_rows * cuda.cols(from) * 4) as f64 / seconds.map_err(text)?)
    }
}

fn copies(options: &Options, report: FindingSink<'_>) -> Done {
    let mut copies = Copies::new(options)?;
    copies.round()?;
    let rounds = (0..2 * ROUNDS).map(|_| copies.round()).collect::<Result<_, _>>()?;
    report(Finding::measured("copies within the device", json!({ "bytes_per_second": Spread::of(rounds).to_json() })));
    Ok(())
}
