//! The replicas behind this router: a link to each, one table of what is known of them, and the choice of one for each
//! request. Knows no text and no tokens' values.

use crate::config::{Config, Waits};
use crate::link::{Link, Replica, Submit, View};
use crate::peers::{Need, Peers};
use crate::pick::{Row, Standing, equal, least_work, strangers};
use crate::refusal::Refusal;
use crate::resume::{Handle, NoResume};
use crate::roster::{Membership, Roster};
use crate::ticket::Ticket;
use crate::topology::{self, StoreView};
use cluster::Health;
use proto::cluster::state::Phase;
use proto::v1;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Of all replicas, in the order in which they came.
pub struct Replicas {
    peers: Peers,
    views: watch::Receiver<Vec<View>>,
    /// Where they are known from: which kind of store, and whether it is there. None where they were given.
    store: Option<(&'static str, watch::Receiver<Health>)>,
    /// It has been said that one of them gets nothing.
    told_strangers: AtomicBool,
    retry_after: Duration,
}

/// Who serves a request, with all of its prompts and choices: they share what is cached.
pub struct Picked {
    link: Link,
    pub replica: Arc<Replica>,
}

impl Picked {
    pub fn wait(&self, n_tokens: u64) -> Option<Duration> {
        self.link.wait(n_tokens)
    }

    pub fn keys(&self, n: u64) -> u64 {
        self.link.keys(n)
    }

    pub fn submit(&self, submit: Submit) -> Result<Ticket, Refusal> {
        self.link.submit(submit)
    }
}

/// The links, and what begins and ends them, which is to be run.
pub fn attach(membership: Membership, config: &Config, end: CancellationToken) -> (Replicas, Roster) {
    let store = match &membership {
        Membership::Given(_) => None,
        Membership::Followed { store, .. } => Some((store.kind(), store.health())),
    };
    let peers = Peers::default();
    let roster = Roster::new(membership, peers.clone(), config, end);
    let Waits { retry_after, .. } = config.waits;
    let views = peers.views();
    (Replicas { peers, views, store, told_strangers: AtomicBool::new(false), retry_after }, roster)
}

impl Replicas {
    pub fn views(&self) -> watch::Receiver<Vec<View>> {
        self.views.clone()
    }

    /// The live cluster, as people look at it.
    pub fn topology(&self) -> v1::Topology {
        let store = self.store.as_ref().map(|(kind, health)| StoreView { kind, health: health.borrow().clone() });
        topology::topology(&self.views.borrow(), store)
    }

    pub fn is_any_ready(&self) -> bool {
        self.views.borrow().iter().any(View::is_ready)
    }

    /// One that has said what it serves: all serve the same.
    pub fn any(&self) -> Option<Arc<Replica>> {
        let views = self.views.borrow();
        let ready = views.iter().find(|view| view.is_ready());
        ready.or_else(|| views.iter().find(|view| view.replica.is_some()))?.replica.clone()
    }

    /// For a request whose longest prompt has so many tokens.
    pub fn pick(&self, n_prompt: usize) -> Result<Picked, Refusal> {
        let views = self.views.borrow();
        let table = self.peers.table(&views);
        let rows: Vec<Row> = table.iter().map(|(view, link)| row(view, link)).collect();
        let picked = least_work(&rows, u32::try_from(n_prompt).unwrap_or(u32::MAX));
        if let Some(stranger) = strangers(&rows).next().filter(|_| !self.told_strangers.swap(true, Relaxed)) {
            let replica = &table[stranger].0.name;
            tracing::warn!(
                replica,
                "gets no requests: its policy differs, and it would answer otherwise than the rest"
            );
        }
        let picked = picked.map(|idx| &table[idx]);
        let picked =
            picked.and_then(|(view, link)| Some(Picked { link: link.clone(), replica: view.replica.clone()? }));
        drop(views);
        picked.ok_or_else(|| self.refusal())
    }

    /// For a stream that is gone on with: who had it, or else who says the same.
    pub fn pick_again(&self, need: Need, before: &Handle) -> Result<Picked, Refusal> {
        let views = self.views.borrow();
        let table = self.peers.table(&views);
        let rows: Vec<Row> = table.iter().map(|(view, link)| row(view, link)).collect();
        let had_it = |((view, _), row): (&(&View, Link), &Row)| {
            let is_it = view.replica.as_ref().is_some_and(|of| before.is_of(&of.name, of.incarnation));
            is_it && row.standing == Standing::Ready && row.meets(need)
        };
        let idx = table.iter().zip(&rows).position(had_it);
        let picked = idx.or_else(|| equal(&rows, need, Standing::Recovering)).map(|idx| &table[idx]);
        let picked =
            picked.and_then(|(view, link)| Some(Picked { link: link.clone(), replica: view.replica.clone()? }));
        picked.ok_or_else(|| match rows.iter().any(|row| row.may_come_for(need)) {
            true => Refusal::NotReady { retry_after: self.retry_after },
            false => NoResume::OtherPolicy.into(),
        })
    }

    /// Why nobody takes requests.
    pub fn refusal(&self) -> Refusal {
        let retry_after = self.retry_after;
        let views = self.views.borrow();
        let drains = views.iter().any(|view| view.phase() == Phase::Draining);
        let all_drain = drains && views.iter().all(|view| matches!(view.phase(), Phase::Draining | Phase::Unspecified));
        if all_drain { Refusal::Draining { retry_after } } else { Refusal::NotReady { retry_after } }
    }
}

pub fn row(view: &View, link: &Link) -> Row {
    let standing = match (&view.replica, view.phase()) {
        (None, _) => Standing::Absent,
        (Some(_), Phase::Ready) => Standing::Ready,
        (Some(_), Phase::Draining) => Standing::Draining,
        (Some(_), Phase::Recovering | Phase::Loading | Phase::Unspecified) => Standing::Recovering,
    };
    let (digest, context) = view.replica.as_ref().map(|replica| (replica.digest, replica.context)).unwrap_or_default();
    Row { standing, digest, context, work: link.work() }
}
