//! Notifies a link that its request has lost its owner. The link changes when the request moves. Knows keys, and
//! neither tokens nor replicas.

use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;

/// The owner's side of a running request. Dropping it cancels the request, unless it is over.
#[derive(Debug)]
pub struct Ticket {
    key: u64,
    home: Arc<CancelRoute>,
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
pub struct CancelRoute(Mutex<Option<mpsc::OwnedPermit<Cancel>>>);

impl CancelRoute {
    pub fn to_link(cancel: mpsc::OwnedPermit<Cancel>) -> Arc<CancelRoute> {
        Arc::new(CancelRoute(Mutex::new(Some(cancel))))
    }

    /// Sends the end to another link from now on. Returns false if the request is over already.
    pub fn move_to(&self, cancel: mpsc::OwnedPermit<Cancel>) -> bool {
        let mut home = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_running = home.is_some();
        *home = is_running.then_some(cancel);
        is_running
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
    pub fn new(key: u64, home: Arc<CancelRoute>) -> Ticket {
        Ticket { key, home }
    }

    /// Returns the ticket of an answer that no replica gives.
    pub fn detached() -> Ticket {
        Ticket { key: 0, home: Arc::new(CancelRoute(Mutex::new(None))) }
    }

    #[cfg(test)]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Ends a request that is over at the replica: there is nothing to cancel.
    pub fn finish(self) {
        self.home.take();
    }

    /// Ends a request with a complete text. The replica has not noticed that end.
    pub fn stop(self) {
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
        let (first, mut first_rx) = mpsc::channel(4);
        let (second, mut second_rx) = mpsc::channel(4);
        let reserve = |queue: &mpsc::Sender<Cancel>| queue.clone().try_reserve_owned().unwrap();
        let home = CancelRoute::to_link(reserve(&first));
        let ticket = Ticket::new(7, home.clone());
        assert!(home.move_to(reserve(&second)) && !home.is_over());
        ticket.stop();
        assert!(home.is_over() && !home.move_to(reserve(&first)));
        assert!(matches!(second_rx.try_recv(), Ok(Cancel { key: 7, stopped: true })));
        assert!(first_rx.try_recv().is_err() && second_rx.try_recv().is_err());
        // A request that is over is not cancelled, and its place in the queue is free again.
        let home = CancelRoute::to_link(reserve(&first));
        Ticket::new(8, home.clone()).finish();
        assert!(home.is_over() && first_rx.try_recv().is_err() && first.capacity() == 4);
        drop(Ticket::new(9, CancelRoute::to_link(reserve(&first))));
        assert!(matches!(first_rx.try_recv(), Ok(Cancel { key: 9, stopped: false })));
    }
}
