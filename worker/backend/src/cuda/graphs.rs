//! Passes of which one is like another: their launches are recorded and begun again as one, so that the device does not
//! wait for the host between kernels. Only where every slice is a row: those passes are short, and there are many.
//!
//! What differs between two passes of one outline lies in the arena of `uploads`, never in an argument: positions,
//! slots, items, tables, tokens. An outline is recorded when it comes the second time: what is allocated or told to the
//! device once has been by then. Rows are filled up to a few numbers, and tiles of attention to powers of four.
//!
//! Graphs take memory of the device when they are made ready, up to a limit that is counted here and that `free_bytes`
//! leaves out. It is not held until then: giving it back piece by piece would free memory between passes.

use super::driver::{Card, Context, Graph, Record, Stream};
use super::outline::Outline;
use crate::{BatchLimits, Pass, Repeats, Result};
use std::collections::BTreeMap;

/// Of the device's memory, what graphs may take; and at most so much.
const SHARE: u64 = 64;
const BYTES_MAX: u64 = 512 << 20;
/// Of a graph, as far as is known before it is made; then it is measured.
const NODE_BYTES: usize = 8 << 10;
const PIECE: usize = 2 << 20;

pub(super) struct Graphs {
    is_on: bool,
    /// Of the buffers that passes work in.
    rows_max: usize,
    known: BTreeMap<Outline, Known>,
    /// In bytes: what graphs may take, and what they have taken.
    n_max: usize,
    n_used: usize,
    pub counts: Repeats,
    /// A record is being made.
    pub is_recording: bool,
}

enum Known {
    /// It has been there once.
    Seen,
    Kept(Graph),
    Refused,
}

/// What is done with a pass.
pub(super) enum Turn {
    Plain,
    Record(Outline),
    Replay(Outline),
}

impl Graphs {
    pub fn new(card: &Card, is_on: bool) -> Graphs {
        let n_max = if is_on { (card.memory_bytes / SHARE).min(BYTES_MAX) as usize } else { 0 };
        // A driver takes memory for them in whole pieces.
        let n_max = n_max - n_max % PIECE;
        let (known, counts) = (BTreeMap::new(), Repeats::default());
        Graphs { is_on, rows_max: 0, known, n_max, n_used: 0, counts, is_recording: false }
    }

    /// Bytes that graphs may still take.
    pub fn n_left(&self) -> usize {
        self.n_max.saturating_sub(self.n_used)
    }

    pub fn fits(&mut self, limits: BatchLimits) {
        self.rows_max = limits.rows_max;
    }

    pub fn rows_for(&self, pass: &Pass<'_>) -> usize {
        if self.is_on { Outline::rows_for(pass, self.rows_max) } else { pass.n_rows() }
    }

    pub fn turn(&mut self, outline: Option<Outline>) -> Turn {
        let Some(outline) = outline.filter(|_| self.is_on && !self.is_recording) else {
            self.counts.plain += 1;
            return Turn::Plain;
        };
        match self.known.get(&outline) {
            Some(Known::Kept(_)) => return Turn::Replay(outline),
            Some(Known::Seen) => return Turn::Record(outline),
            Some(Known::Refused) => {}
            None => drop(self.known.insert(outline, Known::Seen)),
        }
        self.counts.plain += 1;
        Turn::Plain
    }

    pub fn replay(&mut self, outline: Outline, stream: &Stream) -> Result<()> {
        self.counts.replayed += 1;
        match self.known.get(&outline) {
            Some(Known::Kept(graph)) => stream.replay(graph),
            _ => unreachable!("it is this turn because it is kept"),
        }
    }

    /// A graph of what was recorded, if there is room for it.
    pub fn keep(&mut self, outline: Outline, record: &Record, context: &Context, stream: &Stream) {
        match self.make(record, context, stream) {
            Ok(Some(graph)) => {
                self.counts.recorded += 1;
                self.known.insert(outline, Known::Kept(graph));
            }
            _ => self.refuse(outline),
        }
    }

    fn make(&mut self, record: &Record, context: &Context, stream: &Stream) -> Result<Option<Graph>> {
        let (n_bytes, before) = (record.n_nodes()? * NODE_BYTES, context.free_bytes()?);
        if n_bytes > self.n_left() || n_bytes as u64 > before {
            return Ok(None);
        }
        let graph = record.ready(stream)?;
        let taken = before.saturating_sub(context.free_bytes()?) as usize;
        // One that has taken more than graphs may takes from what others were promised.
        if taken > self.n_left() {
            return Ok(None);
        }
        self.n_used += taken.max(n_bytes);
        Ok(Some(graph))
    }

    /// What a graph has taken the driver may keep, for others of the same size.
    pub fn forget(&mut self) {
        self.known.clear();
        self.n_used = 0;
    }

    pub fn refuse(&mut self, outline: Outline) {
        self.counts.refused += 1;
        self.known.insert(outline, Known::Refused);
    }
}
