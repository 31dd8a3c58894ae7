//! When passes began on the device, and when their draws were there: how long it was busy, and how long it had nothing
//! to do between two of them. Knows nothing of what they are.

use super::driver::{Context, CudaEvent, Stream};
use crate::Result;
use std::sync::Arc;

/// More than may be under way at once, and the one before them.
const RING: usize = 4;

pub(super) struct BusyClock {
    begins: [CudaEvent; RING],
    ends: [CudaEvent; RING],
    n_begun: u64,
    /// The last that is known to be through.
    last: u64,
    pub busy_micros: u64,
    pub idle_micros: u64,
}

fn place(pass: u64) -> usize {
    pass as usize % RING
}

impl BusyClock {
    pub fn new(context: &Arc<Context>) -> Result<BusyClock> {
        let ring = || -> Result<[CudaEvent; RING]> {
            Ok([
                CudaEvent::timed(context)?,
                CudaEvent::timed(context)?,
                CudaEvent::timed(context)?,
                CudaEvent::timed(context)?,
            ])
        };
        Ok(BusyClock { begins: ring()?, ends: ring()?, n_begun: 0, last: 0, busy_micros: 0, idle_micros: 0 })
    }

    pub fn begin(&mut self, stream: &Stream) -> Result<()> {
        self.n_begun += 1;
        self.begins[place(self.n_begun)].record(stream)
    }

    /// Behind the draws of the pass that was begun last; its number.
    pub fn end(&self, stream: &Stream) -> Result<u64> {
        self.ends[place(self.n_begun)].record(stream)?;
        Ok(self.n_begun)
    }

    /// It is through. What lies between it and a pass that drew nothing is not known.
    pub fn add_finished(&mut self, pass: u64) -> Result<()> {
        let (begin, end) = (&self.begins[place(pass)], &self.ends[place(pass)]);
        let micros = |millis: f32| (millis.max(0.0) * 1e3) as u64;
        self.busy_micros += micros(end.millis_since(begin)?);
        if self.last > 0 && self.last + 1 == pass {
            self.idle_micros += micros(begin.millis_since(&self.ends[place(self.last)])?);
        }
        self.last = pass;
        Ok(())
    }
}
