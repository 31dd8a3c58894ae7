//! The disk behind a rank's pools: pages of the KV cache that outlive their blocks, requests and processes. The
//! coordinator decides what is stored and fetched; a rank keeps its own part of each page.
//!
//! ```text
//! step ── stores ──▶ copied on the computing thread ──▶ queue ──▶ a thread writes files
//!      ── fetches ─▶ threads read files, compare hashes, and write blocks ──▶ an answer to the coordinator
//! ```
//! Nothing of it can fail a request: a page that is not read is computed.

mod evictor;
mod fetches;
mod folder;
mod stores;
#[cfg(test)]
mod tests;

pub use fetches::ReportFetch;
pub use folder::{PageSecret, open_secret};
pub use stores::KvDiskConfig;

use backend::{Device, KvSpec};
use fetches::{FetchJob, GroupPages, PageReaders};
use folder::{PageFolder, PageShape};
use model::KvCache;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use stores::{PageChange, StoreQueue};
use types::{Epoch, FetchId, PageKey, PolicyDigest, RankPart, Sharding, Step, Unsupported};

/// How long the start of a rank waits for the names of the folder's pages.
const LIST_WAIT: Duration = Duration::from_millis(500);

/// The folder of a loader, and its threads. They outlive a rank: what waits to be written is written.
#[derive(Clone)]
pub struct KvDisk {
    config: KvDiskConfig,
    secret: PageSecret,
    stores: StoreQueue,
    readers: Arc<PageReaders>,
}

impl std::fmt::Debug for KvDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("KvDisk").field(&self.config).finish()
    }
}

impl KvDisk {
    /// Opens the folder. Hashes are keyed by `secret`, or by the folder's own.
    pub fn open(config: KvDiskConfig, secret: Option<PageSecret>) -> io::Result<KvDisk> {
        let own = open_secret(&config.folder)?;
        let stores = StoreQueue::start(config.clone())?;
        Ok(KvDisk { config, secret: secret.unwrap_or(own), stores, readers: Arc::new(PageReaders::start()?) })
    }

    /// Returns the tier of a rank with this part of a model.
    pub(crate) fn rank_tier<D: Device>(
        &self,
        policy: &PolicyDigest,
        epoch: Epoch,
        PagedPart { part, heads, specs }: PagedPart<'_>,
        device: &D,
        kv: &KvCache<D>,
    ) -> Result<RankTier, Unsupported> {
        let policy = policy.to_string();
        let group = |((spec, heads), kv): ((&KvSpec, Range<u32>), &D::Kv)| {
            let write = device.page_writer(kv).ok_or(Unsupported("--kv-disk on devices other than the CPU"))?;
            let (part, shape) = (part_name(part, spec), page_shape(spec, heads));
            let folder = PageFolder::new(&self.config.folder, self.secret, &policy, &part, shape);
            Ok(GroupPages { folder: Arc::new(folder), write })
        };
        let groups = specs.iter().zip(heads).zip(kv.groups()).map(group).collect::<Result<_, Unsupported>>()?;
        Ok(RankTier {
            disk: self.clone(),
            policy: policy.into(),
            epoch,
            groups: Arc::new(groups),
            specs: specs.to_vec(),
            fetches: Vec::new(),
            report: None,
        })
    }
}

/// A rank's part of a model, as far as its pages depend on it.
pub(crate) struct PagedPart<'a> {
    pub part: &'a RankPart,
    /// The heads of each cache group.
    pub heads: Vec<Range<u32>>,
    pub specs: &'a [KvSpec],
}

/// Returns the name of what a rank keeps of a group's heads: all that decides what their bytes mean.
fn part_name(part: &RankPart, spec: &KvSpec) -> String {
    let layers = &part.layers;
    let head = spec.layout.rank_layout(Sharding::Heads, 1);
    let name = format!("layers-{}-{}.{}.{head:?}", layers.start, layers.end, spec.dtype);
    name.replace(|letter: char| !letter.is_ascii_alphanumeric() && !"-.".contains(letter), "")
}

fn page_shape(spec: &KvSpec, heads: Range<u32>) -> PageShape {
    let head_bytes = spec.layout.rank_layout(Sharding::Heads, 1).page_bytes(spec.dtype) as usize;
    let shape = PageShape { n_layers: spec.n_layers, heads, head_bytes };
    assert_eq!(shape.n_bytes() as u64, spec.block_bytes(), "a page is its heads in its layers");
    shape
}

/// What a rank reports of its tier.
pub struct TierReports {
    pub fetched: ReportFetch,
    /// Pages of one group that the folder has.
    pub kept: Box<dyn Fn(Vec<PageKey>) + Send>,
}

/// A rank's tier, from its start to the end of its epoch.
pub(crate) struct RankTier {
    disk: KvDisk,
    policy: Arc<str>,
    epoch: Epoch,
    /// One for each cache group.
    groups: Arc<Vec<GroupPages>>,
    specs: Vec<KvSpec>,
    /// Fetches that may not have ended.
    fetches: Vec<Arc<FetchJob>>,
    report: Option<ReportFetch>,
}

impl RankTier {
    /// Sets where answers go. A thread reports the pages that the folder has now: before this returns, unless there are
    /// too many.
    pub fn start(&mut self, reports: TierReports) {
        let TierReports { fetched, kept } = reports;
        self.report = Some(fetched);
        let of_group =
            |(group, pages): (usize, &GroupPages)| (pages.folder.n_bytes() > 0).then(|| (group, pages.folder.clone()));
        let folders: Vec<_> = self.groups.iter().enumerate().filter_map(of_group).collect();
        let (listing, listed) = sync_channel::<()>(1);
        let list = move || {
            for (group, folder) in folders {
                kept(folder.keys().filter(|key| usize::from(key.group) == group).collect());
            }
            drop(listing);
        };
        if let Err(error) = std::thread::Builder::new().name("kv-list".into()).spawn(list) {
            tracing::warn!(%error, "the pages of the KV cache on disk are not known");
        }
        // Nothing is sent: the channel closes when the thread ends.
        let _late = listed.recv_timeout(LIST_WAIT);
    }

    /// Applies a step's work. The blocks of its stores still have the content of the step before.
    pub fn apply<D: Device>(&mut self, step: &Step, device: &D, kv: &KvCache<D>) {
        let work = &step.tier;
        for page in &work.stores {
            let (group, block) = (usize::from(page.key.group), page.block);
            let Some((pages, spec)) = self.groups.get(group).zip(self.specs.get(group)) else { continue };
            let n_bytes = pages.folder.n_bytes();
            if n_bytes > 0 {
                self.disk.stores.push_page(n_bytes as u64, || {
                    let mut bytes = Vec::with_capacity(n_bytes);
                    device.read_page(&kv.groups()[group], spec, block, &mut bytes);
                    let (folder, policy, key) = (pages.folder.clone(), self.policy.clone(), page.key);
                    PageChange::Store { folder, policy, key, bytes }
                });
            }
        }
        work.cancels.iter().for_each(|id| self.cancel(*id));
        for key in &work.removals {
            if let Some(pages) = self.groups.get(usize::from(key.group)) {
                let remove = PageChange::Remove { folder: pages.folder.clone(), key: *key };
                if !self.disk.stores.push(remove) {
                    pages.folder.remove(key);
                }
            }
        }
        for fetch in &work.fetches {
            // Fetches that have ended are held by this list alone.
            self.fetches.retain(|job| Arc::strong_count(job) > 1);
            let (pages, groups, report) = (fetch.pages.clone(), self.groups.clone(), self.report.clone());
            let job = Arc::new(FetchJob::new(self.epoch, fetch.id, pages, groups, report));
            self.disk.readers.begin(&job);
            self.fetches.push(job);
        }
    }

    fn cancel(&mut self, id: FetchId) {
        self.fetches.iter().filter(|job| job.id == id).for_each(|job| job.cancel());
        self.fetches.retain(|job| job.id != id);
    }
}

impl Drop for RankTier {
    /// The blocks belong to others from now on.
    fn drop(&mut self) {
        self.fetches.iter().for_each(|job| job.cancel());
    }
}
