//! Applies a step's answer, and puts each output into its router's queue.

use super::LiveRequests;
use proto::cluster as wire;
use scheduler::{RequestOutput, StaleAnswer, StepTiming};
use telemetry::metrics;
use types::{Micros, StepDone};

impl LiveRequests {
    /// The oldest step in flight is answered. Only a request with a grammar has something that its draws wait for: a
    /// rank that does not draw another's token would hold it for ever, and is refused.
    pub fn apply(&mut self, done: &StepDone, took: Micros, now: Micros) -> Result<(), StaleAnswer> {
        let Some(planner) = &mut self.planner else { return Ok(()) };
        planner.scheduler.check_all_drawn(done)?;
        planner.scheduler.apply(done, took, &mut self.outputs)?;
        if let Some(StepTiming { predicted, measured }) = planner.scheduler.step_timing() {
            metrics::step_ratio(&self.of, measured.0 as f64 / predicted.0 as f64);
        }
        let progress = self.histories.step_done(done.id, &self.outputs);
        progress.into_iter().for_each(|output| self.routers.push(output));
        self.outputs_of(done, now);
        Ok(())
    }

    fn outputs_of(&mut self, done: &StepDone, now: Micros) {
        for output in self.outputs.drain(..) {
            let passages = self.histories.apply_output(&output, now);
            self.routers.push(wire::Output { passages, ..output_frame(&output, done) });
        }
    }

    /// The outputs of cancels, deadlines and losses: they carry no tokens.
    pub(super) fn outputs_without_step(&mut self, now: Micros) {
        if !self.outputs.is_empty() {
            self.outputs_of(&StepDone::default(), now);
        }
    }
}

fn output_frame(output: &RequestOutput, done: &StepDone) -> wire::Output {
    let slice = done.slices.get(output.slice);
    let drawn = slice.map_or(&[][..], |slice| &slice.tokens);
    let beside = slice.filter(|_| output.scored_position > 0);
    let tokens = drawn.iter().take(output.n_tokens as usize).map(wire::TokenOut::from).collect();
    let frame = wire::Output {
        id: output.id.0,
        position: output.position,
        tokens,
        finish: output.finish.map_or(wire::Finish::Unspecified, wire::Finish::from).into(),
        cached_tokens: output.n_cached,
        drafts_accepted: output.drafts_accepted,
        drafts_rejected: output.drafts_rejected,
        scored_position: output.scored_position,
        scored: beside.map_or(&[][..], |slice| &slice.scored).iter().map(wire::TokenOut::from).collect(),
        pooled: beside.map_or_else(Vec::new, |slice| slice.pooled.clone()),
        grammar_fault: output.finish.map_or(wire::GrammarFault::Unspecified, wire::GrammarFault::from).into(),
        ..wire::Output::default()
    };
    if output.position == 0 { frame.with_reuse(output.reuse) } else { frame }
}
