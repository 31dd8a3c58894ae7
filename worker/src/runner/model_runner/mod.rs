//! The runner with a model: a step goes through the sequences, one pass and the draws. Has no knowledge of streams. To
//! it a model is a function from a batch to logits.
//!
//! A step on a rank: apply ends and starts; on the first stage, receive the sampler's tokens of earlier steps if a row
//! needs one; lay out the rows; run the pass, together with all ranks; on the sampler, take the masks of grammars,
//! draw, and send the tokens to the first stage.
//!
//! A rank alone on a device that samples begins the next step, if it has arrived, before it waits for this step's
//! tokens. The tokens that the next step needs stay on the device.

use crate::load::weight_cache::{LoadedPart, PartInUse};
use crate::runner::draft_counts::DraftCounts;
use crate::runner::draft_model::DraftModelRunner;
use crate::runner::guesses::Guesser;
use crate::runner::kv_commit::KvPoolMemory;
use crate::runner::masks::{GrammarMasks, MaskConfig};
use crate::runner::model_part::ModelPart;
use crate::runner::mtp::MtpRunner;
use crate::runner::sequences::{RankSequences, StepViolation, TokenSource};
use crate::runner::{RunError, Runner, UpcomingSteps, reuse_allocation};
use crate::tier::{RankTier, TierReports};
use backend::{Batch, Device, Draw, DrawError, DrawsInFlight, PassStats};
use collective::{AbortHandle, Ranks};
use model::KvCache;
use std::time::{Duration, Instant};
use telemetry::metrics;
use types::{Step, StepDone, StepId, Token, TokenOut};

pub struct ModelRunner<D: Device + 'static> {
    /// Dropped before the rest: transfers in progress use the device's memory.
    ranks: Ranks<D>,
    lent: PartInUse<D>,
    kv: KvCache<D>,
    /// Pages that outlive their blocks.
    tier: Option<RankTier>,
    /// None once it has been taken.
    kv_commit: Option<KvPoolMemory>,
    sequences: RankSequences,
    /// Only the sampler has any.
    masks: GrammarMasks,
    is_sampler: bool,
    // The buffers of a step, reused.
    batch: Batch,
    draws: Vec<Draw<'static>>,
    drawn: Vec<Result<TokenOut, DrawError>>,
    /// The tokens that the sampler sends to the first stage.
    message: Vec<Option<Token>>,
    /// The hidden state of one row.
    state: Vec<f32>,
    /// A step that began before its turn.
    ahead: Option<(StepId, DrawProgress)>,
    /// The device's pass counts at the last report.
    counted: PassStats,
    draft_counts: DraftCounts,
    /// Only the sampler has one. Its weights are lent together with the sampler's part.
    draft_model: Option<DraftModelRunner<D>>,
    /// The same of the model's own layer that predicts one token further.
    mtp: Option<MtpRunner<D>>,
}

/// The progress of a step's draws after its pass has begun.
enum DrawProgress {
    /// The step has no rows.
    Empty,
    /// Everything is drawn.
    Done,
    Drawing(DrawsInFlight),
}

impl<D: Device + 'static> ModelRunner<D> {
    pub(super) fn new(part: ModelPart<D>, ranks: Ranks<D>, masks: MaskConfig) -> ModelRunner<D> {
        let ModelPart { lent, kv, kv_commit, draft_model, mtp, tier, limits, .. } = part;
        let draft_counts = DraftCounts::new(&limits.guesses);
        let (outputs_max, message_words_max) = (limits.outputs_max(), limits.message_words_max());
        let n_guess_max = limits.guesses.n_max_among(1);
        let masks = GrammarMasks::new(masks, lent.get().vocabulary.clone(), limits.running_max, n_guess_max);
        let part = ranks.part();
        let (sequences, is_sampler) = (RankSequences::new(limits, TokenSource::of(part)), part.is_sampler());
        let batch = sequences.new_batch();
        let (draws, drawn) = (Vec::with_capacity(outputs_max), Vec::with_capacity(outputs_max));
        let message = Vec::with_capacity(message_words_max);
        let state = vec![0.0; lent.get().spec.hidden as usize];
        let counted = lent.get().device.pass_counts();
        ModelRunner {
            lent,
            ranks,
            kv,
            tier,
            kv_commit,
            sequences,
            masks,
            is_sampler,
            batch,
            draws,
            drawn,
            message,
            state,
            ahead: None,
            counted,
            draft_counts,
            draft_model,
            mtp,
        }
    }

    /// Applies a step up to the layout of its rows.
    fn begin(&mut self, step: &Step) -> Result<(), RunError> {
        let protocol = |violation: StepViolation| RunError::Protocol { step: step.id.0, what: violation.to_string() };
        self.sequences.begin(step).map_err(protocol)?;
        if let Some(tier) = &mut self.tier {
            tier.apply(step);
        }
        if self.is_sampler {
            self.masks.begin(step);
        }
        if let (Some(draft_model), Some(weights)) = (&mut self.draft_model, &self.lent.get().draft) {
            draft_model.begin(step, &weights.device);
        }
        if let Some(mtp) = &mut self.mtp {
            mtp.begin(step, &self.lent.get().device);
        }
        self.clear_freed_blocks();
        while let Some(earlier) = self.sequences.step_to_receive(step) {
            self.ranks.recv_tokens(earlier, &mut self.message)?;
            self.sequences.receive(&self.message).map_err(protocol)?;
        }
        self.sequences.lay_out(step, &mut self.batch).map_err(protocol)?;
        if self.is_sampler {
            self.sequences.request_draft_masks(step, &self.masks);
        }
        let n_rows = self.lent.get().device.padded_rows(&self.batch.pass());
        self.batch.pad(n_rows);
        Ok(())
    }

    /// Clears freed blocks before anything is stored there again.
    fn clear_freed_blocks(&mut self) {
        if let Some(blocks) = self.sequences.uncleared() {
            self.kv.clear(&self.lent.get().device, blocks);
            blocks.iter_mut().for_each(Vec::clear);
        }
    }

    /// Called when the assignment ends: frees and clears everything, so that the memory's next user finds no data.
    fn forget_all(&mut self) {
        self.sequences.forget_all();
        self.clear_freed_blocks();
        if let (Some(draft_model), Some(weights)) = (&mut self.draft_model, &self.lent.get().draft) {
            draft_model.forget_all(&weights.device);
        }
        if let Some(mtp) = &mut self.mtp {
            mtp.forget_all(&self.lent.get().device);
        }
    }

    fn run_pass(&mut self, step: &Step) -> model::Result<DrawProgress> {
        let LoadedPart { device, model, .. } = self.lent.get_mut();
        let logits = model.forward(device, &mut self.ranks, &self.batch.pass(), &mut self.kv)?;
        let mut begun = DrawProgress::Done;
        if let Some(logits) = logits {
            let mut draws = reuse_allocation(std::mem::take(&mut self.draws));
            self.sequences.take_masks(step, &mut self.masks);
            self.sequences.collect_draws(step, &self.masks, &mut draws);
            match device.begin_draws(logits, &draws) {
                Some(drawing) => begun = DrawProgress::Drawing(drawing),
                None => device.draw(logits, &draws, &mut self.drawn),
            }
            self.draws = reuse_allocation(draws);
        }
        if let (true, true, Some(hidden)) = (self.is_sampler, self.batch.pass().wants_hidden(), model.hidden()) {
            let read = |row: usize, state: &mut [f32]| device.read(hidden, row..row + 1, state);
            self.sequences.pool_rows(step, &self.batch.pass(), &mut self.state, read);
        }
        Ok(begun)
    }

    /// Runs everything of the step that does not wait for its draws.
    fn start(&mut self, step: &Step) -> Result<DrawProgress, RunError> {
        step.supported()?;
        self.begin(step)?;
        if self.batch.n_rows() == 0 {
            return Ok(DrawProgress::Empty);
        }
        self.lent.mark_unsound();
        let passed = self.run_pass(step);
        self.check_pass(passed)
    }

    /// Checks a pass's result. A lost peer may have ended the pass; the weights are still sound, because the next pass
    /// uses nothing of it.
    fn check_pass<T>(&mut self, passed: model::Result<T>) -> Result<T, RunError> {
        if matches!(passed, Err(model::Error::Collective(_))) {
            self.lent.mark_sound();
        }
        passed.map_err(run_error)
    }

    /// While the device computes this step, begins the next one if possible.
    fn begin_next(
        &mut self,
        step: &Step,
        drawing: &DrawsInFlight,
        upcoming: &mut dyn UpcomingSteps,
    ) -> Result<(), RunError> {
        /// Checks of the queue before the thread first yields its core for longer.
        const LOOKS: u32 = 256;
        const PAUSE: Duration = Duration::from_micros(20);
        let mut n_looks = 0;
        while !self.lent.get().device.are_drawn(drawing) {
            if let Some(next) = upcoming.next() {
                if self.can_follow(step, next) {
                    let pass = self.start(next)?;
                    self.ahead = Some((next.id, pass));
                }
                return Ok(());
            }
            n_looks += 1;
            if n_looks < LOOKS { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
        Ok(())
    }

    fn can_follow(&mut self, step: &Step, next: &Step) -> bool {
        if !self.sequences.can_follow(step, next) {
            return false;
        }
        let mut draws = reuse_allocation(std::mem::take(&mut self.draws));
        self.sequences.collect_draws(next, &self.masks, &mut draws);
        let LoadedPart { device, spec, .. } = self.lent.get();
        let are_alone = draws.iter().all(|draw| device.can_draw_alone(draw, spec.vocab as usize));
        self.draws = reuse_allocation(draws);
        are_alone
    }

    /// Completes a step's draws, and checks that its pass is valid.
    fn complete_draws(&mut self, step: &Step, begun: DrawProgress) -> Result<(), RunError> {
        let device = &self.lent.get().device;
        match begun {
            DrawProgress::Empty => return Ok(()),
            DrawProgress::Done => {}
            DrawProgress::Drawing(drawing) => {
                let mut draws = reuse_allocation(std::mem::take(&mut self.draws));
                self.sequences.collect_draws(step, &self.masks, &mut draws);
                device.collect_draws(&drawing, &draws, &mut self.drawn);
                self.draws = reuse_allocation(draws);
            }
        }
        // A pass that a lost peer released computes on arbitrary numbers: the loss is the cause to report.
        let settled = self.ranks.settle().map_err(model::Error::from);
        let settled = settled.and_then(|()| Ok(self.lent.get().device.take_failure()?));
        if settled.is_ok() && self.ahead.is_none() {
            self.lent.mark_sound();
        }
        self.check_pass(settled)
    }

    fn run_step(
        &mut self,
        step: &Step,
        upcoming: Option<&mut dyn UpcomingSteps>,
        done: &mut StepDone,
    ) -> Result<(), RunError> {
        let begun = Instant::now();
        let pass = match self.ahead.take() {
            Some((id, pass)) if id == step.id => pass,
            Some((id, _)) => {
                let what = format!("step {} was begun, but another step is next", id.0);
                return Err(RunError::Protocol { step: step.id.0, what });
            }
            None => {
                self.drawn.clear();
                self.start(step)?
            }
        };
        // On a grid, tokens go through hosts.
        let is_alone = self.ranks.is_alone();
        if let (Some(upcoming), true, DrawProgress::Drawing(drawing)) = (upcoming, is_alone, &pass) {
            self.begin_next(step, drawing, upcoming)?;
        }
        self.complete_draws(step, pass)?;
        let of_draft_model = self.draft_model.as_mut().and_then(|draft_model| draft_model.cost.as_mut());
        if let Some(cost) = of_draft_model.or_else(|| self.mtp.as_mut()?.cost.as_mut()) {
            cost.note_step(self.batch.n_rows(), begun.elapsed());
        }
        self.count();
        self.finish(step, done)?;
        done.micros = u32::try_from(begun.elapsed().as_micros()).unwrap_or(u32::MAX);
        Ok(())
    }

    fn count(&mut self) {
        let (now, before) = (self.lent.get().device.pass_counts(), self.counted);
        let grown = [
            ("plain", now.plain - before.plain),
            ("recorded", now.recorded - before.recorded),
            ("replayed", now.replayed - before.replayed),
            ("refused", now.refused - before.refused),
        ];
        self.counted = now;
        for (way, n) in grown.into_iter().filter(|(_, n)| *n > 0) {
            metrics::cuda_passes(way, n);
        }
    }

    /// Lets the draft model guess where the source has no guesses.
    fn guess_by_model(&mut self, step: &Step, done: &StepDone) -> model::Result<()> {
        let ModelRunner { draft_model, sequences, lent, .. } = self;
        let (Some(draft_model), Some(weights)) = (draft_model, &mut lent.get_mut().draft) else { return Ok(()) };
        sequences.collect_guess_requests(step, &done.slices, draft_model.cost.as_ref(), &mut draft_model.requests);
        draft_model.guess(weights, |id| sequences.log(id))?;
        for (id, guessed) in draft_model.guesses() {
            sequences.set_model_guesses(id, guessed, Guesser::DraftModel);
        }
        Ok(())
    }

    /// Lets the model's own layer compute the step's positions, and guess where the source has no guesses.
    fn guess_by_mtp(&mut self, step: &Step, done: &StepDone) -> model::Result<()> {
        let ModelRunner { mtp, sequences, lent, batch, .. } = self;
        let LoadedPart { device, model, mtp: head, .. } = lent.get_mut();
        let (Some(mtp), Some(head), Some(hidden)) = (mtp, head, model.hidden()) else { return Ok(()) };
        sequences.collect_guess_requests(step, &done.slices, mtp.cost.as_ref(), &mut mtp.requests);
        let slices = step.slices.iter().map(|slice| slice.id).zip(&batch.slices);
        mtp.guess(device, head, hidden, slices, |id| sequences.log(id))?;
        for (id, guessed) in mtp.guesses() {
            sequences.set_model_guesses(id, guessed, Guesser::Mtp);
        }
        Ok(())
    }

    /// Appends the tokens to the logs. The first stage receives one message for each step with draws, and none for
    /// other steps.
    fn finish(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        if !self.is_sampler {
            self.sequences.note_remote_draws(step);
            return Ok(());
        }
        self.sequences.apply_draws(step, &mut self.drawn, &self.masks, &mut self.message, &mut done.slices);
        let LoadedPart { device, model, .. } = self.lent.get_mut();
        let pooled = done.slices.iter_mut().map(|slice| &mut slice.pooled).filter(|pooled| !pooled.is_empty());
        pooled.for_each(|pooled| model.finish_pooled(device, pooled));
        self.draft_counts.count(step, done, |id| self.sequences.drafted_by(id));
        let guessed = self.guess_by_model(step, done).and_then(|()| self.guess_by_mtp(step, done));
        self.check_pass(guessed)?;
        self.sequences.report_guesses(step, &mut self.message, &mut done.slices);
        if self.message.is_empty() { Ok(()) } else { Ok(self.ranks.send_tokens(step.id, &self.message)?) }
    }
}

impl<D: Device + 'static> Drop for ModelRunner<D> {
    /// Clears the KV cache, and drops recorded graphs before the communicators that they name.
    fn drop(&mut self) {
        self.forget_all();
        self.lent.get().device.forget_records();
    }
}

impl<D: Device + 'static> Runner for ModelRunner<D> {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        self.run_step(step, None, done)
    }

    fn run_with(&mut self, step: &Step, upcoming: &mut dyn UpcomingSteps, done: &mut StepDone) -> Result<(), RunError> {
        self.run_step(step, Some(upcoming), done)
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        Some(self.ranks.abort_handle())
    }

    fn take_kv_memory(&mut self) -> Option<KvPoolMemory> {
        self.kv_commit.take()
    }

    fn start_tier(&mut self, reports: TierReports) -> bool {
        let Some(tier) = &mut self.tier else { return false };
        tier.start(reports);
        true
    }

    fn pass_stats(&self) -> PassStats {
        self.lent.get().device.pass_counts()
    }

    fn total_wait(&self) -> Duration {
        Duration::from_micros(self.ranks.times().waiting)
    }
}

fn run_error(error: model::Error) -> RunError {
    match error {
        model::Error::Collective(error) => error.into(),
        error => RunError::Pass(error.into()),
    }
}

#[cfg(test)]
mod mtp_tests;
#[cfg(test)]
mod tests;
