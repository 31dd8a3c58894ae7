//! Pages in the memory of the host: what a device's pools have no room for. Pages are hashed like those in files, and
//! outlive the rank, so that its replacement in the same process finds them.

use crate::tier::folder::{PageHash, PageMiss, PageSecret};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use telemetry::metrics;
use types::PageKey;

/// The pages of all parts that the process has held, at most `bytes_max` of them.
#[derive(Debug)]
pub struct HostPages {
    bytes_max: u64,
    secret: PageSecret,
    kept: Mutex<KeptPages>,
}

/// The name of a rank's part of the model, and of a page of it.
type HostKey = (Arc<str>, PageKey);

#[derive(Debug, Default)]
struct KeptPages {
    pages: HashMap<HostKey, HostPage>,
    /// The pages in the order of their last use.
    by_use: BTreeMap<u64, HostKey>,
    n_bytes: u64,
    n_uses: u64,
}

#[derive(Debug)]
struct HostPage {
    hash: blake3::Hash,
    bytes: Arc<[u8]>,
    /// The number of its last use.
    used: u64,
}

impl HostPages {
    pub fn new(bytes_max: u64, secret: PageSecret) -> HostPages {
        HostPages { bytes_max, secret, kept: Mutex::default() }
    }

    /// Fills `page` with the page of this name.
    pub fn read(&self, part: &Arc<str>, key: &PageKey, page: &mut [u8]) -> Result<(), PageMiss> {
        let name = (part.clone(), *key);
        let found = self.lock().touch(&name);
        let (hash, bytes) = found.ok_or(PageMiss::Absent)?;
        let miss = match () {
            () if bytes.len() != page.len() => PageMiss::Length,
            () if self.hash(part, key, &bytes) != hash => PageMiss::Hash,
            () => {
                page.copy_from_slice(&bytes);
                return Ok(());
            }
        };
        // It would be refused each time.
        self.lock().remove(&name);
        Err(miss)
    }

    /// Keeps a page, and drops those that were used longest ago to make room. False if it is larger than all room.
    pub fn insert(&self, part: &Arc<str>, key: &PageKey, bytes: &[u8]) -> bool {
        if bytes.len() as u64 > self.bytes_max {
            return false;
        }
        let hash = self.hash(part, key, bytes);
        let mut kept = self.lock();
        kept.insert((part.clone(), *key), hash, bytes.into());
        while kept.n_bytes > self.bytes_max {
            kept.remove_oldest();
        }
        metrics::kv_host_bytes(kept.n_bytes);
        true
    }

    pub fn remove(&self, part: &Arc<str>, key: &PageKey) {
        self.lock().remove(&(part.clone(), *key));
    }

    /// Returns the pages of a part, in no order.
    pub fn keys(&self, part: &str) -> Vec<PageKey> {
        self.lock().pages.keys().filter(|(of, _)| **of == *part).map(|(_, key)| *key).collect()
    }

    fn hash(&self, part: &str, key: &PageKey, bytes: &[u8]) -> blake3::Hash {
        PageHash { secret: &self.secret, place: part, key }.of(None, bytes)
    }

    fn lock(&self) -> MutexGuard<'_, KeptPages> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Flips a bit of a page.
    #[cfg(test)]
    pub fn damage(&self, part: &Arc<str>, key: &PageKey) {
        let mut kept = self.lock();
        let page = kept.pages.get_mut(&(part.clone(), *key)).unwrap();
        let mut bytes = page.bytes.to_vec();
        bytes[0] ^= 1;
        page.bytes = bytes.into();
    }
}

impl KeptPages {
    fn touch(&mut self, name: &HostKey) -> Option<(blake3::Hash, Arc<[u8]>)> {
        let page = self.pages.get_mut(name)?;
        self.n_uses += 1;
        let name = self.by_use.remove(&page.used)?;
        page.used = self.n_uses;
        self.by_use.insert(page.used, name);
        Some((page.hash, page.bytes.clone()))
    }

    fn insert(&mut self, name: HostKey, hash: blake3::Hash, bytes: Arc<[u8]>) {
        self.remove(&name);
        self.n_uses += 1;
        self.n_bytes += bytes.len() as u64;
        self.by_use.insert(self.n_uses, name.clone());
        self.pages.insert(name, HostPage { hash, bytes, used: self.n_uses });
    }

    fn remove(&mut self, name: &HostKey) {
        if let Some(page) = self.pages.remove(name) {
            self.by_use.remove(&page.used);
            self.n_bytes -= page.bytes.len() as u64;
        }
    }

    fn remove_oldest(&mut self) {
        if let Some((_, name)) = self.by_use.pop_first() {
            self.n_bytes -= self.pages.remove(&name).map_or(0, |page| page.bytes.len() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::BlockHash;

    fn key(n: u8) -> PageKey {
        PageKey { group: 0, name: BlockHash([n; 16]) }
    }

    #[test]
    fn pages_are_read_as_they_were_kept_and_the_oldest_make_room() {
        let host = HostPages::new(300, PageSecret([1; 32]));
        let [part, other]: [Arc<str>; 2] = ["part".into(), "other".into()];
        let read = |part: &Arc<str>, n: u8, n_bytes: usize| {
            let mut page = vec![0; n_bytes];
            host.read(part, &key(n), &mut page).map(|()| page)
        };
        (1..4).for_each(|n| assert!(host.insert(&part, &key(n), &[n; 100])));
        assert_eq!(read(&part, 1, 100), Ok(vec![1; 100]));
        assert_eq!(read(&other, 1, 100), Err(PageMiss::Absent));
        // The second was used longest ago.
        assert!(host.insert(&part, &key(4), &[4; 90]) && !host.insert(&part, &key(5), &[0; 301]));
        let mut kept = host.keys("part");
        kept.sort_unstable();
        assert_eq!((kept, host.keys("other").len()), (vec![key(1), key(3), key(4)], 0));
        host.damage(&part, &key(1));
        assert_eq!([100, 100].map(|n| read(&part, 1, n)), [Err(PageMiss::Hash), Err(PageMiss::Absent)]);
        assert_eq!(read(&part, 3, 99), Err(PageMiss::Length));
        host.remove(&part, &key(4));
        let kept = host.lock();
        assert_eq!((kept.pages.len(), kept.n_bytes, kept.by_use.len()), (0, 0, 0));
    }
}
