//! Sequences that decode together, in each mode and with four-bit weights: measured in turns, relative to copying
//! speed.

use super::super::{Done, Finding, FindingSink, Options, modes};
use super::course::{Course, Model, Room};
use super::file::{Digits, Random};
use super::{Copies, ROUNDS, Shape, Spread, shares};
use serde_json::{Value, json};
use types::NumericsMode;

/// Steps that are not counted, because they record graphs.
const WARM: usize = 4;
/// Aim for decoding one sequence, as a fraction of the bandwidth of copies.
const AIM_OF_COPY: f64 = 0.75;
/// Aim for the speedup by four-bit weights.
const AIM_OF_INT4: f64 = 3.0;
const AIM_OF_BUSY: f64 = 0.98;
/// Aim for decoding under `lockstep`, as a fraction of the speed under `fast`.
const AIM_OF_DECODE: f64 = 0.85;
const AIM_OF_PREFILL: f64 = 0.6;

struct Runs {
    name: &'static str,
    model: Model,
    /// The least bytes that a step reads.
    read: f64,
}

/// The figures of one model's rounds.
#[derive(Default)]
struct Figures {
    /// Seconds of each step.
    steps: Vec<f64>,
    /// Prefill speeds in tokens a second.
    prefills: Vec<f64>,
    busy: u64,
    idle: u64,
    replayed: u64,
}

pub fn measure(options: &Options, report: FindingSink<'_>) -> Done {
    let shape = Shape::of(options);
    let steps = WARM + ROUNDS * (1 + shape.steps);
    let sequences = shape.batches.iter().copied().max().unwrap_or(1);
    let room = Room { sequences, context: shape.prompt + steps as u32, batch_tokens: shape.prompt.max(2 * sequences) };
    let (modes, lacking) = modes();
    if let Some(why) = lacking {
        report(Finding::not_run("decode under fast", &why));
    }
    let mut all = Vec::new();
    let both = modes.into_iter().map(|mode| (mode.name(), Digits::Bf16, mode));
    for (name, digits, mode) in both.chain([("int4", Digits::Int4, NumericsMode::Lockstep)]) {
        let random = Random::write(&options.cache, &shape, digits, room.context).map_err(|error| error.to_string())?;
        let model = Model::load(options, &random.path, mode, room)?;
        let details = json!({ "seconds": model.seconds, "weight_bytes": model.weight_bytes });
        report(Finding::measured(format!("{name}: loaded"), details));
        // An embedding is only looked up, not read whole.
        let read = model.weight_bytes as f64 - digits.device_bytes(shape.vocab * shape.hidden);
        all.push(Runs { name, model, read });
    }
    let mut copies = Copies::new(options)?;
    for n in shape.batches {
        together(&shape, *n, room, &mut all, &mut copies, report)?;
    }
    Ok(())
}

fn together(shape: &Shape, n: u32, room: Room, all: &mut [Runs], copies: &mut Copies, report: FindingSink<'_>) -> Done {
    let mut copied = Vec::new();
    let mut going: Vec<(Course, Figures)> = Vec::new();
    for runs in all.iter_mut() {
        let mut course = Course::new(shape, &vec![shape.prompt; n as usize], shape.prompt, room.context, room);
        let prefills = runs.model.drive(course.join())?;
        let prefills = prefills.iter().map(|seconds| f64::from(shape.prompt) / seconds).collect();
        runs.model.drive((0..WARM).map(|_| course.next()).collect())?;
        going.push((course, Figures { prefills, ..Figures::default() }));
    }
    for _ in 0..ROUNDS {
        copied.push(copies.round()?);
        for (runs, (course, figures)) in all.iter_mut().zip(&mut going) {
            round(shape, &mut runs.model, course, figures)?;
        }
    }
    for (runs, (course, figures)) in all.iter_mut().zip(&mut going) {
        runs.model.drive(vec![course.ends()])?;
        findings(runs, n, figures, &copied).into_iter().for_each(&mut *report);
    }
    let figures = |name: &str| {
        let place = all.iter().position(|runs| runs.name == name);
        place.map(|i| &going[i].1)
    };
    if let (Some(lockstep), Some(int4)) = (figures("lockstep"), figures("int4")) {
        let faster = shares(&lockstep.steps, &int4.steps);
        let name = format!("four bits beside bf16: {n} sequences decode");
        let aim = if n == 1 { AIM_OF_INT4 } else { 0.0 };
        report(Finding::aimed(name, faster.median(), aim, json!({ "times_as_fast": faster.to_json(), "aim": aim })));
    }
    if let (Some(lockstep), Some(fast)) = (figures("lockstep"), figures("fast")) {
        report(beside(n, lockstep, fast));
    }
    Ok(())
}

/// Runs one round. The first step is not counted: the device was idle during the turns of other models.
fn round(shape: &Shape, model: &mut Model, course: &mut Course, figures: &mut Figures) -> Done {
    let first = vec![course.next()];
    model.drive(first)?;
    let before = model.pass_stats();
    let times = model.drive((0..shape.steps).map(|_| course.next()).collect())?;
    let after = model.pass_stats();
    figures.steps.push(Spread::of(times).median());
    figures.busy += after.busy_micros - before.busy_micros;
    figures.idle += after.idle_micros - before.idle_micros;
    figures.replayed += after.replayed - before.replayed;
    Ok(())
}

fn findings(runs: &Runs, n: u32, figures: &Figures, copied: &[f64]) -> [Finding; 2] {
    let rates = |each: f64| figures.steps.iter().map(|step| each / step).collect::<Vec<f64>>();
    let of_copy = shares(&rates(runs.read), copied);
    let busy = 1.0 - figures.idle as f64 / ((figures.idle + figures.busy) as f64).max(1.0);
    let aim = if n == 1 && runs.name == "fast" { AIM_OF_COPY } else { 0.0 };
    let decoded = json!({
        "tokens_per_second": Spread::of(rates(f64::from(n))).to_json(),
        "step_millis": Spread::of(figures.steps.iter().map(|step| step * 1e3).collect()).to_json(),
        "prefill_tokens_per_second": Spread::of(figures.prefills.clone()).to_json(),
        "weights_read_of_copy": of_copy.to_json(),
        "aim_of_copy": aim,
        "graphs_replayed": figures.replayed,
    });
    let idle = json!({ "idle_share": 1.0 - busy, "busy_micros": figures.busy, "aim": 1.0 - AIM_OF_BUSY });
    [
        Finding::aimed(format!("{}: {n} sequences decode", runs.name), of_copy.median(), aim, decoded),
        Finding::aimed(format!("{}: device idle between steps of {n}", runs.name), busy, AIM_OF_BUSY, idle),
    ]
}

fn beside(n: u32, lockstep: &Figures, fast: &Figures) -> Finding {
    let (decode, prefill) = (shares(&fast.steps, &lockstep.steps), shares(&lockstep.prefills, &fast.prefills));
    // Reported for the figure that is farther from its aim.
    let figure = (decode.median() / AIM_OF_DECODE).min(prefill.median() / AIM_OF_PREFILL);
    let of = |share: &Spread, aim: f64| -> Value { json!({ "share": share.to_json(), "aim": aim }) };
    let details = json!({ "decode": of(&decode, AIM_OF_DECODE), "prefill": of(&prefill, AIM_OF_PREFILL) });
    Finding::aimed(format!("lockstep's share of fast's speed, {n} sequences"), figure, 1.0, details)
}
