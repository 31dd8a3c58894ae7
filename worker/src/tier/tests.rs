//! Pages in files: damaged, swapped and foreign ones are misses, and the folder keeps its limit.

use super::evictor::evict;
use super::fetches::{FetchJob, PageReaders};
use super::folder::{PageFolder, PageMiss, PageSecret, PageShape, entries, open_secret, pages_folder};
use super::host::HostPages;
use super::pages::{GroupPages, HostPart};
use super::stores::{KvDiskConfig, PageChange, StoreQueue};
use backend::{PageCopy, PageMover, WritePage};
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use types::{BlockHash, BlockId, Epoch, FetchDone, FetchId, Page, PageKey};

const SECRET: PageSecret = PageSecret([7; 32]);

/// A folder that is removed at the end of a test.
struct TestFolder(PathBuf);

impl TestFolder {
    fn new(name: &str) -> TestFolder {
        let path = std::env::temp_dir().join(format!("lockstep-tier-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        TestFolder(path)
    }

    fn pages(&self, secret: PageSecret, policy: &str) -> PageFolder {
        self.pages_of(secret, policy, 0..1)
    }

    /// Pages of two layers, with 500 bytes of each head.
    fn pages_of(&self, secret: PageSecret, policy: &str, heads: Range<u32>) -> PageFolder {
        PageFolder::new(&self.0, secret, policy, "part", PageShape { n_layers: 2, heads, head_bytes: 500 })
    }

    fn files(&self) -> Vec<PathBuf> {
        let folders = [pages_folder(&self.0)];
        let mut level: Vec<PathBuf> = folders.to_vec();
        for _ in 0..4 {
            level = level.iter().flat_map(|folder| entries(folder)).collect();
        }
        level.sort();
        level
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn key(n: u8) -> PageKey {
    PageKey { group: n % 2, name: BlockHash([n; 16]) }
}

fn bytes(n: u8) -> Vec<u8> {
    (0..1000).map(|i| (i * 7 + u32::from(n)) as u8).collect()
}

fn read(pages: &PageFolder, n: u8) -> Result<Vec<u8>, PageMiss> {
    let mut bytes = vec![0; pages.n_bytes()];
    pages.read(&key(n), &mut bytes, &mut Vec::new()).map(|()| bytes)
}

fn age(path: &Path, seconds: u64) {
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_modified(SystemTime::now() - Duration::from_secs(seconds))
        .unwrap();
}

#[test]
fn a_page_is_read_only_as_it_was_written() {
    let folder = TestFolder::new("read");
    let pages = folder.pages(SECRET, "policy");
    assert_eq!(read(&pages, 1), Err(PageMiss::Absent));
    assert_eq!((pages.write(&key(1), &bytes(1)).unwrap(), pages.write(&key(1), &bytes(1)).unwrap()), (1032, 0));
    assert_eq!(read(&pages, 1), Ok(bytes(1)));
    // Another cluster, and pages of other lengths.
    assert_eq!(read(&folder.pages(PageSecret([8; 32]), "policy"), 1), Err(PageMiss::Hash));
    assert_eq!(read(&pages, 1), Err(PageMiss::Absent), "a refused file is removed");
    pages.write(&key(1), &bytes(1)).unwrap();
    let shape = PageShape { n_layers: 2, heads: 0..1, head_bytes: 499 };
    assert_eq!(read(&PageFolder::new(&folder.0, SECRET, "policy", "part", shape), 1), Err(PageMiss::Length));
    assert_eq!(pages.keys().count(), 0);
}

/// Ranks that divide the heads in another way find each other's pages.
#[test]
fn heads_are_files_of_their_own() {
    let folder = TestFolder::new("heads");
    let [whole, left, right] = [0..4, 0..1, 1..4].map(|heads| folder.pages_of(SECRET, "policy", heads));
    let page: Vec<u8> = (0..4000).map(|i| (i / 500) as u8).collect();
    assert_eq!(whole.write(&key(2), &page).unwrap(), 4 * 1032);
    assert_eq!(read(&left, 2).unwrap(), [[0; 500], [4; 500]].concat());
    assert_eq!(read(&right, 2).unwrap(), [1, 2, 3, 5, 6, 7].map(|i| [i; 500]).concat());
    whole.remove(&key(2));
    assert!(folder.files().is_empty());
    left.write(&key(2), &[[0; 500], [4; 500]].concat()).unwrap();
    assert_eq!((read(&whole, 2), right.keys().count()), (Err(PageMiss::Absent), 0));
    right.write(&key(2), &[1, 2, 3, 5, 6, 7].map(|i| [i; 500]).concat()).unwrap();
    assert_eq!((read(&whole, 2).unwrap(), whole.keys().collect::<Vec<_>>()), (page, vec![key(2)]));
    // A head in another one's place.
    let files = folder.files();
    fs::copy(&files[0], &files[1]).unwrap();
    assert_eq!(read(&whole, 2), Err(PageMiss::Hash));
}

#[test]
fn a_damaged_a_swapped_and_a_foreign_file_are_misses() {
    let folder = TestFolder::new("damaged");
    let (pages, other) = (folder.pages(SECRET, "policy"), folder.pages(SECRET, "other"));
    let mut misses = Vec::new();
    for (n, at) in [(2_u8, 0_usize), (4, 31), (6, 32), (8, 1031)] {
        pages.write(&key(n), &bytes(n)).unwrap();
        let path = folder.files().remove(0);
        let mut content = fs::read(&path).unwrap();
        content[at] ^= 1;
        fs::write(&path, content).unwrap();
        misses.push(read(&pages, n));
    }
    pages.write(&key(2), &bytes(2)).unwrap();
    let path = folder.files().remove(0);
    fs::write(&path, &fs::read(&path).unwrap()[..1000]).unwrap();
    misses.push(read(&pages, 2));
    let hash = || Err(PageMiss::Hash);
    assert_eq!(misses, [hash(), hash(), hash(), hash(), Err(PageMiss::Length)]);
    // A sound file in another one's place, of the same folder and of another policy.
    [2, 4].into_iter().for_each(|n| _ = pages.write(&key(n), &bytes(n)).unwrap());
    let files = folder.files();
    fs::copy(&files[0], &files[1]).unwrap();
    assert_eq!((read(&pages, 2), read(&pages, 4)), (Ok(bytes(2)), Err(PageMiss::Hash)));
    other.write(&key(2), &bytes(3)).unwrap();
    let [foreign, own] = ["other", "policy"]
        .map(|of| folder.files().into_iter().find(|path| path.to_str().unwrap().contains(&format!("/{of}/"))).unwrap());
    fs::copy(foreign, own).unwrap();
    assert_eq!(read(&pages, 2), Err(PageMiss::Hash));
    // A folder in a page's place is a file that cannot be read, and what is not a page's name is not listed.
    pages.write(&key(4), &bytes(4)).unwrap();
    let path = folder.files().into_iter().find(|path| path.to_str().unwrap().contains("/policy/")).unwrap();
    fs::write(path.with_file_name("note.txt"), "x").unwrap();
    assert_eq!(pages.keys().collect::<Vec<_>>(), [key(4)]);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(read(&pages, 4), Err(PageMiss::Length | PageMiss::Unreadable)));
}

#[test]
fn the_secret_is_made_once_and_is_its_owner_s() {
    let folder = TestFolder::new("secret");
    let path = folder.0.join("inner");
    let secret = open_secret(&path).unwrap();
    assert_eq!(open_secret(&path).unwrap(), secret);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&path.join("secret"))), (0o700, 0o600));
    fs::write(path.join("secret"), "short").unwrap();
    assert!(open_secret(&path).unwrap_err().to_string().contains("has not 32 bytes"));
}

#[test]
fn old_pages_and_those_of_other_policies_go_first() {
    let folder = TestFolder::new("evict");
    let (pages, other) = (folder.pages(SECRET, "policy"), folder.pages(SECRET, "other"));
    (1..=6).for_each(|n| _ = pages.write(&key(n), &bytes(n)).unwrap());
    (1..=2).for_each(|n| _ = other.write(&key(n), &bytes(n)).unwrap());
    for (i, path) in folder.files().into_iter().enumerate() {
        // The files of the other policy are first, and the newest.
        age(&path, if i < 2 { 0 } else { 1000 - i as u64 });
    }
    let remains = folder.files()[7].with_file_name(".part.1.1");
    fs::write(&remains, "x").unwrap();
    age(&remains, 1000);
    assert_eq!(evict(&folder.0, "policy", 8 * 1032).unwrap(), Some(8 * 1032));
    assert!(!remains.exists() && folder.files().len() == 8);
    assert_eq!(evict(&folder.0, "policy", 5 * 1032).unwrap(), Some(4 * 1032));
    assert_eq!((other.keys().count(), pages.keys().count()), (0, 4));
    let kept: Vec<bool> = (1..=6).map(|n| read(&pages, n).is_ok()).collect();
    assert_eq!(kept, [false, false, true, true, true, true]);
    // While another process removes files, this one does not.
    let lock = File::open(folder.0.join("evictor.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert_eq!(evict(&folder.0, "policy", 0).unwrap(), None);
}

/// Blocks that were written, with their content.
type WrittenBlocks = Arc<Mutex<Vec<(u32, Vec<u8>)>>>;

/// Writes blocks to a list.
struct ListMover(WrittenBlocks);

impl PageMover for ListMover {
    fn block_bytes(&self) -> usize {
        500
    }

    fn copy(&self, block: BlockId) -> Option<PageCopy> {
        Some(Box::new(move || Ok(bytes(block.0 as u8))))
    }

    fn writer(&self) -> backend::Result<WritePage> {
        let written = self.0.clone();
        Ok(Box::new(move |block, page| {
            written.lock().unwrap().push((block.0, page.to_vec()));
            Ok(())
        }))
    }
}

fn group(folder: &TestFolder, heads: Range<u32>, host: Option<HostPart>, written: &WrittenBlocks) -> Arc<GroupPages> {
    let pages = folder.pages_of(SECRET, "policy", heads);
    let n_bytes = pages.n_bytes();
    Arc::new(GroupPages { n_bytes, mover: Box::new(ListMover(written.clone())), host, folder: Some(pages) })
}

/// A fetch of pages 1 to 4 of two groups, the first also in host memory. Returns the blocks written, and the answer if
/// there is one.
fn fetch(folder: &TestFolder, host: Option<HostPart>, cancel: bool) -> (Vec<(u32, Vec<u8>)>, Option<FetchDone>) {
    let written = WrittenBlocks::default();
    let pages = (1..5).map(|n| Page { key: key(n), block: BlockId(n.into()) }).collect();
    let (sent, answers) = channel();
    let report = Arc::new(move |done: FetchDone| sent.send(done).unwrap());
    // The rank has no head of the second group.
    let groups = vec![group(folder, 0..1, host, &written), group(folder, 0..0, None, &written)];
    let job = Arc::new(FetchJob::new(Epoch::default(), FetchId(3), pages, groups, Some(report)));
    if cancel {
        job.cancel();
    }
    let readers = PageReaders::start().unwrap();
    readers.begin(&job);
    drop(job);
    let done = answers.recv_timeout(Duration::from_millis(if cancel { 100 } else { 10_000 })).ok();
    let mut written = std::mem::take(&mut *written.lock().unwrap());
    written.sort();
    (written, done.map(|done| FetchDone { micros: 0, ..done }))
}

#[test]
fn a_fetch_writes_what_is_sound_and_reports_the_rest() {
    let folder = TestFolder::new("fetch");
    folder.pages(SECRET, "policy").write(&key(2), &bytes(2)).unwrap();
    let done = |missing| Some(FetchDone { id: FetchId(3), missing, ..FetchDone::default() });
    assert_eq!(fetch(&folder, None, false), (vec![(2, bytes(2))], done(vec![3])));
    assert_eq!(fetch(&folder, None, true), (vec![], None), "a cancelled fetch writes nothing");
    // Page 4 is in host memory, and then damaged there.
    let (pages, part): (_, Arc<str>) = (Arc::new(HostPages::new(1 << 20, SECRET)), "part".into());
    let host = || Some(HostPart { pages: pages.clone(), part: part.clone() });
    assert!(pages.insert(&part, &key(4), &bytes(4)));
    assert_eq!(fetch(&folder, host(), false), (vec![(2, bytes(2)), (4, bytes(4))], done(vec![])));
    pages.damage(&part, &key(4));
    assert_eq!(fetch(&folder, host(), false), (vec![(2, bytes(2))], done(vec![3])));
}

/// What a step stores is in all tiers, and what it removes in none.
#[test]
fn pages_go_through_host_memory_to_the_folder() {
    let folder = TestFolder::new("both");
    let (pages, part): (_, Arc<str>) = (Arc::new(HostPages::new(1 << 20, SECRET)), "part".into());
    let host = HostPart { pages: pages.clone(), part: part.clone() };
    let group = group(&folder, 0..1, Some(host), &WrittenBlocks::default());
    let stores = StoreQueue::start(true, Some(KvDiskConfig::new(folder.0.clone(), 1 << 20))).unwrap();
    for n in 1..9 {
        let page = group.mover.copy(BlockId(n.into())).unwrap();
        let (pages, policy, key) = (group.clone(), "policy".into(), key(n));
        stores.push_page(1000, || Some(PageChange::Store { pages, policy, key, page }));
    }
    stores.remove(&group, &key(4));
    drop(stores);
    let read_all = |n| group.host.as_ref().unwrap().pages.read(&part, &key(n), &mut [0; 1000]).is_ok();
    let in_folder = folder.pages(SECRET, "policy");
    for n in 1..9 {
        assert_eq!((read_all(n), read(&in_folder, n).is_ok()), (n != 4, n != 4), "{n}");
    }
    assert_eq!((group.keys(0).len(), group.keys(1).len()), (3, 4));
}
