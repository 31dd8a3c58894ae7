//! How ranks that have met as a mesh come to exchange without the host: what is made for it on the device, and the
//! communicators, which have exchanged once before they are believed.

use super::cards::{Card, Names, Partners};
use super::table::{Comm, Table, UniqueId};
use super::watch::{Fault, Watch};
use crate::doom::Ended;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use backend::Memory;
use backend::cuda::{Cuda, Room, Side, Words};
use std::ffi::CStr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// What carries numbers between the ranks' devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carrier {
    /// NCCL where all who exchange have it, each with a device of its own; otherwise the host. Sums of ranks whose
    /// devices reach each other's memory go over that: small ones, and without NCCL all.
    #[default]
    Auto,
    /// The mesh, through the host.
    Host,
    /// NCCL alone, or nothing. From 2.30 on ranks may share a device.
    Nccl,
    /// As `Auto`, but sums go over the devices' memory or nowhere, and ranks may share a device for that.
    Ipc,
}

/// The largest exchanges: what memory is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectLimits {
    /// Rows of one pass.
    pub rows_max: usize,
    /// Columns of a row.
    pub hidden: usize,
    /// Rows whose logits are wanted.
    pub outputs_max: usize,
    pub n_vocab: usize,
    /// How many leaves the model's sums have.
    pub n_leaves: Vec<u32>,
    pub pieces: Pieces,
}

/// How what is large is cut, in numbers of 32 bits. Changes no bit of any sum, but all ranks must cut alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// A rank's planes up to here are gathered whole, and every rank folds them: one message's latency instead of two.
    pub small_max: usize,
    /// Rows on their way at a time: so many numbers, or one row.
    pub piece_max: usize,
}

impl Default for Pieces {
    fn default() -> Pieces {
        Pieces { small_max: 256 << 10, piece_max: 4 << 20 }
    }
}

impl Pieces {
    /// Rows of so many columns that go together.
    pub(crate) fn rows_at_once(self, n_cols: usize) -> usize {
        (self.piece_max / n_cols.max(1)).max(1)
    }
}

/// Exchange without the host.
pub(crate) struct Direct {
    pub watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
    pub pieces: Pieces,
    pub stage: Option<Stage>,
    /// To the next stage, and from the one before.
    pub next: Option<Hop>,
    pub before: Option<Hop>,
}

impl std::fmt::Debug for Direct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Direct").field("watch", &self.watch).finish_non_exhaustive()
    }
}

/// Among the ranks of the stage, in the stream that computes.
pub(crate) struct Stage {
    pub comm: usize,
    /// What goes out by column, what came, what was folded, and the finished columns of all.
    pub out: Room,
    pub parts: Room,
    pub sum: Room,
    pub all: Room,
    /// How often to merge behind each of the own planes, where they are added one after the other.
    pub in_a_row: Words,
    /// By number of leaves: how often to merge behind each plane.
    pub merges: Vec<(u32, Words)>,
}

/// With the same rank of a neighbouring stage, in a stream of its own: who computes does not wait for it.
pub(crate) struct Hop {
    pub comm: usize,
    /// The peer's number in it.
    pub peer: usize,
    pub side: Side,
    pub room: Room,
}

/// The marks of a watch.
pub(crate) const STAGE: usize = 0;
pub(crate) const NEXT: usize = 1;
pub(crate) const BEFORE: usize = 2;

/// Columns that a rank folds end on this.
pub(crate) const LINE: usize = 16;

/// What a kernel between stages takes of a device, in blocks: as it waits beside what computes, it holds its place all
/// the time, and a stage's kernels must find one beside those of both hops.
const HOP_BLOCKS: u16 = 4;

impl Mesh {
    /// Settles what carries numbers between the devices. All ranks do this at about the same time, behind the join.
    /// Says whether this rank exchanges with anybody without the host.
    pub fn take_device<M: Memory>(
        &mut self,
        device: &M,
        carrier: Carrier,
        limits: &DirectLimits,
        ended: &Ended,
    ) -> Result<bool> {
        let Some(cuda) = device.cuda() else {
            let is_asked = carrier == Carrier::Nccl;
            return if is_asked { Err(Error::Plan("NCCL between processors")) } else { Ok(false) };
        };
        let table = Table::find().ok();
        let partners = self.partners(&Card::new(cuda, carrier, table)?)?;
        let Some(table) = table.filter(|_| partners.has_any()) else { return Ok(false) };
        let names = self.names(table, partners)?;
        let mut direct = self.watched(cuda, table, limits.pieces)?;
        match self.connect(&mut direct, cuda, (partners, names), limits, ended) {
            Ok(()) => {
                self.direct = Some(Box::new(direct));
                Ok(true)
            }
            // The peers hear of it before the communicators end, which may take long.
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Each communicator comes into being while the others do.
    fn connect(
        &mut self,
        direct: &mut Direct,
        cuda: &Cuda,
        (partners, names): (Partners, Names),
        limits: &DirectLimits,
        ended: &Ended,
    ) -> Result<()> {
        let begin = |is_wanted: bool, comm: Comm| {
            let begun = is_wanted.then(|| direct.watch.add(comm)).transpose();
            begun.map_err(|fault| match fault {
                Fault::Failed(why) => Error::Nccl(why),
                Fault::Aborted | Fault::Gone | Fault::Late => Error::Aborted,
            })
        };
        let pair = |name: &'static CStr, id: UniqueId, rank: usize| Comm {
            n_ranks: 2,
            id,
            rank,
            name,
            blocks_max: Some(HOP_BLOCKS),
        };
        let (n_ranks, rank) = (self.tp_size(), self.tp());
        let of_stage = Comm { n_ranks, id: names.stage, rank, name: c"lockstep stage", blocks_max: None };
        let stage = begin(partners.stage, of_stage)?;
        let next = begin(partners.next, pair(c"lockstep next", names.next, 0))?;
        let before = begin(partners.before, pair(c"lockstep before", names.before, 1))?;
        direct.stage = stage.map(|comm| self.stage(cuda, comm, limits)).transpose()?;
        let hop = |comm: usize, peer: usize| -> Result<Hop> {
            let floats = limits.pieces.rows_at_once(limits.hidden).min(limits.rows_max) * limits.hidden;
            Ok(Hop { comm, peer, side: cuda.side()?, room: cuda.room(floats)? })
        };
        direct.next = next.map(|comm| hop(comm, 1)).transpose()?;
        direct.before = before.map(|comm| hop(comm, 0)).transpose()?;
        self.await_comms(direct, [stage, next, before], ended)?;
        self.watched_by(&direct.watch);
        self.try_out(cuda, direct, limits)
    }

    /// All of them are there, or it is said why not.
    fn await_comms(&mut self, direct: &Direct, comms: [Option<usize>; 3], ended: &Ended) -> Result<()> {
        let until = Instant::now() + self.waits().deadline;
        for comm in comms.into_iter().flatten() {
            let is_wanted = || !ended.is_said() && !self.is_ended() && !self.is_anybody_gone();
            if let Err(fault) = direct.watch.taken_up(comm, until, is_wanted) {
                let fault = if fault == Fault::Aborted && !ended.is_said() { Fault::Gone } else { fault };
                return Err(self.blamed_by(&fault));
            }
        }
        Ok(())
    }

    fn watched(&self, cuda: &Cuda, table: &'static Table, pieces: Pieces) -> Result<Direct> {
        let marks = (0..=BEFORE).map(|_| cuda.new_mark()).collect::<backend::Result<_>>()?;
        cuda.enter()?;
        let watch = Arc::new(Watch::new(table, marks, self.doom(), self.waits()));
        let thread = {
            let watch = watch.clone();
            let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || watch.keep());
            thread.map_err(|source| Error::Io { what: "a thread to look after NCCL", source })?
        };
        Ok(Direct { watch, thread: Some(thread), pieces, stage: None, next: None, before: None })
    }

    fn stage(&mut self, cuda: &Cuda, comm: usize, limits: &DirectLimits) -> Result<Stage> {
        let DirectLimits { rows_max, hidden, outputs_max, n_vocab, pieces, .. } = *limits;
        let n_rows = pieces.rows_at_once(hidden).min(rows_max);
        let columns = (hidden / self.tp_size() + LINE).min(hidden);
        let (mut n_own, mut n_planes) = (1, 1);
        for n_leaves in &limits.n_leaves {
            let idx = self.sum_idx(*n_leaves);
            n_own = n_own.max(self.n_planes(idx, self.tp()));
            n_planes = n_planes.max(self.scratch.sums[idx].1.len());
        }
        let small = n_planes * pieces.small_max.min(rows_max * hidden);
        let logits = pieces.rows_at_once(n_vocab).min(outputs_max) * n_vocab;
        let mut stage = Stage {
            comm,
            out: cuda.room(n_own * n_rows * hidden)?,
            parts: cuda.room(small.max(n_planes * n_rows * columns).max(n_rows * hidden).max(logits))?,
            sum: cuda.room(n_rows * columns)?,
            all: cuda.room(n_rows * hidden)?,
            in_a_row: cuda.words(&(0..n_own).map(|i| u8::from(i > 0)).collect::<Vec<_>>())?,
            merges: Vec::new(),
        };
        for n_leaves in &limits.n_leaves {
            self.merges(cuda, &mut stage, *n_leaves)?;
        }
        Ok(stage)
    }
}

impl Direct {
    /// What was begun comes to its end, if it does so soon.
    pub fn finish(&self) {
        self.watch.finish();
    }

    /// In good order, when nothing is to come any more.
    pub fn leave(&self) {
        self.watch.leave();
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        // If nothing has been said before, it is broken off.
        self.watch.abort();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ended = thread.join();
        }
        self.watch.has_ended();
    }
}
