//! The operations of a mesh whose numbers stay on the devices. They begin what is to be done, in the device's own
//! order, and return; the sums are those of the host's mesh, bit for bit, as it is the same tree that is folded. Under
//! `fast` they are NCCL's own.

use super::meet::{BEFORE, Direct, DirectLimits, Hop, LINE, NEXT, Pieces, STAGE, Stage};
use super::watch::{Fault, Lane, Watch};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::nccl::NcclError;
use backend::Memory;
use backend::cuda::{Buffer, Columns, Cuda, Floats};
use std::ops::Range;
use types::Pace;
use types::leaves::Fold;

/// Between sizes that are tried out: each is a way's at least, so far apart do they lie.
const TRIED_EVERY: usize = 4;

/// A row-parallel product on the device.
#[derive(Clone, Copy)]
pub(crate) struct Planes {
    /// Of `Scratch::sums`.
    pub idx: usize,
    pub n_leaves: u32,
    pub n_rows: usize,
    pub n_cols: usize,
}

/// Why an operation was not begun.
enum Stopped {
    Fault(Fault),
    Device(backend::Error),
}

impl From<Fault> for Stopped {
    fn from(fault: Fault) -> Stopped {
        Stopped::Fault(fault)
    }
}

impl From<backend::Error> for Stopped {
    fn from(error: backend::Error) -> Stopped {
        Stopped::Device(error)
    }
}

type Begun = std::result::Result<(), Stopped>;

impl Mesh {
    pub(crate) fn settle_direct(&mut self) -> Result<()> {
        let fault = self.direct.as_ref().and_then(|direct| direct.watch.fault().cloned());
        match fault {
            None => Ok(()),
            Some(fault) => Err(self.ended_by(&fault)),
        }
    }

    pub(crate) fn adds_on_device(&self) -> bool {
        self.tp_size() == 1 || self.has_direct_stage() || self.has_desks()
    }

    /// What was recorded is under way: the watch looks after it as after what was begun.
    pub(crate) fn has_repeated<M: Memory>(&mut self, device: &M) -> Result<()> {
        self.has_repeated_at_desks(device)?;
        let Some(cuda) = device.cuda().filter(|_| self.has_direct_stage()) else { return Ok(()) };
        self.directly(|_, direct| {
            direct.watch.begins();
            Ok(cuda.mark(direct.watch.mark(STAGE))?)
        })
    }

    pub(crate) fn has_direct_stage(&self) -> bool {
        self.direct.as_ref().is_some_and(|direct| direct.stage.is_some())
    }

    pub(crate) fn has_direct_next(&self) -> bool {
        self.direct.as_ref().is_some_and(|direct| direct.next.is_some())
    }

    pub(crate) fn has_direct_before(&self) -> bool {
        self.direct.as_ref().is_some_and(|direct| direct.before.is_some())
    }

    /// Runs what needs the mesh and its direct part at once.
    fn directly(&mut self, begin: impl FnOnce(&mut Mesh, &mut Direct) -> Begun) -> Result<()> {
        let Some(mut direct) = self.direct.take() else { return Err(Error::NoPeer("peer on a device")) };
        // The watch hears of an abort a moment later, and until then would begin what nobody wants any more.
        if self.is_ended() && direct.watch.fault().is_none() {
            self.direct = Some(direct);
            return Err(Error::Aborted);
        }
        let begun = begin(self, &mut direct);
        self.direct = Some(direct);
        match begun {
            Ok(()) => Ok(()),
            Err(Stopped::Fault(fault)) => Err(self.ended_by(&fault)),
            Err(Stopped::Device(error)) => Err(self.fail(error.into())),
        }
    }

    /// The peers hear of it first: communicators may end slowly.
    fn ended_by(&mut self, fault: &Fault) -> Error {
        let blamed = self.blamed_by(fault);
        let error = self.fail(blamed);
        if let Some(direct) = &self.direct {
            direct.watch.end(fault.clone());
        }
        error
    }

    /// Each communicator exchanges as it will later. NCCL connects ranks, and takes memory for that, when they first
    /// exchange in some way: that may wait for whole devices, and so must not be while one waits for a peer.
    pub(crate) fn try_out(&mut self, cuda: &Cuda, direct: &Direct, limits: &DirectLimits) -> Result<()> {
        self.try_each(cuda, direct, limits).map_err(|stopped| match stopped {
            Stopped::Fault(fault) => self.blamed_by(&fault),
            Stopped::Device(error) => error.into(),
        })
    }

    fn try_each(&self, cuda: &Cuda, direct: &Direct, limits: &DirectLimits) -> Begun {
        let watch = &*direct.watch;
        if let Some(stage) = &direct.stage {
            self.try_stage(cuda, watch, stage, limits)?;
            cuda.mark(watch.mark(STAGE))?;
        }
        // As rows go: who is in between receives before it sends.
        if let Some(hop) = &direct.before {
            let at = hop.room.floats().part(0..1).address();
            // SAFETY: the room lives as long as the hop, which goes when its stream is through.
            watch.begin(hop.comm, hop.side.raw(), |lane| unsafe { lane.recv(at, 1, hop.peer) })?;
            hop.side.mark(watch.mark(BEFORE))?;
        }
        if let Some(hop) = &direct.next {
            let at = hop.room.floats().part(0..1).address();
            // SAFETY: as above.
            watch.begin(hop.comm, hop.side.raw(), |lane| unsafe { lane.send(at, 1, hop.peer) })?;
            hop.side.mark(watch.mark(NEXT))?;
        }
        Ok(watch.passed()?)
    }

    /// All pairs; and the collective operations in all sizes that ways are chosen by, with whatever lies there.
    fn try_stage(&self, cuda: &Cuda, watch: &Watch, stage: &Stage, limits: &DirectLimits) -> Begun {
        let (all, parts, n_ranks) = (stage.all.floats(), stage.parts.floats(), self.tp_size());
        let piece = limits.pieces.rows_at_once(limits.hidden).min(limits.rows_max) * limits.hidden;
        let one = |tp: usize| parts.part(tp % parts.len()..tp % parts.len() + 1);
        watch.begin(stage.comm, cuda.raw_stream(), |lane| self.swap_floats(lane, |_| all.part(0..1), one))?;
        let n_max = match cuda.pace() {
            Pace::Fast => piece,
            Pace::Lockstep => limits.pieces.small_max.min(piece).min(parts.len() / n_ranks),
        };
        let mut n = n_max;
        while n > 0 {
            watch.begin(stage.comm, cuda.raw_stream(), |lane| {
                // SAFETY: all ranks have room for so many, which lives longer than the stream's work.
                unsafe {
                    match cuda.pace() {
                        Pace::Fast => lane.all_reduce(all.address(), n),
                        Pace::Lockstep => lane.all_gather(stage.out.floats().part(0..n).address(), parts.address(), n),
                    }
                }
            })?;
            n /= TRIED_EVERY;
        }
        Ok(())
    }

    /// Who is to blame, as far as the links know.
    pub(crate) fn blamed_by(&mut self, fault: &Fault) -> Error {
        if *fault == Fault::Aborted && self.is_ended() {
            return Error::Aborted;
        }
        if let Some(lost) = self.who_is_lost() {
            return lost;
        }
        match fault {
            Fault::Aborted => Error::Aborted,
            Fault::Failed(why) => Error::Nccl(why.clone()),
            Fault::Gone | Fault::Late => match self.only_peer() {
                Some(rank) if *fault == Fault::Gone => Error::PeerLost { rank },
                Some(rank) => Error::Deadline { rank },
                None => Error::Silence,
            },
        }
    }

    /// How often to merge behind each plane, on the device.
    pub(crate) fn merges(&mut self, cuda: &Cuda, stage: &mut Stage, n_leaves: u32) -> backend::Result<usize> {
        if let Some(at) = stage.merges.iter().position(|(n, _)| *n == n_leaves) {
            return Ok(at);
        }
        let idx = self.sum_idx(n_leaves);
        let mut tree = Fold::default();
        let counts: Vec<u8> = self.scratch.sums[idx].1.iter().map(|plane| tree.push(&plane.run) as u8).collect();
        stage.merges.push((n_leaves, cuda.words(&counts)?));
        Ok(stage.merges.len() - 1)
    }

    pub(crate) fn sum_on_device(&mut self, cuda: &Cuda, buffer: &Buffer, planes: Planes) -> Result<()> {
        let n_own = self.n_planes(planes.idx, self.tp()).max(1);
        let at = cuda.floats_of(buffer, n_own * planes.n_rows);
        self.directly(|mesh, direct| {
            let Direct { watch, pieces, stage: Some(stage), .. } = direct else { return Ok(()) };
            let size = planes.n_rows * planes.n_cols;
            if cuda.pace() == Pace::Fast {
                mesh.reduce(cuda, watch, stage, at, planes)?;
                return Ok(cuda.mark(watch.mark(STAGE))?);
            }
            let merges = mesh.merges(cuda, stage, planes.n_leaves)?;
            if mesh.n_planes_max(planes.idx) * size <= pieces.small_max {
                mesh.gather_and_fold(cuda, watch, stage, at, planes, merges)?;
            } else {
                for rows in in_pieces(*pieces, planes.n_rows, planes.n_cols) {
                    mesh.fold_by_column(cuda, watch, stage, at, planes, merges, rows)?;
                }
            }
            Ok(cuda.mark(watch.mark(STAGE))?)
        })
    }

    /// The own planes are added, and NCCL adds what all ranks have then.
    fn reduce(&self, cuda: &Cuda, watch: &Watch, stage: &Stage, at: Floats<'_>, planes: Planes) -> Begun {
        let (size, n_own) = (planes.n_rows * planes.n_cols, self.n_planes(planes.idx, self.tp()));
        let sum = at.part(0..size);
        match n_own {
            0 => cuda.zero(sum)?,
            1 => {}
            n => cuda.fold_planes(at.part(0..n * size), n, &stage.in_a_row, sum),
        }
        if size > 0 {
            // SAFETY: so many numbers are there, and live longer than the stream's work: freeing waits for it.
            let reduce = |lane: Lane<'_>| unsafe { lane.all_reduce(sum.address(), size) };
            watch.begin(stage.comm, cuda.raw_stream(), reduce)?;
        }
        Ok(())
    }

    /// Everybody has all planes, in the order of their leaves, and folds them.
    fn gather_and_fold(
        &self,
        cuda: &Cuda,
        watch: &Watch,
        stage: &Stage,
        at: Floats<'_>,
        planes: Planes,
        merges: usize,
    ) -> Begun {
        let (size, me) = (planes.n_rows * planes.n_cols, self.tp());
        let n_of = |tp: usize| self.n_planes(planes.idx, tp) * size;
        let first_of = |tp: usize| (0..tp).map(n_of).sum::<usize>();
        let parts = stage.parts.floats();
        let n_all = first_of(self.tp_size());
        if (0..self.tp_size()).all(|tp| n_of(tp) == n_of(0)) {
            let (from, to) = (at.part(0..n_of(me)).address(), parts.part(0..n_all).address());
            // SAFETY: both were seen to be so long, and live longer than the stream's work: freeing waits for it.
            watch.begin(stage.comm, cuda.raw_stream(), |lane| unsafe { lane.all_gather(from, to, n_of(me)) })?;
        } else {
            let own = parts.part(first_of(me)..first_of(me) + n_of(me));
            let as_row = |floats| Columns { floats, stride: n_of(me) };
            cuda.copy_columns(as_row(own), as_row(at), n_of(me), 1)?;
            let sends = |_| at.part(0..n_of(me));
            let comes = |tp: usize| parts.part(first_of(tp)..first_of(tp) + n_of(tp));
            watch.begin(stage.comm, cuda.raw_stream(), |lane| self.swap_floats(lane, sends, comes))?;
        }
        let words = &stage.merges[merges].1;
        cuda.fold_planes(parts.part(0..n_all), n_all / size.max(1), words, at.part(0..size));
        Ok(())
    }

    /// Each rank has its columns of all planes and folds those; then everybody has the finished columns of all.
    #[expect(clippy::too_many_arguments, reason = "one step of one sum; each argument is where something lies")]
    fn fold_by_column(
        &self,
        cuda: &Cuda,
        watch: &Watch,
        stage: &Stage,
        at: Floats<'_>,
        planes: Planes,
        merges: usize,
        rows: Range<usize>,
    ) -> Begun {
        let (me, n_rows, n_cols) = (self.tp(), rows.len(), planes.n_cols);
        let cols = |tp: usize| self.cut_on(LINE, n_cols, tp);
        let n_own = self.n_planes(planes.idx, me);
        // A rank's columns of the own planes: what it is sent.
        let out = |tp: usize| stage.out.floats().part(n_own * n_rows * cols(tp).start..n_own * n_rows * cols(tp).end);
        let plane = n_rows * cols(me).len();
        let first_of = |tp: usize| (0..tp).map(|tp| self.n_planes(planes.idx, tp)).sum::<usize>() * plane;
        let part = |tp: usize| stage.parts.floats().part(first_of(tp)..first_of(tp + 1));
        let whole = |number: usize, cols: &Range<usize>| Columns {
            floats: at.part((number * planes.n_rows + rows.start) * n_cols + cols.start..at.len()),
            stride: n_cols,
        };
        for tp in 0..self.tp_size() {
            let (to, width) = (if tp == me { part(me) } else { out(tp) }, cols(tp).len());
            for number in 0..n_own {
                let to = Columns { floats: to.part(number * n_rows * width..to.len()), stride: width };
                cuda.copy_columns(to, whole(number, &cols(tp)), width, n_rows)?;
            }
        }
        watch.begin(stage.comm, cuda.raw_stream(), |lane| self.swap_floats(lane, out, part))?;
        let (sum, n_all) = (stage.sum.floats().part(0..plane), first_of(self.tp_size()));
        if let Some(n_planes) = n_all.checked_div(plane) {
            let words = &stage.merges[merges].1;
            cuda.fold_planes(stage.parts.floats().part(0..n_all), n_planes, words, sum);
        }
        let finished = |tp: usize| stage.all.floats().part(n_rows * cols(tp).start..n_rows * cols(tp).end);
        watch.begin(stage.comm, cuda.raw_stream(), |lane| self.swap_floats(lane, |_| sum, finished))?;
        for tp in 0..self.tp_size() {
            let from = Columns { floats: if tp == me { sum } else { finished(tp) }, stride: cols(tp).len() };
            cuda.copy_columns(whole(0, &cols(tp)), from, cols(tp).len(), n_rows)?;
        }
        Ok(())
    }

    /// To and from every other rank of the stage.
    fn swap_floats<'a>(
        &self,
        lane: Lane<'_>,
        sends: impl Fn(usize) -> Floats<'a>,
        comes: impl Fn(usize) -> Floats<'a>,
    ) -> std::result::Result<(), NcclError> {
        for tp in self.others() {
            let (to, from) = (sends(tp), comes(tp));
            // SAFETY: memory of the device, which lives longer than the stream's work: freeing waits for it.
            unsafe {
                if !to.is_empty() {
                    lane.send(to.address(), to.len(), tp)?;
                }
                if !from.is_empty() {
                    lane.recv(from.address(), from.len(), tp)?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn share_on_device(
        &mut self,
        cuda: &Cuda,
        buffer: &Buffer,
        owner_of: impl Fn(usize) -> u32,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<()> {
        let at = cuda.floats_of(buffer, n_rows);
        self.directly(|mesh, direct| {
            let Direct { watch, pieces, stage: Some(stage), .. } = direct else { return Ok(()) };
            for rows in in_pieces(*pieces, n_rows, n_cols) {
                let owners: Vec<usize> = rows.clone().map(|row| owner_of(row) as usize).collect();
                mesh.share_some(cuda, watch, stage, at.part(rows.start * n_cols..rows.end * n_cols), &owners, n_cols)?;
            }
            Ok(cuda.mark(watch.mark(STAGE))?)
        })
    }

    /// The own rows leave beside each other; those of all come by owner, and go where they belong.
    fn share_some(
        &self,
        cuda: &Cuda,
        watch: &Watch,
        stage: &Stage,
        at: Floats<'_>,
        owners: &[usize],
        n_cols: usize,
    ) -> Begun {
        let rows_of = |tp: usize| (0..owners.len()).filter(move |row| owners[*row] == tp);
        let first_of = |tp: usize| (0..tp).map(|tp| rows_of(tp).count()).sum::<usize>() * n_cols;
        let parts = stage.parts.floats();
        let part = |tp: usize| parts.part(first_of(tp)..first_of(tp + 1));
        let mine: Vec<u32> = rows_of(self.tp()).map(|row| row as u32).collect();
        cuda.gather_floats(at, &mine, n_cols, part(self.tp()));
        watch.begin(stage.comm, cuda.raw_stream(), |lane| self.swap_floats(lane, |_| part(self.tp()), part))?;
        let mut place = vec![0u32; owners.len()];
        let in_order = (0..self.tp_size()).flat_map(rows_of);
        in_order.enumerate().for_each(|(i, row)| place[row] = i as u32);
        cuda.gather_floats(parts, &place, n_cols, at);
        Ok(())
    }

    /// The columns that rank `tp` has of `n_units`.
    pub(crate) fn gather_on_device(
        &mut self,
        cuda: &Cuda,
        mine: &Buffer,
        whole: &Buffer,
        n_units: u32,
        n_rows: usize,
    ) -> Result<()> {
        let mine = cuda.floats_of(mine, n_rows);
        self.directly(|mesh, direct| {
            let Direct { watch, pieces, stage: Some(stage), .. } = direct else { return Ok(()) };
            let shares = mesh.part.shares.clone();
            let cols = |tp: usize| {
                let units = shares.of(tp as u16, n_units);
                units.start as usize..units.end as usize
            };
            let (me, n_whole) = (mesh.tp(), n_units as usize);
            for rows in in_pieces(*pieces, n_rows, n_whole) {
                let mine = mine.part(rows.start * cols(me).len()..rows.end * cols(me).len());
                if me != 0 {
                    // SAFETY: the buffer outlives the stream's work.
                    let send = |lane: Lane<'_>| unsafe { lane.send(mine.address(), mine.len(), 0) };
                    if !mine.is_empty() {
                        watch.begin(stage.comm, cuda.raw_stream(), send)?;
                    }
                    continue;
                }
                let whole = cuda.floats_of(whole, n_rows).part(rows.start * n_whole..rows.end * n_whole);
                let part =
                    |tp: usize| stage.parts.floats().part(rows.len() * cols(tp).start..rows.len() * cols(tp).end);
                watch.begin(stage.comm, cuda.raw_stream(), |lane| {
                    let others = mesh.others().filter(|tp| !cols(*tp).is_empty());
                    // SAFETY: as above.
                    others
                        .map(|tp| (tp, part(tp)))
                        .try_for_each(|(tp, to)| unsafe { lane.recv(to.address(), to.len(), tp) })
                })?;
                for tp in 0..mesh.tp_size() {
                    let from = Columns { floats: if tp == me { mine } else { part(tp) }, stride: cols(tp).len() };
                    let to = Columns { floats: whole.part(cols(tp).start..whole.len()), stride: n_whole };
                    cuda.copy_columns(to, from, cols(tp).len(), rows.len())?;
                }
            }
            Ok(cuda.mark(watch.mark(STAGE))?)
        })
    }

    /// Copied aside, and sent from there while the next pass computes.
    pub(crate) fn send_on_device(&mut self, cuda: &Cuda, buffer: &Buffer, n_rows: usize, n_cols: usize) -> Result<()> {
        let at = cuda.floats_of(buffer, n_rows);
        self.directly(|_, direct| {
            let Direct { watch, pieces, next: Some(hop), .. } = direct else { return Ok(()) };
            in_pieces(*pieces, n_rows, n_cols).try_for_each(|rows| {
                let (from, aside) = of_hop(at, hop, rows.start * n_cols..rows.end * n_cols);
                // What was sent from there before has left.
                cuda.waits_for(watch.mark(NEXT))?;
                cuda.copy_columns(as_row(aside), as_row(from), from.len(), 1)?;
                cuda.hands_over(&hop.side)?;
                hop.side.follow()?;
                // SAFETY: the room lives as long as the hop, which goes when its stream is through.
                let send = |lane: Lane<'_>| unsafe { lane.send(aside.address(), aside.len(), hop.peer) };
                watch.begin(hop.comm, hop.side.raw(), send)?;
                Ok(hop.side.mark(watch.mark(NEXT))?)
            })
        })
    }

    /// Received aside while the pass before computes, and copied from there.
    pub(crate) fn recv_on_device(&mut self, cuda: &Cuda, buffer: &Buffer, n_rows: usize, n_cols: usize) -> Result<()> {
        let at = cuda.floats_of(buffer, n_rows);
        self.directly(|_, direct| {
            let Direct { watch, pieces, before: Some(hop), .. } = direct else { return Ok(()) };
            in_pieces(*pieces, n_rows, n_cols).try_for_each(|rows| {
                let (to, aside) = of_hop(at, hop, rows.start * n_cols..rows.end * n_cols);
                // What was received there before has been copied.
                hop.side.follow()?;
                // SAFETY: as above.
                let recv = |lane: Lane<'_>| unsafe { lane.recv(aside.address(), aside.len(), hop.peer) };
                watch.begin(hop.comm, hop.side.raw(), recv)?;
                hop.side.mark(watch.mark(BEFORE))?;
                cuda.waits_for(watch.mark(BEFORE))?;
                cuda.copy_columns(as_row(to), as_row(aside), to.len(), 1)?;
                Ok(cuda.hands_over(&hop.side)?)
            })
        })
    }
}

/// Rows that go together.
fn in_pieces(pieces: Pieces, n_rows: usize, n_cols: usize) -> impl Iterator<Item = Range<usize>> {
    let step = pieces.rows_at_once(n_cols);
    let n_rows = if n_cols > 0 { n_rows } else { 0 };
    (0..n_rows).step_by(step).map(move |start| start..(start + step).min(n_rows))
}

/// These numbers of a buffer, and their place in the room of a hop.
fn of_hop<'a>(at: Floats<'a>, hop: &'a Hop, floats: Range<usize>) -> (Floats<'a>, Floats<'a>) {
    let n = floats.len();
    (at.part(floats), hop.room.floats().part(0..n))
}

fn as_row(floats: Floats<'_>) -> Columns<'_> {
    Columns { floats, stride: floats.len() }
}
