//! The places of a listener. Connections that have not proved themselves may use only a part of them, and share that
//! part by address, so that a flood of them keeps no peer out that can prove itself. Has no knowledge of sockets.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// The most connections that a listener holds: those that prove themselves, and those that have and were not yet taken.
const PLACES_MAX: usize = 256;
/// The most of them that prove themselves at once. The others are reserved for connections that have.
const UNPROVEN_MAX: usize = 128;
/// The most connections that wait for a place. One more displaces one of the address that has the most.
const WAITING_MAX: usize = 256;
/// The time of a proof between distant machines. A connection that took longer loses its place if others wait: a
/// silent one keeps them out for no longer than this.
const PROOF_USUAL: Duration = Duration::from_millis(200);

/// The places of one listener, and the connections that wait for one.
pub(crate) struct Places<T> {
    waiting: BTreeMap<IpAddr, VecDeque<T>>,
    n_waiting: usize,
    counts: Arc<PlaceCounts>,
}

/// A connection's place: until it has proved itself, and then until it is taken.
pub(crate) struct Place {
    id: u64,
    has_proved: bool,
    counts: Arc<PlaceCounts>,
    /// Ends when the place is given to another connection.
    lost: Option<oneshot::Receiver<()>>,
}

#[derive(Default)]
struct PlaceCounts {
    state: Mutex<PlaceState>,
    freed: Notify,
}

#[derive(Default)]
struct PlaceState {
    next_id: u64,
    /// In the order of their arrival.
    unproven: VecDeque<UnprovenConnection>,
    n_proved: usize,
}

struct UnprovenConnection {
    id: u64,
    from: IpAddr,
    since: Instant,
    _kept: oneshot::Sender<()>,
}

impl<T> Places<T> {
    pub fn new() -> Places<T> {
        Places { waiting: BTreeMap::new(), n_waiting: 0, counts: Arc::default() }
    }

    /// Lets a connection wait for a place. Returns the one that it displaces, if too many wait.
    pub fn arrive(&mut self, from: IpAddr, connection: T) -> Option<T> {
        self.waiting.entry(network(from)).or_default().push_back(connection);
        self.n_waiting += 1;
        if self.n_waiting <= WAITING_MAX {
            return None;
        }
        let largest = self.waiting.iter().max_by_key(|(_, of)| of.len()).map(|(from, _)| *from)?;
        self.pop(largest)
    }

    /// Gives a place to the waiting connection of the address that has the fewest. Returns None if no connection can
    /// have one now.
    pub fn admit(&mut self, now: Instant) -> Option<(Place, T)> {
        let mut state = self.counts.state();
        let n_of = state.n_by_address();
        let n = |from: &IpAddr| n_of.get(from).copied().unwrap_or_default();
        let from = self.waiting.keys().copied().min_by_key(n)?;
        if state.is_full() {
            return None;
        }
        if state.unproven.len() >= UNPROVEN_MAX {
            let largest = n_of.iter().max_by_key(|(_, n)| **n).filter(|(_, n_largest)| **n_largest > n(&from) + 1);
            let displaced = match largest {
                Some((largest, _)) => state.unproven.iter().position(|one| one.from == *largest),
                None => state.unproven.front().filter(|one| one.since + PROOF_USUAL <= now).map(|_| 0),
            };
            state.unproven.remove(displaced?);
        }
        let (kept, lost) = oneshot::channel();
        let id = state.next_id;
        state.next_id += 1;
        state.unproven.push_back(UnprovenConnection { id, from, since: now, _kept: kept });
        drop(state);
        let place = Place { id, has_proved: false, counts: self.counts.clone(), lost: Some(lost) };
        Some((place, self.pop(from)?))
    }

    /// Waits until `admit` may have another result.
    pub async fn changed(&self) {
        let oldest = self.counts.state().displaceable_at();
        let displaceable = async {
            match oldest.filter(|_| self.n_waiting > 0) {
                // A timer may end a moment early.
                Some(at) => tokio::time::sleep_until(at.max(Instant::now() + Duration::from_millis(1))).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.counts.freed.notified() => {}
            () = displaceable => {}
        }
    }

    fn pop(&mut self, from: IpAddr) -> Option<T> {
        let of_address = self.waiting.get_mut(&from)?;
        let first = of_address.pop_front();
        if of_address.is_empty() {
            self.waiting.remove(&from);
        }
        self.n_waiting -= usize::from(first.is_some());
        first
    }
}

impl Place {
    /// Ends when the place is given to another connection, which never happens once this one has proved itself.
    pub async fn lost(&mut self) {
        match &mut self.lost {
            // The sender is dropped with the place.
            Some(lost) => drop(lost.await),
            None => std::future::pending().await,
        }
    }

    /// Moves the connection to the places that are reserved for those that have proved themselves.
    pub fn prove(&mut self) {
        let mut state = self.counts.state();
        // It may have lost its place in this moment; it keeps its connection, which counts.
        state.remove_unproven(self.id);
        state.n_proved += usize::from(!self.has_proved);
        drop(state);
        (self.has_proved, self.lost) = (true, None);
        self.counts.freed.notify_one();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.counts.state();
        if self.has_proved {
            state.n_proved -= 1;
        } else {
            state.remove_unproven(self.id);
        }
        drop(state);
        self.counts.freed.notify_one();
    }
}

impl PlaceCounts {
    fn state(&self) -> MutexGuard<'_, PlaceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PlaceState {
    fn is_full(&self) -> bool {
        self.unproven.len() + self.n_proved >= PLACES_MAX
    }

    /// Returns when the oldest connection may lose its place to any other.
    fn displaceable_at(&self) -> Option<Instant> {
        let oldest = self.unproven.front().filter(|_| !self.is_full() && self.unproven.len() >= UNPROVEN_MAX);
        oldest.map(|oldest| oldest.since + PROOF_USUAL)
    }

    fn n_by_address(&self) -> BTreeMap<IpAddr, usize> {
        let mut n_of = BTreeMap::<IpAddr, usize>::new();
        self.unproven.iter().for_each(|one| *n_of.entry(one.from).or_default() += 1);
        n_of
    }

    /// Does nothing if it has no place any more.
    fn remove_unproven(&mut self, id: u64) {
        self.unproven.retain(|one| one.id != id);
    }
}

/// Returns the part of an address that one host cannot vary: it has a whole network of IPv6 addresses.
fn network(from: IpAddr) -> IpAddr {
    const HOST_BITS: u32 = 64;
    match from.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> HOST_BITS << HOST_BITS).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    /// Fills the unproven places with connections of one address.
    fn flooded(now: Instant) -> (Places<u8>, Vec<Place>) {
        let mut places = Places::new();
        (0..2 * UNPROVEN_MAX).for_each(|_| assert!(places.arrive(address(1), 1).is_none()));
        let held: Vec<Place> = std::iter::from_fn(|| places.admit(now)).map(|(place, _)| place).collect();
        assert_eq!(held.len(), UNPROVEN_MAX);
        (places, held)
    }

    fn is_lost(place: &mut Place) -> bool {
        place.lost.as_mut().is_some_and(|lost| lost.try_recv() == Err(oneshot::error::TryRecvError::Closed))
    }

    #[tokio::test]
    async fn a_flood_from_one_address_keeps_no_other_out() {
        let now = Instant::now();
        let (mut places, mut held) = flooded(now);
        places.arrive(address(2), 2);
        let (_place, of) = places.admit(now).unwrap();
        assert_eq!(of, 2, "it goes before the waiting connections of the flood");
        assert!(is_lost(&mut held[0]) && !is_lost(&mut held[1]));
        assert!(places.admit(now).is_none());
        // Of one address, the first place is given on after the usual time of a proof.
        let (_next, of) = places.admit(now + PROOF_USUAL).unwrap();
        assert_eq!(of, 1);
        assert!(is_lost(&mut held[1]) && !is_lost(&mut held[2]));
    }

    #[tokio::test]
    async fn connections_that_have_proved_themselves_leave_the_places_of_the_others() {
        let now = Instant::now();
        let (mut places, mut held) = flooded(now);
        held.iter_mut().for_each(Place::prove);
        let more: Vec<_> = std::iter::from_fn(|| places.admit(now)).collect();
        assert_eq!((more.len(), more.len() + held.len()), (UNPROVEN_MAX, PLACES_MAX));
        // A connection that has proved itself is never displaced.
        places.arrive(address(2), 2);
        assert!(places.admit(now + PROOF_USUAL).is_none() && !held.iter_mut().any(is_lost));
        drop(held);
        assert_eq!(places.admit(now + PROOF_USUAL).map(|(_, of)| of), Some(2));
        let counts = places.counts.clone();
        drop((more, places));
        let state = counts.state();
        assert_eq!((state.unproven.len(), state.n_proved), (0, 0));
    }

    #[test]
    fn waiting_connections_have_a_bound_that_the_largest_address_pays_for() {
        let mut places = Places::new();
        assert!(places.arrive(address(2), 2).is_none());
        let displaced = (0..2 * WAITING_MAX).filter_map(|_| places.arrive(address(1), 1)).collect::<Vec<_>>();
        assert_eq!((displaced.len(), places.n_waiting), (WAITING_MAX + 1, WAITING_MAX));
        assert!(displaced.iter().all(|of| *of == 1));
    }

    #[test]
    fn an_ipv6_host_has_one_network() {
        let network = |text: &str| network(text.parse().unwrap()).to_string();
        assert_eq!(network("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(network("::ffff:192.0.2.1"), "192.0.2.1");
    }
}
