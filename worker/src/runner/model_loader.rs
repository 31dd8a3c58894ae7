//! Makes the runner with a model: its device, and how its rank meets the others once all have loaded. Has no knowledge
//! of steps or of the model's contents.

use crate::assignment::{Assignment, Load, LoadError, LoadedModel, MeshSecret, ReadyReport};
use crate::load::packed_cache::PackedCache;
use crate::load::scrub::Scrubber;
use crate::load::weight_cache::{PartKey, WeightCache};
use crate::runner::Runner;
use crate::runner::guesses::{GuessConfig, GuessSource, RecalledLogs};
use crate::runner::masks::MaskConfig;
use crate::runner::model_part::{Kept, ModelPart, load_failed, load_part};
use crate::runner::model_runner::ModelRunner;
use crate::runner::refused;
use crate::tier::KvTiers;
use backend::Device;
use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::cuda::{Cuda, CudaConfig};
use collective::{
    CancelFlag, CarrierChoice, LinkEncryption, Mesh, MeshPlan, PeerListener, RankDevice, Ranks, WireChoice,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use types::{Activations, NumericsMode, RankPart, Unsupported};
use wire::refusals::Refusals;

/// The machine's device on which a rank computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ComputeDevice {
    Cpu,
    Cuda {
        ordinal: u32,
        /// The folder that keeps compiled kernels between starts.
        cache: Option<PathBuf>,
    },
}

/// Loads models for a device of this machine.
#[derive(Clone, Debug)]
pub struct ModelLoader {
    pub device: ComputeDevice,
    /// Computing threads, including the caller's.
    pub threads: usize,
    pub isa: Isa,
    /// Whether a waiting thread spins. Use it only if all ranks together have at most as many threads as cores.
    pub spin: bool,
    /// The listener for peers, if this worker may have any.
    pub listener: Option<Arc<PeerListener>>,
    /// The peers that the listener refused, for the log.
    pub refusals: Arc<Refusals>,
    pub wire: WireChoice,
    /// Whether connections between ranks are encrypted.
    pub encryption: LinkEncryption,
    /// A key that all ranks of the cluster share in addition to an epoch's secret, if they have one.
    pub link_key: Option<MeshSecret>,
    /// The weights that this worker's last rank held.
    pub weight_cache: WeightCache,
    /// The carrier between the ranks' devices; only for GPUs.
    pub carrier: CarrierChoice,
    /// Whether a GPU runs passes of the same shape as recorded graphs.
    pub graphs: bool,
    pub masks: MaskConfig,
    /// Known answers to guess from, instead of the assignment's source, so that tests decide which guesses are
    /// accepted.
    pub recalled: Option<Arc<RecalledLogs>>,
    /// Checks the weights while they are held.
    pub scrubber: Option<Scrubber>,
    /// The files of packed weights; None packs at every start. Only for the CPU.
    pub packed_cache: Option<PackedCache>,
    /// What is behind the pools.
    pub kv_tiers: Option<KvTiers>,
}

impl ModelLoader {
    /// Creates a loader for the CPU, with the widest instructions of this machine and without peers.
    pub fn new(threads: usize) -> ModelLoader {
        let (device, isa, wire, carrier) =
            (ComputeDevice::Cpu, Isa::detect(), WireChoice::default(), CarrierChoice::default());
        ModelLoader {
            device,
            threads,
            isa,
            spin: true,
            listener: None,
            refusals: Arc::default(),
            wire,
            encryption: LinkEncryption::default(),
            link_key: None,
            weight_cache: WeightCache::default(),
            carrier,
            graphs: true,
            masks: MaskConfig::default(),
            recalled: None,
            scrubber: None,
            packed_cache: None,
            kv_tiers: None,
        }
    }

    /// Builds the runner of a rank that has met the others through `mesh`, and its report.
    pub fn build_with(&self, assignment: &Assignment, mesh: Mesh) -> Result<(Box<dyn Runner>, ReadyReport), LoadError> {
        let cancel = CancelFlag::default();
        let (parts, ready) = self.prepare(assignment, mesh.part(), &cancel)?;
        Ok((parts.into_runner(mesh, self.carrier, self.masks, &cancel)?, ready))
    }

    /// `load` followed by `meet`.
    pub fn build(&self, assignment: &Assignment) -> Result<(Box<dyn Runner>, ReadyReport), LoadError> {
        let (apart, ready) = self.load_without_peers(assignment, &CancelFlag::default())?;
        Ok((apart.join(&CancelFlag::default())?, ready))
    }

    fn load_without_peers(
        &self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(JoiningRank, ReadyReport), LoadError> {
        let way = self.join_method(assignment)?;
        let (parts, ready) = self.prepare(assignment, &assignment.layout.part(assignment.rank), cancel)?;
        Ok((JoiningRank { parts, way, carrier: self.carrier, masks: self.masks }, ready))
    }

    /// Returns how the rank will meet the others once all have loaded.
    fn join_method(&self, assignment: &Assignment) -> Result<JoinMethod, LoadError> {
        let Assignment { epoch, rank, layout, mesh_addresses, mesh_secret, timeouts, .. } = assignment;
        if layout.grid().n_ranks() == 1 {
            return Ok(JoinMethod::Alone { n_layers: layout.n_layers() });
        }
        let Some(listener) = self.listener.clone() else {
            return Err(Unsupported("a grid of several ranks on a worker without an address for peers").into());
        };
        let plan = MeshPlan::new(*epoch, *rank, layout.clone(), mesh_addresses.clone(), mesh_secret.0);
        let (wire, encryption, spin, timeouts) = (self.wire, self.encryption, self.spin, *timeouts);
        let plan = match self.link_key {
            Some(MeshSecret(key)) => plan.with_key(&key),
            None => plan,
        };
        let plan = MeshPlan { wire, encryption, spin, timeouts, ..plan };
        Ok(JoinMethod::Through { listener, refusals: self.refusals.clone(), plan: Box::new(plan) })
    }

    fn prepare(
        &self,
        assignment: &Assignment,
        part: &RankPart,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn PreparedPart>, ReadyReport), LoadError> {
        let recalled = self.recalled.clone().map(|recalled| {
            let guesses = GuessConfig { source: GuessSource::Recalled(recalled), ..assignment.guesses.clone() };
            Assignment { guesses, ..assignment.clone() }
        });
        let assignment = recalled.as_ref().unwrap_or(assignment);
        match &self.device {
            ComputeDevice::Cpu if assignment.mode != NumericsMode::Lockstep => {
                Err(Unsupported("numerics other than lockstep on the CPU, where there is one way to compute").into())
            }
            ComputeDevice::Cpu => {
                let config = self.cpu(assignment.activations);
                let open = || Cpu::new(config).map_err(load_failed(assignment));
                let (scrubber, packed_cache) = (self.scrubber.as_ref(), self.packed_cache.as_ref());
                let kv_tiers = self.kv_tiers.as_ref();
                let kept = Kept { weight_cache: &self.weight_cache, scrubber, packed_cache, kv_tiers };
                Ok(boxed(load_part(open, kept, assignment, part, cancel)?))
            }
            ComputeDevice::Cuda { ordinal, cache } => {
                let open = || self.cuda(*ordinal, cache.as_deref(), assignment);
                let kv_tiers = self.kv_tiers.as_ref();
                let kept = Kept { weight_cache: &self.weight_cache, scrubber: None, packed_cache: None, kv_tiers };
                Ok(boxed(load_part(open, kept, assignment, part, cancel)?))
            }
        }
    }

    fn cpu(&self, activations: Activations) -> CpuConfig {
        CpuConfig { threads: self.threads, activations, isa: self.isa, spin: self.spin }
    }

    fn cuda(&self, ordinal: u32, cache: Option<&Path>, assignment: &Assignment) -> Result<Cuda, LoadError> {
        if assignment.activations != Activations::Bf16 {
            return Err(Unsupported("activations other than bf16 on CUDA: give --activations bf16 to all roles").into());
        }
        // This CPU packs weights and runs the draws that need sorting; in between it waits for the device.
        let host = CpuConfig { spin: false, ..self.cpu(Activations::F32) };
        let (cache, mode, graphs) = (cache.map(Path::to_owned), assignment.mode, self.graphs);
        let config = CudaConfig { ordinal, cache, mode, host, graphs };
        Cuda::open(&config).map_err(load_failed(assignment))
    }
}

impl Load for ModelLoader {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let (apart, ready) = self.load_without_peers(assignment, cancel)?;
        Ok((Box::new(apart), ready))
    }

    fn reject_last_load(&mut self) {
        self.packed_cache.iter().for_each(PackedCache::forget_last);
    }

    fn holds(&self, assignment: &Assignment) -> bool {
        let part = assignment.layout.part(assignment.rank);
        let key = assignment.policy.map(|policy| PartKey::new(policy, assignment, &part));
        key.is_some_and(|key| self.weight_cache.holds(&key, assignment))
    }
}

fn boxed<D: Device + RankDevice + 'static>(
    (part, ready): (ModelPart<D>, ReadyReport),
) -> (Box<dyn PreparedPart>, ReadyReport) {
    (Box::new(part), ready)
}

/// A loaded part of a model, on any device.
trait PreparedPart: Send {
    fn into_runner(
        self: Box<Self>,
        mesh: Mesh,
        carrier: CarrierChoice,
        masks: MaskConfig,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Runner>, collective::Error>;
}

impl<D: Device + RankDevice + 'static> PreparedPart for ModelPart<D> {
    fn into_runner(
        self: Box<Self>,
        mesh: Mesh,
        carrier: CarrierChoice,
        masks: MaskConfig,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Runner>, collective::Error> {
        let ranks = Ranks::with_carrier(&self.lent.get().device, mesh, carrier, &self.direct, cancel)?;
        if ranks.uses_carrier(CarrierChoice::Nccl) {
            tracing::info!(rank = ranks.part().place.tp, "devices exchange through NCCL");
        }
        if ranks.uses_carrier(CarrierChoice::Ipc) {
            tracing::info!(rank = ranks.part().place.tp, "devices sum over each other's memory");
        }
        Ok(Box::new(ModelRunner::new(*self, ranks, masks)))
    }
}

/// A rank that has loaded but has not met the others.
struct JoiningRank {
    parts: Box<dyn PreparedPart>,
    way: JoinMethod,
    carrier: CarrierChoice,
    masks: MaskConfig,
}

enum JoinMethod {
    Alone { n_layers: u32 },
    Through { listener: Arc<PeerListener>, refusals: Arc<Refusals>, plan: Box<MeshPlan> },
}

impl JoiningRank {
    fn join(self, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        let mesh = match self.way {
            JoinMethod::Alone { n_layers } => Mesh::solo(n_layers),
            JoinMethod::Through { listener, refusals, plan } => {
                let joined = Mesh::join_until(&listener, *plan, cancel);
                refused::log_refusals(&listener.refusals(), &refusals);
                joined?
            }
        };
        Ok(self.parts.into_runner(mesh, self.carrier, self.masks, cancel)?)
    }
}

impl LoadedModel for JoiningRank {
    fn join_peers(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        self.join(cancel)
    }
}
