//! The order of requests of one tenant. Needs no clock.

use types::{Micros, Priority};

/// A request's order among all others of its tenant, waiting or running, for its whole life: the lowest goes first.
///
/// `due` is the time of arrival, later by `aging_micros` for each level of priority. Comparing it is comparing
/// priorities that improve by one level in every `aging_micros` of waiting, and needs no clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    due: u64,
    arrival: u64,
}

impl QueueKey {
    pub const FIRST: QueueKey = QueueKey { due: 0, arrival: 0 };
    pub const LAST: QueueKey = QueueKey { due: u64::MAX, arrival: u64::MAX };

    pub fn new(priority: Priority, arrived: Micros, arrival: u64, aging_micros: u64) -> QueueKey {
        let level = (i64::from(priority.0) - i64::from(i8::MIN)) as u64;
        QueueKey { due: arrived.0.saturating_add(level.saturating_mul(aging_micros)), arrival }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_request_of_low_priority_overtakes_a_new_one_of_high_priority() {
        let aging = 1000;
        // (priority, arrived) of the first and of the second, and whether the first goes first
        let cases = [
            ((0, 0), (0, 0), true),
            ((0, 5), (0, 9), true),
            ((1, 0), (0, 999), false),
            ((1, 0), (0, 1000), true),
            ((1, 0), (0, 1001), true),
            ((127, 0), (-128, 254_999), false),
            ((127, 0), (-128, 255_001), true),
        ];
        for ((a, at), (b, bt), first) in cases {
            let sooner =
                QueueKey::new(Priority(a), Micros(at), 0, aging) < QueueKey::new(Priority(b), Micros(bt), 1, aging);
            assert_eq!(sooner, first, "{a}@{at} before {b}@{bt}");
        }
    }
}
