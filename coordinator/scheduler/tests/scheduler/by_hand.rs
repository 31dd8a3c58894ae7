//! Steps one by one, each answered with the same token.

use scheduler::Scheduler;
use types::{Micros, Request, RequestId, Sampling, SliceDone, Step, StepDone, Token, TokenOut, Want};

pub fn request(id: u64, prompt: impl IntoIterator<Item = Token>, tokens_max: u32) -> Request {
    let sampling = Sampling { tokens_max, ..Sampling::default() };
    Request { id: RequestId(id), prompt: prompt.into_iter().collect(), sampling, ..Request::default() }
}

pub fn plan(scheduler: &mut Scheduler) -> Option<Step> {
    let mut step = Step::default();
    let planned = scheduler.next_step(Micros(0), &mut step);
    scheduler.check();
    planned.then_some(step)
}

pub fn apply(scheduler: &mut Scheduler, step: &Step) {
    let draw = |want| if want == Want::Last { vec![TokenOut { token: 7, ..TokenOut::default() }] } else { vec![] };
    let slices = step.slices.iter().map(|slice| SliceDone { tokens: draw(slice.want), ..SliceDone::default() });
    let done = StepDone { id: step.id, epoch: step.epoch, slices: slices.collect(), micros: 0 };
    scheduler.apply(&done, Micros(0), &mut Vec::new()).unwrap();
    scheduler.check();
}

/// Runs until nothing is left to plan, one step at a time; returns the steps.
pub fn run_out(scheduler: &mut Scheduler) -> Vec<Step> {
    core::iter::from_fn(|| plan(scheduler).inspect(|step| apply(scheduler, step))).collect()
}
