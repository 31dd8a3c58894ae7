//! The text that a process publishes to its whole cluster while it lives: one per process, under a name of its own.
//! Does not know what the texts mean, nor where they are stored.

use crate::state::{Health, Posts, State};
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::DropGuard;

/// A process's place among the posts. Its text goes soon after this is dropped.
#[derive(Debug)]
pub struct Post {
    name: String,
    state: watch::Receiver<State>,
    health: watch::Receiver<Health>,
    says: PostKind,
}

#[derive(Debug)]
pub(crate) enum PostKind {
    Memory(Arc<watch::Sender<State>>),
    /// A task keeps the text in an external store, and ends with this.
    Kept {
        text: watch::Sender<Option<String>>,
        _end: DropGuard,
    },
}

impl Post {
    pub(crate) fn new(
        name: &str,
        (state, health): (watch::Receiver<State>, watch::Receiver<Health>),
        says: PostKind,
    ) -> Post {
        Post { name: name.into(), state, health, says }
    }

    /// Replaces this process's text. Others read it when the store has taken it.
    pub fn say(&self, text: String) {
        match &self.says {
            PostKind::Memory(store) => tell(store, &self.name, Some(text)),
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
        if let PostKind::Memory(store) = &self.says {
            tell(store, &self.name, None);
        }
    }
}

fn tell(store: &watch::Sender<State>, name: &str, text: Option<String>) {
    store.send_modify(|state| {
        state.revision += 1;
        match text {
            Some(text) => drop(state.posts.insert(name.into(), text)),
            None => drop(state.posts.remove(name)),
        }
    });
}
