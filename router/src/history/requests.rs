//! The requests under way, and those that ended last. A request's recorder holds its `TimelineRecorder`; when that is
//! dropped, the request is over.

use crate::history::ArrivedRequest;
use crate::history::load::LastHour;
use crate::history::timeline::{Timeline, TimelineEventKind};
use proto::cluster as wire;
use proto::cluster::passage::Kind;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use types::TenantId;

/// The most requests that are remembered after their end. How many are under way is the admission's limit.
const ENDED_MAX: usize = 1024;

type SharedTimeline = Arc<Mutex<Timeline>>;

#[derive(Clone, Default)]
pub struct RequestTimelines(Arc<TimelineRings>);

#[derive(Default)]
struct TimelineRings {
    n_arrived: AtomicU64,
    /// Of those under way: without a token yet, and with one.
    n_waiting: AtomicU32,
    n_running: AtomicU32,
    live: Mutex<BTreeMap<u64, SharedTimeline>>,
    ended: Mutex<VecDeque<SharedTimeline>>,
}

/// One request, for its recorder.
pub struct TimelineRecorder {
    number: u64,
    timeline: SharedTimeline,
    last_token: Option<Instant>,
    rings: RequestTimelines,
    load: Arc<LastHour>,
}

impl std::fmt::Debug for TimelineRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sighting({})", self.number)
    }
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RequestTimelines {
    pub(super) fn add_request(&self, arrival: ArrivedRequest, load: Arc<LastHour>) -> TimelineRecorder {
        let number = self.0.n_arrived.fetch_add(1, Relaxed) + 1;
        let timeline = Arc::new(Mutex::new(Timeline::new(number, arrival)));
        locked(&self.0.live).insert(number, timeline.clone());
        let n_waiting = self.0.n_waiting.fetch_add(1, Relaxed) + 1;
        load.record_arrival(n_waiting, self.0.n_running.load(Relaxed));
        TimelineRecorder { number, timeline, last_token: None, rings: self.clone(), load }
    }

    /// How many requests have no token yet.
    pub fn n_waiting(&self) -> u32 {
        self.0.n_waiting.load(Relaxed)
    }

    /// Visits the requests of a tenant, or of all: those under way in order of arrival, then those that have ended, the
    /// last one first.
    pub fn for_each(&self, of: Option<TenantId>, n_max: usize, mut visit: impl FnMut(&Timeline)) {
        let is_shown = |timeline: &Timeline| of.is_none_or(|tenant| timeline.arrival.tenant == tenant);
        // The list is cloned, so that no token waits for a reader of the page.
        let live: Vec<SharedTimeline> = locked(&self.0.live).values().cloned().collect();
        let ended: Vec<SharedTimeline> = locked(&self.0.ended).iter().rev().cloned().collect();
        let mut n_visited = 0;
        for timeline in live.iter().chain(&ended) {
            if n_visited == n_max {
                return;
            }
            let timeline = locked(timeline);
            if is_shown(&timeline) {
                n_visited += 1;
                visit(&timeline);
            }
        }
    }

    /// Returns a request by its number, or by the id of its answer.
    pub fn find(&self, of: Option<TenantId>, name: &str) -> Option<Timeline> {
        let is_shown = |timeline: &Timeline| of.is_none_or(|tenant| timeline.arrival.tenant == tenant);
        // A page that shows one request reads it again and again, by its number.
        let numbered = name.parse::<u64>().ok().and_then(|number| self.numbered(number));
        if let Some(shown) = numbered.map(|timeline| locked(&timeline).clone()).filter(is_shown) {
            return Some(shown);
        }
        let mut found = None;
        self.for_each(of, usize::MAX, |timeline| {
            if !timeline.id.is_empty() && name.ends_with(&timeline.id) {
                found.get_or_insert_with(|| timeline.clone());
            }
        });
        found
    }

    fn numbered(&self, number: u64) -> Option<SharedTimeline> {
        let live = locked(&self.0.live).get(&number).cloned();
        live.or_else(|| locked(&self.0.ended).iter().find(|ended| locked(ended).number == number).cloned())
    }

    pub fn waiting_and_running(&self) -> (u32, u32) {
        (self.0.n_waiting.load(Relaxed), self.0.n_running.load(Relaxed))
    }
}

impl TimelineRecorder {
    /// Records that the request went to a replica.
    pub fn record_placed(&self, id: &str, model: &str, replica: &str, (n_prompt, n_choices): (u64, u32)) {
        let mut timeline = locked(&self.timeline);
        id.clone_into(&mut timeline.id);
        model.clone_into(&mut timeline.model);
        replica.clone_into(&mut timeline.replica);
        (timeline.n_prompt, timeline.n_choices) = (n_prompt, n_choices);
        timeline.record(Duration::ZERO, 0, TimelineEventKind::Placed { replica: replica.into() });
    }

    pub fn record_passages(&self, choice: u32, passages: &[wire::Passage]) {
        if passages.is_empty() {
            return;
        }
        let mut timeline = locked(&self.timeline);
        for passage in passages {
            let what = match passage.kind() {
                Kind::Started => TimelineEventKind::Started { n_cached: passage.start },
                Kind::Chunk => TimelineEventKind::Chunk { start: passage.start, end: passage.end },
                Kind::Preempted => TimelineEventKind::Preempted,
                Kind::Lost => TimelineEventKind::Lost,
                Kind::Moved => TimelineEventKind::Moved,
                Kind::Unspecified => continue,
            };
            timeline.record(Duration::from_micros(passage.micros_ago), choice, what);
        }
    }

    /// Records that so many tokens of its prompt are computed or cached.
    pub fn record_computed(&self, n: u32) {
        let mut timeline = locked(&self.timeline);
        timeline.n_computed = timeline.n_computed.max(n.into());
    }

    pub fn record_tokens(&mut self, choice: u32, n: u32) {
        let now = Instant::now();
        let mut timeline = locked(&self.timeline);
        let at = now.saturating_duration_since(timeline.arrived);
        let since_last = self.last_token.replace(now).map(|last| now.saturating_duration_since(last));
        if since_last.is_none() {
            timeline.first_token = Some(at);
            timeline.record(Duration::ZERO, choice, TimelineEventKind::FirstToken);
            self.rings.0.n_waiting.fetch_sub(1, Relaxed);
            let n_running = self.rings.0.n_running.fetch_add(1, Relaxed) + 1;
            self.load.record_first_token(at, n_running);
        }
        timeline.n_output += u64::from(n);
        timeline.tokens.add(at, n);
        self.load.record_tokens(&timeline.arrival.label, n, since_last);
    }

    /// Ends the request. `used` has the tokens of its prompt, and how many of them were cached.
    pub fn ended(self, outcome: &'static str, (n_prompt, n_cached): (u64, u64)) {
        let mut timeline = locked(&self.timeline);
        timeline.ended = Some((outcome, timeline.arrived.elapsed()));
        timeline.n_prompt = timeline.n_prompt.max(n_prompt);
        timeline.n_cached = n_cached;
        // The request has no token, and its client has not left: it was refused.
        let is_refused = timeline.first_token.is_none() && !["ok", "cancelled"].contains(&outcome);
        self.load.ended((!is_refused).then_some((n_prompt, n_cached)), outcome == "ok");
    }
}

impl Drop for TimelineRecorder {
    fn drop(&mut self) {
        let rings = &self.rings.0;
        let counted = if self.last_token.is_some() { &rings.n_running } else { &rings.n_waiting };
        counted.fetch_sub(1, Relaxed);
        let mut timeline = locked(&self.timeline);
        let took = timeline.arrived.elapsed();
        timeline.ended.get_or_insert(("cancelled", took));
        drop(timeline);
        locked(&rings.live).remove(&self.number);
        let mut ended = locked(&rings.ended);
        if ended.len() >= ENDED_MAX {
            ended.pop_front();
        }
        ended.push_back(self.timeline.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::History;

    fn arrival(tenant: u64) -> ArrivedRequest {
        ArrivedRequest { face: "http", tenant: TenantId(tenant), label: "t".into(), unix_millis: 1 }
    }

    fn numbers(history: &History, of: Option<u64>) -> Vec<u64> {
        let mut numbers = Vec::new();
        history.requests.for_each(of.map(TenantId), 5, |timeline| numbers.push(timeline.number));
        numbers
    }

    #[test]
    fn tenant_sees_only_its_own_requests() {
        let history = History::default();
        let (one, mut two) = (history.add_request(arrival(1)), history.add_request(arrival(2)));
        assert_eq!((numbers(&history, None), numbers(&history, Some(2))), (vec![1, 2], vec![2]));
        two.record_placed("00ab", "m", "r", (7, 1));
        two.record_tokens(0, 1);
        assert_eq!(history.requests.waiting_and_running(), (1, 1));
        assert!(history.requests.find(Some(TenantId(1)), "2").is_none());
        assert_eq!(history.requests.find(Some(TenantId(2)), "cmpl-00ab").unwrap().number, 2);
        one.ended("full", (0, 0));
        two.ended("ok", (7, 4));
        assert_eq!((numbers(&history, None), history.requests.waiting_and_running()), (vec![2, 1], (0, 0)));
        let (bins, _, _) = history.load.bins(Instant::now());
        let bin = &bins[0];
        assert_eq!((bin.n_arrived, bin.n_refused, bin.n_ended, bin.n_cached, bin.n_output), (2, 1, 1, 4, 1));
    }

    #[test]
    fn those_that_have_ended_are_forgotten_in_their_order() {
        let history = History::default();
        for _ in 0..ENDED_MAX + 10 {
            history.add_request(arrival(1)).ended("ok", (0, 0));
        }
        let mut n = 0;
        history.requests.for_each(None, usize::MAX, |_| n += 1);
        assert_eq!((n, numbers(&history, None)[0]), (ENDED_MAX, ENDED_MAX as u64 + 10));
        assert!(history.requests.find(None, "10").is_none() && history.requests.find(None, "11").is_some());
    }

    #[test]
    fn events_are_in_order_and_relative_to_arrival() {
        let history = History::default();
        let mut sighting = history.add_request(arrival(1));
        sighting.record_placed("a", "m", "r", (9, 1));
        let passage = |kind: Kind, start, end| wire::Passage { kind: kind.into(), micros_ago: 0, start, end };
        sighting.record_passages(0, &[passage(Kind::Started, 4, 4), passage(Kind::Chunk, 4, 9)]);
        sighting.record_computed(6);
        assert_eq!(history.requests.find(None, "1").unwrap().n_computed, 6);
        sighting.record_tokens(0, 2);
        sighting.record_passages(0, &[passage(Kind::Lost, 0, 0)]);
        let timeline = history.requests.find(None, "1").unwrap();
        assert_eq!(timeline.state(), "moving");
        let what: Vec<TimelineEventKind> = timeline.events.iter().map(|event| event.kind.clone()).collect();
        use TimelineEventKind::{Chunk, FirstToken, Lost, Placed, Started};
        let placed = Placed { replica: "r".into() };
        assert_eq!(what, [placed, Started { n_cached: 4 }, Chunk { start: 4, end: 9 }, FirstToken, Lost]);
        assert!(timeline.events.is_sorted_by_key(|event| event.at));
        drop(sighting);
        assert_eq!(history.requests.find(None, "1").unwrap().state(), "cancelled");
    }
}
