//! What was shown to those who watch, made once for all who watch the same; and how many watch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use types::TenantId;

/// The most that are kept: further ones are made again each time.
const TEXTS_MAX: usize = 256;
/// The most streams of those who watch, of these all tenants together, and each of them.
const WATCHERS_MAX: usize = 128;
const OF_TENANTS_MAX: usize = 96;
const OF_TENANT_MAX: usize = 16;

/// What is shown, and whose it is; None: everybody's.
type Key = (&'static str, Option<TenantId>);

#[derive(Default)]
pub struct Texts {
    made: Mutex<HashMap<Key, (Instant, Arc<str>)>>,
    watchers: Arc<Mutex<Watchers>>,
}

#[derive(Default)]
struct Watchers {
    n_operators: usize,
    of_tenants: HashMap<TenantId, usize>,
}

/// A place among those who watch; free again when it is dropped.
pub struct WatcherPlace {
    of: Option<TenantId>,
    watchers: Arc<Mutex<Watchers>>,
}

impl Watchers {
    fn n_of_tenants(&self) -> usize {
        self.of_tenants.values().sum()
    }

    /// Whether one more has a place: no tenant keeps others from watching, and all of them no operator.
    fn has_place(&self, of: Option<TenantId>) -> bool {
        let n_of_tenants = self.n_of_tenants();
        let is_within = of.is_none_or(|tenant| {
            n_of_tenants < OF_TENANTS_MAX && self.of_tenants.get(&tenant).is_none_or(|n| *n < OF_TENANT_MAX)
        });
        is_within && self.n_operators + n_of_tenants < WATCHERS_MAX
    }

    fn n(&mut self, of: Option<TenantId>) -> &mut usize {
        match of {
            None => &mut self.n_operators,
            Some(tenant) => self.of_tenants.entry(tenant).or_default(),
        }
    }
}

impl Texts {
    /// A text that is at most `age_max` old, or older if it is large: a byte is shown for a microsecond at least.
    pub fn get(&self, key: Key, age_max: Duration, make: impl FnOnce() -> String) -> Arc<str> {
        let now = Instant::now();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, text)) = made.get(&key) {
            let age_max = age_max.max(Duration::from_micros(text.len() as u64));
            if now.saturating_duration_since(*at) < age_max {
                return text.clone();
            }
        }
        drop(made);
        let text: Arc<str> = make().into();
        made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.len() >= TEXTS_MAX {
            made.clear();
        }
        made.insert(key, (now, text.clone()));
        text
    }

    /// A place for a tenant, or for an operator. None: too many watch.
    pub fn watch(&self, of: Option<TenantId>) -> Option<WatcherPlace> {
        let mut watchers = locked(&self.watchers);
        if !watchers.has_place(of) {
            return None;
        }
        *watchers.n(of) += 1;
        Some(WatcherPlace { of, watchers: self.watchers.clone() })
    }
}

fn locked(watchers: &Mutex<Watchers>) -> MutexGuard<'_, Watchers> {
    watchers.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for WatcherPlace {
    fn drop(&mut self) {
        let mut watchers = locked(&self.watchers);
        *watchers.n(self.of) -= 1;
        watchers.of_tenants.retain(|_, n| *n > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_who_watch_the_same_cost_as_one() {
        let (texts, mut n) = (Texts::default(), 0);
        let long = Duration::from_secs(600);
        for _ in 0..10 {
            let text = texts.get(("a", None), long, || {
                n += 1;
                n.to_string()
            });
            assert_eq!(&*text, "1");
        }
        let others = texts.get(("a", Some(TenantId(1))), long, || "others".into());
        assert_eq!(&*others, "others", "nobody is shown what another's is");
        assert_eq!(&*texts.get(("a", None), Duration::ZERO, || "2".into()), "2");
        for tenant in 0..1000 {
            texts.get(("b", Some(TenantId(tenant))), long, String::new);
        }
        assert!(texts.made.lock().unwrap().len() <= TEXTS_MAX);
    }

    #[test]
    fn so_many_may_watch() {
        let texts = Texts::default();
        let watch = |of: Option<u64>| texts.watch(of.map(TenantId));
        let mut places: Vec<_> = (0..OF_TENANT_MAX).map(|_| watch(Some(1)).unwrap()).collect();
        assert!(watch(Some(1)).is_none(), "one tenant keeps nobody else from watching");
        places.extend((OF_TENANT_MAX..OF_TENANTS_MAX).map(|n| watch(Some(n as u64)).unwrap()));
        assert!(watch(Some(0)).is_none(), "and all of them no operator");
        places.extend((OF_TENANTS_MAX..WATCHERS_MAX).map(|_| watch(None).unwrap()));
        assert!(watch(None).is_none());
        drop(places);
        assert!(locked(&texts.watchers).of_tenants.is_empty());
        assert!(watch(Some(1)).is_some() && watch(None).is_some());
    }
}
