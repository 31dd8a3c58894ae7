//! Sets up NCCL for ranks that have met as a mesh: buffers on the device, and communicators. Each communicator
//! exchanges once before it is used.

use super::agree::{CommIds, NcclPartners, NcclSupport, exchange_comm_ids, partners};
use super::api::{CommSpec, NcclApi, UniqueId};
use super::comms::{BEFORE, BeginError, BeginResult, HopComm, NEXT, STAGE, StageComm, WatchedComms};
use super::ops::NcclCarrier;
use super::stage::StageExchange;
use super::watchdog::CommFault;
use crate::cancel::CancelFlag;
use crate::carriers::carry::{CarrierChoice, ExchangeLimits};
use crate::carriers::host::HostCarrier;
use crate::error::{Error, Result};
use crate::mesh::{COLUMNS_MULTIPLE, Mesh, WaitFault};
use crate::sum::SumPlan;
use backend::Memory;
use backend::cuda::Cuda;
use std::ffi::CStr;
use std::time::Instant;
use types::NumericsMode;

/// Blocks that a kernel between stages may take. It waits beside the computing kernels and holds its blocks all the
/// time, so a stage's kernels must fit beside those of both hops.
const HOP_BLOCKS: u16 = 4;
/// Factor between the tested sizes: NCCL's algorithms change at sizes at least this far apart.
const TRIED_EVERY: usize = 4;

/// Decides whether this rank exchanges with some of its neighbours through NCCL. All ranks do this at about the same
/// time, after the join.
pub fn meet(
    mesh: &mut Mesh,
    cuda: &Cuda,
    choice: CarrierChoice,
    limits: &ExchangeLimits,
    cancel: &CancelFlag,
) -> Result<Option<NcclCarrier>> {
    let api = NcclApi::find().ok();
    let partners = partners(mesh, &NcclSupport::new(cuda, choice, api)?)?;
    let Some(api) = api.filter(|_| partners.has_any()) else { return Ok(None) };
    let names = exchange_comm_ids(mesh, api, partners)?;
    let (watched, host) = (WatchedComms::start(mesh, cuda, api)?, HostCarrier::default());
    let mut nccl = NcclCarrier { watched, stage: None, next: None, before: None, chunks: limits.chunks, host };
    match connect(&mut nccl, mesh, cuda, (partners, names), limits, cancel) {
        Ok(()) => Ok(Some(nccl)),
        // The peers are notified before the communicators end, which may take long.
        Err(error) => Err(mesh.fail(error)),
    }
}

/// Creates all communicators at once.
fn connect(
    nccl: &mut NcclCarrier,
    mesh: &mut Mesh,
    cuda: &Cuda,
    (partners, names): (NcclPartners, CommIds),
    limits: &ExchangeLimits,
    cancel: &CancelFlag,
) -> Result<()> {
    let begin = |is_needed: bool, comm: CommSpec| {
        let begun = is_needed.then(|| nccl.watched.watchdog.add(comm)).transpose();
        begun.map_err(|fault| match fault {
            CommFault::Failed(why) => Error::Nccl(why),
            CommFault::Wait(_) => Error::Aborted,
        })
    };
    let pair = |name: &'static CStr, id: UniqueId, rank: usize| CommSpec {
        n_ranks: 2,
        id,
        rank,
        name,
        blocks_max: Some(HOP_BLOCKS),
    };
    let (n_ranks, rank) = (mesh.tp_size(), mesh.tp());
    let of_stage = CommSpec { n_ranks, id: names.stage, rank, name: c"lockstep stage", blocks_max: None };
    let stage = begin(partners.stage, of_stage)?;
    let next = begin(partners.next, pair(c"lockstep next", names.next, 0))?;
    let before = begin(partners.before, pair(c"lockstep before", names.before, 1))?;
    nccl.stage = stage.map(|comm| stage_comm(mesh, cuda, comm, limits)).transpose()?;
    let hop = |comm: usize, peer: usize| -> Result<HopComm> {
        let floats = limits.chunks.rows_at_once(limits.hidden).min(limits.rows_max) * limits.hidden;
        Ok(HopComm { comm, peer, side: cuda.side()?, room: cuda.transfer_buffer(floats)? })
    };
    nccl.next = next.map(|comm| hop(comm, 1)).transpose()?;
    nccl.before = before.map(|comm| hop(comm, 0)).transpose()?;
    await_comms(nccl, mesh, [stage, next, before], cancel)?;
    mesh.add_device_wait(&nccl.watched.watchdog);
    warm_up(nccl, mesh, cuda, limits)
}

/// Waits until all communicators are ready, or returns why one is not.
fn await_comms(nccl: &NcclCarrier, mesh: &mut Mesh, comms: [Option<usize>; 3], cancel: &CancelFlag) -> Result<()> {
    let until = Instant::now() + mesh.policy().deadline;
    for comm in comms.into_iter().flatten() {
        let should_wait = || !cancel.is_cancelled() && !mesh.is_ended() && !mesh.is_any_peer_gone();
        if let Err(fault) = nccl.watched.watchdog.wait_until_accepted(comm, until, should_wait) {
            let is_unwanted = fault == CommFault::Wait(WaitFault::Aborted) && !cancel.is_cancelled();
            let fault = if is_unwanted { WaitFault::Gone.into() } else { fault };
            return Err(fault.blame(mesh));
        }
    }
    Ok(())
}

/// Allocates the memory that the largest exchanges of a stage need.
fn stage_comm(mesh: &Mesh, cuda: &Cuda, comm: usize, limits: &ExchangeLimits) -> Result<StageComm> {
    let ExchangeLimits { rows_max, hidden, outputs_max, n_vocab, chunks, .. } = *limits;
    let n_rows = chunks.rows_at_once(hidden).min(rows_max);
    let columns = (hidden / mesh.tp_size() + COLUMNS_MULTIPLE).min(hidden);
    let plans: Vec<SumPlan> = limits.n_leaves.iter().map(|n| SumPlan::new(&mesh.part().shares, *n)).collect();
    let n_own = plans.iter().map(|plan| plan.n_planes(mesh.tp())).max().unwrap_or(0).max(1);
    let n_planes = plans.iter().map(|plan| plan.planes.len()).max().unwrap_or(0).max(1);
    let small = n_planes * chunks.small_max.min(rows_max * hidden);
    let logits = chunks.rows_at_once(n_vocab).min(outputs_max) * n_vocab;
    let mut stage = StageComm {
        comm,
        out: cuda.transfer_buffer(n_own * n_rows * hidden)?,
        parts: cuda.transfer_buffer(small.max(n_planes * n_rows * columns).max(n_rows * hidden).max(logits))?,
        sum: cuda.transfer_buffer(n_rows * columns)?,
        all: cuda.transfer_buffer(n_rows * hidden)?,
        in_a_row: cuda.upload_words(&(0..n_own).map(|i| u8::from(i > 0)).collect::<Vec<_>>())?,
        merges: Vec::new(),
    };
    for plan in &plans {
        stage.merges(cuda, plan)?;
    }
    Ok(stage)
}

/// Runs each communicator once as it will be used. NCCL connects ranks and allocates memory at the first exchange of
/// each kind. That may wait for whole devices, so it must not happen while a device waits for a peer.
fn warm_up(nccl: &NcclCarrier, mesh: &mut Mesh, cuda: &Cuda, limits: &ExchangeLimits) -> Result<()> {
    warm_up_each(nccl, mesh, cuda, limits).map_err(|stopped| match stopped {
        BeginError::Fault(fault) => fault.blame(mesh),
        BeginError::Device(error) => error.into(),
    })
}

fn warm_up_each(nccl: &NcclCarrier, mesh: &Mesh, cuda: &Cuda, limits: &ExchangeLimits) -> BeginResult {
    let watchdog = &*nccl.watched.watchdog;
    if let Some(stage) = &nccl.stage {
        warm_up_stage(StageExchange { mesh, cuda, watchdog, stage }, limits)?;
        cuda.mark(watchdog.mark(STAGE))?;
    }
    // In the order of rows: a stage in the middle receives before it sends.
    if let Some(hop) = &nccl.before {
        let at = hop.room.floats().part(0..1).address();
        // SAFETY: the buffer lives as long as the hop, which is dropped after its stream has passed.
        watchdog.begin(hop.comm, hop.side.raw(), |lane| unsafe { lane.recv(at, 1, hop.peer) })?;
        hop.side.mark(watchdog.mark(BEFORE))?;
    }
    if let Some(hop) = &nccl.next {
        let at = hop.room.floats().part(0..1).address();
        // SAFETY: as above.
        watchdog.begin(hop.comm, hop.side.raw(), |lane| unsafe { lane.send(at, 1, hop.peer) })?;
        hop.side.mark(watchdog.mark(NEXT))?;
    }
    Ok(watchdog.wait_until_idle()?)
}

/// Runs all pairs, and the collective operations at each size where NCCL changes its algorithm, on arbitrary contents.
fn warm_up_stage(exchange: StageExchange<'_>, limits: &ExchangeLimits) -> BeginResult {
    let StageExchange { mesh, cuda, stage, .. } = exchange;
    let (all, parts, n_ranks) = (stage.all.floats(), stage.parts.floats(), mesh.tp_size());
    let chunk = limits.chunks.rows_at_once(limits.hidden).min(limits.rows_max) * limits.hidden;
    let one = |tp: usize| parts.part(tp % parts.len()..tp % parts.len() + 1);
    exchange.begin(|lane| exchange.swap_floats(lane, |_| all.part(0..1), one))?;
    let mut n = match cuda.numerics_mode() {
        NumericsMode::Fast => chunk,
        NumericsMode::Lockstep => limits.chunks.small_max.min(chunk).min(parts.len() / n_ranks),
    };
    while n > 0 {
        exchange.begin(|lane| {
            // SAFETY: all ranks have room for this many numbers, and the buffers outlive the stream's work.
            unsafe {
                match cuda.numerics_mode() {
                    NumericsMode::Fast => lane.all_reduce(all.address(), n),
                    NumericsMode::Lockstep => {
                        lane.all_gather(stage.out.floats().part(0..n).address(), parts.address(), n)
                    }
                }
            }
        })?;
        n /= TRIED_EVERY;
    }
    Ok(())
}
