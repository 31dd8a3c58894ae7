//! How much work a replica has, as far as this router knows: what it gave to the replica itself, at once, and what others
//! gave to it, as the replica tells. Knows numbers of tokens and no requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Of one replica.
#[derive(Debug, Default)]
pub struct Ledger {
    own: AtomicU64,
    others: AtomicU64,
}

impl Ledger {
    pub fn work(&self) -> u64 {
        self.own.load(Relaxed).saturating_add(self.others.load(Relaxed))
    }

    /// The replica says what it has in all. What is not from here is other routers'.
    pub fn told(&self, n_tokens: u64) {
        self.others.store(n_tokens.saturating_sub(self.own.load(Relaxed)), Relaxed);
    }

    /// Until the result is dropped, so much more is to be done there.
    pub fn enter(self: &Arc<Self>, n_tokens: u64) -> Item {
        self.own.fetch_add(n_tokens, Relaxed);
        Item { ledger: self.clone(), n_tokens }
    }
}

/// What is left to do of one request, as far as anybody can know.
#[derive(Debug)]
pub struct Item {
    ledger: Arc<Ledger>,
    n_tokens: u64,
}

impl Item {
    /// It says tokens: its prompt is done, and each step of it is one token.
    pub fn begun(&mut self) {
        let done = self.n_tokens.saturating_sub(1);
        self.n_tokens -= done;
        self.ledger.own.fetch_sub(done, Relaxed);
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.ledger.own.fetch_sub(self.n_tokens, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_work_is_known_at_once_and_others_when_it_is_told() {
        let ledger = Arc::new(Ledger::default());
        let mut item = ledger.enter(500);
        assert_eq!(ledger.work(), 500);
        ledger.told(700);
        assert_eq!(ledger.work(), 700);
        item.begun();
        item.begun();
        assert_eq!(ledger.work(), 201);
        drop(item);
        assert_eq!(ledger.work(), 200);
        // Of what this router has sent, the replica has not got everything yet.
        let _item = ledger.enter(500);
        ledger.told(20);
        assert_eq!(ledger.work(), 500);
    }
}
