//! Notifies a link that its request has lost its owner. The link changes when the request moves. Knows keys, and
//! neither tokens nor replicas.

use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;

/// The owner's side of a running request. Dropping it cancels the request, unless it is over.
#[derive(Debug)]
pub struct Ticket {
    key: u64,
    home: Arc<Home>,
}

/// The end of a request, which its replica does not know yet.
#[derive(Clone, Copy, Debug)]
pub struct Cancel {
    pub key: u64,
    /// The request ended at a stop string, and its client has not left.
    pub stopped: bool,
}

/// The link that has a request. A place in that link's queue of cancels is reserved, so that a cancel never finds it
/// full.
#[derive(Debug)]
pub struct Home(Mutex<Option<mpsc::OwnedPermit<Cancel>>>);

impl Home {
    pub fn at(cancel: mpsc::OwnedPermit<Cancel>) -> Arc<Home> {
        Arc::new(Home(Mutex::new(Some(cancel))))
    }

    /// Sends the end to another link from now on. Returns false if the request is over already.
    pub fn moves_to(&self, cancel: mpsc::OwnedPermit<Cancel>) -> bool {
        let mut home = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_wanted = home.is_some();
        *home = is_wanted.then_some(cancel);
        is_wanted
    }

    /// Whether the request's owner has left. Its cancel may have overtaken the request.
    pub fn is_over(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn take(&self) -> Option<mpsc::OwnedPermit<Cancel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Ticket {
    pub fn new(key: u64, home: Arc<Home>) -> Ticket {
        Ticket { key, home }
    }

    /// Returns the ticket of an answer that no replica gives.
    pub fn of_nobody() -> Ticket {
        Ticket { key: 0, home: Arc::new(Home(Mutex::new(None))) }
    }

    #[cfg(test)]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Ends a request that is over at the replica: there is nothing to cancel.
    pub fn over(self) {
        self.home.take();
    }

    /// Ends a request with a complete text. The replica has not noticed that end.
    pub fn stopped(self) {
        self.end(true);
    }

    fn end(&self, stopped: bool) {
        if let Some(cancel) = self.home.take() {
            cancel.send(Cancel { key: self.key, stopped });
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.end(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_reaches_the_link_that_has_the_request() {
        let (first, mut heard_first) = mpsc::channel(4);
        let (second, mut heard_second) = mpsc::channel(4);
        let reserve = |queue: &mpsc::Sender<Cancel>| queue.clone().try_reserve_owned().unwrap();
        let home = Home::at(reserve(&first));
        let ticket = Ticket::new(7, home.clone());
        assert!(home.moves_to(reserve(&second)) && !home.is_over());
        ticket.stopped();
        assert!(home.is_over() && !home.moves_to(reserve(&first)));
        assert!(matches!(heard_second.try_recv(), Ok(Cancel { key: 7, stopped: true })));
        assert!(heard_first.try_recv().is_err() && heard_second.try_recv().is_err());
        // A request that is over is not cancelled, and its place in the queue is free again.
        let home = Home::at(reserve(&first));
        Ticket::new(8, home.clone()).over();
        assert!(home.is_over() && heard_first.try_recv().is_err() && first.capacity() == 4);
        drop(Ticket::new(9, Home::at(reserve(&first))));
        assert!(matches!(heard_first.try_recv(), Ok(Cancel { key: 9, stopped: false })));
    }
}
