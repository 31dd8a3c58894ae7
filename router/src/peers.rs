//! What the links of a router know of each other: who could go on with a request whose replica is lost. Knows no
//! tokens' values and no clients.

use crate::link::{Link, View};
use crate::pick::{self, Row, Standing};
use crate::replicas::row;
use std::sync::{Arc, PoisonError, RwLock};
use tokio::sync::watch;
use types::PolicyDigest;

/// The links and their views, each at its own place.
#[derive(Clone)]
pub struct Peers {
    links: Arc<RwLock<Vec<Link>>>,
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
    pub fn new(views: Vec<View>) -> Peers {
        Peers { links: Arc::default(), views: Arc::new(watch::Sender::new(views)) }
    }

    /// A link, at the place of its view.
    pub fn introduce(&self, link: Link) {
        self.links.write().unwrap_or_else(PoisonError::into_inner).push(link);
    }

    pub fn links(&self) -> Vec<Link> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn views(&self) -> watch::Receiver<Vec<View>> {
        self.views.subscribe()
    }

    pub fn show(&self, idx: usize, change: impl FnOnce(&mut View)) {
        self.views.send_modify(|views| change(&mut views[idx]));
    }

    /// All but one, as they are now.
    pub fn besides(&self, idx: usize) -> Others {
        let links = self.links();
        let rows = self.views.borrow().iter().zip(&links).map(|(view, link)| row(view, link)).collect();
        Others { rows, links, idx }
    }
}

/// The other links at one moment.
pub struct Others {
    rows: Vec<Row>,
    links: Vec<Link>,
    idx: usize,
}

impl Others {
    /// Who can go on with a request at once. What was given to it before counts.
    pub fn ready_for(&mut self, need: Need, n_tokens: u64) -> Option<Link> {
        let idx = pick::equal(&self.rows, need, Standing::Ready, Some(self.idx))?;
        self.rows[idx].work += n_tokens;
        Some(self.links[idx].clone())
    }

    pub fn is_any_ready_for(&self, need: Need) -> bool {
        pick::equal(&self.rows, need, Standing::Ready, Some(self.idx)).is_some()
    }

    /// Whether somebody may come to be able to: who is away could be anybody.
    pub fn may_come_for(&self, need: Need) -> bool {
        let others = self.rows.iter().enumerate().filter(|(idx, _)| *idx != self.idx);
        others.map(|(_, row)| row).any(|row| row.may_come_for(need))
    }
}
