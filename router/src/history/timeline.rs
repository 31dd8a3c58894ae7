//! One request's timeline: the events and their times, and how many tokens came when. Bounded, whatever happens.

use crate::history::ArrivedRequest;
use crate::history::curve::TokenCurve;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most events of one request. Of more, the first and the last stay.
const EVENTS_MAX: usize = 256;

#[derive(Clone, Debug)]
pub struct Timeline {
    pub number: u64,
    pub arrival: ArrivedRequest,
    pub arrived: Instant,
    /// The answer's id without its page's prefix; empty until the request was placed.
    pub id: String,
    pub model: String,
    pub replica: String,
    pub n_choices: u32,
    pub n_prompt: u64,
    /// How many of these are computed or cached; known of long prompts, before the first token.
    pub n_computed: u64,
    pub n_cached: u64,
    pub n_output: u64,
    pub events: Vec<TimelineEvent>,
    /// How many events found no room.
    pub n_unkept: u32,
    pub first_token: Option<Duration>,
    pub tokens: TokenCurve,
    /// How it ended, and after which time.
    pub ended: Option<(&'static str, Duration)>,
}

/// Times are counted from the request's arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineEvent {
    pub at: Duration,
    pub choice: u32,
    pub kind: TimelineEventKind,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TimelineEventKind {
    /// It became tokens, was let in and went to a replica.
    Placed {
        replica: Arc<str>,
    },
    /// The ranks began with it, or began again.
    Started {
        n_cached: u32,
    },
    Chunk {
        start: u32,
        end: u32,
    },
    FirstToken,
    Preempted,
    Lost,
    Moved,
}

impl Timeline {
    pub fn new(number: u64, arrival: ArrivedRequest) -> Timeline {
        Timeline {
            number,
            arrival,
            arrived: Instant::now(),
            id: String::new(),
            model: String::new(),
            replica: String::new(),
            n_choices: 1,
            n_prompt: 0,
            n_computed: 0,
            n_cached: 0,
            n_output: 0,
            events: Vec::new(),
            n_unkept: 0,
            first_token: None,
            tokens: TokenCurve::default(),
            ended: None,
        }
    }

    /// Adds an event that happened `ago`.
    pub fn record(&mut self, ago: Duration, choice: u32, kind: TimelineEventKind) {
        let event = TimelineEvent { at: self.arrived.elapsed().saturating_sub(ago), choice, kind };
        if self.events.len() < EVENTS_MAX {
            return self.events.push(event);
        }
        self.n_unkept += 1;
        // The second half is what happened last.
        self.events.remove(EVENTS_MAX / 2);
        self.events.push(event);
    }

    /// Returns one word for what the request does now.
    pub fn state(&self) -> &'static str {
        if let Some((outcome, _)) = self.ended {
            return outcome;
        }
        let last = self.events.iter().rev().find(|event| event.kind != TimelineEventKind::FirstToken);
        match last.map(|event| &event.kind) {
            None => "arriving",
            Some(TimelineEventKind::Placed { .. }) if self.n_computed > 0 => "computing",
            Some(TimelineEventKind::Placed { .. }) => "waiting",
            Some(TimelineEventKind::Preempted) => "preempted",
            Some(TimelineEventKind::Lost | TimelineEventKind::Moved) => "moving",
            Some(
                TimelineEventKind::Started { .. } | TimelineEventKind::Chunk { .. } | TimelineEventKind::FirstToken,
            ) => "answering",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::TenantId;

    #[test]
    fn a_timeline_is_bounded_and_keeps_its_ends() {
        let arrival = ArrivedRequest { face: "http", tenant: TenantId(1), label: "a".into(), unix_millis: 5 };
        let mut timeline = Timeline::new(1, arrival);
        assert_eq!(timeline.state(), "arriving");
        timeline.record(Duration::ZERO, 0, TimelineEventKind::Placed { replica: "r".into() });
        for start in 0..1000 {
            timeline.record(Duration::ZERO, 0, TimelineEventKind::Chunk { start, end: start + 1 });
        }
        timeline.record(Duration::ZERO, 0, TimelineEventKind::Preempted);
        assert_eq!((timeline.events.len(), timeline.n_unkept, timeline.state()), (EVENTS_MAX, 746, "preempted"));
        assert!(matches!(timeline.events[0].kind, TimelineEventKind::Placed { .. }));
        timeline.ended = Some(("ok", Duration::ZERO));
        assert_eq!(timeline.state(), "ok");
    }
}
