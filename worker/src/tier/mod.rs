//! The tiers behind a rank's pools: pages of the KV cache that outlive their blocks, in host memory and on disk. The
//! coordinator decides what is stored and fetched; a rank keeps its own part of each page.
//!
//! ```text
//! step ── stores ──▶ copies that begin between passes ──▶ queues ──▶ threads keep them in memory, and write files
//!      ── fetches ─▶ threads read pages, compare hashes, and write blocks ──▶ an answer to the coordinator
//! ```
//! Nothing of it can fail a request: a page that is not read is computed.

mod evictor;
mod fetches;
mod folder;
mod host;
mod pages;
mod stores;
#[cfg(test)]
mod tests;

pub use fetches::ReportFetch;
pub use folder::{PageSecret, open_secret};
pub use stores::KvDiskConfig;

use backend::{Device, KvSpec};
use fetches::{FetchJob, PageReaders};
use folder::{PageFolder, PageShape};
use host::HostPages;
use model::KvCache;
use pages::{GroupPages, HostPart};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use stores::{PageChange, StoreQueue};
use types::{DeviceClass, Epoch, FetchId, PageKey, PolicyDigest, RankPart, Sharding, Step, Unsupported};

/// How long the start of a rank waits for the names of the folder's pages.
const LIST_WAIT: Duration = Duration::from_millis(500);

/// The tiers of a loader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvTiersConfig {
    /// Bytes of host memory, on devices with memory of their own.
    pub host_bytes: Option<u64>,
    pub disk: Option<KvDiskConfig>,
}

/// The tiers of a loader, and their threads. They outlive a rank: what waits to be written is written.
#[derive(Clone)]
pub struct KvTiers {
    config: KvTiersConfig,
    secret: PageSecret,
    host: Option<Arc<HostPages>>,
    stores: StoreQueue,
    readers: Arc<PageReaders>,
}

impl std::fmt::Debug for KvTiers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("KvTiers").field(&self.config).finish()
    }
}

impl KvTiers {
    /// Opens the tiers. Hashes are keyed by `secret`, or else by the folder's own or a random one.
    pub fn open(config: KvTiersConfig, secret: Option<PageSecret>) -> io::Result<KvTiers> {
        let own = match &config.disk {
            Some(disk) => open_secret(&disk.folder)?,
            None => PageSecret(wire::random().map_err(io::Error::other)?),
        };
        let secret = secret.unwrap_or(own);
        let host = config.host_bytes.map(|n_bytes| Arc::new(HostPages::new(n_bytes, secret)));
        let stores = StoreQueue::start(host.is_some(), config.disk.clone())?;
        Ok(KvTiers { config, secret, host, stores, readers: Arc::new(PageReaders::start()?) })
    }

    /// Returns the tiers of a rank with this part of a model.
    pub(crate) fn rank_tier<D: Device>(
        &self,
        policy: &PolicyDigest,
        epoch: Epoch,
        PagedPart { part, heads, specs }: PagedPart<'_>,
        device: &D,
        kv: &KvCache<D>,
    ) -> Result<RankTier, backend::Error> {
        if self.host.is_some() && device.class() == DeviceClass::Cpu {
            return Err(Unsupported("--kv-host on the CPU, whose KV cache is in host memory").into());
        }
        let policy = policy.to_string();
        let group = |((spec, heads), kv): ((&KvSpec, Range<u32>), &D::Kv)| {
            let mover = device.page_mover(kv)?;
            let part = part_name(part, spec, device.class());
            let shape = page_shape(spec, heads.clone(), mover.block_bytes());
            let (n_bytes, of_heads) = (shape.n_bytes(), format!("{policy}/{part}/heads-{}-{}", heads.start, heads.end));
            let host = self.host.clone().map(|pages| HostPart { pages, part: of_heads.into() });
            let in_folder = |disk: &KvDiskConfig| PageFolder::new(&disk.folder, self.secret, &policy, &part, shape);
            let folder = self.config.disk.as_ref().map(in_folder);
            Ok(Arc::new(GroupPages { n_bytes, mover, host, folder }))
        };
        let groups = specs.iter().zip(heads).zip(kv.groups()).map(group).collect::<backend::Result<_>>()?;
        Ok(RankTier { tiers: self.clone(), policy: policy.into(), epoch, groups, fetches: Vec::new(), report: None })
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
fn part_name(part: &RankPart, spec: &KvSpec, class: DeviceClass) -> String {
    let layers = &part.layers;
    let head = spec.layout.rank_layout(Sharding::Heads, 1);
    let name = format!("layers-{}-{}.{}.{head:?}.{class:?}", layers.start, layers.end, spec.dtype);
    name.replace(|letter: char| !letter.is_ascii_alphanumeric() && !"-.".contains(letter), "")
}

fn page_shape(spec: &KvSpec, heads: Range<u32>, block_bytes: usize) -> PageShape {
    let head_bytes = block_bytes.checked_div(heads.len()).unwrap_or(0);
    assert_eq!(head_bytes * heads.len(), block_bytes, "a block is its heads");
    PageShape { n_layers: spec.n_layers, heads, head_bytes }
}

/// What a rank reports of its tier.
pub struct TierReports {
    pub fetched: ReportFetch,
    /// Pages of one group that the folder has.
    pub kept: Box<dyn Fn(Vec<PageKey>) + Send>,
}

/// A rank's tiers, from its start to the end of its epoch.
pub(crate) struct RankTier {
    tiers: KvTiers,
    policy: Arc<str>,
    epoch: Epoch,
    /// One for each cache group.
    groups: Vec<Arc<GroupPages>>,
    /// Fetches that may not have ended.
    fetches: Vec<Arc<FetchJob>>,
    report: Option<ReportFetch>,
}

impl RankTier {
    /// Sets where answers go. A thread reports the pages that the tiers have now: before this returns, unless there are
    /// too many.
    pub fn start(&mut self, reports: TierReports) {
        let TierReports { fetched, kept } = reports;
        self.report = Some(fetched);
        let groups = self.groups.clone();
        let (listing, listed) = sync_channel::<()>(1);
        let list = move || {
            let with_bytes = groups.iter().enumerate().filter(|(_, pages)| pages.n_bytes > 0);
            with_bytes.for_each(|(group, pages)| kept(pages.keys(group)));
            drop(listing);
        };
        if let Err(error) = std::thread::Builder::new().name("kv-list".into()).spawn(list) {
            tracing::warn!(%error, "the pages of earlier ranks are not known");
        }
        // Nothing is sent: the channel closes when the thread ends.
        let _late = listed.recv_timeout(LIST_WAIT);
    }

    /// Applies a step's work, before its pass begins. The blocks of its stores still have the content of the step
    /// before.
    pub fn apply(&mut self, step: &Step) {
        let (work, stores) = (&step.tier, &self.tiers.stores);
        for page in &work.stores {
            let Some(pages) = self.groups.get(usize::from(page.key.group)).filter(|pages| pages.n_bytes > 0) else {
                continue;
            };
            stores.push_page(pages.n_bytes as u64, || {
                let copy = pages.mover.copy(page.block)?;
                let (pages, policy, key) = (pages.clone(), self.policy.clone(), page.key);
                Some(PageChange::Store { pages, policy, key, page: copy })
            });
        }
        work.cancels.iter().for_each(|id| self.cancel(*id));
        for key in &work.removals {
            let pages = self.groups.get(usize::from(key.group));
            pages.into_iter().for_each(|pages| self.tiers.stores.remove(pages, key));
        }
        for fetch in &work.fetches {
            // Fetches that have ended are held by this list alone.
            self.fetches.retain(|job| Arc::strong_count(job) > 1);
            let (pages, groups, report) = (fetch.pages.clone(), self.groups.clone(), self.report.clone());
            let job = Arc::new(FetchJob::new(self.epoch, fetch.id, pages, groups, report));
            self.tiers.readers.begin(&job);
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
