//! Maps the buffers of a stage's ranks into each other. Each rank sends where it runs; then, if it reaches all others,
//! where its buffer is; and then whether it has mapped theirs. Either all ranks can sum this way, or none does.

use super::ops::PeerBuffers;
use super::watchdog::SumWatchdog;
use crate::carriers::carry::{CarrierChoice, ExchangeLimits};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::notes::swap_stage_notes;
use crate::region;
use crate::sum::{Plane, SumPlan};
use backend::cuda::{Cuda, MappedBuffer, OneShotSum, PeerBuffer, SumTerm};
use std::sync::{Arc, OnceLock};

/// The host and device of a rank, and the carrier that it was configured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OneShotHello {
    carrier: u32,
    /// A machine's current boot; zero if it cannot be determined.
    host: [u32; 4],
    /// The PCI address of its device.
    pci: [u32; 3],
    process: [u32; 4],
}

const HELLO_WORDS: usize = 12;

impl OneShotHello {
    fn words(&self) -> [u32; HELLO_WORDS] {
        let mut words = [0; HELLO_WORDS];
        words[0] = self.carrier;
        words[1..5].copy_from_slice(&self.host);
        words[5..8].copy_from_slice(&self.pci);
        words[8..].copy_from_slice(&self.process);
        words
    }

    fn of(words: &[u32; HELLO_WORDS]) -> OneShotHello {
        let four = |at: usize| std::array::from_fn(|i| words[at + i]);
        OneShotHello { carrier: words[0], host: four(1), pci: std::array::from_fn(|i| words[5 + i]), process: four(8) }
    }
}

/// Returns whether ranks at these places may sum over memory. All of them get the same result.
fn agree(hellos: &[OneShotHello]) -> Result<bool> {
    let is_chosen = |choice: CarrierChoice| hellos.iter().any(|hello| hello.carrier == choice as u32);
    if is_chosen(CarrierChoice::Host) || is_chosen(CarrierChoice::Nccl) {
        let why = "some ranks sum over CUDA IPC, and their peers do not";
        return if is_chosen(CarrierChoice::Ipc) { Err(Error::Plan(why)) } else { Ok(false) };
    }
    let is_one_host = hellos.iter().all(|hello| hello.host == hellos[0].host && hello.host != [0; 4]);
    let is_shared = (1..hellos.len()).any(|i| hellos[..i].iter().any(|hello| hello.pci == hellos[i].pci));
    // A kernel that waits blocks others on its device, so devices are shared only if the configuration requires this
    // carrier.
    let is_chosen_by_all = hellos.iter().all(|hello| hello.carrier == CarrierChoice::Ipc as u32);
    Ok(is_one_host && (!is_shared || is_chosen_by_all))
}

/// A rank's buffer: its address within the process, and its handle for other processes.
struct BufferOffer {
    is_able: bool,
    address: u64,
    handle: [u8; 64],
}

const OFFER_WORDS: usize = 3 + 16;

impl BufferOffer {
    fn words(&self) -> [u32; OFFER_WORDS] {
        let mut words = [0; OFFER_WORDS];
        words[..3].copy_from_slice(&[self.is_able.into(), self.address as u32, (self.address >> 32) as u32]);
        words[3..].iter_mut().zip(self.handle.as_chunks::<4>().0).for_each(|(word, b)| *word = u32::from_le_bytes(*b));
        words
    }

    fn of(words: &[u32; OFFER_WORDS]) -> BufferOffer {
        let mut handle = [0; 64];
        handle.as_chunks_mut::<4>().0.iter_mut().zip(&words[3..]).for_each(|(b, word)| *b = word.to_le_bytes());
        BufferOffer { is_able: words[0] == 1, address: u64::from(words[1]) | u64::from(words[2]) << 32, handle }
    }
}

/// Decides whether the ranks of the stage add over each other's memory. All ranks do this at about the same time, after
/// the join.
pub fn meet(
    mesh: &mut Mesh,
    cuda: &Cuda,
    choice: CarrierChoice,
    limits: &ExchangeLimits,
) -> Result<Option<PeerBuffers>> {
    if mesh.tp_size() == 1 {
        return Ok(None);
    }
    let hello = OneShotHello { carrier: choice as u32, host: host_id(), pci: cuda.card().pci, process: process()? };
    let hellos: Vec<OneShotHello> = swap_notes(mesh, 0, hello.words())?.iter().map(OneShotHello::of).collect();
    let buffers = if agree(&hellos)? { exchange_buffers(mesh, cuda, &hellos, limits)? } else { None };
    match buffers {
        Some(buffers) => Ok(Some(buffers)),
        None if choice == CarrierChoice::Ipc => {
            Err(Error::Plan("CUDA IPC requires that all devices can access each other's memory"))
        }
        None => Ok(None),
    }
}

/// Returns the buffers of all ranks, if every rank could map all of them.
fn exchange_buffers(
    mesh: &mut Mesh,
    cuda: &Cuda,
    hellos: &[OneShotHello],
    limits: &ExchangeLimits,
) -> Result<Option<PeerBuffers>> {
    let fits = limits.n_leaves.iter().all(|n_leaves| OneShotSum::fits(mesh.tp_size(), &terms(mesh, *n_leaves)));
    let reaches = || hellos.iter().all(|hello| matches!(cuda.can_access_peer(hello.pci), Ok(true)));
    // A failure here only means that another carrier is used.
    let own = if fits && reaches() { cuda.peer_buffer().ok() } else { None };
    let offer = own.as_ref().and_then(|own| offer(own, hellos)).unwrap_or(BufferOffer {
        is_able: false,
        address: 0,
        handle: [0; 64],
    });
    let offers: Vec<BufferOffer> = swap_notes(mesh, 1, offer.words())?.iter().map(BufferOffer::of).collect();
    let Some(own) = own.filter(|_| offers.iter().all(|offer| offer.is_able)) else { return Ok(None) };
    let me = mesh.tp();
    let show = |(tp, (hello, offer)): (usize, (&OneShotHello, &BufferOffer))| match hello.process == hellos[me].process
    {
        _ if tp == me => Ok(MappedBuffer::Local(own.clone())),
        true => cuda.local_peer_buffer(offer.address),
        false => cuda.open_peer_buffer(&offer.handle),
    };
    let shown: backend::Result<Vec<MappedBuffer>> = hellos.iter().zip(&offers).enumerate().map(show).collect();
    // All memory for sums is allocated before the last exchange. A peer may begin a sum at once after it, and if ranks
    // share a device, the driver's allocation might then wait for that sum.
    let ready = shown.and_then(|shown| Ok((shown, cuda.sum_control()?, cuda.new_mark()?)));
    let are_ready = swap_notes(mesh, 2, [u32::from(ready.is_ok())])?;
    let ready = ready.ok().filter(|_| are_ready.iter().all(|[is_ready]| *is_ready == 1));
    let Some((shown, control, mark)) = ready else { return Ok(None) };
    let watchdog = SumWatchdog::new(control, mark, mesh.abort_state(), mesh.policy().deadline);
    peer_buffers(mesh, shown, watchdog, limits).map(Some)
}

fn terms(mesh: &Mesh, n_leaves: u32) -> Vec<SumTerm> {
    let plan = SumPlan::new(&mesh.part().shares, n_leaves);
    let term = |(plane, merges): (&Plane, u32)| SumTerm { rank: plane.tp, number: plane.number, merges };
    plan.planes.iter().zip(plan.merges()).map(term).collect()
}

fn peer_buffers(
    mesh: &Mesh,
    shown: Vec<MappedBuffer>,
    watchdog: SumWatchdog,
    limits: &ExchangeLimits,
) -> Result<PeerBuffers> {
    let watchdog = Arc::new(watchdog);
    let thread = {
        let watchdog = watchdog.clone();
        let thread = std::thread::Builder::new().name("one-shot".into()).spawn(move || watchdog.run());
        thread.map_err(|source| Error::Io { what: "the thread that watches sums", source })?
    };
    mesh.add_device_wait(&watchdog);
    let me = mesh.tp();
    let sum = |n_leaves: &u32| Some((*n_leaves, OneShotSum::new(&shown, me, &terms(mesh, *n_leaves))?));
    let sums = limits.n_leaves.iter().filter_map(sum).collect();
    Ok(PeerBuffers { watchdog, thread: Some(thread), shown, sums })
}

/// Returns the notes of all ranks of the stage.
fn swap_notes<const N: usize>(mesh: &mut Mesh, round: u64, mine: [u32; N]) -> Result<Vec<[u32; N]>> {
    // The tag's high bit separates these from the notes on NCCL, whose tag is their small word count.
    swap_stage_notes(mesh, 1 << 32 | round, mine)
}

/// Makes this rank's offer. Handles are for other processes: the driver opens none in the process that made it.
fn offer(own: &PeerBuffer, hellos: &[OneShotHello]) -> Option<BufferOffer> {
    let is_for_others = hellos.iter().any(|hello| hello.process != hellos[0].process);
    let handle = if is_for_others { own.handle().ok()? } else { [0; 64] };
    Some(BufferOffer { is_able: true, address: own.address(), handle })
}

/// Returns the machine's current boot, which is the same for all of its processes.
fn host_id() -> [u32; 4] {
    match region::boot_id() {
        id if id.is_empty() => [0; 4],
        id => {
            let hash = blake3::hash(&id);
            let words = hash.as_bytes().as_chunks::<4>().0;
            std::array::from_fn(|i| u32::from_le_bytes(words[i]))
        }
    }
}

/// Returns a name that no other process has. Process ids are not enough if processes are in several namespaces.
fn process() -> Result<[u32; 4]> {
    static PROCESS: OnceLock<[u32; 4]> = OnceLock::new();
    let mut bytes = [0; 16];
    let drawn = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    drawn.map_err(|source| Error::Io { what: "random numbers", source: source.into() })?;
    let words = bytes.as_chunks::<4>().0;
    Ok(*PROCESS.get_or_init(|| std::array::from_fn(|i| u32::from_le_bytes(words[i]))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(carrier: CarrierChoice, host: u32, bus: u32) -> OneShotHello {
        OneShotHello { carrier: carrier as u32, host: [host; 4], pci: [0, bus, 0], process: [bus; 4] }
    }

    #[test]
    fn all_ranks_of_one_host_sum_or_none() {
        let auto = |host, bus| hello(CarrierChoice::Auto, host, bus);
        assert!(agree(&[auto(1, 1), auto(1, 2)]).unwrap());
        assert!(!agree(&[auto(1, 1), auto(2, 2)]).unwrap(), "two hosts");
        assert!(!agree(&[auto(0, 1), auto(0, 2)]).unwrap(), "unknown hosts");
        assert!(!agree(&[auto(1, 1), auto(1, 1)]).unwrap(), "one device, and no explicit choice");
        for other in [CarrierChoice::Host, CarrierChoice::Nccl] {
            assert!(!agree(&[auto(1, 1), hello(other, 1, 2)]).unwrap());
            assert!(agree(&[hello(CarrierChoice::Ipc, 1, 1), hello(other, 1, 2)]).is_err());
        }
        assert!(agree(&[hello(CarrierChoice::Ipc, 1, 1), hello(CarrierChoice::Ipc, 1, 1)]).unwrap());
        assert!(!agree(&[hello(CarrierChoice::Ipc, 1, 1), auto(1, 1)]).unwrap());
    }

    #[test]
    fn hello_and_offer_survive_encoding() {
        let hello = OneShotHello { carrier: 3, host: [1, 2, 3, 4], pci: [5, 6, 7], process: [8, 9, 10, 11] };
        assert_eq!(OneShotHello::of(&hello.words()), hello);
        let handle = std::array::from_fn(|i| i as u8 + 100);
        let back = BufferOffer::of(&BufferOffer { is_able: true, address: 0x1234_5678_9abc_def0, handle }.words());
        assert_eq!((back.is_able, back.address, back.handle), (true, 0x1234_5678_9abc_def0, handle));
    }
}
