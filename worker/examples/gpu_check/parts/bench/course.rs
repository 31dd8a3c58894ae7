//! Steps for a rank alone, as a coordinator would plan them: sequences join one after another and decode together; when
//! one ends, another one takes its place.

use super::super::{Options, cores};
use super::Shape;
use std::collections::VecDeque;
use std::path::Path;
use std::time::Instant;
use types::cache::blocks_for;
use types::{
    Activations, BlockId, Epoch, KvDtype, Layout, NumericsMode, Rank, Request, RequestId, Sampling, Slice, Step,
    StepDone, StepId, Want,
};
use worker::{Assignment, ComputeDevice, MeshSecret, MeshTimeouts, ModelLoader, PassStats, Runner, UpcomingSteps};

/// A loaded model.
pub struct Model {
    pub runner: Box<dyn Runner>,
    pub weight_bytes: u64,
    pub seconds: f64,
    done: StepDone,
}

/// The limits for which a model is loaded.
#[derive(Clone, Copy)]
pub struct Room {
    pub sequences: u32,
    pub context: u32,
    pub batch_tokens: u32,
}

impl Model {
    pub fn load(options: &Options, path: &Path, mode: NumericsMode, room: Room) -> Result<Model, String> {
        let begun = Instant::now();
        let device = ComputeDevice::Cuda { ordinal: 0, cache: Some(options.cache.clone()) };
        let loader = ModelLoader { device, spin: false, ..ModelLoader::new(cores()) };
        let assignment = assignment(path, &Shape::of(options), mode, room);
        let (runner, ready) = loader.build(&assignment).map_err(|error| error.to_string())?;
        let seconds = begun.elapsed().as_secs_f64();
        Ok(Model { runner: Box::new(runner), weight_bytes: ready.weight_bytes, seconds, done: StepDone::default() })
    }

    /// Runs the steps and returns the seconds of each. Each step is available before its turn; no step follows the last
    /// one.
    pub fn drive(&mut self, steps: Vec<Step>) -> Result<Vec<f64>, String> {
        let mut given = VecDeque::from(steps);
        let mut times = Vec::with_capacity(given.len());
        while let Some(step) = given.pop_front() {
            let begun = Instant::now();
            let ran = self.runner.run_with(&step, &mut Given(&given), &mut self.done);
            ran.map_err(|error| error.to_string())?;
            times.push(begun.elapsed().as_secs_f64());
        }
        Ok(times)
    }

    pub fn pass_stats(&self) -> PassStats {
        self.runner.pass_stats()
    }
}

/// Steps that are available before their turn.
struct Given<'a>(&'a VecDeque<Step>);

impl UpcomingSteps for Given<'_> {
    fn next(&mut self) -> Option<&Step> {
        self.0.front()
    }
}

fn assignment(model: &Path, shape: &Shape, mode: NumericsMode, room: Room) -> Assignment {
    Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::solo(shape.n_layers),
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        timeouts: MeshTimeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        guesses: worker::GuessConfig::default(),
        model_path: model.to_owned(),
        activations: Activations::Bf16,
        kv_dtype: KvDtype::Bf16,
        mode,
        n_blocks: vec![room.sequences * blocks_for(room.context)],
        kv_bytes: 1 << 50,
        context: room.context,
        batch_tokens_max: room.batch_tokens,
        running_max: room.sequences,
    }
}

struct Seat {
    id: RequestId,
    n_prompt: u32,
    /// Positions computed so far.
    at: u32,
}

/// Sequences, each with blocks of its own.
pub struct Course {
    places: Vec<Seat>,
    /// The prompt length of a sequence that takes the place of another one.
    n_prompt: u32,
    /// The number of positions at which a sequence ends.
    end: u32,
    room: Room,
    vocab: u32,
    n_begun: u64,
    id: u64,
}

impl Course {
    /// Creates a course in which each of the first sequences has its own prompt length.
    pub fn new(shape: &Shape, prompts: &[u32], n_prompt: u32, end: u32, room: Room) -> Course {
        let place = |(i, n_prompt): (u64, &u32)| Seat { id: RequestId(i), n_prompt: *n_prompt, at: 0 };
        let places: Vec<Seat> = (0..).zip(prompts).map(place).collect();
        Course { n_begun: places.len() as u64, places, n_prompt, end, room, vocab: shape.vocab as u32, id: 0 }
    }

    fn step(&mut self) -> Step {
        self.id += 1;
        Step { id: StepId(self.id), ..Step::default() }
    }

    /// Returns steps for the prompts, one after another.
    pub fn join(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        for i in 0..self.places.len() {
            while self.places[i].at < self.places[i].n_prompt {
                let (mut step, mut room) = (self.step(), self.room.batch_tokens);
                self.go_on(i, &mut room, &mut step);
                steps.push(step);
            }
        }
        steps
    }

    /// Returns a step in which all sequences decode one token, except those in prefill, which get the remaining room.
    pub fn next(&mut self) -> Step {
        let mut step = self.step();
        for place in &mut self.places {
            if place.at == self.end {
                step.ends.push(place.id);
                *place = Seat { id: RequestId(self.n_begun), n_prompt: self.n_prompt, at: 0 };
                self.n_begun += 1;
            }
        }
        let mut room = self.room.batch_tokens - self.places.len() as u32;
        (0..self.places.len()).for_each(|i| self.go_on(i, &mut room, &mut step));
        step
    }

    /// Returns the step that ends all sequences.
    pub fn ends(&mut self) -> Step {
        Step { ends: self.places.iter().map(|place| place.id).collect(), ..self.step() }
    }

    fn go_on(&mut self, i: usize, room: &mut u32, step: &mut Step) {
        let (vocab, end, of_place) = (self.vocab, self.end, blocks_for(self.room.context));
        let place = &mut self.places[i];
        let is_prompt = place.at < place.n_prompt;
        let n = if is_prompt { (place.n_prompt - place.at).min(*room) } else { 1 };
        if n == 0 {
            return;
        }
        *room -= if is_prompt { n } else { 0 };
        if place.at == 0 {
            let sampling = Sampling { tokens_max: end, ..Sampling::default() };
            let prompt = (0..place.n_prompt).map(|j| (j * 37 + place.id.0 as u32 * 101) % vocab).collect();
            step.starts.push(Request { id: place.id, prompt, sampling, ..Request::default() });
        }
        let range = place.at..place.at + n;
        let want = if range.end >= place.n_prompt { Want::Last } else { Want::Nothing };
        let blocks = blocks_for(range.start)..blocks_for(range.end);
        step.blocks.extend(blocks.map(|block| BlockId(i as u32 * of_place + block)));
        place.at = range.end;
        step.slices.push(Slice::new(place.id, range, want));
    }
}
