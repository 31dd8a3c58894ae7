//! How a pass is begun: plainly, while it is recorded, or from its record.

use super::device::Cuda;
use super::driver::LaunchShape;
use super::graphs::PassMode;
use super::kernels::{arguments, by_row};
use super::lock::lock;
use super::outline::PassOutline;
use super::table::Kernel;
use super::uploads::{self, Uploads};
use crate::{BatchLimits, Device, Error, Pass, PassStats, Result, RunOutcome};

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

    fn reserve_batches(&self, limits: BatchLimits) -> Result<()> {
        let n_bytes = uploads::bytes_for(limits).ok_or_else(|| Error::Shape(format!("batches of {limits:?}")))?;
        self.forget_graphs();
        *lock(&self.uploads) = Uploads::new(&self.context, n_bytes)?;
        lock(&self.graphs).set_limits(limits);
        lock(&self.draws).reserve(&self.context, limits.rows_max)
    }

    fn begin_pass(&self, pass: &Pass<'_>) {
        let began = lock(&self.clock).begin(&self.stream);
        self.keep_error(began);
        let drawn = lock(&self.draws);
        let mut uploads = lock(&self.uploads);
        let begun = uploads.begin(&self.stream, pass, drawn.drawn_entries());
        let (tokens, (pairs, n)) = (uploads.batch.tokens, uploads.batch.taken);
        if self.keep_error(begun).is_some() && n > 0 {
            let shape = LaunchShape { grid: [n.div_ceil(256), 1, 1], ..by_row(0) };
            // SAFETY: so many pairs of a row of the pass and an entry of what the pass before has drawn.
            unsafe { self.launch(Kernel::TakeDrawn, shape, arguments![tokens, pairs, n, drawn.device_address()]) };
        }
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
