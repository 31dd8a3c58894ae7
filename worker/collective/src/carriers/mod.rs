//! The carriers of numbers between ranks. One is chosen when the ranks have met and their devices are known. After
//! that, only the carrier's own file depends on the choice.
//!
//! ```text
//! carry      what a carrier is
//! host       everything, for any device, through the links of the mesh
//! nccl       from device to device, where all ranks of an exchange have NCCL; the rest through the host
//! one_shot   sums, by kernels that read each other's memory; the rest by the host or NCCL
//! ```
//! All ranks choose the same carriers, because each sends the others what it supports.

pub mod carry;
pub mod host;
pub mod nccl;
pub mod one_shot;

use crate::cancel::CancelFlag;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use backend::Memory;
use backend::cpu::Cpu;
use backend::cuda::Cuda;
use carry::{CarrierChoice, ExchangeLimits, RankCarrier, leave};
use host::HostCarrier;
use one_shot::OneShotCarrier;

/// A device whose ranks can exchange.
pub trait RankDevice: Memory + Sized {
    /// Chooses the carrier of a rank that has met the others, so it is not alone. All ranks do this at about the same
    /// time.
    fn carrier(
        &self,
        mesh: &mut Mesh,
        choice: CarrierChoice,
        limits: &ExchangeLimits,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn RankCarrier<Self>>>;
}

impl RankDevice for Cpu {
    fn carrier(
        &self,
        _mesh: &mut Mesh,
        choice: CarrierChoice,
        _limits: &ExchangeLimits,
        _cancel: &CancelFlag,
    ) -> Result<Box<dyn RankCarrier<Cpu>>> {
        match choice {
            CarrierChoice::Auto | CarrierChoice::Host => Ok(Box::new(HostCarrier::default())),
            CarrierChoice::Nccl => Err(Error::Plan("NCCL requires CUDA devices")),
            CarrierChoice::Ipc => Err(Error::Plan("CUDA IPC requires CUDA devices")),
        }
    }
}

impl RankDevice for Cuda {
    fn carrier(
        &self,
        mesh: &mut Mesh,
        choice: CarrierChoice,
        limits: &ExchangeLimits,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn RankCarrier<Cuda>>> {
        let mut below: Box<dyn RankCarrier<Cuda>> = match nccl::meet(mesh, self, choice, limits, cancel)? {
            Some(nccl) => Box::new(nccl),
            None => Box::new(HostCarrier::default()),
        };
        match one_shot::meet(mesh, self, choice, limits) {
            Ok(Some(buffers)) => Ok(Box::new(OneShotCarrier { below, buffers })),
            Ok(None) => Ok(below),
            Err(error) => {
                leave(mesh, &mut *below);
                Err(error)
            }
        }
    }
}
