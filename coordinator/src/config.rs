//! A coordinator's settings. Declared once, resolved by the binary, passed whole.

use crate::placement::{Blueprint, ModelShape, PlacementPolicy};
use proto::cluster as wire;
use scheduler::{DraftPolicy, RowCost, StepPace};
use std::path::PathBuf;
use std::time::Duration;
use types::{DeviceKind, Epoch, Grid, NgramLimits, Numerics, NumericsMode, PolicyDigest};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The replica's name in the store and in resume handles.
    pub replica: String,
    /// The name that clients call the model by.
    pub model: String,
    /// The model's path on the workers' machines.
    pub model_path: PathBuf,
    pub shape: ModelShape,
    pub policy: PlacementPolicy,
    /// The parts of the policy digest under which every rank must compute. None: the digest of the first rank that is
    /// ready; used where there is no model.
    pub policy_digest: Option<DigestInputs>,
    pub prefix_cache: bool,
    /// Ranks clear a sequence's blocks before another sequence gets them. Then no two share a block, whatever
    /// `prefix_cache` is.
    pub zero_kv: bool,
    /// The secret at the root of every block hash, derived from the cluster's.
    pub salt: [u8; 16],
    /// The base of every epoch's secret, by which its ranks recognise each other.
    pub mesh_seed: [u8; 32],
    /// The protocols that this build sends to routers and workers and compares with theirs.
    pub speaks: proto::ProtocolRange,
    pub limits: Limits,
    pub waits: Timings,
}

/// The parts of a policy digest, beside the policy's types and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigestInputs {
    /// The model's fingerprint.
    pub weights: [u8; 32],
    pub mode: NumericsMode,
}

/// Limits of every queue and every size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub waiting_max: u32,
    pub waiting_tokens_max: u64,
    pub batch_tokens_max: u32,
    pub chunk_tokens_max: u32,
    pub pace: StepPace,
    /// How long a fetch from a tier behind the pools may take. None: as learned times decide.
    pub fetch_micros: Option<u64>,
    /// The limit for one stage; every further stage adds one.
    pub steps_in_flight_max: u32,
    pub speculation: Speculation,
    /// A smaller model that guesses. Its memory is in `ModelShape::draft`.
    pub draft_model: Option<DraftModel>,
    /// The model's own layer that guesses. Its memory is in `ModelShape::draft` too.
    pub mtp: Option<MtpDrafts>,
    /// Events that wait for the loop; a sender waits while the queue is full.
    pub events_max: usize,
    /// Frames that wait for one router. A router that leaves more unread is cut off, so that it delays no one else.
    pub router_frames_max: usize,
    /// Frames that wait for one rank: more than are ever in flight.
    pub rank_frames_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            waiting_max: 1024,
            waiting_tokens_max: 4 << 20,
            batch_tokens_max: 512,
            chunk_tokens_max: 512,
            pace: StepPace::DEFAULT,
            fetch_micros: None,
            steps_in_flight_max: 2,
            speculation: Speculation::default(),
            draft_model: None,
            mtp: None,
            events_max: 4096,
            router_frames_max: 4096,
            rank_frames_max: 64,
        }
    }
}

/// How many guessed tokens steps compute ahead of known ones, and how they are guessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    pub drafting: DraftPolicy,
    pub ngrams: NgramLimits,
}

/// A smaller model of the same vocabulary, which the sampling rank holds whole and uses for guesses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftModel {
    /// Its path on the workers' machines.
    pub path: PathBuf,
    /// The memory for its KV cache.
    pub kv_bytes: u64,
    /// The time of one of its passes, in thousandths of a step.
    pub pass_permille: u32,
    /// Only the draft model guesses, and repetitions in answers do not.
    pub is_alone: bool,
}

/// Guesses by the model's own layer that predicts one token further, which the sampling rank holds whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtpDrafts {
    /// The memory for its KV cache.
    pub kv_bytes: u64,
    /// The time of one of its passes, in thousandths of a step.
    pub pass_permille: u32,
    /// Only the layer guesses, and repetitions in answers do not.
    pub is_alone: bool,
}

impl Limits {
    /// Returns the ranks' settings for guesses.
    pub(crate) fn guesses(&self) -> Option<wire::Guesses> {
        let Speculation { drafting, ngrams: NgramLimits { least, most } } = self.speculation;
        let cost = |pass_permille: u32| match drafting {
            DraftPolicy::Adaptive { row, .. } => Some(wire::DraftCost {
                row_permille: row.permille(),
                pass_permille,
                is_learned: matches!(row, RowCost::Learned(_)),
            }),
            DraftPolicy::Off | DraftPolicy::Fixed(_) => None,
        };
        let of_model = |draft: &DraftModel| wire::DraftModel {
            path: draft.path.to_string_lossy().into_owned(),
            kv_bytes: draft.kv_bytes,
            cost: cost(draft.pass_permille),
        };
        let of_layer = |mtp: MtpDrafts| wire::MtpDrafts { kv_bytes: mtp.kv_bytes, cost: cost(mtp.pass_permille) };
        let is_model_alone = self.draft_model.as_ref().is_some_and(|draft| draft.is_alone);
        let guesses = wire::Guesses {
            n_max: drafting.max(),
            ngram_least: least.into(),
            ngram_most: most.into(),
            no_ngrams: is_model_alone || self.mtp.is_some_and(|mtp| mtp.is_alone),
            draft_model: self.draft_model.as_ref().map(of_model),
            mtp: self.mtp.map(of_layer),
        };
        (guesses.n_max > 0).then_some(guesses)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timings {
    /// The interval at which a rank sends a heartbeat and the loop looks at its timers.
    pub beat_every: Duration,
    /// A rank that misses this many heartbeats is lost.
    pub beats_missed_max: u32,
    pub state_every: Duration,
    /// The time limit for a peer's first frame.
    pub hello_max: Duration,
    /// The time limit for a rank to load its part of the model.
    pub load_max: Duration,
    /// The time limit for ranks that have loaded to meet each other.
    pub meet_max: Duration,
    /// A rank whose computing thread hangs still sends heartbeats. It counts as hung if a step is not answered within
    /// `hang_factor` times the recent duration of such steps; never before `hang_min`, always after `step_max`.
    pub hang_min: Duration,
    pub step_max: Duration,
    pub hang_factor: u32,
    /// The time limit for the first step after a load.
    pub step_first_max: Duration,
    /// The time limit for one collective operation. Longer than a step's: the coordinator receives reports of all
    /// ranks, a rank does not.
    pub exchange_max: Duration,
    /// How long the computing thread of a rank that its peers blame may stand still, once it has a rank again.
    pub suspect_max: Duration,
    /// The pause between placements that end because ranks do not reach each other: doubles from the first to the
    /// second.
    pub replace_min: Duration,
    pub replace_max: Duration,
    /// How long one of two workers that do not reach each other is left out; doubles each time, up to 64 times.
    pub apart_min: Duration,
    /// How long a lost rank's place is kept for another worker, before fewer ranks carry the model.
    pub replan_after: Duration,
    /// How long enough workers must have been there before the model is spread over more of them again.
    pub regrow_after: Duration,
    /// How long a replica makes no optional change after it has taken over another replica's stream.
    pub takeover_hold: Duration,
    /// How long memory of the KV cache must have been unused before ranks that grow give it back.
    pub kv_release_after: Duration,
    /// How long the requests of a router that vanished go on.
    pub router_grace: Duration,
    /// Requests that still run this long after a drain began are left to the routers, which may move them elsewhere.
    pub drain_max: Duration,
    /// The time limit for connections to close at the end.
    pub close_max: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Timings {
            beat_every: Duration::from_millis(100),
            beats_missed_max: 8,
            state_every: Duration::from_secs(1),
            hello_max: Duration::from_secs(5),
            load_max: Duration::from_secs(600),
            meet_max: Duration::from_secs(30),
            hang_min: Duration::from_secs(3),
            step_max: Duration::from_secs(600),
            hang_factor: 8,
            step_first_max: Duration::from_secs(120),
            exchange_max: Duration::from_secs(900),
            suspect_max: Duration::from_secs(3),
            replace_min: Duration::from_millis(100),
            replace_max: Duration::from_secs(10),
            apart_min: Duration::from_secs(60),
            replan_after: Duration::from_secs(10),
            regrow_after: Duration::from_secs(10),
            takeover_hold: Duration::from_secs(60),
            kv_release_after: Duration::from_secs(10),
            router_grace: Duration::from_secs(10),
            drain_max: Duration::from_secs(30),
            close_max: Duration::from_secs(1),
        }
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The most tokens that a step of an encoder has by default.
const ENCODER_TOKENS_MAX: u32 = 8192;

impl Config {
    /// The secret of one epoch's ranks, which no other process has, not even ranks of another epoch.
    pub(crate) fn mesh_secret(&self, epoch: Epoch) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.mesh_seed);
        hasher.update(&epoch.incarnation.to_le_bytes());
        hasher.update(&epoch.n.to_le_bytes());
        *hasher.finalize().as_bytes()
    }

    /// Whether requests with a common prefix share its blocks.
    pub(crate) fn shares_blocks(&self) -> bool {
        self.prefix_cache && !self.zero_kv
    }

    pub(crate) fn mode(&self) -> NumericsMode {
        self.policy_digest.map_or(NumericsMode::default(), |of| of.mode)
    }

    /// The policy digest on this device, if there is a model.
    pub(crate) fn digest_on(&self, device: &DeviceKind) -> Option<PolicyDigest> {
        self.policy_digest.map(|of| self.digest_of(device, of))
    }

    pub(crate) fn digest_of(&self, device: &DeviceKind, DigestInputs { weights, mode }: DigestInputs) -> PolicyDigest {
        let PlacementPolicy { activations, kv_dtype, .. } = self.policy;
        Numerics::plain(device, mode, activations, kv_dtype, weights).digest()
    }

    /// Every stage beyond the first adds a step.
    pub(crate) fn steps_in_flight_max(&self, grid: Grid) -> u32 {
        self.limits.steps_in_flight_max + u32::from(grid.pp).saturating_sub(1)
    }

    /// The most tokens of one step. A step of an encoder has room for the longest text, which is computed at once.
    pub(crate) fn batch_tokens_max(&self) -> u32 {
        let longest = if self.shape.keeps_nothing() { self.shape.context.min(ENCODER_TOKENS_MAX) } else { 0 };
        self.limits.batch_tokens_max.max(longest)
    }

    /// The scheduler's config for a replica with this blueprint.
    pub fn scheduler(&self, blueprint: &Blueprint, policy: PolicyDigest) -> scheduler::Config {
        let (limits, context) = (&self.limits, blueprint.context);
        scheduler::Config {
            n_blocks: blueprint.n_blocks(),
            context_max: context,
            running_max: self.policy.running_max,
            waiting_max: limits.waiting_max,
            // A prompt that fits the context must fit an empty queue.
            waiting_tokens_max: limits.waiting_tokens_max.max(context.into()),
            batch_tokens_max: self.batch_tokens_max(),
            // The pools were sized for slices of at most `slice_max`.
            chunk_tokens_max: match self.shape.keeps_nothing() {
                true => self.batch_tokens_max(),
                false => limits.chunk_tokens_max.min(self.policy.slice_max),
            },
            pace: limits.pace,
            fetch_micros: limits.fetch_micros,
            n_stages: blueprint.grid.pp.into(),
            steps_in_flight_max: self.steps_in_flight_max(blueprint.grid),
            drafting: limits.speculation.drafting,
            prefix_cache: self.shares_blocks(),
            groups: self.shape.cache.groups().to_vec(),
            policy,
            salt: self.salt,
            ..scheduler::Config::default()
        }
    }
}
