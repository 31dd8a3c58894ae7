//! How ranks that have met as a mesh agree to exchange without the host: each tells its neighbours which NCCL and which
//! device it has, and who has the lowest rank of a pair or a stage makes the name that all of it meet under.

use super::table::{NcclVersion, Table, UniqueId};
use super::watch::{Fault, Watch};
use crate::doom::Ended;
use crate::error::{Error, Result};
use crate::frame::Kind;
use crate::mesh::Mesh;
use crate::moves::{Ends, Move, Way};
use backend::Memory;
use backend::cuda::{Cuda, Room, Side, Words};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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

const ID_WORDS: usize = 32;
const CARD_WORDS: usize = 6 + 2 * ID_WORDS;

/// What a rank tells its neighbours.
#[derive(Clone, Copy)]
struct Card {
    /// Which carrier it was told to take.
    wish: u32,
    /// Zero: it has none.
    version: i32,
    /// Which device of which host.
    device: [u32; 4],
    /// Made for its stage, and for its pair with the next.
    ids: [[u32; ID_WORDS]; 2],
}

impl Card {
    fn words(&self) -> [u32; CARD_WORDS] {
        let mut words = [0; CARD_WORDS];
        (words[0], words[1]) = (self.wish, self.version as u32);
        words[2..6].copy_from_slice(&self.device);
        words[6..].copy_from_slice(self.ids.as_flattened());
        words
    }

    fn of(words: &[u32; CARD_WORDS]) -> Card {
        let id = |i: usize| std::array::from_fn(|word| words[6 + i * ID_WORDS + word]);
        let device = std::array::from_fn(|i| words[2 + i]);
        Card { wish: words[0], version: words[1] as i32, device, ids: [id(0), id(1)] }
    }
}

/// Whether these ranks exchange through NCCL. All of them come to the same answer.
fn agree(cards: &[&Card]) -> Result<bool> {
    let wish = |carrier: Carrier| cards.iter().any(|card| card.wish == carrier as u32);
    if wish(Carrier::Nccl) && wish(Carrier::Host) {
        return Err(Error::Plan("ranks that are to exchange through NCCL, and their peers through the host"));
    }
    let version = cards[0].version;
    let is_there = version >= NcclVersion::MIN.0 && cards.iter().all(|card| card.version == version);
    let is_shared = (1..cards.len()).any(|i| cards[..i].iter().any(|card| card.device == cards[i].device));
    let is_able = is_there && (!is_shared || NcclVersion(version) >= NcclVersion::SHARING);
    if wish(Carrier::Nccl) && !is_able {
        return Err(Error::Plan(match is_there {
            true => "NCCL before 2.30 for ranks that share a device",
            false => "NCCL (libnccl.so.2, 2.18 or later) for ranks that do not all have the same",
        }));
    }
    // To share a device has to be allowed in NCCL's own environment, so that nobody gets there unasked.
    let is_asked = cards.iter().all(|card| card.wish == Carrier::Nccl as u32);
    Ok(!wish(Carrier::Host) && is_able && (!is_shared || is_asked))
}

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
        let card = self.card(cuda, carrier, table.as_ref())?;
        let cards = self.swap(&card)?;
        let group = |ranks: &[usize]| ranks.iter().map(|rank| &cards[*rank]).collect::<Vec<_>>();
        let me = usize::from(self.rank.0);
        let stage: Vec<usize> = (0..self.tp_size()).map(|tp| self.in_stage(tp)).collect();
        let next = (!self.part.is_last()).then(|| [me, me + self.tp_size()]);
        let before = (!self.part.is_first()).then(|| [me - self.tp_size(), me]);
        let is_direct = |ranks: &[usize]| if ranks.len() > 1 { agree(&group(ranks)) } else { Ok(false) };
        let pair = |ranks: Option<[usize; 2]>| ranks.map_or(Ok(false), |ranks| is_direct(&ranks));
        let (with_stage, with_next, with_before) = (is_direct(&stage)?, pair(next)?, pair(before)?);
        let Some(table) = table.filter(|_| with_stage || with_next || with_before) else { return Ok(false) };
        let id = |rank: usize, which: usize| UniqueId(cards[rank].ids[which]);
        let mut direct = self.watched(cuda, table, limits.pieces)?;
        let begin = |n: usize, id: UniqueId, rank: usize| {
            direct.watch.add(|table| table.init(n, id, rank)).map_err(|fault| match fault {
                Fault::Failed(why) => Error::Nccl(why),
                Fault::Aborted | Fault::Gone | Fault::Late => Error::Aborted,
            })
        };
        // Each comes into being while the others do.
        let stage = with_stage.then(|| begin(stage.len(), id(stage[0], 0), self.tp())).transpose()?;
        let next = with_next.then(|| begin(2, id(me, 1), 0)).transpose()?;
        let before = with_before.then(|| begin(2, id(me - self.tp_size(), 1), 1)).transpose()?;
        direct.stage = stage.map(|comm| self.stage(cuda, comm, limits)).transpose()?;
        let hop = |comm: usize, peer: usize| -> Result<Hop> {
            let floats = limits.pieces.rows_at_once(limits.hidden).min(limits.rows_max) * limits.hidden;
            Ok(Hop { comm, peer, side: cuda.side()?, room: cuda.room(floats)? })
        };
        direct.next = next.map(|comm| hop(comm, 1)).transpose()?;
        direct.before = before.map(|comm| hop(comm, 0)).transpose()?;
        self.await_comms(direct, [stage, next, before], ended)
    }

    /// All of them are there, or it is said why not.
    fn await_comms(&mut self, direct: Direct, comms: [Option<usize>; 3], ended: &Ended) -> Result<bool> {
        let until = Instant::now() + self.deadline();
        for comm in comms.into_iter().flatten() {
            let is_wanted = || !ended.is_said() && !self.is_ended() && !self.is_anybody_gone();
            if let Err(fault) = direct.watch.taken_up(comm, until, is_wanted) {
                let fault = if fault == Fault::Aborted && !ended.is_said() { Fault::Gone } else { fault };
                direct.watch.end(fault.clone());
                let error = self.blamed_by(&fault);
                return Err(self.fail(error));
            }
        }
        self.watched_by(direct.watch.clone());
        self.direct = Some(Box::new(direct));
        Ok(true)
    }

    fn card(&self, cuda: &Cuda, carrier: Carrier, table: Option<&Table>) -> Result<Card> {
        let version = table.map_or(Ok(NcclVersion(0)), Table::version)?;
        let make = |is_needed: bool| match table {
            Some(table) if is_needed && version >= NcclVersion::MIN && carrier != Carrier::Host => {
                Ok::<_, Error>(table.unique_id()?.0)
            }
            _ => Ok([0; ID_WORDS]),
        };
        let ids = [make(self.tp() == 0 && self.tp_size() > 1)?, make(!self.part.is_last())?];
        Ok(Card { wish: carrier as u32, version: version.0, device: device_name(cuda), ids })
    }

    /// Cards by rank; of those that are no neighbours, this rank's own.
    fn swap(&mut self, mine: &Card) -> Result<Vec<Card>> {
        let (me, tp_size) = (usize::from(self.rank.0), self.tp_size());
        let stage = self.in_stage(0);
        let hops = [me.checked_sub(tp_size), Some(me + tp_size).filter(|_| !self.part.is_last())];
        let neighbours = (stage..stage + tp_size).filter(|rank| *rank != me).chain(hops.into_iter().flatten());
        let mut cards = Cards { mine: mine.words(), theirs: vec![mine.words(); self.grid.n_ranks().into()] };
        for rank in neighbours.collect::<Vec<_>>() {
            let both = [Way::Out, Way::In].map(|way| Move::block(rank, way, 1, 0..CARD_WORDS));
            self.moves.extend(both);
        }
        self.exchange(Kind::Cards, CARD_WORDS as u64, &|_| 0, &mut cards)?;
        Ok(cards.theirs.iter().map(Card::of).collect())
    }

    fn watched(&self, cuda: &Cuda, table: Table, pieces: Pieces) -> Result<Direct> {
        let marks = (0..=BEFORE).map(|_| cuda.new_mark()).collect::<backend::Result<_>>()?;
        cuda.enter()?;
        let watch = Arc::new(Watch::new(table, marks, self.doom(), self.deadline()));
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

/// The same for all processes that can reach the device.
fn device_name(cuda: &Cuda) -> [u32; 4] {
    // Where it cannot be read, hosts are told apart by nothing, and devices look shared: the host carries.
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&boot);
    for number in cuda.card().pci {
        hasher.update(&number.to_le_bytes());
    }
    let hash = hasher.finalize();
    let words = hash.as_bytes().as_chunks::<4>().0;
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

struct Cards {
    mine: [u32; CARD_WORDS],
    theirs: Vec<[u32; CARD_WORDS]>,
}

impl Ends for Cards {
    fn read(&mut self, _row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.mine[col..][..out.len()]);
    }

    fn write(&mut self, peer: usize, _row: usize, col: usize, words: &[u32]) {
        self.theirs[peer][col..][..words.len()].copy_from_slice(words);
    }
}

impl Mesh {
    fn deadline(&self) -> Duration {
        self.waits().deadline
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(wish: Carrier, version: i32, device: u32) -> Card {
        Card { wish: wish as u32, version, device: [device; 4], ids: [[0; ID_WORDS]; 2] }
    }

    fn agreed(cards: &[Card]) -> Option<bool> {
        agree(&cards.iter().collect::<Vec<_>>()).ok()
    }

    #[test]
    fn all_have_it_or_nobody_does() {
        let auto = |version, device| card(Carrier::Auto, version, device);
        assert_eq!(agreed(&[auto(22_800, 1), auto(22_800, 2)]), Some(true));
        assert_eq!(agreed(&[auto(22_800, 1), auto(0, 2)]), Some(false));
        assert_eq!(agreed(&[auto(22_800, 1), auto(23_007, 2)]), Some(false));
        assert_eq!(agreed(&[auto(21_000, 1), auto(21_000, 2)]), Some(false));
        assert_eq!(agreed(&[auto(22_800, 1), card(Carrier::Host, 22_800, 2)]), Some(false));
    }

    #[test]
    fn a_device_is_shared_only_by_those_who_ask_for_it() {
        let both = |wish, version| agreed(&[card(wish, version, 1), card(wish, version, 1)]);
        assert_eq!(both(Carrier::Auto, 23_007), Some(false));
        assert_eq!(both(Carrier::Nccl, 23_007), Some(true));
        assert_eq!(both(Carrier::Nccl, 22_800), None);
        assert_eq!(both(Carrier::Nccl, 0), None);
        assert_eq!(agreed(&[card(Carrier::Nccl, 23_007, 1), card(Carrier::Host, 23_007, 2)]), None);
    }

    #[test]
    fn cards_come_back() {
        let mut there = card(Carrier::Nccl, 23_007, 5);
        there.ids[1][31] = 77;
        let back = Card::of(&there.words());
        assert_eq!((back.wish, back.version, back.device, back.ids), (2, 23_007, [5; 4], there.ids));
    }
}
