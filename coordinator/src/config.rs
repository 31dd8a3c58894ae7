//! What a coordinator is told at its start. Declared once, resolved by the binary, passed whole.

use crate::placement::{Blueprint, ModelShape, Policy};
use std::path::PathBuf;
use std::time::Duration;
use types::{DeviceKind, Epoch, Grid, Mode, Numerics, PolicyDigest};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The replica's name in the store and in resume handles.
    pub replica: String,
    /// The name that clients call the model by.
    pub model: String,
    /// Where the workers' machines find it.
    pub model_path: PathBuf,
    pub shape: ModelShape,
    pub policy: Policy,
    /// What every rank must compute under, by the fingerprint of the model that is meant. None: what the first that is
    /// ready computes under, where no model is.
    pub policy_digest: Option<DigestOf>,
    pub prefix_cache: bool,
    /// Ranks clear what a sequence lets go before anybody else has it. Then no two share a block, whatever
    /// `prefix_cache` says.
    pub zero_kv: bool,
    /// The cluster's secret at the root of every block hash.
    pub salt: [u8; 16],
    /// From which every epoch's secret is derived, with which its ranks know each other.
    pub mesh_seed: [u8; 32],
    pub limits: Limits,
    pub waits: Waits,
}

/// Of what a policy digest is made, beside the policy's types and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigestOf {
    /// The model's fingerprint.
    pub weights: [u8; 32],
    pub mode: Mode,
}

/// Every queue and every size has its limit here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub waiting_max: u32,
    pub waiting_tokens_max: u64,
    pub batch_tokens_max: u32,
    pub chunk_tokens_max: u32,
    /// With one stage; every further stage adds one.
    pub steps_in_flight_max: u32,
    /// Events that wait for the loop; whoever sends more waits.
    pub events_max: usize,
    /// Frames that wait for one router. One that leaves more unread is cut off, so that nobody waits for it.
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
            steps_in_flight_max: 2,
            events_max: 4096,
            router_frames_max: 4096,
            rank_frames_max: 64,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    /// How often a rank is expected to say that it lives, and the loop to look at its timers.
    pub beat_every: Duration,
    /// A rank that was silent for so many of them is lost.
    pub beats_missed_max: u32,
    pub state_every: Duration,
    /// For a peer's first frame.
    pub hello_max: Duration,
    /// For a rank to load what it is to hold.
    pub load_max: Duration,
    /// For ranks that have loaded to meet each other.
    pub meet_max: Duration,
    /// A rank whose computing thread hangs goes on beating. A step that is not answered within `hang_factor` times what
    /// such steps took lately has one that hangs; never before the first of these, always after the second.
    pub hang_min: Duration,
    pub step_max: Duration,
    pub hang_factor: u32,
    /// For the first step after a load.
    pub step_first_max: Duration,
    /// For one operation among ranks. Longer than a step, because the coordinator hears of all ranks and they do not.
    pub exchange_max: Duration,
    /// For the computing thread of a rank that its peers blame to move, once it has a place again.
    pub suspect_max: Duration,
    /// Between placements that end because ranks do not reach each other: doubles from the first to the second.
    pub replace_min: Duration,
    pub replace_max: Duration,
    /// For how long one of two workers that do not reach each other is left out; doubles each time, up to 64 times.
    pub apart_min: Duration,
    /// How long a lost rank's place is kept for another worker, before fewer ranks carry the model.
    pub replan_after: Duration,
    /// How long enough workers must have been there before the model is spread over more of them again.
    pub regrow_after: Duration,
    /// How long the requests of a router that vanished go on.
    pub router_grace: Duration,
    /// What still runs so long after a drain began is left to the routers, who may go on with it elsewhere.
    pub drain_max: Duration,
    /// For connections to close at the end.
    pub close_max: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Waits {
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
            router_grace: Duration::from_secs(10),
            drain_max: Duration::from_secs(30),
            close_max: Duration::from_secs(1),
        }
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Config {
    /// Known to the ranks of one epoch and to nobody else, not even to those of another.
    pub(crate) fn mesh_secret(&self, epoch: Epoch) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.mesh_seed);
        hasher.update(&epoch.incarnation.to_le_bytes());
        hasher.update(&epoch.n.to_le_bytes());
        *hasher.finalize().as_bytes()
    }

    /// Requests that begin alike have the same blocks there.
    pub(crate) fn shares_blocks(&self) -> bool {
        self.prefix_cache && !self.zero_kv
    }

    pub(crate) fn mode(&self) -> Mode {
        self.policy_digest.map_or(Mode::default(), |of| of.mode)
    }

    /// Under which ranks on such a device compute, where a model says so.
    pub(crate) fn digest_on(&self, device: &DeviceKind) -> Option<PolicyDigest> {
        self.policy_digest.map(|of| self.digest_of(device, of))
    }

    pub(crate) fn digest_of(&self, device: &DeviceKind, DigestOf { weights, mode }: DigestOf) -> PolicyDigest {
        let Policy { activations, kv_dtype, .. } = self.policy;
        Numerics::plain(device, mode, activations, kv_dtype, weights).digest()
    }

    /// Each stage has a step of its own.
    pub(crate) fn steps_in_flight_max(&self, grid: Grid) -> u32 {
        self.limits.steps_in_flight_max + u32::from(grid.pp).saturating_sub(1)
    }

    /// What the planner of a replica that is laid out so is given.
    pub fn scheduler(&self, blueprint: &Blueprint, policy: PolicyDigest) -> scheduler::Config {
        let (limits, context) = (&self.limits, blueprint.context);
        scheduler::Config {
            n_blocks: blueprint.n_blocks(),
            context_max: context,
            running_max: self.policy.running_max,
            waiting_max: limits.waiting_max,
            // A prompt that fits the context must fit an empty queue.
            waiting_tokens_max: limits.waiting_tokens_max.max(context.into()),
            batch_tokens_max: limits.batch_tokens_max,
            // What pools were made for.
            chunk_tokens_max: limits.chunk_tokens_max.min(self.policy.slice_max),
            n_stages: blueprint.grid.pp.into(),
            steps_in_flight_max: self.steps_in_flight_max(blueprint.grid),
            prefix_cache: self.shares_blocks(),
            groups: self.shape.cache.groups().to_vec(),
            policy,
            salt: self.salt,
            ..scheduler::Config::default()
        }
    }
}
