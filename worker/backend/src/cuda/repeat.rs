//! How a pass is begun: plainly, while it is recorded, or from its record.

use super::device::Cuda;
use super::graphs::PassMode;
use super::lock::lock;
use super::outline::Outline;
use crate::{Device, Pass, Repeat, Repeats, Result};

impl Cuda {
    pub(super) fn repeat_work<E>(
        &self,
        mut work: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Repeat, E> {
        let outline = lock(&self.uploads).batch.outline.filter(|_| self.is_well());
        let turn = lock(&self.graphs).turn(outline);
        match turn {
            PassMode::Plain => work().map(|()| Repeat::Done),
            PassMode::Replay(outline) => {
                let begun = lock(&self.graphs).replay(outline, &self.stream);
                self.note(begun);
                Ok(Repeat::Begun)
            }
            PassMode::Record(outline) => self.record(outline, &mut work).map(|()| Repeat::Recorded),
        }
    }

    /// Behind it there is a graph, or there will be none. What goes wrong here goes wrong again when it is done
    /// plainly, or does not matter.
    fn record<E>(
        &self,
        outline: Outline,
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
            Ok(record) if fault.is_none() => graphs.keep(outline, &record, &self.context, &self.stream),
            _ => graphs.refuse(outline),
        }
        Ok(())
    }
}

impl Device for Cuda {
    fn settle(&self) -> Result<()> {
        self.fault.take().map_or(Ok(()), Err)
    }

    fn rows_for(&self, pass: &Pass<'_>) -> usize {
        lock(&self.graphs).rows_for(pass)
    }

    fn repeat<E>(&self, work: impl FnMut() -> std::result::Result<(), E>) -> std::result::Result<Repeat, E> {
        self.repeat_work(work)
    }

    fn forget(&self) {
        self.forget_graphs();
    }

    fn repeats(&self) -> Repeats {
        let clock = lock(&self.clock);
        Repeats { busy_micros: clock.busy_micros, idle_micros: clock.idle_micros, ..self.repeats_so_far() }
    }
}
