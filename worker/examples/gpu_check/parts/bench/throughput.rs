//! As many sequences as there is room for, at positions spread over their length. A sequence that ends makes room for
//! another one, whose prompt is computed beside the decoding ones. So all stretches of steps are alike, and each round
//! is one stretch.

use super::super::{Done, Finding, FindingSink, Options};
use super::course::{Course, Model, Room};
use super::file::{Digits, Random};
use super::{ROUNDS, Shape, Spread};
use serde_json::json;
use std::time::Instant;
use types::{NumericsMode, Step, Want};

/// The aim, in tokens a second.
const AIM: f64 = 7000.0;
/// Steps of a round.
const STEPS: usize = 64;

pub fn measure(options: &Options, mode: NumericsMode, report: FindingSink<'_>) -> Done {
    let (shape, name) = (Shape::of(options), format!("{}: throughput", mode.name()));
    if let (NumericsMode::Fast, Err(why)) = (mode, worker::lt_version()) {
        report(Finding::not_run(name, &why));
        return Ok(());
    }
    let [n, n_in, n_out] = shape.load;
    let room = Room { sequences: n, context: n_in + n_out, batch_tokens: 1024.min(n_in) + n };
    let random = Random::write(&options.cache, &shape, Digits::Bf16, room.context);
    let random = random.map_err(|error| error.to_string())?;
    let mut model = Model::load(options, &random.path, mode, room)?;
    // Positions spread evenly.
    let prompts: Vec<u32> = (0..n).map(|i| n_in + i * (n_out - 1) / n).collect();
    let mut course = Course::new(&shape, &prompts, n_in, n_in + n_out, room);
    let begun = Instant::now();
    model.drive(course.join())?;
    let (prefill, n_prefilled) = (begun.elapsed().as_secs_f64(), prompts.iter().sum::<u32>());
    let n_steps = if options.is_tiny { shape.steps } else { STEPS };
    model.drive((0..n_steps / 2).map(|_| course.next()).collect())?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let steps: Vec<Step> = (0..n_steps).map(|_| course.next()).collect();
        let is_drawn = |step: &Step| step.slices.iter().filter(|slice| slice.want == Want::Last).count();
        let (n_drawn, begun) = (steps.iter().map(is_drawn).sum::<usize>(), Instant::now());
        model.drive(steps)?;
        rounds.push(n_drawn as f64 / begun.elapsed().as_secs_f64());
    }
    let rate = Spread::of(rounds);
    let details = json!({
        "tokens_per_second": rate.to_json(),
        "aim": AIM,
        "sequences": n,
        "tokens_in_and_out": [n_in, n_out],
        "prefill_tokens_per_second": f64::from(n_prefilled) / prefill,
        "load_seconds": model.seconds,
    });
    report(Finding::aimed(name, rate.median(), if mode == NumericsMode::Fast { AIM } else { 0.0 }, details));
    Ok(())
}
