//! `/events?of=cluster,requests,load`: one stream for one who watches, with an event of each kind whenever it has
//! changed. It ends when the server drains, with an event that says so.

use crate::faces::http::browser::{load, requests};
use crate::faces::http::door::Viewer;
use crate::faces::http::error::HttpError;
use crate::front::frontend::Frontend;
use crate::front::reader_watch::Unread;
use crate::history::WatcherPlace;
use crate::refusal::Refusal;
use crate::replicas::topology;
use axum::body::Body;
use axum::extract::{Extension, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_stream::Stream;

/// How often it is looked whether there is something new.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What can be watched.
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

    /// How old what is shown may be.
    fn age_max(self) -> Duration {
        match self {
            Topic::Cluster => LOOK_EVERY,
            Topic::Requests => 2 * LOOK_EVERY,
            Topic::Load => 8 * LOOK_EVERY,
        }
    }

    fn text(self, front: &Frontend, viewer: Viewer) -> Arc<str> {
        let of = if self == Topic::Requests { viewer.sees_of() } else { None };
        // A little less, so that each look finds something new.
        let age_max = self.age_max().mul_f64(0.9);
        front.history.texts.get((self.name(), of), age_max, || match self {
            Topic::Cluster => topology::json(&front.topology(0)).to_string(),
            Topic::Requests => requests::listed(front, viewer, requests::WATCHED_MAX).to_string(),
            Topic::Load => load::told(front).to_string(),
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
    let topics = topics(names)?;
    if topics.iter().any(|topic| *topic != Topic::Requests) && !viewer.sees_cluster {
        let message = "this key may watch `requests`; the rest is shown to keys with `role=operator`";
        return Err(HttpError::bad_request(StatusCode::FORBIDDEN, message));
    }
    let retry_after = front.config.timeouts.retry_after;
    let place = front.history.texts.watch(viewer.sees_of()).ok_or(Refusal::Full { retry_after })?;
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let shown = topics.into_iter().map(|topic| (topic, None)).collect();
    let watcher = front.reader_watch.clone();
    let changes = Changes { front, viewer, shown, looks, spoke: Instant::now(), is_over: false, _place: place };
    let headers = [("content-type", "text/event-stream"), ("cache-control", "no-store"), ("x-accel-buffering", "no")];
    let head: Response = headers.into_response();
    Ok(head.map(|_| Body::from_stream(watcher.watched(changes))))
}

/// Each at most once: one who watches is sent as much as there is, and no more.
fn topics(names: &str) -> Result<Vec<Topic>, Refusal> {
    let mut topics = Vec::new();
    for name in names.split(',') {
        let topic = Topic::ALL.into_iter().find(|topic| topic.name() == name && !topics.contains(topic));
        let bad = || Refusal::invalid("of", "names of cluster, requests and load, each once, with commas");
        topics.push(topic.ok_or_else(bad)?);
    }
    Ok(topics)
}

struct Changes {
    front: Arc<Frontend>,
    viewer: Viewer,
    /// What was shown last of each.
    shown: Vec<(Topic, Option<Arc<str>>)>,
    looks: Interval,
    spoke: Instant,
    is_over: bool,
    _place: WatcherPlace,
}

impl Changes {
    fn look(&mut self) -> String {
        let mut out = String::new();
        for (topic, shown) in &mut self.shown {
            let text = topic.text(&self.front, self.viewer);
            if shown.as_ref() != Some(&text) {
                out.push_str(&format!("event: {}\ndata: {text}\n\n", topic.name()));
                *shown = Some(text);
            }
        }
        if self.front.admission.is_draining() {
            self.is_over = true;
            out.push_str("event: draining\ndata: {}\n\n");
        }
        if out.is_empty() && self.spoke.elapsed() >= self.front.config.timeouts.sse_silence_max {
            out.push_str(": still here\n\n");
        }
        out
    }
}

impl Stream for Changes {
    type Item = Result<Bytes, Unread>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        while !this.is_over {
            ready!(this.looks.poll_tick(context));
            let out = this.look();
            if !out.is_empty() {
                this.spoke = Instant::now();
                return Poll::Ready(Some(Ok(out.into())));
            }
        }
        Poll::Ready(None)
    }
}
