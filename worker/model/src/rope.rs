//! Cosines and sines of rotary positions. In f64 by portable arithmetic, so that every machine has the same tables.

use crate::Result;
use backend::{Memory, RopeStyle};
use checkpoint::{RopeScaling, RopeSpec};

pub fn load<M: Memory>(device: &M, spec: &RopeSpec, context: u32) -> Result<M::Rope> {
    let (cos, sin) = tables(spec, context);
    let style = if spec.pairs { RopeStyle::Pairs } else { RopeStyle::Halves };
    Ok(device.rope(&cos, &sin, spec.dim as usize / 2, style)?)
}

/// cos, sin: [context, dim / 2]
fn tables(spec: &RopeSpec, context: u32) -> (Vec<f32>, Vec<f32>) {
    let turns = frequencies(spec);
    let n = turns.len() * context as usize;
    let (mut cos, mut sin) = (Vec::with_capacity(n), Vec::with_capacity(n));
    for position in 0..context {
        for turn in &turns {
            let (s, c) = libm::sincos(f64::from(position) * turn);
            cos.push(c as f32);
            sin.push(s as f32);
        }
    }
    (cos, sin)
}

/// Radians per position of each pair: `theta^(-2i/dim)`, scaled.
fn frequencies(spec: &RopeSpec) -> Vec<f64> {
    let plain = |i: u32| libm::pow(f64::from(spec.theta), -f64::from(2 * i) / f64::from(spec.dim));
    (0..spec.dim / 2).map(|i| scaled(plain(i), i as usize, &spec.scaling)).collect()
}

fn scaled(turn: f64, i: usize, scaling: &RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => turn,
        RopeScaling::Linear { factor } => turn / f64::from(*factor),
        RopeScaling::Divisors(divisors) => turn / divisors.get(i).map_or(1.0, |divisor| f64::from(*divisor)),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let (low, high) = (f64::from(*low_freq_factor), f64::from(*high_freq_factor));
            // How often this pair turns within the context that the model was first made for.
            let n_turns = f64::from(*original_context) * turn / (2.0 * std::f64::consts::PI);
            let kept = ((n_turns - low) / (high - low)).clamp(0.0, 1.0);
            turn * (kept + (1.0 - kept) / f64::from(*factor))
        }
    }
}
