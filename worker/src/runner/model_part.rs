//! A rank's part of a model on its device, and the memory for its sequences. The part is read from the files or kept
//! from the assignment before. Has no knowledge of other ranks or steps.

use crate::assignment::{Assignment, LoadError, ReadyReport};
use crate::load::draft_weights::{DraftSpec, DraftWeights};
use crate::load::packed_cache::PackedCache;
use crate::load::reading::{FileStamps, ReloadPlan, WeightsReadRecord};
use crate::load::scrub::{HashedPart, Scrubber};
use crate::load::vocabulary::LazyVocabulary;
use crate::load::weight_cache::{LoadedPart, PartInUse, PartKey, WeightCache};
use crate::runner::draft_model::{DraftLimits, DraftModelRunner};
use crate::runner::guesses::{DraftCost, LearnedDraftCost};
use crate::runner::kv_commit::KvPoolMemory;
use crate::runner::mtp::MtpRunner;
use crate::runner::sequences::SequenceLimits;
use crate::tier::{KvTiers, PagedPart, RankTier};
use backend::{Device, KvSpec};
use checkpoint::{Checkpoint, ModelSpec};
use collective::{CancelFlag, ChunkLimits, ExchangeLimits};
use model::{KvCache, LoadSource, Model, MtpHead, PassLimits};
use std::sync::Arc;
use std::time::Instant;
use types::{BLOCKS_MAX, DeviceClass, PolicyDigest, RankPart, Unsupported};

/// A runner without its connection to the other ranks.
pub(super) struct ModelPart<D: Device + 'static> {
    pub lent: PartInUse<D>,
    pub kv: KvCache<D>,
    pub kv_commit: Option<KvPoolMemory>,
    pub draft_model: Option<DraftModelRunner<D>>,
    pub mtp: Option<MtpRunner<D>>,
    /// What is behind the pools.
    pub tier: Option<RankTier>,
    pub limits: SequenceLimits,
    pub direct: ExchangeLimits,
}

/// What a loader keeps from one load to the next: weights, in memory and in files, what checks them, and pages of KV.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    pub weight_cache: &'a WeightCache,
    pub scrubber: Option<&'a Scrubber>,
    pub packed_cache: Option<&'a PackedCache>,
    pub kv_tiers: Option<&'a KvTiers>,
}

/// Loads a rank's part, on any device.
pub(super) fn load_part<D: Device + 'static>(
    open: impl Fn() -> Result<D, LoadError>,
    Kept { weight_cache, scrubber, packed_cache, kv_tiers }: Kept<'_>,
    assignment: &Assignment,
    part: &RankPart,
    cancel: &CancelFlag,
) -> Result<(ModelPart<D>, ReadyReport), LoadError> {
    let begun = Instant::now();
    let part_key = assignment.policy.map(|policy| PartKey::new(policy, assignment, part));
    let kept = weight_cache.take::<D>(part_key.as_ref());
    let plan = kept.map(|mut kept| (kept.reading.plan_reload(assignment), kept));
    let was_kept = matches!(plan, Some((ReloadPlan::Keep { .. }, _)));
    let (mut held, unread) = match plan {
        Some((ReloadPlan::Keep { unread }, kept)) => (kept, unread),
        Some((ReloadPlan::Read(files), kept)) => reload(kept, files, (assignment, part), packed_cache, cancel)?,
        None => (read(open()?, (assignment, part), packed_cache, cancel)?, None),
    };
    held.draft = draft_weights(held.draft.take(), &open, assignment, held.spec.vocab, cancel)?;
    load_mtp(&mut held, assignment, part, cancel)?;
    if let Some(scrubber) = scrubber {
        let hashed = held.hashed.take().unwrap_or_else(|| Arc::new(HashedPart::of(held.model.packed(), &held.device)));
        scrubber.watch(&hashed, assignment.rank);
        held.hashed = Some(hashed);
    }
    let LoadedPart { device, spec, policy, .. } = &held;
    let (limits, specs) = sizes(assignment, spec, part, device.class())?;
    let rows = [assignment.batch_tokens_max, assignment.running_max].map(|n| n as usize);
    let of_encoder = model::encoder_kv(spec, part, device.class(), rows);
    let all_specs: Vec<KvSpec> = specs.iter().copied().chain(of_encoder).collect();
    let kv = KvCache::new(device, &all_specs).map_err(load_failed(assignment))?;
    let draft_model = held.draft.as_ref().map(|draft| draft_runner(draft, assignment)).transpose()?;
    let mtp = held.mtp.as_ref().map(|head| mtp_runner(&held.device, head, assignment)).transpose()?;
    if kv_tiers.is_some() && assignment.zero_kv {
        return Err(Unsupported("--kv-disk or --kv-host with --zero-kv, which keeps nothing of a request").into());
    }
    let tier = kv_tiers.map(|tiers| {
        let heads = model::kv_heads(spec, part, device.class());
        let paged = PagedPart { part, heads, specs: &specs };
        tiers.rank_tier(policy, assignment.epoch, paged, device, &kv)
    });
    let tier = tier.transpose().map_err(load_failed(assignment))?;
    let lengths = (assignment.context, assignment.batch_tokens_max);
    let kv_commit = KvPoolMemory::new(kv.block_memories(device), &specs, &limits.groups, lengths);
    let (weight_bytes, weights) = (held.model.weight_bytes() as u64, held.model.piece_runs().to_vec());
    let ready = ReadyReport { policy: *policy, weight_bytes, weights, unread };
    let millis = begun.elapsed().as_millis() as u64;
    let (epoch, rank) = (assignment.epoch, assignment.rank.0);
    tracing::info!(%epoch, rank, was_kept, millis, "holding a part of the model");
    let (of, direct) = (PartKey::new(*policy, assignment, part), exchange_limits(&limits, spec, device.class()));
    Ok((
        ModelPart { lent: weight_cache.hand_out(held, of), kv, kv_commit, draft_model, mtp, tier, limits, direct },
        ready,
    ))
}

/// Returns the draft model for this rank, kept or read.
fn draft_weights<D: Device>(
    kept: Option<DraftWeights<D>>,
    open: impl Fn() -> Result<D, LoadError>,
    assignment: &Assignment,
    n_vocab: u32,
    cancel: &CancelFlag,
) -> Result<Option<DraftWeights<D>>, LoadError> {
    let Some(draft_spec) = DraftSpec::of(assignment) else { return Ok(None) };
    match kept.filter(|kept| kept.has_spec(&draft_spec) && kept.device.take_failure().is_ok()) {
        Some(kept) => Ok(Some(kept)),
        None => DraftWeights::read(open()?, draft_spec, n_vocab, cancel).map(Some),
    }
}

/// The limits of a cache of guesses: its memory, the costs of a guess, and whether they give way to measured ones.
fn draft_limits(assignment: &Assignment, config: Option<(u64, Option<DraftCost>, bool)>) -> DraftLimits {
    let (kv_bytes, cost, learns_cost) = config.unwrap_or_default();
    DraftLimits {
        kv_bytes,
        cost: cost.map(|cost| LearnedDraftCost::new(cost, learns_cost)),
        kv_dtype: assignment.kv_dtype,
        running_max: assignment.running_max as usize,
        zero_kv: assignment.zero_kv,
    }
}

fn draft_runner<D: Device>(draft: &DraftWeights<D>, assignment: &Assignment) -> Result<DraftModelRunner<D>, LoadError> {
    let config = assignment.guesses.draft_model.as_ref();
    let limits = draft_limits(assignment, config.map(|of| (of.kv_bytes, of.cost, of.learns_cost)));
    DraftModelRunner::new(draft, limits).map_err(load_failed(assignment))
}

/// Reads the layer that predicts one token further, where it guesses.
fn load_mtp<D: Device>(
    held: &mut LoadedPart<D>,
    assignment: &Assignment,
    part: &RankPart,
    cancel: &CancelFlag,
) -> Result<(), LoadError> {
    let guesses = assignment.guesses.mtp.is_some() && part.is_sampler();
    held.model.keep_hidden(guesses);
    if !guesses {
        held.mtp = None;
        return Ok(());
    }
    if assignment.guesses.draft_model.is_some() {
        return Err(Unsupported("a draft model beside the model's own layer that guesses").into());
    }
    if held.device.class() != DeviceClass::Cpu {
        return Err(Unsupported("guesses by a layer of the model on devices other than the CPU").into());
    }
    if held.mtp.is_none() {
        let checkpoint = Checkpoint::open(&assignment.model_path).map_err(load_failed(assignment))?;
        let (rows_max, outputs_max) = (assignment.batch_tokens_max as usize, assignment.running_max as usize);
        let limits = PassLimits { rows_max, outputs_max, context: assignment.context };
        let head = MtpHead::load(&checkpoint, &held.device, limits, Some(&held.model), cancel);
        let head = head.map_err(load_failed(assignment))?;
        tracing::info!(bytes = head.weight_bytes(), "loaded the layer that predicts one token further");
        held.mtp = Some(head);
    }
    Ok(())
}

fn mtp_runner<D: Device>(device: &D, head: &MtpHead<D>, assignment: &Assignment) -> Result<MtpRunner<D>, LoadError> {
    let config = assignment.guesses.mtp;
    let limits = draft_limits(assignment, config.map(|of| (of.kv_bytes, of.cost, of.learns_cost)));
    let pass = (assignment.batch_tokens_max as usize, assignment.context);
    MtpRunner::new(device, head, limits, pass).map_err(load_failed(assignment))
}

/// Reads the model again if the same model can still be read. If its file is gone or has another model, the rank keeps
/// its old weights. Before the reading they are dropped, as there may not be room for both.
fn reload<D: Device>(
    mut kept: LoadedPart<D>,
    files: FileStamps,
    (assignment, part): (&Assignment, &RankPart),
    packed_cache: Option<&PackedCache>,
    cancel: &CancelFlag,
) -> Result<(LoadedPart<D>, Option<String>), LoadError> {
    let why = difference(&kept, assignment, cancel).unwrap_or_else(|error| Some(error.to_string()));
    if cancel.is_cancelled() {
        // The epoch is over. The next one reads again.
        return Ok((kept, None));
    }
    if let Some(why) = why {
        let path = assignment.model_path.display();
        tracing::warn!(%path, why, "the model cannot be read again: this rank keeps its weights");
        let why = format!("{path}: {why}");
        kept.reading.record_refused(assignment, files, why.clone());
        return Ok((kept, Some(why)));
    }
    let LoadedPart { device, model, hashed, mtp, .. } = kept;
    drop((model, hashed, mtp));
    // An operator may distrust what was made of the files, so that the files themselves are read.
    packed_cache.iter().for_each(|cache| cache.forget_last());
    Ok((read(device, (assignment, part), packed_cache, cancel)?, None))
}

/// Returns why the model on disk differs from the held one. Reads every byte of it.
fn difference<D: Device>(
    kept: &LoadedPart<D>,
    assignment: &Assignment,
    cancel: &CancelFlag,
) -> checkpoint::Result<Option<String>> {
    let checkpoint = Checkpoint::open(&assignment.model_path)?;
    let found = model::policy(&checkpoint, &kept.device, assignment.activations, assignment.kv_dtype)?;
    if found != kept.policy {
        let ours = kept.policy;
        return Ok(Some(format!("the file has policy {found}, but the replica serves {ours}")));
    }
    let differs = checkpoint.first_difference(kept.model.piece_runs(), &|| cancel.is_cancelled())?;
    Ok(differs.map(|weight| format!("the bytes of weight {weight} differ from those that the replica serves")))
}

fn read<D: Device>(
    device: D,
    (assignment, part): (&Assignment, &RankPart),
    packed_cache: Option<&PackedCache>,
    cancel: &CancelFlag,
) -> Result<LoadedPart<D>, LoadError> {
    let checkpoint = Checkpoint::open(&assignment.model_path).map_err(load_failed(assignment))?;
    let (limits, _) = sizes(assignment, checkpoint.spec(), part, device.class())?;
    let (rows_max, outputs_max) = (limits.rows_max, limits.outputs_max());
    let limits = PassLimits { rows_max, outputs_max, context: assignment.context };
    let packed = packed_cache.and_then(|cache| cache.open(&checkpoint, part));
    let source = LoadSource { cancel, packed: packed.as_ref() };
    let model = Model::load_from(&checkpoint, &device, part, limits, source).map_err(load_failed(assignment))?;
    if let (Some(cache), Some(packed)) = (packed_cache, packed) {
        cache.store(packed);
    }
    let unread = checkpoint.unread_tensors();
    if !unread.is_empty() {
        tracing::debug!(?unread, "the model does not use some tensors of its file: the policy does not cover them");
    }
    let (policy, spec) = (policy(assignment, &checkpoint, &device)?, checkpoint.spec().clone());
    let vocabulary = Arc::new(LazyVocabulary::new(&assignment.model_path, spec.vocab, &spec.eos));
    let reading = WeightsReadRecord::new(assignment, &checkpoint);
    Ok(LoadedPart { device, model, spec, policy, reading, vocabulary, draft: None, mtp: None, hashed: None })
}

fn policy(assignment: &Assignment, checkpoint: &Checkpoint, device: &impl Device) -> Result<PolicyDigest, LoadError> {
    model::policy(checkpoint, device, assignment.activations, assignment.kv_dtype).map_err(load_failed(assignment))
}

/// Returns a rank's limits, and the KV cache that they need.
fn sizes(
    assignment: &Assignment,
    spec: &ModelSpec,
    part: &RankPart,
    class: DeviceClass,
) -> Result<(SequenceLimits, Vec<KvSpec>), LoadError> {
    if assignment.layout.n_layers() != spec.n_layers {
        return Err(Unsupported("a layout whose number of layers differs from the model's").into());
    }
    if assignment.context > spec.context {
        return Err(Unsupported("a context longer than the model's").into());
    }
    let groups = spec.cache_groups().groups().to_vec();
    let n_blocks = assignment.n_blocks.clone();
    if n_blocks.len() != groups.len() {
        return Err(Unsupported("any number of pools other than one for each cache group of the model").into());
    }
    // A rank without heads stores nothing, so its memory sets no bound.
    if n_blocks.iter().any(|n_blocks| !(1..=BLOCKS_MAX).contains(n_blocks)) {
        return Err(Unsupported("a pool without blocks, or with more than 2^24").into());
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
        guesses: assignment.guesses.clone(),
        pooling: spec.pooling.kind,
    };
    Ok((limits, specs))
}

/// Returns the largest exchanges between devices.
fn exchange_limits(limits: &SequenceLimits, spec: &ModelSpec, class: DeviceClass) -> ExchangeLimits {
    ExchangeLimits {
        rows_max: limits.rows_max,
        hidden: spec.hidden as usize,
        outputs_max: limits.outputs_max(),
        n_vocab: spec.vocab as usize,
        n_leaves: model::leaf_counts(spec, class),
        chunks: ChunkLimits::default(),
    }
}

fn kv_bytes(specs: &[KvSpec]) -> u64 {
    specs.iter().map(|spec| (spec.n_blocks as u64).saturating_mul(spec.block_bytes())).sum()
}

pub(super) fn load_failed<E: Into<model::Error>>(assignment: &Assignment) -> impl FnOnce(E) -> LoadError + '_ {
    |source| match source.into() {
        model::Error::Checkpoint(source @ checkpoint::Error::Changed { .. }) => LoadError::Changed(source),
        source => LoadError::Model { path: assignment.model_path.clone(), source: source.into() },
    }
}
