//! How a pass is begun: plainly, while it is recorded, or from its record.

use super::device::Cuda;
use super::graphs::PassMode;
use super::lock::lock;
use super::outline::PassOutline;
use crate::{Device, Pass, PassStats, Result, RunOutcome};

impl Cuda {
    pub(super) fn replay_or_run<E>(
        &self,
        mut work: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<RunOutcome, E> {
        let outline = lock(&self.uploads).batch.outline.filter(|_| self.is_well());
        let turn = lock(&self.graphs).mode_for(outline);
        match turn {
            PassMode::Plain => work().map(|()| RunOutcome::Done),
            PassMode::Replay(outline) => {
                let begun = lock(&self.graphs).replay(outline, &self.stream);
                self.keep_error(begun);
                Ok(RunOutcome::Begun)
            }
            PassMode::Record(outline) => self.record(outline, &mut work).map(|()| RunOutcome::Recorded),
        }
    }

    /// Behind it there is a graph, or there will be none. What goes wrong here goes wrong again when it is done
    /// plainly, or does not matter.
    fn record<E>(
        &self,
        outline: PassOutline,
        work: &mut impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        if self.stream.begin_record().is_err() {
            lock(&self.graphs).refuse(outline);
            return Ok(());
        }
        lock(&self.graphs).is_recording = true;
        let done = work();
        let record = self.stream.end_record();
        let fault = self.fault.take();
        let mut graphs = lock(&self.graphs);
        graphs.is_recording = false;
        done?;
        match record {
            Ok(record) if fault.is_none() => graphs.instantiate(outline, &record, &self.context, &self.stream),
            _ => graphs.refuse(outline),
        }
        Ok(())
    }
}

impl Device for Cuda {
    fn take_failure(&self) -> Result<()> {
        self.fault.take().map_or(Ok(()), Err)
    }

    fn padded_rows(&self, pass: &Pass<'_>) -> usize {
        lock(&self.graphs).rows_for(pass)
    }

    fn run_or_replay<E>(&self, work: impl FnMut() -> std::result::Result<(), E>) -> std::result::Result<RunOutcome, E> {
        self.replay_or_run(work)
    }

    fn forget_records(&self) {
        self.forget_graphs();
    }

    fn pass_counts(&self) -> PassStats {
        let clock = lock(&self.clock);
        PassStats { busy_micros: clock.busy_micros, idle_micros: clock.idle_micros, ..self.pass_counts_so_far() }
    }
}
