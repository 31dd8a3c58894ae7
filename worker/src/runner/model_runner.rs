//! The runner with a model: a step goes through the sequences, one pass and the draws. Knows nothing of streams; of the
//! model it only knows that it turns a batch into logits.
//!
//! A step on a rank: apply ends and starts; on the first stage, receive the sampler's tokens of earlier steps if a row
//! needs one; lay out the rows; run the pass, together with all ranks; on the sampler, draw, and send the tokens to the
//! first stage.
//!
//! A rank alone on a device that samples begins the next step, if it has arrived, before it waits for this one's
//! tokens: those that the next step needs stay on the device.

use crate::load::kept::{Held, Lent, Of, Shelf};
use crate::runner::refused;
use crate::runner::sequences::{SequenceLimits, Sequences, Tokens, Violation};
use crate::runner::{Assignment, Load, LoadError, Loaded, Ready, RunError, Runner, Upcoming};
use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::cuda::{Cuda, CudaConfig};
use backend::{Batch, Device, Draw, Drawing, KvSpec, Repeats};
use checkpoint::{Checkpoint, ModelSpec};
use collective::{
    AbortHandle, CancelFlag, CarrierChoice, ChunkLimits, ExchangeLimits, Mesh, MeshPlan, PeerListener, RankDevice,
    Ranks, Wire,
};
use model::{KvCache, Limits, Model};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::metrics;
use types::{
    Activations, BLOCKS_MAX, DeviceClass, Mode, Part, PolicyDigest, Step, StepDone, StepId, Token, TokenOut,
    Unsupported,
};
use wire::refusals::Refusals;

pub struct ModelRunner<D: Device + 'static> {
    /// Dropped before the rest: transfers in progress use the device's memory.
    ranks: Ranks<D>,
    lent: Lent<D>,
    kv: KvCache<D>,
    sequences: Sequences,
    is_sampler: bool,
    // A step's buffers, reused.
    batch: Batch,
    draws: Vec<Draw<'static>>,
    drawn: Vec<Option<TokenOut>>,
    /// The tokens that the sampler sends to the first stage.
    told: Vec<Option<Token>>,
    /// The hidden state of one row.
    state: Vec<f32>,
    /// A step that was begun before its turn.
    ahead: Option<(StepId, Begun)>,
    /// The device's pass counts at the last report.
    counted: Repeats,
}

/// How far a step's draws are after its pass was begun.
enum Begun {
    /// The step has no rows.
    Empty,
    /// Everything is drawn.
    Done,
    Drawing(Drawing),
}

impl<D: Device + 'static> ModelRunner<D> {
    fn new(lent: Lent<D>, ranks: Ranks<D>, kv: KvCache<D>, limits: SequenceLimits) -> ModelRunner<D> {
        let outputs_max = limits.outputs_max();
        let part = ranks.part();
        let (sequences, is_sampler) = (Sequences::new(limits, Tokens::of(part)), part.is_sampler());
        let batch = sequences.new_batch();
        let (draws, drawn) = (Vec::with_capacity(outputs_max), Vec::with_capacity(outputs_max));
        let told = Vec::with_capacity(outputs_max);
        let state = vec![0.0; lent.get().spec.hidden as usize];
        let counted = lent.get().device.repeats();
        ModelRunner { lent, ranks, kv, sequences, is_sampler, batch, draws, drawn, told, state, ahead: None, counted }
    }

    /// Applies a step up to the layout of its rows.
    fn begin(&mut self, step: &Step) -> Result<(), RunError> {
        let protocol = |violation: Violation| RunError::Protocol { step: step.id.0, what: violation.to_string() };
        self.sequences.begin(step).map_err(protocol)?;
        self.clear();
        while let Some(earlier) = self.sequences.must_hear(step) {
            self.ranks.recv_tokens(earlier, &mut self.told)?;
            self.sequences.hear(&self.told).map_err(protocol)?;
        }
        self.sequences.lay_out(step, &mut self.batch).map_err(protocol)?;
        let n_rows = self.lent.get().device.rows_for(&self.batch.pass());
        self.batch.pad(n_rows);
        Ok(())
    }

    /// Clears freed blocks before anything is stored there again.
    fn clear(&mut self) {
        if let Some(blocks) = self.sequences.uncleared() {
            self.kv.clear(&self.lent.get().device, blocks);
            blocks.iter_mut().for_each(Vec::clear);
        }
    }

    /// Called when the assignment ends: frees and clears everything, so that the memory's next user finds nothing.
    fn let_all_go(&mut self) {
        self.sequences.forget_all();
        self.clear();
    }

    fn pass(&mut self, step: &Step) -> model::Result<Begun> {
        let Held { device, model, .. } = self.lent.get_mut();
        let logits = model.forward(device, &mut self.ranks, &self.batch.pass(), &mut self.kv)?;
        let mut begun = Begun::Done;
        if let Some(logits) = logits {
            let mut draws = emptied(std::mem::take(&mut self.draws));
            self.sequences.draws(step, &mut draws);
            match device.begin_draws(logits, &draws) {
                Some(drawing) => begun = Begun::Drawing(drawing),
                None => device.draw(logits, &draws, &mut self.drawn),
            }
            self.draws = emptied(draws);
        }
        if let (true, true, Some(hidden)) = (self.is_sampler, self.batch.pass().wants_hidden(), model.hidden()) {
            let read = |row: usize, state: &mut [f32]| device.read(hidden, row..row + 1, state);
            self.sequences.pool(step, &self.batch.pass(), &mut self.state, read);
        }
        Ok(begun)
    }

    /// Runs all of the step that does not wait for its draws.
    fn start(&mut self, step: &Step) -> Result<Begun, RunError> {
        step.supported()?;
        self.begin(step)?;
        if self.batch.n_rows() == 0 {
            return Ok(Begun::Empty);
        }
        self.lent.begin();
        let passed = self.pass(step);
        self.passed(passed)
    }

    /// A pass that a lost peer has ended leaves the weights sound: the next pass uses nothing of it.
    fn passed<T>(&mut self, passed: model::Result<T>) -> Result<T, RunError> {
        if matches!(passed, Err(model::Error::Collective(_))) {
            self.lent.end();
        }
        passed.map_err(run_error)
    }

    /// While the device computes this step, begins the next one if possible.
    fn follow(&mut self, step: &Step, drawing: &Drawing, upcoming: &mut dyn Upcoming) -> Result<(), RunError> {
        /// Checks of the queue before the thread first yields its core for longer.
        const LOOKS: u32 = 256;
        const PAUSE: Duration = Duration::from_micros(20);
        let mut n_looks = 0;
        while !self.lent.get().device.are_drawn(drawing) {
            if let Some(next) = upcoming.next() {
                if self.can_follow(step, next) {
                    let pass = self.start(next)?;
                    self.ahead = Some((next.id, pass));
                }
                return Ok(());
            }
            n_looks += 1;
            if n_looks < LOOKS { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
        Ok(())
    }

    fn can_follow(&mut self, step: &Step, next: &Step) -> bool {
        if !self.sequences.can_follow(step, next) {
            return false;
        }
        let mut draws = emptied(std::mem::take(&mut self.draws));
        self.sequences.draws(next, &mut draws);
        let Held { device, spec, .. } = self.lent.get();
        let are_alone = draws.iter().all(|draw| device.draws_alone(draw, spec.vocab as usize));
        self.draws = emptied(draws);
        are_alone
    }

    /// Completes a step's draws, and checks that its pass can be trusted.
    fn answer(&mut self, step: &Step, begun: Begun) -> Result<(), RunError> {
        let device = &self.lent.get().device;
        match begun {
            Begun::Empty => return Ok(()),
            Begun::Done => {}
            Begun::Drawing(drawing) => {
                let mut draws = emptied(std::mem::take(&mut self.draws));
                self.sequences.draws(step, &mut draws);
                device.drawn(&drawing, &draws, &mut self.drawn);
                self.draws = emptied(draws);
            }
        }
        // A pass released by a lost peer computes on any numbers: the loss is the cause to report.
        let settled = self.ranks.settle().map_err(model::Error::from);
        let settled = settled.and_then(|()| Ok(self.lent.get().device.settle()?));
        if settled.is_ok() && self.ahead.is_none() {
            self.lent.end();
        }
        self.passed(settled)
    }

    fn run_step(
        &mut self,
        step: &Step,
        upcoming: Option<&mut dyn Upcoming>,
        done: &mut StepDone,
    ) -> Result<(), RunError> {
        let begun = Instant::now();
        let pass = match self.ahead.take() {
            Some((id, pass)) if id == step.id => pass,
            Some((id, _)) => {
                let what = format!("step {} was begun, and is not what comes next", id.0);
                return Err(RunError::Protocol { step: step.id.0, what });
            }
            None => {
                self.drawn.clear();
                self.start(step)?
            }
        };
        // On a grid tokens go through hosts.
        let is_alone = self.ranks.is_alone();
        if let (Some(upcoming), true, Begun::Drawing(drawing)) = (upcoming, is_alone, &pass) {
            self.follow(step, drawing, upcoming)?;
        }
        self.answer(step, pass)?;
        self.count();
        self.finish(step, done)?;
        done.micros = u32::try_from(begun.elapsed().as_micros()).unwrap_or(u32::MAX);
        Ok(())
    }

    fn count(&mut self) {
        let (now, before) = (self.lent.get().device.repeats(), self.counted);
        let grown = [
            ("plain", now.plain - before.plain),
            ("recorded", now.recorded - before.recorded),
            ("replayed", now.replayed - before.replayed),
            ("refused", now.refused - before.refused),
        ];
        self.counted = now;
        for (way, n) in grown.into_iter().filter(|(_, n)| *n > 0) {
            metrics::cuda_passes(way, n);
        }
    }

    /// Appends the tokens to the logs. The first stage gets one message for each step with draws, and none for others.
    fn finish(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        if !self.is_sampler {
            self.sequences.pass_by(step);
            return Ok(());
        }
        self.sequences.finish(step, &mut self.drawn, &mut self.told, &mut done.slices);
        if self.told.is_empty() { Ok(()) } else { Ok(self.ranks.send_tokens(step.id, &self.told)?) }
    }
}

impl<D: Device + 'static> Drop for ModelRunner<D> {
    /// Clears the KV cache, and forgets recorded graphs before the communicators that they name are dropped.
    fn drop(&mut self) {
        self.let_all_go();
        self.lent.get().device.forget();
    }
}

impl<D: Device + 'static> Runner for ModelRunner<D> {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        self.run_step(step, None, done)
    }

    fn run_with(&mut self, step: &Step, upcoming: &mut dyn Upcoming, done: &mut StepDone) -> Result<(), RunError> {
        self.run_step(step, Some(upcoming), done)
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        Some(self.ranks.abort_handle())
    }

    fn repeats(&self) -> Repeats {
        self.lent.get().device.repeats()
    }

    fn waited(&self) -> Duration {
        Duration::from_micros(self.ranks.times().waiting)
    }
}

fn run_error(error: model::Error) -> RunError {
    match error {
        model::Error::Collective(error) => error.into(),
        error => RunError::Pass(error.into()),
    }
}

/// An empty vector with the same memory for draws of another lifetime: collecting in place keeps the allocation.
fn emptied<'a>(mut draws: Vec<Draw<'_>>) -> Vec<Draw<'a>> {
    draws.clear();
    draws.into_iter().map(|_| unreachable!("it is empty")).collect()
}

/// Which of a machine's devices a rank computes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Cuda {
        ordinal: u32,
        /// The folder in which compiled kernels are kept between starts.
        cache: Option<PathBuf>,
    },
}

/// Loads models for a device of this machine.
#[derive(Clone, Debug)]
pub struct ModelLoader {
    pub place: Place,
    /// Computing threads, including the caller's.
    pub threads: usize,
    pub isa: Isa,
    /// Whether a waiting thread spins. Only where all ranks together have no more threads than cores.
    pub spin: bool,
    /// The listener for peers, if this worker is to have any.
    pub listener: Option<Arc<PeerListener>>,
    /// The peers refused there, for the log.
    pub refusals: Arc<Refusals>,
    pub wire: Wire,
    /// The weights that its last rank held.
    pub shelf: Shelf,
    /// The carrier between the ranks' devices; only for GPUs.
    pub carrier: CarrierChoice,
    /// Whether a GPU runs passes of the same shape as recorded graphs.
    pub graphs: bool,
}

impl ModelLoader {
    /// A loader for the CPU, with the widest instructions of this machine and without peers.
    pub fn new(threads: usize) -> ModelLoader {
        let (place, isa, wire, carrier) = (Place::Cpu, Isa::detect(), Wire::default(), CarrierChoice::default());
        ModelLoader {
            place,
            threads,
            isa,
            spin: true,
            listener: None,
            refusals: Arc::default(),
            wire,
            shelf: Shelf::default(),
            carrier,
            graphs: true,
        }
    }

    /// The runner of a rank that has met the others through `mesh`, and its report.
    pub fn build_with(&self, assignment: &Assignment, mesh: Mesh) -> Result<(Box<dyn Runner>, Ready), LoadError> {
        let cancel = CancelFlag::default();
        let (parts, ready) = self.prepare(assignment, mesh.part(), &cancel)?;
        Ok((parts.with(mesh, self.carrier, &cancel)?, ready))
    }

    /// `load` followed by `meet`.
    pub fn build(&self, assignment: &Assignment) -> Result<(Box<dyn Runner>, Ready), LoadError> {
        let (apart, ready) = self.load_apart(assignment, &CancelFlag::default())?;
        Ok((apart.join(&CancelFlag::default())?, ready))
    }

    fn load_apart(&self, assignment: &Assignment, cancel: &CancelFlag) -> Result<(Apart, Ready), LoadError> {
        let way = self.way(assignment)?;
        let (parts, ready) = self.prepare(assignment, &assignment.layout.part(assignment.rank), cancel)?;
        Ok((Apart { parts, way, carrier: self.carrier }, ready))
    }

    /// How the rank will meet the others, once all have loaded.
    fn way(&self, assignment: &Assignment) -> Result<Way, LoadError> {
        let Assignment { epoch, rank, layout, mesh_addresses, mesh_secret, timeouts, .. } = assignment;
        layout.grid().supported()?;
        if layout.grid().n_ranks() == 1 {
            return Ok(Way::Alone { n_layers: layout.n_layers() });
        }
        let Some(listener) = self.listener.clone() else {
            return Err(Unsupported("a grid of several ranks, of a worker that has no address for peers").into());
        };
        let plan = MeshPlan::new(*epoch, *rank, layout.clone(), mesh_addresses.clone(), mesh_secret.0);
        let plan = MeshPlan { wire: self.wire, spin: self.spin, timeouts: *timeouts, ..plan };
        Ok(Way::Through { listener, refusals: self.refusals.clone(), plan: Box::new(plan) })
    }

    fn prepare(
        &self,
        assignment: &Assignment,
        part: &Part,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn Prepared>, Ready), LoadError> {
        match &self.place {
            Place::Cpu if assignment.mode != Mode::Lockstep => {
                Err(Unsupported("numerics other than lockstep on the CPU, where there is one way to compute").into())
            }
            Place::Cpu => {
                let config = self.cpu(assignment.activations);
                let open = || Cpu::new(config).map_err(failed(assignment));
                Ok(boxed(on_device(open, &self.shelf, assignment, part, cancel)?))
            }
            Place::Cuda { ordinal, cache } => {
                let open = || self.cuda(*ordinal, cache.as_deref(), assignment);
                Ok(boxed(on_device(open, &self.shelf, assignment, part, cancel)?))
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
        // This CPU packs weights and does the draws that need sorting; in between it waits for the device.
        let host = CpuConfig { spin: false, ..self.cpu(Activations::F32) };
        let (cache, mode, graphs) = (cache.map(Path::to_owned), assignment.mode, self.graphs);
        let config = CudaConfig { ordinal, cache, mode, host, graphs };
        Cuda::open(&config).map_err(failed(assignment))
    }
}

/// Loads a rank's part, on any device.
fn on_device<D: Device + 'static>(
    open: impl FnOnce() -> Result<D, LoadError>,
    shelf: &Shelf,
    assignment: &Assignment,
    part: &Part,
    cancel: &CancelFlag,
) -> Result<(Parts<D>, Ready), LoadError> {
    let begun = Instant::now();
    let told = assignment.policy.map(|policy| Of::new(policy, assignment, part));
    let kept = shelf.take::<D>(told.as_ref());
    let was_kept = kept.as_ref().is_some_and(|kept| kept.reading == assignment.reading);
    let (held, unread) = match kept {
        Some(kept) if was_kept => (kept, None),
        Some(kept) => again(kept, assignment, part, cancel)?,
        None => (read(open()?, assignment, part, cancel)?, None),
    };
    let Held { device, spec, policy, .. } = &held;
    let (limits, specs) = sizes(assignment, spec, part, device.class())?;
    let kv = KvCache::new(device, &specs).map_err(failed(assignment))?;
    let (weight_bytes, weights) = (held.model.weight_bytes() as u64, held.model.runs().to_vec());
    let ready = Ready { policy: *policy, weight_bytes, weights, unread };
    let millis = begun.elapsed().as_millis() as u64;
    let (epoch, rank) = (assignment.epoch, assignment.rank.0);
    tracing::info!(%epoch, rank, was_kept, millis, "holding a part of the model");
    let (of, direct) = (Of::new(*policy, assignment, part), direct(&limits, spec, device.class()));
    Ok((Parts { lent: shelf.lend(held, of), kv, limits, direct }, ready))
}

fn boxed<D: Device + RankDevice + 'static>((parts, ready): (Parts<D>, Ready)) -> (Box<dyn Prepared>, Ready) {
    (Box::new(parts), ready)
}

/// The largest exchanges between devices.
fn direct(limits: &SequenceLimits, spec: &ModelSpec, class: DeviceClass) -> ExchangeLimits {
    ExchangeLimits {
        rows_max: limits.rows_max,
        hidden: spec.hidden as usize,
        outputs_max: limits.outputs_max(),
        n_vocab: spec.vocab as usize,
        n_leaves: model::leaf_counts(spec, class),
        chunks: ChunkLimits::default(),
    }
}

/// Reads the model again, if the same model can still be read: where its file is gone or another model's, the rank
/// keeps its old weights. These are dropped before reading: there may not be room for both.
fn again<D: Device>(
    kept: Held<D>,
    assignment: &Assignment,
    part: &Part,
    cancel: &CancelFlag,
) -> Result<(Held<D>, Option<String>), LoadError> {
    let why = difference(&kept, assignment, cancel).unwrap_or_else(|error| Some(error.to_string()));
    if cancel.is_cancelled() {
        // The epoch is over. The next one asks again.
        return Ok((kept, None));
    }
    if let Some(why) = why {
        let path = assignment.model_path.display();
        tracing::warn!(%path, why, "the model cannot be read again: this rank goes on with what it has");
        return Ok((kept, Some(format!("{path}: {why}"))));
    }
    let Held { device, model, .. } = kept;
    drop(model);
    Ok((read(device, assignment, part, cancel)?, None))
}

/// Why the model on disk differs from the one held. Reads every byte of it.
fn difference<D: Device>(
    kept: &Held<D>,
    assignment: &Assignment,
    cancel: &CancelFlag,
) -> checkpoint::Result<Option<String>> {
    let checkpoint = Checkpoint::open(&assignment.model_path)?;
    let found = model::policy(&checkpoint, &kept.device, assignment.activations, assignment.kv_dtype)?;
    if found != kept.policy {
        let ours = kept.policy;
        return Ok(Some(format!("what is there is of policy {found}, the replica serves under {ours}")));
    }
    let differs = checkpoint.differs_from(kept.model.runs(), &|| cancel.is_cancelled())?;
    Ok(differs.map(|weight| format!("there are other bytes of the weight {weight} than the replica serves")))
}

fn read<D: Device>(device: D, assignment: &Assignment, part: &Part, cancel: &CancelFlag) -> Result<Held<D>, LoadError> {
    let checkpoint = Checkpoint::open(&assignment.model_path).map_err(failed(assignment))?;
    let (limits, _) = sizes(assignment, checkpoint.spec(), part, device.class())?;
    let (rows_max, outputs_max) = (limits.rows_max, limits.outputs_max());
    let limits = Limits { rows_max, outputs_max, context: assignment.context };
    let model = Model::load_until(&checkpoint, &device, part, limits, cancel).map_err(failed(assignment))?;
    let unread = checkpoint.unread();
    if !unread.is_empty() {
        tracing::debug!(?unread, "the model has no use for some of its file: the policy does not know of them");
    }
    let (policy, spec) = (policy(assignment, &checkpoint, &device)?, checkpoint.spec().clone());
    Ok(Held { device, model, spec, policy, reading: assignment.reading })
}

fn policy(assignment: &Assignment, checkpoint: &Checkpoint, device: &impl Device) -> Result<PolicyDigest, LoadError> {
    model::policy(checkpoint, device, assignment.activations, assignment.kv_dtype).map_err(failed(assignment))
}

/// A runner without its connection to the other ranks.
struct Parts<D: Device + 'static> {
    lent: Lent<D>,
    kv: KvCache<D>,
    limits: SequenceLimits,
    direct: ExchangeLimits,
}

/// `Parts` of any device.
trait Prepared: Send {
    fn with(
        self: Box<Self>,
        mesh: Mesh,
        carrier: CarrierChoice,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Runner>, collective::Error>;
}

impl<D: Device + RankDevice + 'static> Prepared for Parts<D> {
    fn with(
        self: Box<Self>,
        mesh: Mesh,
        carrier: CarrierChoice,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Runner>, collective::Error> {
        let Parts { lent, kv, limits, direct } = *self;
        let ranks = Ranks::on(&lent.get().device, mesh, carrier, &direct, cancel)?;
        if ranks.has(CarrierChoice::Nccl) {
            tracing::info!(rank = ranks.part().place.tp, "NCCL carries between devices");
        }
        if ranks.has(CarrierChoice::Ipc) {
            tracing::info!(rank = ranks.part().place.tp, "sums go over the devices' memory");
        }
        Ok(Box::new(ModelRunner::new(lent, ranks, kv, limits)))
    }
}

/// A rank that has loaded and has not met the others.
struct Apart {
    parts: Box<dyn Prepared>,
    way: Way,
    carrier: CarrierChoice,
}

enum Way {
    Alone { n_layers: u32 },
    Through { listener: Arc<PeerListener>, refusals: Arc<Refusals>, plan: Box<MeshPlan> },
}

impl Apart {
    fn join(self, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        let mesh = match self.way {
            Way::Alone { n_layers } => Mesh::solo(n_layers),
            Way::Through { listener, refusals, plan } => {
                let joined = Mesh::join_until(&listener, *plan, cancel);
                refused::log(&listener.refusals(), &refusals);
                joined?
            }
        };
        Ok(self.parts.with(mesh, self.carrier, cancel)?)
    }
}

impl Loaded for Apart {
    fn meet(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        self.join(cancel)
    }
}

/// A rank's limits, and the KV cache that they need.
fn sizes(
    assignment: &Assignment,
    spec: &ModelSpec,
    part: &Part,
    class: DeviceClass,
) -> Result<(SequenceLimits, Vec<KvSpec>), LoadError> {
    if assignment.layout.n_layers() != spec.n_layers {
        return Err(Unsupported("a layout with other layers than the model's").into());
    }
    if assignment.context > spec.context {
        return Err(Unsupported("a context longer than the model's").into());
    }
    let groups = spec.cache_groups().groups().to_vec();
    let n_blocks = assignment.n_blocks.clone();
    if n_blocks.len() != groups.len() {
        return Err(Unsupported("other than one pool for each cache group of the model").into());
    }
    // A rank without heads stores nothing, so its memory sets no bound.
    if n_blocks.iter().any(|n_blocks| !(1..=BLOCKS_MAX).contains(n_blocks)) {
        return Err(Unsupported("a pool of no block, or of more than 2^24").into());
    }
    let specs = model::kv_specs(spec, part, class, assignment.kv_dtype, &n_blocks);
    let needed = kv_bytes(&specs);
    let available = assignment.kv_bytes;
    if needed > available {
        return Err(LoadError::Memory { what: "the KV cache", needed, available });
    }
    let limits = SequenceLimits {
        n_vocab: spec.vocab,
        context: assignment.context,
        groups,
        n_blocks,
        rows_max: assignment.batch_tokens_max as usize,
        running_max: assignment.running_max as usize,
        zero_kv: assignment.zero_kv,
    };
    Ok((limits, specs))
}

impl Load for ModelLoader {
    fn load(&mut self, assignment: &Assignment, cancel: &CancelFlag) -> Result<(Box<dyn Loaded>, Ready), LoadError> {
        let (apart, ready) = self.load_apart(assignment, cancel)?;
        Ok((Box::new(apart), ready))
    }
}

fn kv_bytes(specs: &[KvSpec]) -> u64 {
    specs.iter().map(|spec| (spec.n_blocks as u64).saturating_mul(spec.block_bytes())).sum()
}

fn failed<E: Into<model::Error>>(assignment: &Assignment) -> impl FnOnce(E) -> LoadError + '_ {
    |source| match source.into() {
        model::Error::Checkpoint(source @ checkpoint::Error::Changed { .. }) => LoadError::Changed(source),
        source => LoadError::Model { path: assignment.model_path.clone(), source: source.into() },
    }
}

#[cfg(test)]
mod tests;
