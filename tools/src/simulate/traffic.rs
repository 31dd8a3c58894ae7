//! The arrivals of requests and their lengths: drawn from a seed, or read from a trace. Has no knowledge of the
//! cluster.

use crate::bench::lengths::{LengthDistribution, SplitMix64};
use anyhow::{Context, ensure};
use serde::Deserialize;
use std::path::Path;
use types::Tokens;

/// Virtual time since the beginning.
pub type Nanos = u64;

pub fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round() as Nanos
}

/// One request, before it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    pub at: Nanos,
    pub n_prompt: u32,
    pub n_output: u32,
    /// The prompt begins with `n_prefix` tokens of this shared text.
    pub prefix: u64,
    pub n_prefix: u32,
}

/// Independent requests.
#[derive(Clone, Copy, Debug)]
pub struct RandomTraffic {
    /// Arrivals per second.
    pub rate: f64,
    pub until: Nanos,
    pub prompt: LengthDistribution,
    pub output: LengthDistribution,
    /// The part of each prompt that it shares with others, and the number of different shared texts.
    pub prefix_share: f64,
    pub n_prefixes: u64,
}

pub enum Traffic {
    Crowd { crowd: RandomTraffic, random: SplitMix64, at: f64 },
    Trace(std::vec::IntoIter<Arrival>),
}

impl Traffic {
    pub fn random_traffic(crowd: RandomTraffic, seed: u64) -> Traffic {
        Traffic::Crowd { crowd, random: SplitMix64::new(seed), at: 0.0 }
    }

    /// Reads a line of JSON for each request: `{"at": 0.25, "prompt": 900, "output": 120}`, in seconds and tokens. The
    /// first `"prefix_tokens"` of a prompt may be those of the shared text with number `"prefix"`.
    pub fn trace(path: &Path) -> anyhow::Result<(Traffic, Nanos)> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let arrival =
            |(i, line): (usize, &str)| arrival(line).with_context(|| format!("{}, line {}", path.display(), i + 1));
        let mut arrivals = lines.map(arrival).collect::<anyhow::Result<Vec<Arrival>>>()?;
        ensure!(!arrivals.is_empty(), "{} has no requests", path.display());
        arrivals.sort_by_key(|arrival| arrival.at);
        let last = arrivals[arrivals.len() - 1].at;
        Ok((Traffic::Trace(arrivals.into_iter()), last))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceLine {
    at: f64,
    prompt: u32,
    output: u32,
    #[serde(default)]
    prefix: u64,
    #[serde(default)]
    prefix_tokens: u32,
}

/// The longest trace. A longer one is a typing mistake.
const TRACE_SECONDS_MAX: f64 = 7.0 * 86_400.0;

fn arrival(line: &str) -> anyhow::Result<Arrival> {
    let line: TraceLine = serde_json::from_str(line)?;
    ensure!((0.0..=TRACE_SECONDS_MAX).contains(&line.at), "\"at\" is a number of seconds, within a week");
    ensure!(line.prompt > 0 && line.output > 0, "a request has a prompt and an output of at least one token");
    ensure!(line.prefix_tokens <= line.prompt, "a prefix cannot be longer than its prompt");
    let (n_prompt, n_output, n_prefix) = (line.prompt, line.output, line.prefix_tokens);
    Ok(Arrival { at: nanos(line.at), n_prompt, n_output, prefix: line.prefix, n_prefix })
}

impl Iterator for Traffic {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let (crowd, random, at) = match self {
            Traffic::Trace(arrivals) => return arrivals.next(),
            Traffic::Crowd { crowd, random, at } => (crowd, random, at),
        };
        *at += random.exponential(crowd.rate);
        let n_prompt = crowd.prompt.draw(random) as u32;
        let arrival = Arrival {
            at: nanos(*at),
            n_prompt,
            n_output: crowd.output.draw(random) as u32,
            prefix: random.next() % crowd.n_prefixes,
            n_prefix: (f64::from(n_prompt) * crowd.prefix_share) as u32,
        };
        (arrival.at < crowd.until).then_some(arrival)
    }
}

impl Arrival {
    /// Returns the prompt. No other request has the tokens after its prefix.
    pub fn prompt(&self, own: u64) -> Tokens {
        let shared = (0..self.n_prefix).map(|i| token(self.prefix, i));
        shared.chain((self.n_prefix..self.n_prompt).map(|i| token(own ^ (1 << 63), i))).collect()
    }
}

/// Returns any token: only equality between requests matters.
pub fn token(text: u64, position: u32) -> u32 {
    let x = (text ^ (u64::from(position) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as u32
}
