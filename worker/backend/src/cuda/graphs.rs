//! Records the launches of a pass and replays them as one graph for similar passes, so that the device does not wait
//! for the host between kernels. Only where every slice is one row: those passes are short, and there are many.
//!
//! All differences between two passes of one outline are in the arena of `uploads`, never in an argument: positions,
//! slots, items, tables, tokens. An outline is recorded at its second pass, when all one-time allocations and uploads
//! are done. Rows are padded to a few numbers, and tiles of attention to powers of four.
//!
//! Instantiated graphs take memory of the device, up to a limit that is counted here and that `free_bytes` leaves out.
//! The memory is not reserved before: a reservation would have to be freed piece by piece, between passes.

use super::driver::{Card, Context, Graph, Stream, StreamRecord};
use super::outline::PassOutline;
use crate::{BatchLimits, Pass, PassStats, Result};
use std::collections::BTreeMap;

/// The share of the device's memory for graphs, as a divisor; and their absolute limit.
const SHARE: u64 = 64;
const BYTES_MAX: u64 = 512 << 20;
/// The estimated size of a graph's node; the real size is measured once the graph exists.
const NODE_BYTES: usize = 8 << 10;
const PIECE: usize = 2 << 20;

pub(super) struct GraphCache {
    is_on: bool,
    /// The rows of the buffers that passes use.
    rows_max: usize,
    known: BTreeMap<PassOutline, GraphState>,
    /// In bytes: the limit of graphs, and their current use.
    n_max: usize,
    n_used: usize,
    pub counts: PassStats,
    /// Whether a record is being made.
    pub is_recording: bool,
}

enum GraphState {
    /// It occurred once.
    Seen,
    Kept(Graph),
    Refused,
}

/// How a pass is run.
pub(super) enum PassMode {
    Plain,
    Record(PassOutline),
    Replay(PassOutline),
}

impl GraphCache {
    pub fn new(card: &Card, is_on: bool) -> GraphCache {
        let n_max = if is_on { (card.memory_bytes / SHARE).min(BYTES_MAX) as usize } else { 0 };
        // A driver allocates memory for them in whole pieces.
        let n_max = n_max - n_max % PIECE;
        let (known, counts) = (BTreeMap::new(), PassStats::default());
        GraphCache { is_on, rows_max: 0, known, n_max, n_used: 0, counts, is_recording: false }
    }

    /// Returns the bytes that graphs may still take.
    pub fn n_left(&self) -> usize {
        self.n_max.saturating_sub(self.n_used)
    }

    pub fn set_limits(&mut self, limits: BatchLimits) {
        self.rows_max = limits.rows_max;
    }

    pub fn rows_for(&self, pass: &Pass<'_>) -> usize {
        if self.is_on { PassOutline::padded_rows(pass, self.rows_max) } else { pass.n_rows() }
    }

    pub fn mode_for(&mut self, outline: Option<PassOutline>) -> PassMode {
        let Some(outline) = outline.filter(|_| self.is_on && !self.is_recording) else {
            self.counts.plain += 1;
            return PassMode::Plain;
        };
        match self.known.get(&outline) {
            Some(GraphState::Kept(_)) => return PassMode::Replay(outline),
            Some(GraphState::Seen) => return PassMode::Record(outline),
            Some(GraphState::Refused) => {}
            None => drop(self.known.insert(outline, GraphState::Seen)),
        }
        self.counts.plain += 1;
        PassMode::Plain
    }

    pub fn replay(&mut self, outline: PassOutline, stream: &Stream) -> Result<()> {
        self.counts.replayed += 1;
        match self.known.get(&outline) {
            Some(GraphState::Kept(graph)) => stream.replay(graph),
            _ => unreachable!("only a stored graph is replayed"),
        }
    }

    /// Instantiates a graph of the record, if there is room for it.
    pub fn instantiate(&mut self, outline: PassOutline, record: &StreamRecord, context: &Context, stream: &Stream) {
        match self.make(record, context, stream) {
            Ok(Some(graph)) => {
                self.counts.recorded += 1;
                self.known.insert(outline, GraphState::Kept(graph));
            }
            _ => self.refuse(outline),
        }
    }

    fn make(&mut self, record: &StreamRecord, context: &Context, stream: &Stream) -> Result<Option<Graph>> {
        let (n_bytes, before) = (record.n_nodes()? * NODE_BYTES, context.free_bytes()?);
        if n_bytes > self.n_left() || n_bytes as u64 > before {
            return Ok(None);
        }
        let graph = record.instantiate(stream)?;
        let taken = before.saturating_sub(context.free_bytes()?) as usize;
        // A graph beyond the limit uses memory that is promised to others.
        if taken > self.n_left() {
            return Ok(None);
        }
        self.n_used += taken.max(n_bytes);
        Ok(Some(graph))
    }

    /// Drops all graphs. The driver may keep their memory for others of the same size.
    pub fn forget(&mut self) {
        self.known.clear();
        self.n_used = 0;
    }

    pub fn refuse(&mut self, outline: PassOutline) {
        self.counts.refused += 1;
        self.known.insert(outline, GraphState::Refused);
    }
}
