//! A rank's part of the pages of one cache group, and the tiers that keep it: host memory, then a folder.

use crate::tier::folder::{PageFolder, PageMiss};
use crate::tier::host::HostPages;
use backend::PageMover;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use telemetry::metrics;
use types::PageKey;

pub(super) struct GroupPages {
    /// Its pages have no bytes where the rank has no layer or head of the group.
    pub n_bytes: usize,
    pub mover: Box<dyn PageMover>,
    pub host: Option<HostPart>,
    pub folder: Option<PageFolder>,
}

/// What host memory has of a part.
pub(super) struct HostPart {
    pub pages: Arc<HostPages>,
    /// Names all that decides what the bytes mean.
    pub part: Arc<str>,
}

impl GroupPages {
    /// Fills `page` with the page of this name, through a buffer. Host memory does not keep what the folder has: a step
    /// may remove it meanwhile.
    pub fn read(&self, key: &PageKey, page: &mut [u8], buffer: &mut Vec<u8>) -> Result<(), PageMiss> {
        let from_host = self.host.as_ref().map(|HostPart { pages, part }| pages.read(part, key, page));
        from_host.iter().for_each(|read| metrics::kv_host_read(outcome(read), 1));
        if let Some(Ok(())) = from_host {
            return Ok(());
        }
        let Some(folder) = &self.folder else { return Err(PageMiss::Absent) };
        let read = folder.read(key, page, buffer);
        metrics::kv_disk_read(outcome(&read), 1);
        read
    }

    pub fn keep_in_host(&self, key: &PageKey, page: &[u8]) {
        if let Some(HostPart { pages, part }) = &self.host {
            let is_kept = pages.insert(part, key, page);
            metrics::kv_host_stored(if is_kept { "written" } else { "dropped" }, 1);
        }
    }

    /// Writes a page to the folder, as far as it is not there. Returns the bytes written.
    pub fn write(&self, key: &PageKey, page: &[u8]) -> io::Result<u64> {
        self.folder.as_ref().map_or(Ok(0), |folder| folder.write(key, page))
    }

    pub fn remove(&self, key: &PageKey) {
        self.host.iter().for_each(|HostPart { pages, part }| pages.remove(part, key));
        self.folder.iter().for_each(|folder| folder.remove(key));
    }

    /// Returns the pages of this group that some tier has.
    pub fn keys(&self, group: usize) -> Vec<PageKey> {
        let of_host = self.host.iter().flat_map(|HostPart { pages, part }| pages.keys(part));
        let keys = of_host.chain(self.folder.iter().flat_map(PageFolder::keys));
        keys.filter(|key| usize::from(key.group) == group).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

fn outcome(read: &Result<(), PageMiss>) -> &'static str {
    read.map_or_else(|miss| miss.name(), |()| "hit")
}
