//! The replicas behind this router: a link to each, one table of what is known of them, and the choice of one for each
//! request. Knows no text and no tokens' values.

use crate::config::{Config, Waits};
use crate::link::{self, Link, Replica, Submit, Task, View};
use crate::peers::{Need, Peers};
use crate::pick::{Row, Standing, equal, least_work, strangers};
use crate::refusal::Refusal;
use crate::resume::{Handle, NoResume};
use crate::ticket::Ticket;
use proto::cluster::state::Phase;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::watch;
use tonic::transport::Channel;

/// Where a replica's coordinator is reached.
#[derive(Clone, Debug)]
pub struct Coordinator {
    /// As people know it, until the replica says its own name.
    pub name: String,
    pub channel: Channel,
}

/// Of all replicas, in the order in which they were given.
pub struct Replicas {
    links: Vec<Link>,
    views: watch::Receiver<Vec<View>>,
    /// It has been said that one of them gets nothing.
    told_strangers: AtomicBool,
    retry_after: Duration,
}

/// Who serves a request, with all of its prompts and choices: they share what is cached.
pub struct Picked<'a> {
    link: &'a Link,
    pub replica: Arc<Replica>,
}

impl Picked<'_> {
    pub fn keys(&self, n: u64) -> u64 {
        self.link.keys(n)
    }

    pub fn submit(&self, submit: Submit) -> Result<Ticket, Refusal> {
        self.link.submit(submit)
    }
}

/// The links, and a task to be run for each.
pub fn attach(coordinators: Vec<Coordinator>, config: &Config) -> (Replicas, Vec<Task>) {
    let views = coordinators.iter().map(|coordinator| View::of(&coordinator.name)).collect();
    let peers = Peers::new(views);
    // One count for all links, so that no two requests of this router have the same key.
    let keys = Arc::new(AtomicU64::new(1));
    let link = |(idx, coordinator): (usize, Coordinator)| {
        link::link(coordinator.channel, peers.clone(), idx, keys.clone(), config)
    };
    let tasks = coordinators.into_iter().enumerate().map(link).collect();
    let Waits { retry_after, .. } = config.waits;
    let (links, views) = (peers.links(), peers.views());
    (Replicas { links, views, told_strangers: AtomicBool::new(false), retry_after }, tasks)
}

impl Replicas {
    pub fn views(&self) -> watch::Receiver<Vec<View>> {
        self.views.clone()
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
    pub fn pick(&self, n_prompt: usize) -> Result<Picked<'_>, Refusal> {
        let views = self.views.borrow();
        let table: Vec<Row> = views.iter().zip(&self.links).map(|(view, link)| row(view, link)).collect();
        let picked = least_work(&table, u32::try_from(n_prompt).unwrap_or(u32::MAX));
        if let Some(stranger) = strangers(&table).next().filter(|_| !self.told_strangers.swap(true, Relaxed)) {
            let replica = &views[stranger].name;
            tracing::warn!(
                replica,
                "gets no requests: its policy differs, and it would answer otherwise than the rest"
            );
        }
        let picked =
            picked.and_then(|idx| Some(Picked { link: &self.links[idx], replica: views[idx].replica.clone()? }));
        drop(views);
        picked.ok_or_else(|| self.refusal())
    }

    /// For a stream that is gone on with: who had it, or else who says the same.
    pub fn pick_again(&self, need: Need, before: &Handle) -> Result<Picked<'_>, Refusal> {
        let views = self.views.borrow();
        let table: Vec<Row> = views.iter().zip(&self.links).map(|(view, link)| row(view, link)).collect();
        let had_it = |(view, row): (&View, &Row)| {
            let is_it = view.replica.as_ref().is_some_and(|of| before.is_of(&of.name, of.incarnation));
            is_it && row.standing == Standing::Ready && row.meets(need)
        };
        let idx = views.iter().zip(&table).position(had_it);
        let idx = idx.or_else(|| equal(&table, need, Standing::Recovering, None));
        let picked = idx.and_then(|idx| Some(Picked { link: &self.links[idx], replica: views[idx].replica.clone()? }));
        picked.ok_or_else(|| match table.iter().any(|row| row.may_come_for(need)) {
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
