//! Limits how often the same thing is logged of one peer: a peer that dials often must not fill the log. Knows no
//! clock, and no log.

use std::collections::BTreeMap;
use std::fmt;
use types::Micros;

/// Microseconds between two lines about one address.
const EVERY: u64 = 1_000_000;
/// The most addresses of the last second with a line of their own; all others share one line a second.
const ADDRESSES_MAX: usize = 256;

/// Allows one line a second for each address. `K` distinguishes addresses.
#[derive(Debug)]
pub struct LogRateLimit<K> {
    every: u64,
    addresses_max: usize,
    addresses: BTreeMap<K, AddressState>,
    /// Shared by all addresses for which there is no room.
    others: AddressState,
}

#[derive(Debug, Default)]
struct AddressState {
    logged: Option<Micros>,
    suppressed: SuppressedEvents,
}

/// The events that were left out of the log since the last line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SuppressedEvents {
    pub n: u64,
    /// The text of the last one.
    pub last: Option<String>,
}

impl SuppressedEvents {
    /// None if nothing was left out.
    pub fn count(&self) -> Option<u64> {
        (self.n > 0).then_some(self.n)
    }
}

impl<K: Ord> Default for LogRateLimit<K> {
    fn default() -> LogRateLimit<K> {
        LogRateLimit::new(EVERY, ADDRESSES_MAX)
    }
}

impl<K: Ord> LogRateLimit<K> {
    fn new(every: u64, addresses_max: usize) -> LogRateLimit<K> {
        LogRateLimit { every, addresses_max, addresses: BTreeMap::new(), others: AddressState::default() }
    }

    /// Returns what was left out before, if this is to be logged now. Otherwise returns None, and counts the `n`
    /// events.
    pub fn admit(&mut self, address: K, n: u64, what: &impl fmt::Display, now: Micros) -> Option<SuppressedEvents> {
        if self.addresses.len() >= self.addresses_max && !self.addresses.contains_key(&address) {
            self.forget_quiet(now);
        }
        let is_full = self.addresses.len() >= self.addresses_max && !self.addresses.contains_key(&address);
        let address = if is_full { &mut self.others } else { self.addresses.entry(address).or_default() };
        if address.is_quiet(self.every, now) {
            address.logged = Some(now);
            return Some(std::mem::take(&mut address.suppressed));
        }
        address.suppressed.n += n;
        address.suppressed.last = Some(what.to_string());
        None
    }

    /// Makes room. The next line of `others` reports what was left out about them.
    fn forget_quiet(&mut self, now: Micros) {
        let (every, others) = (self.every, &mut self.others.suppressed);
        self.addresses.retain(|_, address| {
            let is_quiet = address.is_quiet(every, now);
            if is_quiet && address.suppressed.n > 0 {
                others.n += address.suppressed.n;
                others.last = address.suppressed.last.take();
            }
            !is_quiet
        });
    }
}

impl AddressState {
    /// True if the last line about it is old enough for the next one.
    fn is_quiet(&self, every: u64, now: Micros) -> bool {
        self.logged.is_none_or(|logged| now >= logged.plus(every))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suppressed(n: u64, last: &str) -> Option<SuppressedEvents> {
        Some(SuppressedEvents { n, last: (n > 0).then(|| last.to_owned()) })
    }

    #[test]
    fn an_address_is_logged_once_in_a_while_with_what_was_not() {
        let mut limit = LogRateLimit::new(10, 4);
        let mut admit = |address, what: &str, now| limit.admit(address, 1, &what, Micros(now));
        assert_eq!(admit(1, "a", 5), suppressed(0, ""));
        assert_eq!([admit(1, "b", 5), admit(1, "c", 14)], [None, None]);
        // Another address has its own second.
        assert_eq!(admit(2, "d", 14), suppressed(0, ""));
        assert_eq!(admit(1, "e", 15), suppressed(2, "c"));
        assert_eq!(admit(1, "f", 24), None);
        assert_eq!(admit(1, "g", 40), suppressed(1, "f"));
        assert_eq!(admit(1, "h", 50), suppressed(0, ""));
    }

    #[test]
    fn addresses_for_which_there_is_no_room_share_a_line() {
        let mut limit = LogRateLimit::new(10, 2);
        let mut admit = |address, now| limit.admit(address, 1, &address, Micros(now));
        assert_eq!([admit(1, 0), admit(2, 0), admit(3, 0)], [(); 3].map(|()| suppressed(0, "")));
        assert_eq!([admit(4, 0), admit(5, 0), admit(1, 1)], [None, None, None]);
        // The first two are quiet and make room for two others; what one of them had left out is not lost.
        assert_eq!([admit(6, 10), admit(7, 10)], [suppressed(0, ""), suppressed(0, "")]);
        assert_eq!(admit(8, 10), suppressed(3, "1"));
        assert_eq!(limit.addresses.len(), 2);
    }

    /// The map stays small, however many addresses an attacker has.
    #[test]
    fn lines_and_memory_have_a_bound() {
        let mut limit = LogRateLimit::default();
        let seconds = 3;
        let mut n_lines = 0;
        for n in 0..100_000_u64 * seconds {
            let admitted = limit.admit(n, 1, &"refused", Micros(n * EVERY / 100_000));
            n_lines += u64::from(admitted.is_some());
            assert!(limit.addresses.len() <= ADDRESSES_MAX);
        }
        assert!(n_lines <= (ADDRESSES_MAX as u64 + 1) * (seconds + 1), "{n_lines}");
    }
}
