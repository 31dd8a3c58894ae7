//! Hosts that have loaded other weights than the replica serves: a file there is damaged, or of another model. Their
//! workers are taken last, and if they must be taken, each time after a longer wait. A refused worker is started anew,
//! so only its host stays the same. Knows no time of its own.

use std::collections::BTreeMap;
use types::Micros;

/// The most hosts that are remembered: the one whose wait is over first is forgotten.
const HOSTS_MAX: usize = 1024;
const DOUBLINGS_MAX: u32 = 20;
/// A longer name is no host's.
const HOST_BYTES_MAX: usize = 256;

#[derive(Default)]
pub(crate) struct DistrustedHosts(BTreeMap<String, Distrust>);

struct Distrust {
    /// None of its workers is taken before this time.
    until: Micros,
    n_times: u32,
}

impl DistrustedHosts {
    /// Records that a rank of this host loaded refused weights. Returns the time before which none of its workers is
    /// taken. The wait is `min` the first time, and doubles up to `max`.
    pub fn record_refusal(&mut self, host: &str, now: Micros, [min, max]: [u64; 2]) -> Micros {
        // Workers that report no host have nothing in common.
        if host.is_empty() || host.len() > HOST_BYTES_MAX {
            return now.plus(min);
        }
        let n_times = match self.0.get(host) {
            // Another rank of it, in the same epoch.
            Some(before) if now < before.until => return before.until,
            before => before.map_or(0, |before| before.n_times),
        };
        let until = now.plus((min << n_times.min(DOUBLINGS_MAX)).min(max));
        self.0.insert(host.to_owned(), Distrust { until, n_times: n_times + 1 });
        if self.0.len() > HOSTS_MAX
            && let Some(first) = self.0.iter().min_by_key(|(_, of)| of.until).map(|(host, _)| host.clone())
        {
            self.0.remove(&first);
        }
        until
    }

    /// Records that an epoch has met: it serves without these hosts, or they have loaded the served weights.
    pub fn record_met(&mut self) {
        self.0.clear();
    }

    pub fn has(&self, host: &str) -> bool {
        self.0.contains_key(host)
    }

    pub fn is_excluded(&self, host: &str, now: Micros) -> bool {
        self.0.get(host).is_some_and(|of| now < of.until)
    }

    /// When the next excluded host is taken again.
    pub fn next(&self, now: Micros) -> Option<Micros> {
        self.0.values().map(|of| of.until).filter(|until| now < *until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAITS: [u64; 2] = [10, 35];

    #[test]
    fn host_refused_repeatedly_waits_longer_each_time() {
        let mut distrusted = DistrustedHosts::default();
        let until = |distrusted: &mut DistrustedHosts, now| distrusted.record_refusal("bad", Micros(now), WAITS).0;
        assert_eq!(until(&mut distrusted, 0), 10);
        assert_eq!(until(&mut distrusted, 5), 10, "two refused ranks of one host count once");
        assert!(distrusted.is_excluded("bad", Micros(9)) && !distrusted.is_excluded("bad", Micros(10)));
        assert!(distrusted.has("bad") && !distrusted.has("good") && !distrusted.is_excluded("good", Micros(0)));
        assert_eq!((distrusted.next(Micros(9)), distrusted.next(Micros(10))), (Some(Micros(10)), None));
        assert_eq!([100, 200, 300].map(|now| until(&mut distrusted, now)), [120, 235, 335]);
        distrusted.record_met();
        assert!(!distrusted.has("bad"));
        assert_eq!(until(&mut distrusted, 400), 410);
    }

    #[test]
    fn so_many_hosts_are_remembered_and_no_more() {
        let mut distrusted = DistrustedHosts::default();
        for host in 0..=HOSTS_MAX as u64 {
            distrusted.record_refusal(&host.to_string(), Micros(host), WAITS);
        }
        assert!(!distrusted.has("0") && distrusted.has("1") && distrusted.has(&HOSTS_MAX.to_string()));
    }
}
