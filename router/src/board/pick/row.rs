//! The input of a choice: a row for each replica, columns of the replicas that are open to a request, and what the
//! request needs. Plain data; knows no policy.

use types::PolicyDigest;

/// A version, that is a model's name and its policy digest, hashed to one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct VersionId(pub u64);

/// One replica, as the router knows it at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaRow {
    pub standing: ReplicaStanding,
    pub digest: PolicyDigest,
    pub version: VersionId,
    pub context: u32,
    /// How many positions its ranks have room for at present. A number above the context stands for all of it.
    pub room: u32,
    /// Tokens that it has to compute before it could start one more request: the uncached part of prompts, and one
    /// token of each request that is being answered.
    pub work: u64,
    pub n_running: u32,
    /// Positions that its cache has room for at once. None until the replica has reported them.
    pub tokens_free: Option<u64>,
    /// How much of the prompt its cache has, from the beginning.
    pub n_cached: u32,
    /// Named blocks in its cache, as far as this router knows.
    pub n_names: u32,
    /// A number of the replica that is the same at every router.
    pub id: u64,
    /// The newest protocol that its coordinator, its ranks and this router speak.
    pub protocol: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplicaStanding {
    Ready,
    /// It could serve, but others serve better: it gets no new requests while there are any.
    Shunned,
    /// Its ranks are being placed anew, or it is silent: requests wait there.
    Recovering,
    /// There are no machines for its ranks: requests wait there, for an unknown time.
    Unplaced,
    /// It finishes its requests, and takes no new ones.
    Draining,
    /// It is not attached, or has not loaded yet.
    Absent,
}

/// The rule by which a replica is chosen among those that could serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PickPolicy {
    #[default]
    Prefix,
    LeastWork,
    PowerOfTwo,
    RoundRobin,
    Affinity,
}

/// What a choice needs to know of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PickInfo {
    /// Tokens of its longest prompt.
    pub n_prompt: u32,
    /// Requests with the same session belong together.
    pub session: Option<u64>,
    /// The id of a replica that gets the request only if no other could serve it as soon.
    pub apart_from: Option<u64>,
    /// How many requests this router has placed before.
    pub n_before: u64,
    /// Only replicas of this version may get it. None: all replicas that serve.
    pub version: Option<VersionId>,
    /// The protocol version that introduced what the request uses.
    pub protocol: u32,
}

/// What a replica needs to continue a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContinuationNeed {
    pub digest: PolicyDigest,
    /// The length of its log at its end: with less context it would end sooner.
    pub n_tokens: u64,
    /// The length of its log so far.
    pub n_known: u64,
    /// The protocol version that introduced what the request uses.
    pub protocol: u32,
}

/// The cost of each running sequence for one more request, in prompt tokens, because every step takes longer with it. A
/// step reads that sequence's cache, which is cheap beside computing a prompt token, and there are some hundred steps.
const CROWD: u64 = 32;
/// The most digests that are counted. Replicas of one name have more than two digests only while an operator changes
/// them.
const DIGESTS_MAX: usize = 16;

impl PickPolicy {
    /// Whether the policy reads what caches have.
    pub fn reads_caches(self, info: &PickInfo) -> bool {
        match self {
            PickPolicy::Prefix => true,
            PickPolicy::Affinity => info.session.is_none(),
            PickPolicy::LeastWork | PickPolicy::PowerOfTwo | PickPolicy::RoundRobin => false,
        }
    }
}

/// The replicas among which a policy chooses, in columns of one length. The memory is reused for the next choice.
#[derive(Debug, Default)]
pub struct OpenReplicas {
    /// The row of each, in ascending order.
    pub rows: Vec<u32>,
    /// The work before one more request and beside it, in prompt tokens.
    pub loads: Vec<u64>,
    /// `u64::MAX` until the replica has reported it.
    pub tokens_free: Vec<u64>,
    pub n_cached: Vec<u32>,
    pub n_names: Vec<u32>,
    pub ids: Vec<u64>,
}

/// What decides whether a replica is open to a request. Digests are only compared, so they may be numbers.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaEligibility<D> {
    pub standing: ReplicaStanding,
    pub digest: D,
    pub context: u32,
}

impl OpenReplicas {
    /// Leaves out these replicas, unless no other is open.
    pub fn leave_out(&mut self, is_left_out: impl Fn(u32) -> bool) {
        if !self.rows.iter().all(|row| is_left_out(*row)) {
            self.rows.retain(|row| !is_left_out(*row));
        }
    }

    /// Finds the open replicas: those of the best standing under the digest that is in force, which is the one that
    /// most replicas have. If the prompt fits some of them, only these are open. If it fits none, all stay open, so
    /// that one of them refuses it. Returns the first replica that could serve as well but would answer otherwise.
    pub fn find<D: Copy + PartialEq>(
        &mut self,
        all: impl Iterator<Item = ReplicaEligibility<D>> + Clone,
        n_prompt: u32,
    ) -> Option<usize> {
        self.rows.clear();
        let best = all.clone().map(|candidate| candidate.standing).min();
        let best = best.filter(|best| *best <= ReplicaStanding::Unplaced)?;
        let candidates = all.clone().enumerate().filter(|(_, candidate)| candidate.standing == best);
        let mut digests = candidates.clone().map(|(_, candidate)| candidate.digest);
        let first = digests.next();
        let is_one = digests.all(|digest| Some(digest) == first);
        let digest = if is_one { first } else { most_common(all, best).or(first) };
        let (mut stranger, mut n_fit) = (None, 0);
        for (row, candidate) in candidates.clone() {
            if Some(candidate.digest) != digest {
                stranger.get_or_insert(row);
                continue;
            }
            self.rows.push(row as u32);
            n_fit += usize::from(candidate.context > n_prompt);
        }
        if 0 < n_fit && n_fit < self.rows.len() {
            let fit = candidates.filter(|(_, of)| Some(of.digest) == digest && of.context > n_prompt);
            self.rows.clear();
            self.rows.extend(fit.map(|(row, _)| row as u32));
        }
        stranger
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the first row with the least key.
    pub fn least<K: Ord>(&self, key: impl Fn(usize) -> K) -> Option<usize> {
        (0..self.len()).min_by_key(|&at| key(at))
    }
}

/// Returns the digest that most replicas have, among the digests of which at least one replica has this standing.
/// Replicas that recover count too, so that a loss does not change what is served. Of equal counts, the digest that was
/// known first wins.
fn most_common<D: Copy + PartialEq>(
    all: impl Iterator<Item = ReplicaEligibility<D>>,
    standing: ReplicaStanding,
) -> Option<D> {
    let mut counts = [const { None::<DigestCount<D>> }; DIGESTS_MAX];
    for candidate in all.filter(|candidate| candidate.standing <= ReplicaStanding::Unplaced) {
        let is_its = |of: &&mut Option<DigestCount<D>>| of.as_ref().is_none_or(|of| of.digest == candidate.digest);
        let Some(of) = counts.iter_mut().find(is_its) else { continue };
        let of = of.get_or_insert(DigestCount { digest: candidate.digest, n: 0, is_open: false });
        of.n += 1;
        of.is_open |= candidate.standing == standing;
    }
    let open = counts.into_iter().flatten().filter(|of| of.is_open);
    // Of equals this keeps the first.
    open.reduce(|most, of| if of.n > most.n { of } else { most }).map(|of| of.digest)
}

/// Replicas of one digest.
struct DigestCount<D> {
    digest: D,
    n: u32,
    /// One of them has the standing in question.
    is_open: bool,
}

/// The work before one more request and beside it, in prompt tokens.
pub fn load(work: u64, n_running: u32) -> u64 {
    work.saturating_add(CROWD * u64::from(n_running))
}

impl PickInfo {
    pub fn matches(&self, version: VersionId, protocol: u32) -> bool {
        self.version.is_none_or(|required| required == version) && protocol >= self.protocol
    }
}

impl ReplicaRow {
    /// Whether the replica can continue the request at present. If its ranks have less room than its context, a request
    /// runs as far as it fits. Older ranks may be replaced by newer ones, and fewer ranks by more.
    pub fn meets(&self, need: ContinuationNeed) -> bool {
        self.may_meet(need) && u64::from(self.room) > need.n_known && self.protocol >= need.protocol
    }

    fn may_meet(&self, need: ContinuationNeed) -> bool {
        self.digest == need.digest && u64::from(self.context) >= need.n_tokens
    }

    pub fn may_come_for(&self, need: ContinuationNeed) -> bool {
        match self.standing {
            ReplicaStanding::Absent => true,
            ReplicaStanding::Ready
            | ReplicaStanding::Shunned
            | ReplicaStanding::Recovering
            | ReplicaStanding::Unplaced => self.may_meet(need),
            ReplicaStanding::Draining => false,
        }
    }

    pub fn load(&self) -> u64 {
        load(self.work, self.n_running)
    }
}
