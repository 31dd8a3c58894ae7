//! How the ranks of a stage come to see each other's desks: each says where it is, then, if it reaches all others,
//! where its desk is, and then whether it sees theirs. All of them do, or none does.

use super::watch::Watch;
use crate::error::{Error, Result};
use crate::frame::Kind;
use crate::mesh::Mesh;
use crate::moves::{Ends, Move, Way};
use crate::nccl::{Carrier, DirectLimits, Fault};
use crate::region;
use backend::Memory;
use backend::cuda::{Cuda, Desk, OneShot, Shown, Term};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use types::leaves::Fold;

/// The desks of a stage, and what looks after those who add there.
#[derive(Debug)]
pub(crate) struct Desks {
    pub watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
    /// By rank of the stage.
    shown: Vec<Shown>,
    /// By number of leaves.
    sums: Vec<(u32, OneShot)>,
}

/// Where a rank is, and what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    wish: u32,
    /// Which start of which machine. Zero where that cannot be told.
    host: [u32; 4],
    /// Its device there.
    pci: [u32; 3],
    process: [u32; 4],
}

const HELLO_WORDS: usize = 12;

impl Hello {
    fn words(&self) -> [u32; HELLO_WORDS] {
        let mut words = [0; HELLO_WORDS];
        words[0] = self.wish;
        words[1..5].copy_from_slice(&self.host);
        words[5..8].copy_from_slice(&self.pci);
        words[8..].copy_from_slice(&self.process);
        words
    }

    fn of(words: &[u32; HELLO_WORDS]) -> Hello {
        let four = |at: usize| std::array::from_fn(|i| words[at + i]);
        Hello { wish: words[0], host: four(1), pci: std::array::from_fn(|i| words[5 + i]), process: four(8) }
    }
}

/// Whether so placed ranks may add over memory. All of them come to the same answer.
fn agree(hellos: &[Hello]) -> Result<bool> {
    let wish = |carrier: Carrier| hellos.iter().any(|hello| hello.wish == carrier as u32);
    if wish(Carrier::Host) || wish(Carrier::Nccl) {
        let why = "ranks that are to add over CUDA IPC, and their peers otherwise";
        return if wish(Carrier::Ipc) { Err(Error::Plan(why)) } else { Ok(false) };
    }
    let is_one_host = hellos.iter().all(|hello| hello.host == hellos[0].host && hello.host != [0; 4]);
    let is_shared = (1..hellos.len()).any(|i| hellos[..i].iter().any(|hello| hello.pci == hellos[i].pci));
    // Kernels that wait on a device keep others of it waiting, so that nobody gets there unasked.
    let is_asked = hellos.iter().all(|hello| hello.wish == Carrier::Ipc as u32);
    Ok(is_one_host && (!is_shared || is_asked))
}

/// Where a rank's desk is: in its process, and for others.
struct Offer {
    is_able: bool,
    address: u64,
    handle: [u8; 64],
}

const OFFER_WORDS: usize = 3 + 16;

impl Offer {
    fn words(&self) -> [u32; OFFER_WORDS] {
        let mut words = [0; OFFER_WORDS];
        words[..3].copy_from_slice(&[self.is_able.into(), self.address as u32, (self.address >> 32) as u32]);
        words[3..].iter_mut().zip(self.handle.as_chunks::<4>().0).for_each(|(word, b)| *word = u32::from_le_bytes(*b));
        words
    }

    fn of(words: &[u32; OFFER_WORDS]) -> Offer {
        let mut handle = [0; 64];
        handle.as_chunks_mut::<4>().0.iter_mut().zip(&words[3..]).for_each(|(b, word)| *b = word.to_le_bytes());
        Offer { is_able: words[0] == 1, address: u64::from(words[1]) | u64::from(words[2]) << 32, handle }
    }
}

impl Mesh {
    /// Settles whether the ranks of the stage add over each other's memory. All of them do this at about the same time,
    /// behind the join. Says whether they do.
    pub fn meet_at_desks<M: Memory>(&mut self, device: &M, carrier: Carrier, limits: &DirectLimits) -> Result<bool> {
        let Some(cuda) = device.cuda() else {
            let is_asked = carrier == Carrier::Ipc;
            return if is_asked { Err(Error::Plan("CUDA IPC between processors")) } else { Ok(false) };
        };
        if self.tp_size() == 1 {
            return Ok(false);
        }
        let hello = Hello { wish: carrier as u32, host: host(), pci: cuda.card().pci, process: process()? };
        let hellos: Vec<Hello> = self.swap_notes(0, hello.words())?.iter().map(Hello::of).collect();
        let desks = if agree(&hellos)? { self.desks(cuda, &hellos, limits)? } else { None };
        if let Some((desk, shown)) = desks {
            // What others were shown lives as long as they look.
            drop(desk);
            self.desks = Some(Box::new(self.watched_desks(cuda, shown, limits)?));
        }
        let is_asked = carrier == Carrier::Ipc;
        match &self.desks {
            None if is_asked => Err(Error::Plan("CUDA IPC for devices that do not all reach each other's memory")),
            desks => Ok(desks.is_some()),
        }
    }

    /// This rank's desk and those of all, if all ranks see all of them.
    fn desks(
        &mut self,
        cuda: &Cuda,
        hellos: &[Hello],
        limits: &DirectLimits,
    ) -> Result<Option<(Arc<Desk>, Vec<Shown>)>> {
        let fits = limits.n_leaves.iter().all(|n_leaves| OneShot::fits(self.tp_size(), &self.terms(*n_leaves)));
        let reaches = || hellos.iter().all(|hello| matches!(cuda.can_reach(hello.pci), Ok(true)));
        // What goes wrong here is a reason to go another way, and no more.
        let desk = if fits && reaches() { cuda.desk().ok() } else { None };
        let offer = desk.as_ref().and_then(|desk| offer(desk, hellos)).unwrap_or(Offer {
            is_able: false,
            address: 0,
            handle: [0; 64],
        });
        let offers: Vec<Offer> = self.swap_notes(1, offer.words())?.iter().map(Offer::of).collect();
        let Some(desk) = desk.filter(|_| offers.iter().all(|offer| offer.is_able)) else { return Ok(None) };
        let me = self.tp();
        let show = |(tp, (hello, offer)): (usize, (&Hello, &Offer))| match hello.process == hellos[me].process {
            _ if tp == me => Ok(Shown::Here(desk.clone())),
            true => cuda.desk_here(offer.address),
            false => cuda.desk_of(&offer.handle),
        };
        let shown: backend::Result<Vec<Shown>> = hellos.iter().zip(&offers).enumerate().map(show).collect();
        let sees = self.swap_notes(2, [u32::from(shown.is_ok())])?;
        Ok(shown.ok().filter(|_| sees.iter().all(|[sees]| *sees == 1)).map(|shown| (desk, shown)))
    }

    fn terms(&mut self, n_leaves: u32) -> Vec<Term> {
        let idx = self.sum_idx(n_leaves);
        let mut tree = Fold::default();
        let planes = self.scratch.sums[idx].1.iter();
        planes.map(|plane| Term { rank: plane.tp, number: plane.number, merges: tree.push(&plane.run) }).collect()
    }

    fn watched_desks(&mut self, cuda: &Cuda, shown: Vec<Shown>, limits: &DirectLimits) -> Result<Desks> {
        let watch = Arc::new(Watch::new(cuda.told()?, cuda.new_mark()?, self.doom(), self.waits().deadline));
        let thread = {
            let watch = watch.clone();
            let thread = std::thread::Builder::new().name("one-shot".into()).spawn(move || watch.keep());
            thread.map_err(|source| Error::Io { what: "a thread to look after sums", source })?
        };
        self.desks_watched_by(&watch);
        let me = self.tp();
        let sum = |n_leaves: &u32| Some((*n_leaves, OneShot::new(&shown, me, &self.terms(*n_leaves))?));
        let sums = limits.n_leaves.iter().filter_map(sum).collect();
        Ok(Desks { watch, thread: Some(thread), shown, sums })
    }

    /// The words of all ranks of the stage.
    fn swap_notes<const N: usize>(&mut self, round: u64, mine: [u32; N]) -> Result<Vec<[u32; N]>> {
        let mut notes = Notes { first: self.in_stage(0), mine, theirs: vec![mine; self.tp_size()] };
        for tp in self.others() {
            let both = [Way::Out, Way::In].map(|way| Move::block(self.in_stage(tp), way, 1, 0..N));
            self.moves.extend(both);
        }
        // No card has so many words.
        self.exchange(Kind::Cards, 1 << 32 | round, &|_| 0, &mut notes)?;
        Ok(notes.theirs)
    }
}

/// Handles are for other processes: the driver opens none in its own.
fn offer(desk: &Desk, hellos: &[Hello]) -> Option<Offer> {
    let is_for_others = hellos.iter().any(|hello| hello.process != hellos[0].process);
    let handle = if is_for_others { desk.handle().ok()? } else { [0; 64] };
    Some(Offer { is_able: true, address: desk.address(), handle })
}

impl Desks {
    pub fn sum(&self, n_leaves: u32) -> Option<&OneShot> {
        self.sums.iter().find(|(n, _)| *n == n_leaves).map(|(_, sum)| sum)
    }

    /// In good order, when nothing is to come any more.
    pub fn leave(&self) {
        self.watch.leave();
    }
}

impl Drop for Desks {
    fn drop(&mut self) {
        // If nothing has been said before, it is broken off.
        self.watch.end(Fault::Aborted);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ended = thread.join();
        }
        if !self.watch.is_through() {
            // A kernel may still look at them: they stay for as long as the process.
            std::mem::forget((std::mem::take(&mut self.shown), self.watch.clone()));
        }
    }
}

/// The same for all processes of a machine, from its start on.
fn host() -> [u32; 4] {
    match region::boot_id() {
        id if id.is_empty() => [0; 4],
        id => {
            let hash = blake3::hash(&id);
            let words = hash.as_bytes().as_chunks::<4>().0;
            std::array::from_fn(|i| u32::from_le_bytes(words[i]))
        }
    }
}

/// No other process has it: numbers of processes are not enough where they live in several namespaces.
fn process() -> Result<[u32; 4]> {
    static PROCESS: OnceLock<[u32; 4]> = OnceLock::new();
    let mut bytes = [0; 16];
    let drawn = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    drawn.map_err(|source| Error::Io { what: "random numbers", source: source.into() })?;
    let words = bytes.as_chunks::<4>().0;
    Ok(*PROCESS.get_or_init(|| std::array::from_fn(|i| u32::from_le_bytes(words[i]))))
}

struct Notes<const N: usize> {
    first: usize,
    mine: [u32; N],
    theirs: Vec<[u32; N]>,
}

impl<const N: usize> Ends for Notes<N> {
    fn read(&mut self, _row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.mine[col..][..out.len()]);
    }

    fn write(&mut self, peer: usize, _row: usize, col: usize, words: &[u32]) {
        self.theirs[peer - self.first][col..][..words.len()].copy_from_slice(words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(wish: Carrier, host: u32, bus: u32) -> Hello {
        Hello { wish: wish as u32, host: [host; 4], pci: [0, bus, 0], process: [bus; 4] }
    }

    #[test]
    fn all_of_one_host_do_or_nobody_does() {
        let auto = |host, bus| hello(Carrier::Auto, host, bus);
        assert!(agree(&[auto(1, 1), auto(1, 2)]).unwrap());
        assert!(!agree(&[auto(1, 1), auto(2, 2)]).unwrap(), "two hosts");
        assert!(!agree(&[auto(0, 1), auto(0, 2)]).unwrap(), "hosts that nobody knows");
        assert!(!agree(&[auto(1, 1), auto(1, 1)]).unwrap(), "one device, unasked");
        for other in [Carrier::Host, Carrier::Nccl] {
            assert!(!agree(&[auto(1, 1), hello(other, 1, 2)]).unwrap());
            assert!(agree(&[hello(Carrier::Ipc, 1, 1), hello(other, 1, 2)]).is_err());
        }
        assert!(agree(&[hello(Carrier::Ipc, 1, 1), hello(Carrier::Ipc, 1, 1)]).unwrap());
        assert!(!agree(&[hello(Carrier::Ipc, 1, 1), auto(1, 1)]).unwrap());
    }

    #[test]
    fn what_is_said_comes_back() {
        let said = Hello { wish: 3, host: [1, 2, 3, 4], pci: [5, 6, 7], process: [8, 9, 10, 11] };
        assert_eq!(Hello::of(&said.words()), said);
        let handle = std::array::from_fn(|i| i as u8 + 100);
        let back = Offer::of(&Offer { is_able: true, address: 0x1234_5678_9abc_def0, handle }.words());
        assert_eq!((back.is_able, back.address, back.handle), (true, 0x1234_5678_9abc_def0, handle));
    }
}
