//! The work of the tier behind the pools and its answers, to the wire and back.

use crate::cluster as wire;
use crate::malformed::{Malformed, out_of_range};
use types::{BlockHash, BlockId, Epoch, FetchDone, FetchId, Page, PageFetch, PageKey, TierWork};

const NAME_BYTES: usize = 16;
/// The most names of one frame.
const NAMES_MAX: usize = 1 << 16;

impl From<&TierWork> for wire::TierWork {
    fn from(work: &TierWork) -> Self {
        let removal = |key: &PageKey| wire::Page::from(&Page { key: *key, block: BlockId(0) });
        wire::TierWork {
            stores: work.stores.iter().map(wire::Page::from).collect(),
            fetches: work.fetches.iter().map(wire::PageFetch::from).collect(),
            cancels: work.cancels.iter().map(|id| id.0).collect(),
            removals: work.removals.iter().map(removal).collect(),
        }
    }
}

impl TryFrom<wire::TierWork> for TierWork {
    type Error = Malformed;

    fn try_from(work: wire::TierWork) -> Result<Self, Malformed> {
        let key = |page| Page::try_from(page).map(|page| page.key);
        Ok(TierWork {
            stores: work.stores.into_iter().map(Page::try_from).collect::<Result<_, _>>()?,
            fetches: work.fetches.into_iter().map(PageFetch::try_from).collect::<Result<_, _>>()?,
            cancels: work.cancels.into_iter().map(FetchId).collect(),
            removals: work.removals.into_iter().map(key).collect::<Result<_, _>>()?,
        })
    }
}

impl From<&Page> for wire::Page {
    fn from(Page { key, block }: &Page) -> Self {
        wire::Page { group: key.group.into(), name: key.name.0.to_vec(), block: block.0 }
    }
}

impl TryFrom<wire::Page> for Page {
    type Error = Malformed;

    fn try_from(page: wire::Page) -> Result<Self, Malformed> {
        let group = u8::try_from(page.group).map_err(|_| out_of_range("page.group", page.group))?;
        let n_bytes = page.name.len();
        let name = page.name.try_into().map_err(|_| out_of_range("page.name", n_bytes))?;
        Ok(Page { key: PageKey { group, name: BlockHash(name) }, block: BlockId(page.block) })
    }
}

impl From<&PageFetch> for wire::PageFetch {
    fn from(fetch: &PageFetch) -> Self {
        wire::PageFetch { id: fetch.id.0, pages: fetch.pages.iter().map(wire::Page::from).collect() }
    }
}

impl TryFrom<wire::PageFetch> for PageFetch {
    type Error = Malformed;

    fn try_from(fetch: wire::PageFetch) -> Result<Self, Malformed> {
        let pages = fetch.pages.into_iter().map(Page::try_from).collect::<Result<_, _>>()?;
        Ok(PageFetch { id: FetchId(fetch.id), pages })
    }
}

impl From<&FetchDone> for wire::PagesFetched {
    fn from(done: &FetchDone) -> Self {
        let Epoch { incarnation, n } = done.epoch;
        let (id, missing, micros) = (done.id.0, done.missing.clone(), done.micros);
        wire::PagesFetched { epoch_incarnation: incarnation, epoch_n: n, id, missing, micros }
    }
}

impl From<wire::PagesFetched> for FetchDone {
    fn from(done: wire::PagesFetched) -> Self {
        let epoch = Epoch { incarnation: done.epoch_incarnation, n: done.epoch_n };
        let mut missing = done.missing;
        missing.sort_unstable();
        missing.dedup();
        FetchDone { epoch, id: FetchId(done.id), missing, micros: done.micros }
    }
}

impl wire::PagesKept {
    /// Returns the frames that name these pages.
    pub fn of(epoch: Epoch, keys: &[PageKey]) -> Vec<wire::PagesKept> {
        let mut keys = keys.to_vec();
        keys.sort_unstable_by_key(|key| key.group);
        let of_group = keys.chunk_by(|a, b| a.group == b.group).flat_map(|keys| keys.chunks(NAMES_MAX));
        let frame = |keys: &[PageKey]| wire::PagesKept {
            epoch_incarnation: epoch.incarnation,
            epoch_n: epoch.n,
            group: keys[0].group.into(),
            names: keys.iter().flat_map(|key| key.name.0).collect(),
        };
        of_group.map(frame).collect()
    }

    /// Returns the pages. A name that is cut short is ignored: a page that is not found is computed.
    pub fn keys(&self) -> impl Iterator<Item = PageKey> + '_ {
        let group = u8::try_from(self.group).ok();
        let names = self.names.as_chunks::<NAME_BYTES>().0.iter();
        names.filter_map(move |name| Some(PageKey { group: group?, name: BlockHash(*name) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(group: u8, n: u8) -> Page {
        Page { key: PageKey { group, name: BlockHash([n; 16]) }, block: BlockId(u32::from(n) * 1000) }
    }

    #[test]
    fn tier_work_survives_the_wire() {
        let fetch = PageFetch { id: FetchId(1 << 40), pages: vec![page(1, 5), page(0, 6)] };
        let work = TierWork {
            stores: vec![page(0, 1), page(2, 2)],
            fetches: vec![fetch],
            cancels: vec![FetchId(3)],
            removals: vec![page(3, 4).key],
        };
        assert_eq!(TierWork::try_from(wire::TierWork::from(&work)).unwrap(), work);
        let [long, short, group] = [(vec![0; 17], 0), (vec![0; 15], 0), (vec![0; 16], 256)]
            .map(|(name, group)| Page::try_from(wire::Page { group, name, block: 0 }).is_err());
        assert!(long && short && group);
    }

    #[test]
    fn answers_and_names_survive_the_wire() {
        let epoch = Epoch { incarnation: 9, n: 4 };
        let done = FetchDone { epoch, id: FetchId(7), missing: vec![1, 5], micros: 12 };
        assert_eq!(FetchDone::from(wire::PagesFetched::from(&done)), done);
        let unsorted = wire::PagesFetched { missing: vec![5, 1, 5], ..wire::PagesFetched::from(&done) };
        assert_eq!(FetchDone::from(unsorted), done);
        let keys = [page(1, 1), page(0, 2), page(1, 3)].map(|page| page.key);
        let frames = wire::PagesKept::of(epoch, &keys);
        assert_eq!(frames.len(), 2);
        let read: Vec<PageKey> = frames.iter().flat_map(wire::PagesKept::keys).collect();
        assert_eq!(read, [keys[1], keys[0], keys[2]]);
        let torn = wire::PagesKept { names: vec![1; 31], ..frames[0].clone() };
        assert_eq!(torn.keys().count(), 1);
    }
}
