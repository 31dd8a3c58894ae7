//! This machine's name and memory.

use std::path::Path;

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// This machine's host name.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// This machine's memory, or the container's limit if that is less.
pub fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    let total = info.totalram * u64::from(info.mem_unit);
    let limit = std::fs::read_to_string(Path::new("/sys/fs/cgroup/memory.max")).ok();
    limit.and_then(|text| text.trim().parse().ok()).map_or(total, |limit: u64| limit.min(total))
}
