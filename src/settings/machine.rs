//! This machine's name and memory.

use std::path::{Path, PathBuf};

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of cores that this process may use and that no other program used in the last minute. Returns
/// None where the system does not report its load.
pub fn free_cores() -> Option<usize> {
    let read = |file: &str| std::fs::read_to_string(file).ok();
    Some(free_of(&read("/proc/loadavg")?, &read("/proc/stat")?)?.min(cores()))
}

/// The load is that of the whole machine, also in a container.
fn free_of(load: &str, stat: &str) -> Option<usize> {
    let load: f64 = load.split_whitespace().next()?.parse().ok()?;
    let is_core =
        |line: &&str| line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let n_cores = stat.lines().filter(is_core).count();
    Some((n_cores as f64 - load).round().max(0.0) as usize)
}

/// This machine's host name.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the free memory of this machine, or of the container that limits it. Returns None where the system does not
/// report it.
pub fn memory_left() -> Option<u64> {
    let machine = meminfo_available(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let containers = [Some(PathBuf::from("/sys/fs/cgroup")), own_cgroup(&own)];
    Some(containers.into_iter().flatten().filter_map(|folder| cgroup_left(&folder)).fold(machine, u64::min))
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Returns the folder of this process's own cgroup, where the process sees the tree of groups from above.
fn own_cgroup(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    (!path.is_empty()).then(|| Path::new("/sys/fs/cgroup").join(path))
}

/// Returns the free memory within a group's limit. Inactive pages of files count as free, because the system drops them
/// first.
fn cgroup_left(folder: &Path) -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let droppable = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok());
    Some(limit.saturating_sub(used.saturating_sub(droppable.unwrap_or(0))))
}

/// Returns this machine's memory, or the container's limit if that is less.
pub fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    let total = info.totalram * u64::from(info.mem_unit);
    let limit = std::fs::read_to_string(Path::new("/sys/fs/cgroup/memory.max")).ok();
    limit.and_then(|text| text.trim().parse().ok()).map_or(total, |limit: u64| limit.min(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_cores_are_those_that_the_load_leaves() {
        let stat = "cpu  9 9\ncpu0 1 1\ncpu1 1 1\ncpu2 1 1\nctxt 5\n";
        let free = |load: &str| free_of(load, stat);
        assert_eq!((free("0.20 9 9 1/9 9"), free("1.9 0 0 1/9 9"), free("7.0 0 0 1/9 9")), (Some(3), Some(1), Some(0)));
        assert_eq!(free(""), None);
        assert!(free_cores().is_some_and(|free| free <= cores()), "this machine reports its load");
    }

    #[test]
    fn what_is_left_is_what_the_tightest_of_machine_and_container_gives() -> std::io::Result<()> {
        let text = "MemTotal:       100 kB\nMemAvailable:    7 kB\n";
        assert_eq!((meminfo_available(text), meminfo_available("MemTotal: 1 kB")), (Some(7 << 10), None));
        assert_eq!(own_cgroup("9:name=x:/\n0::/a/b\n"), Some(PathBuf::from("/sys/fs/cgroup/a/b")));
        assert_eq!((own_cgroup("0::/\n"), own_cgroup("")), (None, None));
        let folder = std::env::temp_dir().join(format!("lockstep-cgroup-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let write = |file: &str, text: &str| std::fs::write(folder.join(file), text);
        assert_eq!(cgroup_left(&folder), None);
        write("memory.max", "1000\n")?;
        write("memory.current", "900\n")?;
        assert_eq!(cgroup_left(&folder), Some(100));
        write("memory.stat", "anon 500\ninactive_file 300\n")?;
        assert_eq!(cgroup_left(&folder), Some(400));
        write("memory.max", "max\n")?;
        assert_eq!(cgroup_left(&folder), None, "no limit");
        std::fs::remove_dir_all(&folder)?;
        assert!(memory_left().is_some_and(|left| left > 1 << 20), "this machine reports its memory");
        Ok(())
    }
}
