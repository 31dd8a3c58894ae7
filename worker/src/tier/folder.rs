//! A folder of pages: one file for each head of a page, in the layers of a stage. So ranks that divide the heads in
//! another way find them too. Has no knowledge of blocks, steps or threads.
//!
//! ```text
//! secret                        keys every hash, unless the cluster has a secret of its own
//! evictor.lock                  held by the process that removes files
//! pages/{policy}/{part}/{first byte of the name}/{name}.{group}.{head}
//! ```
//! A file has the hash of its bytes and then the bytes. The hash is keyed, and covers the place of the file: a file of
//! another cluster, policy, part, page or head is never used. So nothing is synchronized to the disk, and the folder
//! may be shared and may survive any crash.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
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
    let secret: [u8; 32] = wire::random().map_err(io::Error::other)?;
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(mut file) => file.write_all(&secret),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// The bytes of a page: `[n_layers, heads, head_bytes]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageShape {
    pub n_layers: usize,
    /// The heads that the rank has, as the model numbers them.
    pub heads: Range<u32>,
    pub head_bytes: usize,
}

impl PageShape {
    pub fn n_bytes(&self) -> usize {
        self.n_layers * self.layer_bytes()
    }

    fn layer_bytes(&self) -> usize {
        self.heads.len() * self.head_bytes
    }

    /// The bytes of a head in one layer of a page.
    fn in_layer(&self, layer: usize, head: u32) -> Range<usize> {
        let start = layer * self.layer_bytes() + (head - self.heads.start) as usize * self.head_bytes;
        start..start + self.head_bytes
    }
}

/// The pages of one rank's part of a model, of one cache group.
#[derive(Debug)]
pub struct PageFolder {
    folder: PathBuf,
    secret: PageSecret,
    /// The part of the path that names policy and part; hashes cover it.
    place: String,
    shape: PageShape,
}

impl PageFolder {
    /// `policy` and `part` name all that decides what the bytes of a head mean.
    pub fn new(folder: &Path, secret: PageSecret, policy: &str, part: &str, shape: PageShape) -> PageFolder {
        let place = format!("{policy}/{part}");
        PageFolder { folder: pages_folder(folder).join(&place), secret, place, shape }
    }

    #[cfg(test)]
    pub fn n_bytes(&self) -> usize {
        self.shape.n_bytes()
    }

    /// Fills `page` with the page of this name, through `buffer`.
    pub fn read(&self, key: &PageKey, page: &mut [u8], buffer: &mut Vec<u8>) -> Result<(), PageMiss> {
        buffer.resize(self.shape.n_layers * self.shape.head_bytes, 0);
        for head in self.shape.heads.clone() {
            self.read_head(key, head, buffer)?;
            for (layer, bytes) in buffer.chunks_exact(self.shape.head_bytes).enumerate() {
                page[self.shape.in_layer(layer, head)].copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    fn read_head(&self, key: &PageKey, head: u32, bytes: &mut [u8]) -> Result<(), PageMiss> {
        let path = self.path(key, head);
        let read = self.read_file(&path, (key, head), bytes);
        if matches!(read, Err(PageMiss::Length | PageMiss::Hash)) {
            // It would be refused each time. A file that cannot be removed is refused each time.
            let _ = fs::remove_file(&path);
        }
        read
    }

    fn read_file(&self, path: &Path, of: (&PageKey, u32), bytes: &mut [u8]) -> Result<(), PageMiss> {
        let miss = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => PageMiss::Absent,
            ErrorKind::UnexpectedEof => PageMiss::Length,
            _ => PageMiss::Unreadable,
        };
        let mut file = File::open(path).map_err(miss)?;
        let metadata = file.metadata().map_err(miss)?;
        if metadata.len() != (HASH_BYTES + bytes.len()) as u64 {
            return Err(PageMiss::Length);
        }
        let mut hash = [0; HASH_BYTES];
        file.read_exact(&mut hash).and_then(|()| file.read_exact(bytes)).map_err(miss)?;
        if self.hash(of, bytes) != blake3::Hash::from(hash) {
            return Err(PageMiss::Hash);
        }
        if unused_for(&metadata) > TOUCH_EVERY {
            // By this time the evictor finds the files that were used longest ago.
            let _ = file.set_modified(SystemTime::now());
        }
        Ok(())
    }

    /// Writes a page, as far as it is not there. Returns the bytes written.
    pub fn write(&self, key: &PageKey, page: &[u8]) -> io::Result<u64> {
        let mut bytes = Vec::with_capacity(self.shape.n_layers * self.shape.head_bytes);
        let mut n_written = 0;
        for head in self.shape.heads.clone() {
            bytes.clear();
            (0..self.shape.n_layers).for_each(|layer| bytes.extend_from_slice(&page[self.shape.in_layer(layer, head)]));
            n_written += self.write_head(key, head, &bytes)?;
        }
        Ok(n_written)
    }

    fn write_head(&self, key: &PageKey, head: u32, bytes: &[u8]) -> io::Result<u64> {
        static N_PARTS: AtomicU64 = AtomicU64::new(0);
        let path = self.path(key, head);
        if path.exists() {
            return Ok(0);
        }
        let folder = path.parent().unwrap_or(&self.folder);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let part = folder.join(format!(".part.{}.{}", std::process::id(), N_PARTS.fetch_add(1, Relaxed)));
        let hash = self.hash((key, head), bytes);
        let written = write_file(&part, hash.as_bytes(), bytes).and_then(|()| fs::rename(&part, path));
        if written.is_err() {
            let _ = fs::remove_file(&part);
        }
        written.map(|()| (HASH_BYTES + bytes.len()) as u64)
    }

    pub fn remove(&self, key: &PageKey) {
        // A file that is not there needs no removal; one that stays is of a request that failed, and is not looked up.
        self.shape.heads.clone().for_each(|head| _ = fs::remove_file(self.path(key, head)));
    }

    /// Returns the pages that are there, in no order, by the files of the rank's first head.
    pub fn keys(&self) -> impl Iterator<Item = PageKey> {
        let first = self.shape.heads.start;
        let files = entries(&self.folder).flat_map(|folder| entries(&folder));
        files.filter_map(|path| page_key(&path)).filter(move |(_, head)| *head == first).map(|(key, _)| key)
    }

    fn path(&self, key: &PageKey, head: u32) -> PathBuf {
        let name = Hex(&key.name.0).to_string();
        self.folder.join(&name[..2]).join(format!("{name}.{}.{head}", key.group))
    }

    fn hash(&self, (key, head): (&PageKey, u32), bytes: &[u8]) -> blake3::Hash {
        PageHash { secret: &self.secret, place: &self.place, key }.of(Some(head), bytes)
    }
}

/// The hash of a page, which covers its place beside its bytes.
pub struct PageHash<'a> {
    pub secret: &'a PageSecret,
    pub place: &'a str,
    pub key: &'a PageKey,
}

impl PageHash<'_> {
    /// `head` is none for the bytes of all heads of a rank, which are then part of the place.
    pub fn of(&self, head: Option<u32>, bytes: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret.0);
        hasher.update(&(self.place.len() as u64).to_le_bytes()).update(self.place.as_bytes());
        hasher.update(&[self.key.group]).update(&self.key.name.0);
        head.iter().for_each(|head| _ = hasher.update(&head.to_le_bytes()));
        hasher.update(bytes).finalize()
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

/// The page and the head of a file's name.
fn page_key(path: &Path) -> Option<(PageKey, u32)> {
    let mut parts = path.file_name()?.to_str()?.split('.');
    let name = parts.next()?.as_bytes().chunks_exact(2);
    let digits = name.map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok());
    let name = BlockHash(digits.collect::<Option<Vec<u8>>>()?.try_into().ok()?);
    Some((PageKey { group: parts.next()?.parse().ok()?, name }, parts.next()?.parse().ok()?))
}
