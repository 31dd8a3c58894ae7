//! Every limit of the scheduler, named and checked once.

use crate::drafting::DraftPolicy;
use crate::pace::StepPace;
use alloc::vec;
use alloc::vec::Vec;
use types::{CacheGroup, PolicyDigest, Unsupported};

/// Deeper than any pipeline; memory for steps in flight is allocated ahead.
const STEPS_IN_FLIGHT_LIMIT: u32 = 64;

/// All tenants are visited in each step.
const TENANTS_LIMIT: u32 = 1024;

/// No model has more than three cache groups.
pub(crate) const GROUPS_MAX: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The blocks of each group's pool, on every rank that has layers of the group.
    pub n_blocks: Vec<u32>,
    /// The most tokens of one sequence, prompt and output.
    pub context_max: u32,
    /// The most sequences that hold blocks at the same time.
    pub running_max: u32,
    /// The most requests that wait: for their first admission, or to begin again.
    pub waiting_max: u32,
    /// The most tokens in the logs of all waiting requests.
    pub waiting_tokens_max: u64,
    /// The most tenants that get shares by weight at the same time. Further ones share one tenant's part.
    pub tenants_max: u32,
    /// The most tokens of one step, all slices together.
    pub batch_tokens_max: u32,
    /// The bytes of a step's frame for requests that it starts. A request that needs more is refused.
    pub starts_bytes_max: usize,
    /// The most tokens of one slice.
    pub chunk_tokens_max: u32,
    /// How long a step may take while sequences decode.
    pub pace: StepPace,
    /// Prompts are not cut smaller than this only to keep stages busy: each chunk reads all weights again.
    pub chunk_tokens_min: u32,
    /// Pipeline stages: as many steps run at once, and a sequence has a slice in every `n_stages`-th step.
    pub n_stages: u32,
    /// Steps planned and not yet applied. One more than there are stages keeps all of them busy: the first has its next
    /// step while the last still computes. Further steps would only wait.
    pub steps_in_flight_max: u32,
    /// Slices of a sequence planned before the token that they compute is known here: none or one.
    pub slices_ahead_max: u32,
    /// How many guessed tokens a slice computes beside the last known one.
    pub drafting: DraftPolicy,
    /// A request with this much suspicion is not tried again. Suspicion is the sum of the weights of the losses that it
    /// was in since its last token: three that were reported, or six without a known cause.
    pub suspicion_max: u32,
    /// Waiting this long is worth one level of priority, so that the least important request runs in the end.
    pub aging_micros: u64,
    /// Full blocks keep their name after their sequence ends, and serve later requests with the same prefix.
    pub prefix_cache: bool,
    /// Of a recurrence the states at multiples of so many positions are kept, if there is room; zero: at none.
    pub state_stride: u32,
    /// The most pages whose names are kept of the tier behind the pools; zero without one.
    pub tier_pages_max: u32,
    /// How long a fetch from the tier may take, however long it is expected to take. None: as learned times decide.
    pub fetch_micros: Option<u64>,
    /// Each group has its own tables and blocks; a position is computed in all of them at once.
    pub groups: Vec<CacheGroup>,
    /// The root of every block hash.
    pub policy: PolicyDigest,
    /// The replica's secret, so that no outsider can aim at a block's hash.
    pub salt: [u8; 16],
}

impl Default for Config {
    fn default() -> Self {
        Config {
            n_blocks: vec![4096],
            context_max: 8192,
            running_max: 64,
            waiting_max: 1024,
            waiting_tokens_max: 4 << 20,
            tenants_max: 64,
            batch_tokens_max: 512,
            // Half of what a frame may have.
            starts_bytes_max: 32 << 20,
            chunk_tokens_max: 512,
            pace: StepPace::DEFAULT,
            chunk_tokens_min: 128,
            n_stages: 1,
            steps_in_flight_max: 2,
            slices_ahead_max: 1,
            drafting: DraftPolicy::Off,
            suspicion_max: 6,
            aging_micros: 1_000_000,
            prefix_cache: true,
            state_stride: 512,
            tier_pages_max: 0,
            fetch_micros: None,
            groups: vec![CacheGroup::FULL],
            policy: PolicyDigest::default(),
            salt: [0; 16],
        }
    }
}

impl Config {
    /// The size of the first pool that is too small for a log of this length, even if nothing else is in it.
    pub(crate) fn too_small_pool(&self, length_max: u32) -> Option<u32> {
        let needed = |group: &CacheGroup| group.n_held_max(length_max - 1, self.slice_max());
        let mut pools = self.groups.iter().zip(&self.n_blocks);
        pools.find(|(group, n_blocks)| needed(group) > **n_blocks).map(|(_, &n_blocks)| n_blocks)
    }

    /// Whether nothing is kept of a request's positions. Then each request is one slice: no later slice could read what
    /// an earlier one computed.
    pub(crate) fn keeps_nothing(&self) -> bool {
        self.groups.is_empty()
    }

    /// The most tokens of any slice.
    pub(crate) fn slice_max(&self) -> u32 {
        self.chunk_tokens_max.min(self.batch_tokens_max)
    }

    /// Refuses by name what could never plan a step, or would starve a request.
    pub fn supported(&self) -> Result<(), Unsupported> {
        self.groups.iter().try_for_each(CacheGroup::supported)?;
        let refusals = [
            (self.groups.len() > GROUPS_MAX, "more than 8 cache groups"),
            (self.n_blocks.len() != self.groups.len(), "other than one n_blocks for each cache group"),
            (self.n_blocks.contains(&0), "n_blocks = 0"),
            (self.n_blocks.contains(&u32::MAX), "n_blocks = u32::MAX"),
            (self.context_max < 2, "context_max below 2"),
            (self.running_max == 0, "running_max = 0"),
            (self.waiting_max == 0, "waiting_max = 0"),
            (self.tenants_max == 0, "tenants_max = 0"),
            (self.tenants_max > TENANTS_LIMIT, "tenants_max above 1024"),
            (self.starts_bytes_max == 0, "starts_bytes_max = 0"),
            (self.chunk_tokens_max == 0, "chunk_tokens_max = 0"),
            (self.n_stages == 0, "n_stages = 0"),
            (self.steps_in_flight_max == 0, "steps_in_flight_max = 0"),
            (self.steps_in_flight_max > STEPS_IN_FLIGHT_LIMIT, "steps_in_flight_max above 64"),
            (self.slices_ahead_max > 1, "slices_ahead_max above 1"),
            (self.suspicion_max == 0, "suspicion_max = 0"),
            // Otherwise a prompt could wait for ever behind the decoding of others.
            (self.batch_tokens_max < self.running_max, "batch_tokens_max below running_max"),
            // Otherwise a request that fits the context would be refused with a retry time for ever.
            (self.waiting_tokens_max < u64::from(self.context_max), "waiting_tokens_max below context_max"),
        ];
        refusals.into_iter().try_for_each(|(refused, what)| if refused { Err(Unsupported(what)) } else { Ok(()) })
    }
}
