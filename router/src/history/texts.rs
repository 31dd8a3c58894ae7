//! Texts for watching clients, made once for all clients that watch the same; and how many clients watch.

use bytes::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use types::TenantId;

/// The most texts that are kept: further ones are made again each time.
const TEXTS_MAX: usize = 256;
/// The most streams of watching clients: in all, of all tenants together, and of each tenant.
const WATCHERS_MAX: usize = 128;
const OF_TENANTS_MAX: usize = 96;
const OF_TENANT_MAX: usize = 16;

/// The kind of text, and the tenant that may see it; None: all tenants' data, for operators.
type TextKey = (&'static str, Option<TenantId>);

/// How long a text is shown: a minimum, and a time for each of its bytes, since large texts cost the most.
#[derive(Clone, Copy)]
pub struct ShowDuration {
    pub at_least: Duration,
    pub each_byte: Duration,
}

#[derive(Default)]
pub struct SharedTexts {
    made: Mutex<HashMap<TextKey, (Instant, Bytes)>>,
    watchers: Arc<Mutex<Watchers>>,
}

#[derive(Default)]
struct Watchers {
    n_operators: usize,
    of_tenants: HashMap<TenantId, usize>,
}

/// A place of a watching client; free again when it is dropped.
pub struct WatcherPlace {
    of: Option<TenantId>,
    watchers: Arc<Mutex<Watchers>>,
}

impl Watchers {
    fn n_of_tenants(&self) -> usize {
        self.of_tenants.values().sum()
    }

    /// Whether one more client has a place: a tenant cannot keep others from watching, and all tenants together cannot
    /// keep an operator from it.
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

impl SharedTexts {
    /// Returns a text that is shown for so long. All clients that watch the same share its bytes. If a new text equals
    /// the one before, the one before is kept.
    pub fn get(&self, key: TextKey, shown: ShowDuration, make: impl FnOnce() -> String) -> Bytes {
        let now = Instant::now();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let before = made.get(&key).cloned();
        if let Some((at, text)) = &before {
            let n_bytes = text.len().try_into().unwrap_or(u32::MAX);
            let age_max = shown.at_least.max(shown.each_byte.saturating_mul(n_bytes));
            if now.saturating_duration_since(*at) < age_max {
                return text.clone();
            }
        }
        drop(made);
        let text = Bytes::from(make());
        let text = before.map(|(_, before)| before).filter(|before| *before == text).unwrap_or(text);
        made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.len() >= TEXTS_MAX {
            made.clear();
        }
        made.insert(key, (now, text.clone()));
        text
    }

    /// Returns a place for a tenant, or for an operator. None: too many watch.
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

    const fn at_least(seconds: u64) -> ShowDuration {
        ShowDuration { at_least: Duration::from_secs(seconds), each_byte: Duration::ZERO }
    }

    #[test]
    fn ten_watchers_of_one_text_render_it_once() {
        let (texts, mut n) = (SharedTexts::default(), 0);
        let long = at_least(600);
        for _ in 0..10 {
            let text = texts.get(("a", None), long, || {
                n += 1;
                n.to_string()
            });
            assert_eq!(&*text, b"1");
        }
        let others = texts.get(("a", Some(TenantId(1))), long, || "others".into());
        assert_eq!(&*others, b"others", "each viewer gets its own text");
        let two = texts.get(("a", None), at_least(0), || "2".into());
        assert_eq!(&*two, b"2");
        let again = texts.get(("a", None), at_least(0), || "2".into());
        assert_eq!(again.as_ptr(), two.as_ptr(), "an equal text is shared");
        let each_byte = ShowDuration { each_byte: Duration::from_secs(600), ..at_least(0) };
        assert_eq!(&*texts.get(("a", None), each_byte, || "3".into()), b"2", "a text stays valid for a time per byte");
        for tenant in 0..1000 {
            texts.get(("b", Some(TenantId(tenant))), long, String::new);
        }
        assert!(texts.made.lock().unwrap().len() <= TEXTS_MAX);
    }

    #[test]
    fn so_many_may_watch() {
        let texts = SharedTexts::default();
        let watch = |of: Option<u64>| texts.watch(of.map(TenantId));
        let mut places: Vec<_> = (0..OF_TENANT_MAX).map(|_| watch(Some(1)).unwrap()).collect();
        assert!(watch(Some(1)).is_none(), "one tenant has a limit");
        places.extend((OF_TENANT_MAX..OF_TENANTS_MAX).map(|n| watch(Some(n as u64)).unwrap()));
        assert!(watch(Some(0)).is_none(), "all tenants together leave room for operators");
        places.extend((OF_TENANTS_MAX..WATCHERS_MAX).map(|_| watch(None).unwrap()));
        assert!(watch(None).is_none());
        drop(places);
        assert!(locked(&texts.watchers).of_tenants.is_empty());
        assert!(watch(Some(1)).is_some() && watch(None).is_some());
    }
}
