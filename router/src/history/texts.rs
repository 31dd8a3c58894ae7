//! What was shown to those who watch, made once for all who watch the same; and how many watch.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use types::TenantId;

/// The most that are kept: further ones are made again each time.
const TEXTS_MAX: usize = 256;
/// The most streams of those who watch.
const WATCHERS_MAX: usize = 128;

/// What is shown, and whose it is; None: everybody's.
type Key = (&'static str, Option<TenantId>);

#[derive(Default)]
pub struct Texts {
    made: Mutex<HashMap<Key, (Instant, Arc<str>)>>,
    n_watchers: Arc<AtomicUsize>,
}

/// A place among those who watch; free again when it is dropped.
pub struct WatcherPlace(Arc<AtomicUsize>);

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

    /// None: too many watch.
    pub fn watch(&self) -> Option<WatcherPlace> {
        let place = WatcherPlace(self.n_watchers.clone());
        (self.n_watchers.fetch_add(1, Relaxed) < WATCHERS_MAX).then_some(place)
    }
}

impl Drop for WatcherPlace {
    fn drop(&mut self) {
        // Nobody looks at what is left over from them.
        self.0.fetch_sub(1, Relaxed);
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
        let places: Vec<_> = (0..WATCHERS_MAX).map(|_| texts.watch().unwrap()).collect();
        assert!(texts.watch().is_none());
        drop(places);
        assert!(texts.watch().is_some());
    }
}
