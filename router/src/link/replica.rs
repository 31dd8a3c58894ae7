//! What a link knows of the replica at its stream: its welcome, its condition, its room and its beats. Knows no
//! requests.

use crate::board::pick::ContinuationNeed;
use crate::config::Timeouts;
use crate::link::beats::BeatMonitor;
use crate::link::condition::ReplicaCondition;
use crate::link::view::{ReplicaInfo, room};
use proto::cluster as wire;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use types::RequestId;

pub(super) struct AttachedReplica {
    /// Present while the stream is open and the replica has reported that it can serve.
    info: Option<Arc<ReplicaInfo>>,
    condition: ReplicaCondition,
    /// How many tokens of a request its ranks have room for, as last reported.
    room: u32,
    beats: BeatMonitor,
    recovery_max: Duration,
    beats_missed_max: u32,
}

impl AttachedReplica {
    /// No replica is attached yet.
    pub fn new(timeouts: &Timeouts) -> AttachedReplica {
        AttachedReplica {
            info: None,
            condition: ReplicaCondition::Serves,
            room: u32::MAX,
            beats: BeatMonitor::default(),
            recovery_max: timeouts.recovery_max,
            beats_missed_max: timeouts.beats_missed_max,
        }
    }

    /// Attaches a replica that sends a beat in each such interval.
    pub fn attach(&mut self, info: Arc<ReplicaInfo>, every: Duration, now: Instant) {
        self.info = Some(info);
        self.beats = BeatMonitor::every(every, self.beats_missed_max, now);
    }

    /// Forgets the replica. Returns true if it was attached.
    pub fn detach(&mut self) -> bool {
        self.beats = BeatMonitor::default();
        (self.condition, self.room) = (ReplicaCondition::Serves, u32::MAX);
        self.info.take().is_some()
    }

    pub fn is_attached(&self) -> bool {
        self.info.is_some()
    }

    pub fn name(&self) -> &str {
        self.info.as_ref().map_or("", |info| &info.name)
    }

    pub fn incarnation(&self) -> Option<u64> {
        self.info.as_ref().map(|info| info.incarnation)
    }

    /// Returns the id of this router's request at the replica.
    pub fn id(&self, key: u64) -> Option<RequestId> {
        self.info.as_ref().map(|info| info.id(key))
    }

    /// Returns the key of the request that would have this id at the replica.
    pub fn key(&self, id: u64) -> Option<u64> {
        id.checked_sub(self.info.as_ref()?.first_id.0)
    }

    /// Whether the replica may get the waiting requests.
    pub fn accepts_requests(&self) -> bool {
        self.info.is_some() && self.condition != ReplicaCondition::Drains
    }

    /// Whether the replica may get the waiting requests, however long they are.
    pub fn accepts_all_lengths(&self) -> bool {
        self.accepts_requests() && self.room == u32::MAX
    }

    /// Whether the replica would give the same tokens, and its model has room for them.
    pub fn can_continue(&self, need: ContinuationNeed) -> bool {
        let fits = |info: &Arc<ReplicaInfo>| need.digest == info.digest && need.n_tokens <= info.context.into();
        self.info.as_ref().is_some_and(fits)
    }

    /// Whether its ranks have room for the next token at present.
    pub fn has_room_for(&self, need: ContinuationNeed) -> bool {
        need.n_known < self.room.into()
    }

    pub fn is_stranded(&self) -> bool {
        self.condition.is_stranded()
    }

    /// Whether the replica computes the requests that it has.
    pub fn computes(&self) -> bool {
        self.condition.computes()
    }

    /// Returns why the requests had better leave this replica, if others can continue them at once, or None if they had
    /// better stay.
    pub fn reason_to_leave(&self) -> Option<&'static str> {
        if self.beats.is_suspected() {
            return Some("a replica is silent: moving its requests");
        }
        self.condition.is_stranded().then_some("a replica has lost ranks: moving its requests")
    }

    /// Returns why the attached replica does not continue a request.
    pub fn absence_reason(&self, need: ContinuationNeed) -> String {
        match self.condition.why() {
            Some(why) => why.to_owned(),
            None if !self.has_room_for(need) => self.room_limit(),
            None => "it is full".to_owned(),
        }
    }

    /// Returns how much room its ranks have, in words.
    pub fn room_limit(&self) -> String {
        format!("the remaining ranks hold {} tokens of a request", self.room)
    }

    /// Applies a state that the replica reported.
    pub fn apply_state(&mut self, state: &wire::State, now: Instant) {
        self.room = room(state);
        self.condition = self.condition.after_state(state, now, self.recovery_max);
    }

    /// Records that a frame arrived. Returns true if the replica had been suspected.
    pub fn record_frame(&mut self, now: Instant) -> bool {
        self.beats.record_frame(now)
    }

    /// When a beat will have been missed or the condition changes by itself.
    pub fn due(&self) -> Option<Instant> {
        [self.condition.due(self.recovery_max), self.beats.due()].into_iter().flatten().min()
    }

    /// Ends a recovery that takes too long. Returns true if its requests had better leave from now on.
    pub fn end_recovery(&mut self, now: Instant) -> bool {
        let is_over = self.condition.due(self.recovery_max).is_some_and(|due| due <= now);
        if is_over {
            self.condition = self.condition.clone().at_time(now, self.recovery_max);
        }
        is_over
    }

    /// Records a missed beat, if one is due by now. Returns true if the replica is suspected from this one on.
    pub fn record_missed_beat(&mut self, now: Instant) -> bool {
        self.beats.pass(now)
    }
}
