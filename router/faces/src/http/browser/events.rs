//! `/events?of=cluster,requests,load`: one stream for one viewer. It has an event of each topic whenever that topic has
//! changed. When the server drains, a last event reports it and the stream ends.

use crate::http::browser::{load, requests};
use crate::http::door::Viewer;
use crate::http::error::HttpError;
use axum::body::Body;
use axum::extract::{Extension, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use router::front::frontend::Frontend;
use router::front::reader_watch::ReadTimeout;
use router::history::{ShowDuration, WatcherPlace};
use router::refusal::Refusal;
use router::replicas::topology;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_stream::Stream;

/// The interval between checks for changes.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What a viewer can watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topic {
    Cluster,
    Requests,
    Load,
}

impl Topic {
    const ALL: [Topic; 3] = [Topic::Cluster, Topic::Requests, Topic::Load];

    fn name(self) -> &'static str {
        match self {
            Topic::Cluster => "cluster",
            Topic::Requests => "requests",
            Topic::Load => "load",
        }
    }

    /// Returns the least time between two events of this topic. The loss of a rank must show within a second on
    /// clusters of any size. Requests and load take at most 62 KB a second for each viewer.
    fn refresh_interval(self) -> ShowDuration {
        let (looks, micros_each_byte) = match self {
            Topic::Cluster => (1, 1),
            Topic::Requests => (2, 16),
            Topic::Load => (8, 16),
        };
        // A little less, so that each check finds a new event.
        let at_least = (looks * LOOK_EVERY).mul_f64(0.9);
        ShowDuration { at_least, each_byte: Duration::from_micros(micros_each_byte) }
    }

    /// Builds the whole event. All viewers of the same topic share it.
    fn build_event(self, front: &Frontend, viewer: Viewer) -> Bytes {
        let of = if self == Topic::Requests { viewer.tenant_filter() } else { None };
        front.history.texts.get((self.name(), of), self.refresh_interval(), || {
            let state = match self {
                Topic::Cluster => topology::json(&front.topology(0)),
                Topic::Requests => requests::list_json(front, viewer, requests::WATCHED_MAX),
                Topic::Load => load::load_json(front),
            };
            format!("event: {}\ndata: {state}\n\n", self.name())
        })
    }
}

pub async fn watch(
    State(front): State<Arc<Frontend>>,
    RawQuery(query): RawQuery,
    Extension(viewer): Extension<Viewer>,
) -> Result<Response, HttpError> {
    let mut fields = query.iter().flat_map(|query| query.split('&'));
    let names = fields.find_map(|field| field.strip_prefix("of=")).unwrap_or_default();
    let topics = parse_topics(names)?;
    if topics.iter().any(|topic| *topic != Topic::Requests) && !viewer.sees_cluster {
        let message = "this key may watch only `requests`; other topics need a key with `role=operator`";
        return Err(HttpError::bad_request(StatusCode::FORBIDDEN, message));
    }
    let retry_after = front.config.timeouts.retry_after;
    let place = front.history.texts.watch(viewer.tenant_filter()).ok_or(Refusal::Full { retry_after })?;
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let shown = topics.into_iter().map(|topic| (topic, None)).collect();
    let watcher = front.reader_watch.clone();
    let (found, last_sent) = (VecDeque::new(), Instant::now());
    let changes = BrowserEvents { front, viewer, shown, found, looks, last_sent, is_over: false, _place: place };
    let headers = [("content-type", "text/event-stream"), ("cache-control", "no-store"), ("x-accel-buffering", "no")];
    let head: Response = headers.into_response();
    Ok(head.map(|_| Body::from_stream(watcher.watched(changes))))
}

/// Reads the topics, each at most once, so that a viewer cannot multiply its traffic.
fn parse_topics(names: &str) -> Result<Vec<Topic>, Refusal> {
    let mut topics = Vec::new();
    for name in names.split(',') {
        let topic = Topic::ALL.into_iter().find(|topic| topic.name() == name && !topics.contains(topic));
        let bad = || Refusal::invalid("of", "must be a comma-separated list of cluster, requests and load, each once");
        topics.push(topic.ok_or_else(bad)?);
    }
    Ok(topics)
}

struct BrowserEvents {
    front: Arc<Frontend>,
    viewer: Viewer,
    /// The last event that was sent for each topic.
    shown: Vec<(Topic, Option<Bytes>)>,
    /// Events of the last check that are still to be sent.
    found: VecDeque<Bytes>,
    looks: Interval,
    last_sent: Instant,
    is_over: bool,
    _place: WatcherPlace,
}

impl BrowserEvents {
    fn check_topics(&mut self) {
        for (topic, shown) in &mut self.shown {
            let event = topic.build_event(&self.front, self.viewer);
            if shown.as_ref().is_none_or(|shown| shown.as_ptr() != event.as_ptr()) {
                self.found.push_back(event.clone());
                *shown = Some(event);
            }
        }
        if self.front.admission.is_draining() {
            self.is_over = true;
            self.found.push_back(Bytes::from_static(b"event: draining\ndata: {}\n\n"));
        }
        if !self.found.is_empty() {
            self.last_sent = Instant::now();
        } else if self.last_sent.elapsed() >= self.front.config.timeouts.sse_silence_max {
            self.last_sent = Instant::now();
            self.found.push_back(Bytes::from_static(b": still here\n\n"));
        }
    }
}

impl Stream for BrowserEvents {
    type Item = Result<Bytes, ReadTimeout>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(event) = this.found.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if this.is_over {
                return Poll::Ready(None);
            }
            ready!(this.looks.poll_tick(context));
            this.check_topics();
        }
    }
}
