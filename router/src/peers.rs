//! What the links of a router know of each other: who could go on with a request whose replica is lost. Knows no
//! tokens' values and no clients.

use crate::link::{Link, View};
use crate::pick::{self, Row, Standing};
use crate::replicas::row;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use tokio::sync::watch;
use types::PolicyDigest;

/// The links and their views, each at its own place. Replicas come and go; no place is given twice.
#[derive(Clone, Default)]
pub struct Peers {
    links: Arc<RwLock<BTreeMap<usize, Link>>>,
    /// In the order in which they came.
    views: Arc<watch::Sender<Vec<View>>>,
}

/// What a request asks of a replica that goes on with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub digest: PolicyDigest,
    /// Tokens of its log when it ends: with less room it would end sooner.
    pub n_tokens: u64,
}

impl Peers {
    /// A view, whose link comes next.
    pub fn sit(&self, view: View) {
        self.views.send_modify(|views| views.push(view));
    }

    /// A link, at the place of its view.
    pub fn introduce(&self, place: usize, link: Link) {
        self.links.write().unwrap_or_else(PoisonError::into_inner).insert(place, link);
    }

    pub fn leave(&self, place: usize) {
        self.views.send_modify(|views| views.retain(|view| view.place != place));
        self.links.write().unwrap_or_else(PoisonError::into_inner).remove(&place);
    }

    /// For each view that has one, its link.
    pub fn table<'a>(&self, views: &'a [View]) -> Vec<(&'a View, Link)> {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        views.iter().filter_map(|view| Some((view, links.get(&view.place)?.clone()))).collect()
    }

    pub fn views(&self) -> watch::Receiver<Vec<View>> {
        self.views.subscribe()
    }

    pub fn show(&self, place: usize, change: impl FnOnce(&mut View)) {
        self.views.send_if_modified(|views| {
            let view = views.iter_mut().find(|view| view.place == place);
            view.map(change).is_some()
        });
    }

    /// All but one, as they are now.
    pub fn besides(&self, place: usize) -> Others {
        let views = self.views.borrow();
        let others = self.table(&views).into_iter().filter(|(view, _)| view.place != place);
        let (rows, links) = others.map(|(view, link)| (row(view, &link), link)).unzip();
        Others { rows, links }
    }
}

/// The other links at one moment.
pub struct Others {
    rows: Vec<Row>,
    links: Vec<Link>,
}

impl Others {
    /// Who can go on with a request at once. What was given to it before counts.
    pub fn ready_for(&mut self, need: Need, n_tokens: u64) -> Option<Link> {
        let idx = pick::equal(&self.rows, need, Standing::Ready)?;
        self.rows[idx].work += n_tokens;
        Some(self.links[idx].clone())
    }

    pub fn is_any_ready_for(&self, need: Need) -> bool {
        pick::equal(&self.rows, need, Standing::Ready).is_some()
    }

    /// Whether somebody may come to be able to: who is away could be anybody.
    pub fn may_come_for(&self, need: Need) -> bool {
        self.rows.iter().any(|row| row.may_come_for(need))
    }
}
