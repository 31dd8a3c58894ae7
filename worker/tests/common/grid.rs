//! All ranks of a grid as threads of the test, each with its own slice of the model.

use crate::common::Ranks;
use collective::Mesh;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use types::{Layout, Rank, Shares, Stage, Step, StepDone};
use worker::{Assignment, ModelLoader, ReadyReport, RunError, Runner};

/// Far longer than a step of a tiny model takes.
const PATIENCE: Duration = Duration::from_secs(300);

pub struct Threads {
    steps: Vec<Sender<Arc<Step>>>,
    answers: Receiver<StepDone>,
    threads: Vec<JoinHandle<Result<(), RunError>>>,
    pub weight_bytes: Vec<u64>,
}

type Built = (Box<dyn Runner>, ReadyReport);

impl Threads {
    /// Starts ranks that exchange over this process's memory.
    pub fn start(loader: &ModelLoader, assignment: &Assignment, layout: &Layout) -> Threads {
        let builds = Mesh::in_process(layout).into_iter().map(|collective| {
            let loader = loader.clone();
            move |assignment: &Assignment| loader.build_with(assignment, collective).unwrap()
        });
        Threads::of(builds, assignment, layout)
    }

    /// Like `start`, with a loader for each rank.
    pub fn start_each(loaders: Vec<ModelLoader>, assignment: &Assignment, layout: &Layout) -> Threads {
        let builds = Mesh::in_process(layout).into_iter().zip(loaders).map(|(collective, loader)| {
            move |assignment: &Assignment| loader.build_with(assignment, collective).unwrap()
        });
        Threads::of(builds, assignment, layout)
    }

    /// Starts ranks that meet through the listeners of their loaders.
    pub fn meet(loaders: impl Iterator<Item = ModelLoader>, assignment: &Assignment, layout: &Layout) -> Threads {
        let builds = loaders.map(|loader| move |assignment: &Assignment| loader.build(assignment).unwrap());
        Threads::of(builds, assignment, layout)
    }

    fn of<B>(builds: impl Iterator<Item = B>, assignment: &Assignment, layout: &Layout) -> Threads
    where
        B: FnOnce(&Assignment) -> Built + Send + 'static,
    {
        let (sender, answers) = channel();
        let (built, found) = channel();
        let mut grid = Threads { steps: vec![], answers, threads: vec![], weight_bytes: vec![] };
        for (rank, build) in (0..).map(Rank).zip(builds) {
            let assignment = Assignment { rank, layout: layout.clone(), ..assignment.clone() };
            let answers = layout.part(rank).is_sampler().then(|| sender.clone());
            let (steps, queue) = channel();
            grid.steps.push(steps);
            let built = built.clone();
            grid.threads.push(std::thread::spawn(move || {
                let (runner, ready) = build(&assignment);
                built.send(ready).unwrap();
                run(runner, &queue, answers)
            }));
        }
        // Dropped so that the test does not wait for a failed rank.
        drop(built);
        for _ in 0..grid.threads.len() {
            let ready = found.recv_timeout(PATIENCE).unwrap();
            grid.weight_bytes.push(ready.weight_bytes);
        }
        grid
    }

    /// Ends all ranks, and checks that each ended well.
    pub fn end(mut self) {
        self.steps.clear();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap().unwrap());
    }

    /// Returns the errors of the other ranks for a step that one rank has left.
    pub fn without(mut self, gone: usize, step: Step) -> Vec<RunError> {
        drop(self.steps.remove(gone));
        self.threads.remove(gone).join().unwrap().unwrap();
        self.give(step);
        self.steps.clear();
        self.threads.drain(..).filter_map(|thread| thread.join().unwrap().err()).collect()
    }
}

fn run(
    mut runner: impl Runner,
    queue: &Receiver<Arc<Step>>,
    answers: Option<Sender<StepDone>>,
) -> Result<(), RunError> {
    for step in queue {
        let mut done = StepDone { id: step.id, ..StepDone::default() };
        runner.run(&step, &mut done)?;
        if let Some(answers) = &answers {
            // A failed test receives no more answers.
            let _ = answers.send(done);
        }
    }
    Ok(())
}

impl Ranks for Threads {
    fn give(&mut self, step: Step) {
        let step = Arc::new(step);
        self.steps.iter().for_each(|rank| rank.send(step.clone()).unwrap());
    }

    fn answer(&mut self) -> StepDone {
        self.answers.recv_timeout(PATIENCE).unwrap_or_else(|why| {
            self.steps.clear();
            let results: Vec<_> = self.threads.drain(..).map(|thread| thread.join().unwrap()).collect();
            panic!("no answer ({why}): the ranks return {results:?}")
        })
    }
}

/// Returns stages with these numbers of layers, and with these shares on a scale of 16.
pub fn layout(layers: &[u32], sixteenths: &[&[u32]]) -> Layout {
    let mut next = 0;
    let stages = layers.iter().zip(sixteenths).map(|(n, bounds)| {
        let bounds = bounds.iter().map(|bound| bound * (Shares::WHOLE / 16)).collect();
        next += n;
        Stage { layers: next - n..next, shares: Shares::new(bounds).unwrap() }
    });
    Layout::new(stages.collect()).unwrap()
}
