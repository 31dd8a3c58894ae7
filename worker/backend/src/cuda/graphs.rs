//! Passes of which one is like another: their launches are recorded and begun again as one, so that the device does not
//! wait for the host between kernels. Only where every slice is a row: those passes are short, and there are many.
//!
//! What differs between two passes of one outline lies in the arena of `uploads`, never in an argument: positions,
//! slots, items, tables, tokens. An outline is recorded when it comes the second time: what is allocated or told to the
//! device once has been by then. Rows are filled up to a few numbers, and tiles of attention to powers of four.
//!
//! Graphs take memory of the device when they are made ready, up to a limit that is counted here and that `free_bytes`
//! leaves out. It is not held until then: giving it back piece by piece would free memory between passes.

use super::attention::n_tiles;
use super::driver::{Card, Context, Graph, Record, Stream};
use super::{Cuda, lock};
use crate::{BatchLimits, Pass, Repeat, Repeats, Result};
use std::collections::BTreeMap;

/// Rows that passes are filled up to. The kernels for products take 8, 16, 32 and 64 rows at a time.
const ROWS: [u32; 11] = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256];
/// Of the device's memory, what graphs may take; and at most so much.
const SHARE: u64 = 64;
const BYTES_MAX: u64 = 512 << 20;
/// Of a graph, as far as is known before it is made; then it is measured.
const NODE_BYTES: usize = 8 << 10;
const PIECE: usize = 2 << 20;

/// What passes have in common that may be begun from one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Outline {
    n_rows: u32,
    /// Of attention, as many as there may be positions for.
    pub n_tiles: u32,
}

impl Outline {
    pub fn of(pass: &Pass<'_>) -> Option<Outline> {
        let n_rows = u32::try_from(pass.n_rows()).ok().filter(|n| ROWS.contains(n))?;
        let is_single = !pass.slices.is_empty() && pass.slices.iter().all(|slice| slice.rows.len() == 1);
        // 1, 4, 16, ..
        let at_least = |n: u32| 1 << (n.max(1).next_power_of_two().ilog2().next_multiple_of(2));
        is_single.then(|| Outline { n_rows, n_tiles: at_least(n_tiles(pass)) })
    }

    /// The rows that a pass is filled up to, in buffers for so many.
    fn rows_for(pass: &Pass<'_>, rows_max: usize) -> usize {
        let n_rows = pass.n_rows();
        let is_single = pass.slices.iter().all(|slice| slice.rows.len() == 1);
        let filled = ROWS.iter().map(|rows| *rows as usize).find(|rows| *rows >= n_rows);
        filled.filter(|rows| is_single && n_rows > 0 && *rows <= rows_max).unwrap_or(n_rows)
    }
}

pub(super) struct Graphs {
    is_on: bool,
    /// Of the buffers that passes work in.
    rows_max: usize,
    known: BTreeMap<Outline, Known>,
    /// In bytes: what graphs may take, and what they have taken.
    n_max: usize,
    n_used: usize,
    counts: Repeats,
    /// A record is being made.
    is_recording: bool,
}

enum Known {
    /// It has been there once.
    Seen,
    Kept(Graph),
    Refused,
}

/// What is done with a pass.
enum Turn {
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

    fn turn(&mut self, outline: Option<Outline>) -> Turn {
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

    fn replay(&mut self, outline: Outline, stream: &Stream) -> Result<()> {
        self.counts.replayed += 1;
        match self.known.get(&outline) {
            Some(Known::Kept(graph)) => stream.replay(graph),
            _ => unreachable!("it is this turn because it is kept"),
        }
    }

    /// A graph of what was recorded, if there is room for it.
    fn keep(&mut self, outline: Outline, record: &Record, context: &Context, stream: &Stream) {
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
    fn forget(&mut self) {
        self.known.clear();
        self.n_used = 0;
    }

    fn refuse(&mut self, outline: Outline) {
        self.counts.refused += 1;
        self.known.insert(outline, Known::Refused);
    }
}

impl Cuda {
    /// Whether what is begun is recorded and not done.
    pub(super) fn is_recording(&self) -> bool {
        lock(&self.graphs).is_recording
    }

    /// Whatever lies elsewhere from now on: no record may name where it was.
    pub(super) fn forget_graphs(&self) {
        lock(&self.graphs).forget();
    }

    pub(super) fn repeats_so_far(&self) -> Repeats {
        lock(&self.graphs).counts
    }

    pub(super) fn repeat_work<E>(
        &self,
        mut work: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Repeat, E> {
        let outline = lock(&self.uploads).batch.outline.filter(|_| self.is_well());
        let turn = lock(&self.graphs).turn(outline);
        match turn {
            Turn::Plain => work().map(|()| Repeat::Done),
            Turn::Replay(outline) => {
                let begun = lock(&self.graphs).replay(outline, &self.stream);
                self.note(begun);
                Ok(Repeat::Begun)
            }
            Turn::Record(outline) => self.record(outline, &mut work).map(|()| Repeat::Recorded),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, PassSlice};
    use types::Want;

    fn batch(n_rows: u32, position: u32) -> Batch {
        let slice = |row| PassSlice::new(row..row + 1, position, Want::Last);
        let (tokens, positions) = (vec![1; n_rows as usize], vec![position; n_rows as usize]);
        Batch { tokens, positions, slices: (0..n_rows).map(slice).collect(), ..Batch::default() }
    }

    #[test]
    fn batches_are_filled_up_to_few_outlines() {
        let rows = |n, rows_max| Outline::rows_for(&batch(n, 5).pass(), rows_max);
        assert_eq!([1, 3, 5, 64, 65, 257].map(|n| rows(n, 512)), [1, 4, 8, 64, 96, 257]);
        assert_eq!([5, 7].map(|n| rows(n, 7)), [5, 7], "no more rows than buffers have");
        let mut long = batch(3, 5);
        long.slices.truncate(1);
        long.slices[0].rows = 0..3;
        assert_eq!(Outline::rows_for(&long.pass(), 512), 3);
        long.pad(4);
        assert_eq!(Outline::of(&long.pass()), None);
    }

    #[test]
    fn positions_of_one_outline_are_many() {
        let tiles = |position| Outline::of(&batch(4, position).pass()).map(|outline| outline.n_tiles);
        let positions = [0, 255, 256, 1023, 1024, 16 * 256 - 1, 16 * 256];
        assert_eq!(positions.map(tiles), [1, 1, 4, 4, 16, 16, 64].map(Some));
        assert_eq!(Outline::of(&batch(3, 5).pass()), None, "three rows are filled up first");
        let mut filled = batch(3, 5);
        filled.pad(4);
        assert!(filled.pass().is_tiled() && filled.n_padding == 1);
        assert_eq!(Outline::of(&filled.pass()), Outline::of(&batch(4, 5).pass()));
    }
}
