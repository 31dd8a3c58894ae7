//! Fetches one file from a hub over HTTP, whole or not at all. Knows nothing of repositories.
//!
//! A file is written to `<name>.part`, which a later attempt resumes, and gets its name once its checksum matches.

use crate::catalogue::entries::CatalogueEntry;
use crate::catalogue::judge::GgufHeaderChecker;
use crate::catalogue::landing::{check_free_space, finalize_part, remove_with_record, write_failed};
use crate::catalogue::model::{FetchProgress, ModelSources};
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CONNECT_MAX: Duration = Duration::from_secs(3);
const ANSWER_MAX: Duration = Duration::from_secs(30);
const FILE_MAX: Duration = Duration::from_secs(24 * 3600);
/// A fetch stops waiting for another process's fetch of the same file after this long without progress.
const STANDSTILL_MAX: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A file of a repository.
pub struct HubFile {
    pub url: String,
    /// With the folders that it is in.
    pub name: String,
    pub bytes: Option<u64>,
    pub sha256: Option<String>,
    /// Whether it is checked during the download. A catalogue's file is known to be supported.
    pub is_judged: bool,
}

impl HubFile {
    /// Whether the file at this path has this file's length.
    fn has_length_at(&self, path: &Path) -> bool {
        let there = std::fs::metadata(path).ok().map(|file| file.len());
        there.is_some_and(|there| self.bytes.is_none_or(|bytes| bytes == there))
    }
}

pub fn pull_entry(
    entry: &CatalogueEntry,
    path: &Path,
    sources: &ModelSources,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<()> {
    let remote = HubFile {
        url: file_url(sources, entry.hub_id, entry.revision, entry.file),
        name: entry.file.to_owned(),
        bytes: Some(entry.bytes),
        sha256: Some(entry.sha256.to_owned()),
        is_judged: false,
    };
    fetch(&remote, path, sources, progress)
}

pub fn file_url(sources: &ModelSources, repo: &str, revision: &str, file: &str) -> String {
    format!("{}/{repo}/resolve/{revision}/{file}", sources.hub_endpoint.trim_end_matches('/'))
}

/// Sends a GET for a file from byte `from` on. Errors name the address.
pub fn get(
    url: &str,
    from: u64,
    sources: &ModelSources,
) -> std::result::Result<ureq::http::Response<ureq::Body>, String> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_resolve(Some(CONNECT_MAX))
        .timeout_connect(Some(CONNECT_MAX))
        .timeout_recv_response(Some(ANSWER_MAX))
        .timeout_recv_body(Some(FILE_MAX))
        .http_status_as_error(false)
        .build()
        .into();
    let mut request = agent.get(url);
    // The client does not send the token to other hosts after a redirect.
    if let Some(token) = &sources.hub_token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if from > 0 {
        request = request.header("range", format!("bytes={from}-"));
    }
    let response = request.call().map_err(|error| format!("{url}: {error}"))?;
    match response.status().as_u16() {
        200 | 206 => Ok(response),
        401 | 403 => Err(format!("{url} denies access: set HF_TOKEN, or accept the model's terms")),
        404 => Err(format!("{url} does not exist")),
        status => Err(format!("{url} returned {status}")),
    }
}

/// Fetches a file to this path. An existing file of another length is fetched again.
pub fn fetch(
    file: &HubFile,
    path: &Path,
    sources: &ModelSources,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<()> {
    if file.has_length_at(path) {
        return Ok(());
    }
    remove_with_record(path)?;
    let part = part_of(path);
    let Some(mut out) = lock_part(file, path, &part, progress)? else { return Ok(()) };
    if file.sha256.is_none() {
        // Otherwise nothing would show that the rest belongs to another file than the part.
        out.set_len(0).map_err(Error::io(&part))?;
    }
    let mut hasher = Sha256::new();
    let mut done = hash_file(&mut out, &mut hasher).map_err(Error::io(&part))?;
    if file.bytes.is_none_or(|bytes| done < bytes) {
        // Without an announced length, only a full disk shows that there is no room.
        let folder = part.parent().unwrap_or(&part);
        check_free_space(folder, file.bytes.map_or(0, |bytes| bytes.saturating_sub(done)))?;
        let failed = |why: String| Error::Fetch { what: file.name.clone(), why };
        let response = get(&file.url, done, sources).map_err(|why| {
            if done == 0 {
                // There is nothing to resume. If the removal fails, an empty file is left.
                let _ = std::fs::remove_file(&part);
            }
            failed(why)
        })?;
        if !begins_at(&response, done) {
            return Err(failed(format!("the hub did not send the part from byte {done}")));
        }
        if done > 0 && response.status().as_u16() != 206 {
            // The server begins from the start, so the file does too.
            out.set_len(0).map_err(Error::io(&part))?;
            (hasher, done) = (Sha256::new(), 0);
        }
        let judge = GgufHeaderChecker::of(file, done, sources.checks.start_of_gguf);
        let mut disk = DownloadFile { out, part: &part, write: sources.write, judge };
        copy(response.into_body(), &mut disk, &mut hasher, &mut done, file, progress)?;
    }
    verify_and_rename(file, &part, path, done, hasher)
}

/// Whether the response begins at the requested byte.
fn begins_at(response: &ureq::http::Response<ureq::Body>, from: u64) -> bool {
    let range = response.headers().get("content-range").and_then(|range| range.to_str().ok());
    response.status().as_u16() != 206 || range.is_none_or(|range| range.starts_with(&format!("bytes {from}-")))
}

/// Opens the part file for this process alone; None if another process has meanwhile fetched the whole file.
fn lock_part(
    file: &HubFile,
    path: &Path,
    part: &Path,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<Option<File>> {
    let failed = |why: String| Error::Fetch { what: file.name.clone(), why };
    let (mut seen, mut since) = (None, Instant::now());
    loop {
        let out = File::options().create(true).read(true).append(true).open(part).map_err(Error::io(part))?;
        match out.try_lock() {
            Ok(()) if file.has_length_at(path) => {
                std::fs::remove_file(part).map_err(Error::io(part))?;
                return Ok(None);
            }
            Ok(()) if is_same_file(&out, part) => return Ok(Some(out)),
            // The process that held it has renamed or removed it since it was opened.
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let done = out.metadata().map_err(Error::io(part))?.len();
                if seen.replace(done) != Some(done) {
                    since = Instant::now();
                }
                if since.elapsed() > STANDSTILL_MAX {
                    let why = format!("another process is fetching it, and has stopped at {done} bytes");
                    return Err(failed(why));
                }
                progress(FetchProgress { what: &file.name, done, total: file.bytes });
                std::thread::sleep(LOOK_EVERY);
            }
            Err(TryLockError::Error(error)) => return Err(failed(error.to_string())),
        }
    }
}

fn is_same_file(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(there)) = (file.metadata(), std::fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (there.dev(), there.ino())
}

fn hash_file(file: &mut File, hasher: &mut Sha256) -> io::Result<u64> {
    file.rewind()?;
    io::copy(file, hasher)
}

/// The file that the download is written to.
struct DownloadFile<'a> {
    out: File,
    part: &'a Path,
    write: fn(&mut File, &[u8]) -> io::Result<()>,
    judge: GgufHeaderChecker,
}

fn copy(
    body: ureq::Body,
    disk: &mut DownloadFile<'_>,
    hasher: &mut Sha256,
    done: &mut u64,
    file: &HubFile,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<()> {
    let failed = |error: io::Error| Error::Fetch { what: file.name.clone(), why: error.to_string() };
    let mut reader = body.into_reader();
    let mut buffer = vec![0; 1 << 17];
    loop {
        let n = reader.read(&mut buffer).map_err(failed)?;
        if n == 0 {
            return Ok(());
        }
        *done += n as u64;
        if let Some(bytes) = file.bytes.filter(|bytes| *done > *bytes) {
            let why = format!("it has more than the announced {bytes} bytes");
            return Err(Error::Fetch { what: file.name.clone(), why });
        }
        let missing = file.bytes.map_or(n as u64, |bytes| bytes + n as u64 - *done);
        (disk.write)(&mut disk.out, &buffer[..n]).map_err(write_failed(disk.part, missing))?;
        hasher.update(&buffer[..n]);
        if let Err(refused) = disk.judge.check_part(disk.part, *done) {
            std::fs::remove_file(disk.part).map_err(Error::io(disk.part))?;
            return Err(refused);
        }
        progress(FetchProgress { what: &file.name, done: *done, total: file.bytes });
    }
}

/// Renames the file if its checksum is right, and deletes it otherwise.
fn verify_and_rename(file: &HubFile, part: &Path, path: &Path, done: u64, hasher: Sha256) -> Result<()> {
    if let Some(bytes) = file.bytes.filter(|bytes| done < *bytes) {
        let why = format!("it ended after {done} of {bytes} bytes: fetch it again to resume");
        return Err(Error::Fetch { what: file.name.clone(), why });
    }
    let sha256 = hasher.finalize();
    let found = hex(&sha256);
    if let Some(expected) = file.sha256.as_ref().filter(|expected| **expected != found) {
        std::fs::remove_file(part).map_err(Error::io(part))?;
        return Err(Error::Checksum { what: file.name.clone(), found, expected: expected.clone() });
    }
    finalize_part(part, path, &sha256)
}

/// The checksum of a model: of its file, or of `sha256sum`'s lines for several, in the order of their names.
pub fn sha256_of(files: &[PathBuf]) -> Result<String> {
    let one = |path: &PathBuf| {
        let mut hasher = Sha256::new();
        let mut file = File::open(path).map_err(Error::io(path))?;
        io::copy(&mut file, &mut hasher).map_err(Error::io(path))?;
        Ok(hex(&hasher.finalize()))
    };
    if let [only] = files {
        return one(only);
    }
    let mut lines = Sha256::new();
    for path in files {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        lines.update(format!("{}  {name}\n", one(path)?));
    }
    Ok(hex(&lines.finalize()))
}

pub fn part_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

pub fn hex(bytes: &[u8]) -> String {
    types::Hex(bytes).to_string()
}
