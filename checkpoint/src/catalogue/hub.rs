//! Fetches files from a hub over HTTP, whole or not at all. Knows the hub's two addresses: the list of a repository's
//! files, and a file.
//!
//! A file is written to `<name>.part`, which a later try goes on with, and gets its name when its checksum is right.

use crate::catalogue::entries::CatalogueEntry;
use crate::catalogue::files::{all_parts, choose_gguf};
use crate::catalogue::landing::{has_room, land, sync_folder_of, write_failed};
use crate::catalogue::model::{HubId, Located, Progress, Sources};
use crate::error::{Error, Result};
use crate::small_files::is_plain_name;
use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CONNECT_MAX: Duration = Duration::from_secs(3);
const ANSWER_MAX: Duration = Duration::from_secs(30);
const FILE_MAX: Duration = Duration::from_secs(24 * 3600);
const LIST_BYTES_MAX: u64 = 16 << 20;
const FILES_MAX: usize = 4096;
/// A process that fetches the same file is no longer waited for when it has stood still this long.
const STANDSTILL_MAX: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A file of a repository.
struct Remote {
    url: String,
    name: String,
    bytes: Option<u64>,
    sha256: Option<String>,
}

pub fn pull_entry(
    entry: &CatalogueEntry,
    path: &Path,
    sources: &Sources,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let remote = Remote {
        url: file_url(sources, entry.hub_id, entry.revision, entry.file),
        name: entry.file.to_owned(),
        bytes: Some(entry.bytes),
        sha256: Some(entry.sha256.to_owned()),
    };
    fetch(&remote, path, sources, progress)
}

/// Fetches one GGUF into the repository's folder, or all files of a safetensors model, whose folder gets its name last.
pub fn pull(id: HubId<'_>, sources: &Sources, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Located> {
    progress(Progress { what: id.repo, done: 0, total: None });
    let files = list(id, sources)?;
    let folder = sources.folder(&id.folder_name());
    let name = id.repo.rsplit('/').next().unwrap_or(id.repo).to_owned();
    let names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
    let has = |name: &str| names.iter().any(|known| known == name);
    let safetensors = has("model.safetensors") || has("model.safetensors.index.json");
    if id.variant.is_none() && has("config.json") && safetensors {
        return match fetch_folder(&files, &folder, sources, progress) {
            // Another process has renamed it while this one waited.
            Err(_) if folder.exists() => Ok(Located { name, path: folder }),
            fetched => fetched.map(|()| Located { name, path: folder }),
        };
    }
    let chosen = choose_gguf(&names, id.variant).map(|name| all_parts(name));
    let Some(chosen) = chosen else {
        let ggufs: Vec<_> = names.into_iter().filter(|name| name.ends_with(".gguf")).collect();
        let why = format!("say which of its files as {}:<VARIANT>: [{}]", id.repo, ggufs.join(", "));
        return Err(Error::NotFound { model: id.repo.to_owned(), why });
    };
    std::fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
    for part in &chosen {
        let Some(file) = files.iter().find(|file| file.name == *part) else {
            return Err(Error::NotFound { model: id.repo.to_owned(), why: format!("its part {part} is missing") });
        };
        fetch(file, &folder.join(&file.name), sources, progress)?;
    }
    Ok(Located { name, path: folder.join(&chosen[0]) })
}

fn fetch_folder(
    files: &[Remote],
    folder: &Path,
    sources: &Sources,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let partial = part_of(folder);
    std::fs::create_dir_all(&partial).map_err(Error::io(&partial))?;
    for file in files.iter().filter(|file| belongs_to_model(&file.name)) {
        fetch(file, &partial.join(&file.name), sources, progress)?;
    }
    sync_folder_of(&partial.join("."))?;
    std::fs::rename(&partial, folder).map_err(Error::io(folder))?;
    sync_folder_of(folder)
}

fn belongs_to_model(name: &str) -> bool {
    const FILES: [&str; 7] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ];
    FILES.contains(&name) || (name.starts_with("model-") && name.ends_with(".safetensors"))
}

fn file_url(sources: &Sources, repo: &str, revision: &str, file: &str) -> String {
    format!("{}/{repo}/resolve/{revision}/{file}", sources.hub_endpoint.trim_end_matches('/'))
}

/// The files of a repository's top folder. Leaves out a file whose name would not stay in our folder.
fn list(id: HubId<'_>, sources: &Sources) -> Result<Vec<Remote>> {
    let url = format!("{}/api/models/{}/tree/main", sources.hub_endpoint.trim_end_matches('/'), id.repo);
    let failed = |why: String| Error::Fetch { what: id.repo.to_owned(), why };
    let mut text = String::new();
    let mut body = get(&url, 0, sources).map_err(failed)?.into_body();
    body.as_reader().take(LIST_BYTES_MAX).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    let listed: serde_json::Value = serde_json::from_str(&text).map_err(|error| failed(format!("no list: {error}")))?;
    let mut files = Vec::new();
    for file in listed.as_array().into_iter().flatten().take(FILES_MAX) {
        let name = file["path"].as_str().filter(|name| file["type"] == "file" && is_plain_name(name));
        let Some(name) = name else { continue };
        files.push(Remote {
            url: file_url(sources, id.repo, "main", name),
            name: name.to_owned(),
            bytes: file["size"].as_u64(),
            sha256: file["lfs"]["oid"].as_str().map(str::to_owned),
        });
    }
    Ok(files)
}

fn get(url: &str, from: u64, sources: &Sources) -> std::result::Result<ureq::http::Response<ureq::Body>, String> {
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
    let response = request.call().map_err(|error| error.to_string())?;
    match response.status().as_u16() {
        200 | 206 => Ok(response),
        401 | 403 => Err(format!("{url} is not open to us: does it need HF_TOKEN, or its terms accepted?")),
        404 => Err(format!("there is no {url}")),
        status => Err(format!("{url} answered {status}")),
    }
}

fn fetch(file: &Remote, path: &Path, sources: &Sources, progress: &mut dyn FnMut(Progress<'_>)) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    let part = part_of(path);
    let Some(mut out) = own_part(file, path, &part, progress)? else { return Ok(()) };
    if file.sha256.is_none() {
        // Nobody could tell that the rest is of another file than the part.
        out.set_len(0).map_err(Error::io(&part))?;
    }
    let mut hasher = Sha256::new();
    let mut done = hash_file(&mut out, &mut hasher).map_err(Error::io(&part))?;
    if file.bytes.is_none_or(|bytes| done < bytes) {
        // What is not announced is found out when the disk is full.
        let folder = part.parent().unwrap_or(&part);
        has_room(folder, file.bytes.map_or(0, |bytes| bytes.saturating_sub(done)))?;
        let failed = |why: String| Error::Fetch { what: file.name.clone(), why };
        let response = get(&file.url, done, sources).map_err(|why| {
            if done == 0 {
                // There is nothing to resume. If the removal fails, an empty file is left.
                let _ = std::fs::remove_file(&part);
            }
            failed(why)
        })?;
        if !begins_at(&response, done) {
            return Err(failed(format!("the hub sends another part than the one from byte {done}")));
        }
        if done > 0 && response.status().as_u16() != 206 {
            // The server begins from the start, so the file does too.
            out.set_len(0).map_err(Error::io(&part))?;
            (hasher, done) = (Sha256::new(), 0);
        }
        let mut disk = Disk { out, part: &part, write: sources.write };
        copy(response.into_body(), &mut disk, &mut hasher, &mut done, file, progress)?;
    }
    finish(file, &part, path, done, hasher)
}

/// Whether a part of a file is the part that was asked for.
fn begins_at(response: &ureq::http::Response<ureq::Body>, from: u64) -> bool {
    let range = response.headers().get("content-range").and_then(|range| range.to_str().ok());
    response.status().as_u16() != 206 || range.is_none_or(|range| range.starts_with(&format!("bytes {from}-")))
}

/// Opens the part file for this process alone; None if another process has fetched all of it meanwhile.
fn own_part(file: &Remote, path: &Path, part: &Path, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Option<File>> {
    let failed = |why: String| Error::Fetch { what: file.name.clone(), why };
    let (mut seen, mut since) = (None, Instant::now());
    loop {
        let out = File::options().create(true).read(true).append(true).open(part).map_err(Error::io(part))?;
        match out.try_lock() {
            Ok(()) if path.exists() => {
                std::fs::remove_file(part).map_err(Error::io(part))?;
                return Ok(None);
            }
            Ok(()) if is_at(&out, part) => return Ok(Some(out)),
            // The process that had it has renamed or dropped it since it was opened.
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let done = out.metadata().map_err(Error::io(part))?.len();
                if seen.replace(done) != Some(done) {
                    since = Instant::now();
                }
                if since.elapsed() > STANDSTILL_MAX {
                    let why = format!("another process fetches it, and stands still at {done} bytes");
                    return Err(failed(why));
                }
                progress(Progress { what: &file.name, done, total: file.bytes });
                std::thread::sleep(LOOK_EVERY);
            }
            Err(TryLockError::Error(error)) => return Err(failed(error.to_string())),
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(there)) = (file.metadata(), std::fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (there.dev(), there.ino())
}

fn hash_file(file: &mut File, hasher: &mut Sha256) -> io::Result<u64> {
    file.rewind()?;
    io::copy(file, hasher)
}

/// The file that what is fetched is written to.
struct Disk<'a> {
    out: File,
    part: &'a Path,
    write: fn(&mut File, &[u8]) -> io::Result<()>,
}

fn copy(
    body: ureq::Body,
    disk: &mut Disk<'_>,
    hasher: &mut Sha256,
    done: &mut u64,
    file: &Remote,
    progress: &mut dyn FnMut(Progress<'_>),
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
            let why = format!("more than the {bytes} bytes that were announced");
            return Err(Error::Fetch { what: file.name.clone(), why });
        }
        let missing = file.bytes.map_or(n as u64, |bytes| bytes + n as u64 - *done);
        (disk.write)(&mut disk.out, &buffer[..n]).map_err(write_failed(disk.part, missing))?;
        hasher.update(&buffer[..n]);
        progress(Progress { what: &file.name, done: *done, total: file.bytes });
    }
}

/// Renames the file if its checksum is right, and deletes it otherwise.
fn finish(file: &Remote, part: &Path, path: &Path, done: u64, hasher: Sha256) -> Result<()> {
    if let Some(bytes) = file.bytes.filter(|bytes| done < *bytes) {
        let why = format!("it ended after {done} of {bytes} bytes; another try goes on from there");
        return Err(Error::Fetch { what: file.name.clone(), why });
    }
    let sha256 = hasher.finalize();
    let found = hex(&sha256);
    if let Some(expected) = file.sha256.as_ref().filter(|expected| **expected != found) {
        std::fs::remove_file(part).map_err(Error::io(part))?;
        return Err(Error::Checksum { what: file.name.clone(), found, expected: expected.clone() });
    }
    land(part, path, &sha256)
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
