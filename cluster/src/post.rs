//! The text that a process publishes to its whole cluster while it lives: one per process, under a name of its own.
//! Does not know what the texts mean, nor where they are stored.

use crate::state::{Posts, StoreHealth, StoreState};
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::DropGuard;

/// A process's place among the posts. Its text goes soon after this is dropped.
#[derive(Debug)]
pub struct Post {
    name: String,
    state: watch::Receiver<StoreState>,
    health: watch::Receiver<StoreHealth>,
    kind: PostKind,
}

#[derive(Debug)]
pub(crate) enum PostKind {
    Memory(Arc<watch::Sender<StoreState>>),
    /// A task keeps the text in an external store, and ends with this.
    Kept {
        text: watch::Sender<Option<String>>,
        _end: DropGuard,
    },
}

impl Post {
    pub(crate) fn new(
        name: &str,
        (state, health): (watch::Receiver<StoreState>, watch::Receiver<StoreHealth>),
        kind: PostKind,
    ) -> Post {
        Post { name: name.into(), state, health, kind }
    }

    /// Replaces this process's text. Others read it when the store has taken it.
    pub fn publish(&self, text: String) {
        match &self.kind {
            PostKind::Memory(store) => write_post(store, &self.name, Some(text)),
            PostKind::Kept { text: kept, .. } => drop(kept.send_replace(Some(text))),
        }
    }

    /// Returns the texts of the others, as the store last had them.
    pub fn others(&self) -> Posts {
        let mut posts = self.state.borrow().posts.clone();
        posts.remove(&self.name);
        posts
    }

    /// False while the present texts of the others are unknown.
    pub fn is_connected(&self) -> bool {
        self.health.borrow().is_connected()
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        if let PostKind::Memory(store) = &self.kind {
            write_post(store, &self.name, None);
        }
    }
}

fn write_post(store: &watch::Sender<StoreState>, name: &str, text: Option<String>) {
    store.send_modify(|state| {
        state.revision += 1;
        match text {
            Some(text) => drop(state.posts.insert(name.into(), text)),
            None => drop(state.posts.remove(name)),
        }
    });
}
