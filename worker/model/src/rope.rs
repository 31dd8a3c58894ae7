//! Cosines and sines of rotary positions, in f64 by portable arithmetic: every machine has the same tables.

use crate::error::Result;
use crate::weights::WeightLoader;
use backend::{Memory, RopeStyle};
use checkpoint::{ModelSpec, PositionEncoding, QueryTemperature, RopeScaling, RopeSpec};

/// The ropes of a model's layers, and how its queries grow.
pub struct Ropes<M: Memory> {
    global: Option<M::Rope>,
    local: Option<M::Rope>,
    /// What the queries of each position are multiplied by. [context]
    pub query_factors: Option<M::Vector>,
    /// What this rank's scores have by the distance from query to key. [n_heads, 2 * reach + 1]
    pub distances: Option<M::Vector>,
}

impl<M: Memory> Ropes<M> {
    /// Loads the ropes that some layer uses. `distances` is what scores have by them.
    pub fn load(
        all: &WeightLoader<'_, M>,
        spec: &ModelSpec,
        context: u32,
        distances: Option<M::Vector>,
    ) -> Result<Ropes<M>> {
        let is_used = |positions| spec.layers.iter().any(|layer| layer.positions == positions);
        let global = Some(&spec.rope).filter(|_| is_used(PositionEncoding::Rope));
        let local = spec.local_rope.as_ref().filter(|_| is_used(PositionEncoding::LocalRope));
        Ok(Ropes {
            global: global.map(|rope| load(all, rope, context)).transpose()?,
            local: local.map(|rope| load(all, rope, context)).transpose()?,
            query_factors: match &spec.attention.temperature {
                Some(temperature) => Some(all.vector("factors of queries", &query_factors(temperature, context))?),
                None => None,
            },
            distances,
        })
    }

    pub fn rope_for(&self, positions: PositionEncoding) -> Option<&M::Rope> {
        match positions {
            PositionEncoding::Rope => self.global.as_ref(),
            PositionEncoding::LocalRope => self.local.as_ref(),
            PositionEncoding::None => None,
        }
    }
}

fn query_factors(of: &QueryTemperature, context: u32) -> Vec<f32> {
    let grown = |position: u32| libm::log(1.0 + f64::from(position / of.every));
    (0..context).map(|position| (1.0 + f64::from(of.beta) * grown(position)) as f32).collect()
}

fn load<M: Memory>(all: &WeightLoader<'_, M>, spec: &RopeSpec, context: u32) -> Result<M::Rope> {
    let half_dim = spec.dim as usize / 2;
    let turns = frequencies(spec, context);
    let (cos, sin) = cos_sin_tables(spec, &turns, context);
    let style = match spec.pairs {
        true => RopeStyle::Pairs,
        false if turns.len() < half_dim => RopeStyle::Apart(half_dim),
        false => RopeStyle::Halves,
    };
    all.rope([&cos, &sin], turns.len(), style)
}

/// cos, sin: [context, turns]
fn cos_sin_tables(spec: &RopeSpec, turns: &[f64], context: u32) -> (Vec<f32>, Vec<f32>) {
    let magnitude = match spec.scaling {
        RopeScaling::Yarn { magnitude, .. } | RopeScaling::Long { magnitude, .. } => f64::from(magnitude),
        _ => 1.0,
    };
    let n = turns.len() * context as usize;
    let (mut cos, mut sin) = (Vec::with_capacity(n), Vec::with_capacity(n));
    for position in 0..context {
        for turn in turns {
            let (s, c) = libm::sincos(f64::from(position) * turn);
            cos.push((c * magnitude) as f32);
            sin.push((s * magnitude) as f32);
        }
    }
    (cos, sin)
}

/// Radians per position of each pair up to the last that turns: `theta^(-2i/dim)`, scaled.
fn frequencies(spec: &RopeSpec, context: u32) -> Vec<f64> {
    let plain = |i: u32| libm::pow(f64::from(spec.theta), -f64::from(2 * i) / f64::from(spec.dim));
    let turns = |i: &usize| match &spec.scaling {
        RopeScaling::Divisors(divisors) => divisors.get(*i).is_none_or(|divisor| *divisor < RopeScaling::NEVER),
        _ => true,
    };
    let n = (0..spec.dim as usize / 2).rev().find(turns).map_or(1, |last| last + 1);
    let n = if spec.pairs { spec.dim / 2 } else { n as u32 };
    (0..n).map(|i| scale_frequency(plain(i), i as usize, spec, context)).collect()
}

fn scale_frequency(turn: f64, i: usize, spec: &RopeSpec, context: u32) -> f64 {
    let divided = |divisors: &[f32]| turn / divisors.get(i).map_or(1.0, |divisor| f64::from(*divisor));
    match &spec.scaling {
        RopeScaling::None => turn,
        RopeScaling::Linear { factor } => turn / f64::from(*factor),
        RopeScaling::Divisors(divisors) => divided(divisors),
        // Chosen by the served context, not by how long a sequence is: stored K stays right as a sequence grows.
        RopeScaling::Long { short, long, original_context, .. } => {
            divided(if context > *original_context { long } else { short })
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let (low, high) = (f64::from(*low_freq_factor), f64::from(*high_freq_factor));
            // How often this pair turns within the model's original context.
            let n_turns = f64::from(*original_context) * turn / (2.0 * std::f64::consts::PI);
            let kept = ((n_turns - low) / (high - low)).clamp(0.0, 1.0);
            turn * (kept + (1.0 - kept) / f64::from(*factor))
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate, .. } => {
            // The index of the pair that turns `n_turns` times within the original context.
            let index = |n_turns: &f32| {
                let wavelengths = f64::from(*original_context) / (f64::from(*n_turns) * 2.0 * std::f64::consts::PI);
                f64::from(spec.dim) * libm::log(wavelengths) / (2.0 * libm::log(f64::from(spec.theta)))
            };
            let (start, end) = match truncate {
                true => (index(beta_fast).floor(), index(beta_slow).ceil()),
                false => (index(beta_fast), index(beta_slow)),
            };
            let (start, end) = (start.max(0.0), end.min(f64::from(spec.dim - 1)));
            let divided = ((i as f64 - start) / (end - start).max(0.001)).clamp(0.0, 1.0);
            turn * (1.0 - divided + divided / f64::from(*factor))
        }
    }
}
