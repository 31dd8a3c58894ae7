//! The scheduler's state, and the types that its verbs share. The verbs are in the files named after them.

use crate::blocks::BlockPool;
use crate::in_flight::StepsInFlight;
use crate::journal::BlockNameChange;
use crate::seen::FirstBlockOwners;
use crate::sequence::{SequenceIdx, SequenceSlab};
use crate::stats::Counters;
use crate::tenants::Tenants;
use crate::turns::TurnCandidate;
use crate::waiting::WaitingQueue;
use crate::{Config, Stats};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::Range;
use types::{CacheGroup, Epoch, Finish, Micros, PrefixReuse, Request, RequestId, Unsupported};

/// An event of a request: it got a token, or it ended, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestOutput {
    pub id: RequestId,
    /// The first token's position, counted from the end of the prompt; without a token, the position of the next one.
    pub position: u32,
    /// The tokens are `done.slices[slice].tokens[..n_tokens]`.
    pub slice: usize,
    pub n_tokens: u32,
    /// The slice's other results (scores, pooled states) begin at this position of the log; zero if there are none.
    pub scored_position: u32,
    /// Tokens of the prompt that the prefix cache had when the request was first admitted.
    pub n_cached: u32,
    /// Why it had no more.
    pub reuse: PrefixReuse,
    /// Of the slice's drafts, how many are among the tokens, and how many are not.
    pub drafts_accepted: u32,
    pub drafts_rejected: u32,
    pub finish: Option<Finish>,
}

pub struct Scheduler {
    pub(crate) config: Config,
    /// How long a log may become with the present workers: the context, or less.
    pub(crate) room: u32,
    /// Whether they support the newest fields of a request.
    pub(crate) supports_newest_features: bool,
    pub(crate) epoch: Epoch,
    pub(crate) n_steps: u64,
    pub(crate) sequences: SequenceSlab,
    /// Waiting and running sequences. One that is ending is no longer here: its id may be submitted again.
    pub(crate) by_id: BTreeMap<RequestId, SequenceIdx>,
    pub(crate) deadlines: BTreeSet<(Micros, RequestId)>,
    pub(crate) waiting: WaitingQueue,
    pub(crate) tenants: Tenants,
    /// Requests that lost their places in the queue, until they are read.
    pub(crate) displaced: Vec<RequestId>,
    /// Running sequences by rank and key: the first is served first, the last is preempted first.
    pub(crate) running: Vec<SequenceIdx>,
    /// No sequence has come or gone since the ranks were computed.
    pub(crate) is_ranked: bool,
    /// How many waiting or running sequences are suspects.
    pub(crate) n_suspects: u32,
    /// One pool per cache group.
    pub(crate) pools: Vec<BlockPool>,
    /// Whether some group releases blocks while its sequences run.
    pub(crate) has_windows: bool,
    pub(crate) first_blocks: FirstBlockOwners,
    pub(crate) in_flight: StepsInFlight,
    /// Sequences that are candidates for a turn in the step being planned. Reused for its memory.
    pub(crate) turns: Vec<TurnCandidate>,
    /// The slices of a sequence that the step being planned may have ahead of known tokens.
    pub(crate) ahead_max: u32,
    /// Whether all running sequences were in flight at the last attempt to plan, since the last step or answer.
    pub(crate) is_starved: bool,
    /// Sequences that the ranks may forget, to be sent in the next step.
    pub(crate) ends: Vec<RequestId>,
    pub(crate) draining: bool,
    /// The latest time seen at `submit`, so that a clock that goes backwards cannot overtake.
    pub(crate) latest: Micros,
    pub(crate) n_arrivals: u64,
    pub(crate) n_generations: u64,
    pub(crate) counters: Counters,
}

impl Scheduler {
    pub fn new(config: Config, epoch: Epoch) -> Result<Scheduler, Unsupported> {
        config.supported()?;
        Ok(Scheduler {
            epoch,
            n_steps: 0,
            sequences: SequenceSlab::default(),
            by_id: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            waiting: WaitingQueue::default(),
            tenants: Tenants::new(config.tenants_max),
            displaced: Vec::new(),
            is_ranked: true,
            running: Vec::with_capacity(config.running_max as usize),
            n_suspects: 0,
            pools: pools(&config),
            has_windows: !config.groups.iter().all(CacheGroup::keeps_all),
            first_blocks: FirstBlockOwners::new(&config),
            in_flight: StepsInFlight::new(config.steps_in_flight_max, config.running_max),
            turns: Vec::with_capacity(config.running_max as usize),
            ahead_max: config.slices_ahead_max,
            is_starved: false,
            ends: Vec::new(),
            draining: false,
            latest: Micros(0),
            n_arrivals: 0,
            n_generations: 0,
            counters: Counters::default(),
            room: config.context_max,
            supports_newest_features: true,
            config,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Nothing new is accepted from now on; running requests finish.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// True if nothing waits, runs or is in flight, and the ranks hold nothing.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.in_flight.is_empty() && self.ends.is_empty()
    }

    /// A request that has not ended, with its output so far.
    pub fn request(&self, id: RequestId) -> Option<&Request> {
        self.by_id.get(&id).map(|&idx| &*self.sequences[idx].request)
    }

    /// Tokens to compute before one more request could begin: the logs of waiting sequences, and the known but not
    /// computed tokens of running ones.
    pub fn backlog_tokens(&self) -> u64 {
        let missing = |idx: &SequenceIdx| {
            let sequence = &self.sequences[*idx];
            u64::from(sequence.n_known().saturating_sub(sequence.n_sure))
        };
        self.waiting.n_tokens() + self.running.iter().map(missing).sum::<u64>()
    }

    /// The tokens in the logs of all running sequences.
    pub fn running_tokens(&self) -> u64 {
        self.running.iter().map(|&idx| u64::from(self.sequences[idx].n_known())).sum()
    }

    /// The changes among the names of full blocks since the last call, in order. False: some are missing, and `names`
    /// gives all. Covers the group by which prefixes are found: a full one, if there is one.
    pub fn name_changes(&mut self, out: &mut Vec<BlockNameChange>) -> bool {
        let group = self.reported_group();
        self.pools[group].name_changes(out)
    }

    /// The names of full and computed blocks in this range, in the same group. False: there are no blocks behind it.
    pub fn append_names(&self, blocks: Range<u32>, out: &mut Vec<u64>) -> bool {
        self.pools[self.reported_group()].append_names(blocks, out)
    }

    fn reported_group(&self) -> usize {
        self.pools.iter().position(|pool| pool.group.keeps_all()).unwrap_or(0)
    }

    pub fn stats(&self) -> Stats {
        Stats {
            n_waiting: self.waiting.len() as u32,
            n_running: self.running.len() as u32,
            n_steps_in_flight: self.in_flight.len() as u32,
            waiting_tokens: self.waiting.n_tokens(),
            blocks_total: self.pools.iter().map(BlockPool::n_total).sum(),
            blocks_committed: self.pools.iter().map(BlockPool::n_committed).sum(),
            blocks_used: self.pools.iter().map(BlockPool::n_used).sum(),
            blocks_cached: self.pools.iter().map(BlockPool::n_cached).sum(),
            counters: self.counters,
        }
    }
}

pub(crate) fn pools(config: &Config) -> Vec<BlockPool> {
    config.groups.iter().zip(&config.n_blocks).map(|(&group, &n_blocks)| BlockPool::new(group, n_blocks)).collect()
}
