//! A folder of pages: one file for each page of each rank's part. Has no knowledge of blocks, steps or threads.
//!
//! ```text
//! secret                        keys every hash, unless the cluster has a secret of its own
//! evictor.lock                  held by the process that removes files
//! pages/{policy}/{part}/{first byte of the name}/{name}.{group}
//! ```
//! A file has the hash of its bytes and then the bytes. The hash is keyed, and covers the file's place: a file of
//! another cluster, policy, part or page is never used. So nothing is synchronized to the disk, and the folder may be
//! shared and may survive any crash.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use types::{BlockHash, Hex, PageKey};

const HASH_BYTES: usize = blake3::OUT_LEN;
const SECRET: &str = "secret";
/// The time of a file's last use is written this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// The key of all hashes of a cluster's pages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PageSecret(pub [u8; 32]);

impl std::fmt::Debug for PageSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PageSecret(..)")
    }
}

impl PageSecret {
    /// Returns the secret that follows from a key of the cluster.
    pub fn of(key: &[u8; 32]) -> PageSecret {
        PageSecret(blake3::derive_key("lockstep 2026 pages of a KV cache", key))
    }
}

/// Why a page was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageMiss {
    /// There is no such file.
    Absent,
    /// The file has another length than the page.
    Length,
    /// The hash differs: the bytes are damaged, or of another page or cluster.
    Hash,
    /// The file cannot be read.
    Unreadable,
}

impl PageMiss {
    pub const fn name(self) -> &'static str {
        match self {
            PageMiss::Absent => "absent",
            PageMiss::Length => "length",
            PageMiss::Hash => "hash",
            PageMiss::Unreadable => "unreadable",
        }
    }
}

/// Opens a folder for pages, and makes it where it is missing: only its owner may read it, since prompts follow from
/// what is in it. Returns its secret, which is made once.
pub fn open_secret(folder: &Path) -> io::Result<PageSecret> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let path = folder.join(SECRET);
    // A process that finds the file of another one before it is complete reads it again.
    for _ in 0..100 {
        match fs::read(&path) {
            Ok(bytes) => match bytes.try_into() {
                Ok(secret) => return Ok(PageSecret(secret)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => make_secret(&path)?,
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(ErrorKind::InvalidData, format!("{} has not 32 bytes", path.display())))
}

fn make_secret(path: &Path) -> io::Result<()> {
    let mut secret = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut secret)?;
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(mut file) => file.write_all(&secret),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// The pages of one rank's part of a model.
#[derive(Debug)]
pub struct PageFolder {
    folder: PathBuf,
    secret: PageSecret,
    /// The part of the path that names policy and part; hashes cover it.
    place: String,
}

impl PageFolder {
    /// `policy` and `part` name all that decides what the bytes of a page mean.
    pub fn new(folder: &Path, secret: PageSecret, policy: &str, part: &str) -> PageFolder {
        let place = format!("{policy}/{part}");
        PageFolder { folder: pages_folder(folder).join(&place), secret, place }
    }

    /// Returns a page of `n_bytes`.
    pub fn read(&self, key: &PageKey, n_bytes: usize) -> Result<Vec<u8>, PageMiss> {
        let path = self.path(key);
        let read = self.read_file(&path, key, n_bytes);
        if matches!(read, Err(PageMiss::Length | PageMiss::Hash)) {
            // It would be refused each time. A file that cannot be removed is refused each time.
            let _ = fs::remove_file(&path);
        }
        read
    }

    fn read_file(&self, path: &Path, key: &PageKey, n_bytes: usize) -> Result<Vec<u8>, PageMiss> {
        let miss = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => PageMiss::Absent,
            ErrorKind::UnexpectedEof => PageMiss::Length,
            _ => PageMiss::Unreadable,
        };
        let mut file = File::open(path).map_err(miss)?;
        let metadata = file.metadata().map_err(miss)?;
        if metadata.len() != (HASH_BYTES + n_bytes) as u64 {
            return Err(PageMiss::Length);
        }
        let (mut hash, mut bytes) = ([0; HASH_BYTES], vec![0; n_bytes]);
        file.read_exact(&mut hash).and_then(|()| file.read_exact(&mut bytes)).map_err(miss)?;
        if self.hash(key, &bytes) != blake3::Hash::from(hash) {
            return Err(PageMiss::Hash);
        }
        if unused_for(&metadata) > TOUCH_EVERY {
            // By this time the evictor finds the files that were used longest ago.
            let _ = file.set_modified(SystemTime::now());
        }
        Ok(bytes)
    }

    /// Writes a page, unless it is there. Returns the bytes written.
    pub fn write(&self, key: &PageKey, bytes: &[u8]) -> io::Result<u64> {
        static N_PARTS: AtomicU64 = AtomicU64::new(0);
        let path = self.path(key);
        if path.exists() {
            return Ok(0);
        }
        let folder = path.parent().unwrap_or(&self.folder);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let part = folder.join(format!(".part.{}.{}", std::process::id(), N_PARTS.fetch_add(1, Relaxed)));
        let written = write_file(&part, self.hash(key, bytes).as_bytes(), bytes).and_then(|()| fs::rename(&part, path));
        if written.is_err() {
            let _ = fs::remove_file(&part);
        }
        written.map(|()| (HASH_BYTES + bytes.len()) as u64)
    }

    pub fn remove(&self, key: &PageKey) {
        // A file that is not there needs no removal; one that stays is of a request that failed, and is not looked up.
        let _ = fs::remove_file(self.path(key));
    }

    /// Returns the pages that are there, in no order.
    pub fn keys(&self) -> impl Iterator<Item = PageKey> {
        entries(&self.folder).flat_map(|folder| entries(&folder)).filter_map(|path| page_key(&path))
    }

    fn path(&self, key: &PageKey) -> PathBuf {
        let name = Hex(&key.name.0).to_string();
        self.folder.join(&name[..2]).join(format!("{name}.{}", key.group))
    }

    fn hash(&self, key: &PageKey, bytes: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret.0);
        hasher.update(&(self.place.len() as u64).to_le_bytes()).update(self.place.as_bytes());
        hasher.update(&[key.group]).update(&key.name.0).update(bytes);
        hasher.finalize()
    }
}

/// Returns the folder of all pages.
pub fn pages_folder(folder: &Path) -> PathBuf {
    folder.join("pages")
}

/// Returns for how long a page has not been read or written, within a minute.
pub fn unused_for(metadata: &fs::Metadata) -> Duration {
    metadata.modified().ok().and_then(|used| used.elapsed().ok()).unwrap_or_default()
}

/// Returns the paths in a folder; none if there is no such folder.
pub fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path())
}

fn write_file(path: &Path, hash: &[u8], bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(hash)?;
    file.write_all(bytes)
}

fn page_key(path: &Path) -> Option<PageKey> {
    let (name, group) = path.file_name()?.to_str()?.split_once('.')?;
    let digits = name.as_bytes().chunks_exact(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok());
    let name: Vec<u8> = digits.collect::<Option<_>>()?;
    Some(PageKey { group: group.parse().ok()?, name: BlockHash(name.try_into().ok()?) })
}
