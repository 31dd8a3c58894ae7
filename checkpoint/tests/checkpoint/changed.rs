//! Files that change while they are read: refused by name, whatever happens to them and whenever.

use checkpoint::{Checkpoint, Error};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A copy of a model that is deleted on drop.
struct Copy {
    folder: PathBuf,
    model: PathBuf,
    /// The file with its weights.
    file: PathBuf,
}

impl Copy {
    fn of(reference: &str, file: &str, name: &str) -> Copy {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(reference);
        let folder = std::env::temp_dir().join(format!("lockstep-changed-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        let is_gguf = file.ends_with(".gguf");
        let model = if is_gguf { folder.join(file) } else { folder.clone() };
        Copy { model, file: folder.join(file), folder }
    }

    fn both(name: &str) -> [Copy; 2] {
        [
            Copy::of("gguf-llama3", "model.gguf", &format!("{name}-gguf")),
            Copy::of("llama-f32-tied", "model.safetensors", &format!("{name}-folder")),
        ]
    }

    fn set_len(&self, n_bytes: u64) {
        File::options().write(true).open(&self.file).unwrap().set_len(n_bytes).unwrap();
    }

    fn n_bytes(&self) -> u64 {
        std::fs::metadata(&self.file).unwrap().len()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.folder);
    }
}

/// Reads every tensor, and then checks that all of them came from one state of the file.
fn read_all(checkpoint: &Checkpoint, mut between: impl FnMut(usize)) -> Result<(), Error> {
    for (i, expected) in checkpoint::names::required_tensors(checkpoint.spec()).iter().enumerate() {
        between(i);
        checkpoint.tensor(&expected.name)?.read()?;
    }
    checkpoint.check_unchanged()
}

fn refused(copy: &Copy, result: Result<(), Error>, expect: &str) {
    let error = result.unwrap_err();
    assert!(matches!(&error, Error::Changed { path, .. } if *path == copy.file), "{error:?}");
    assert!(error.to_string().contains(expect), "{error}");
}

#[test]
fn what_stays_as_it_is_is_read() {
    for copy in Copy::both("same") {
        read_all(&Checkpoint::open(&copy.model).unwrap(), |_| {}).unwrap();
    }
}

/// With a memory map, this ended the process by SIGBUS.
#[test]
fn a_file_that_is_cut_short_after_it_was_opened_is_refused() {
    for copy in Copy::both("cut") {
        let checkpoint = Checkpoint::open(&copy.model).unwrap();
        copy.set_len(4096);
        refused(&copy, read_all(&checkpoint, |_| {}), "it ends before byte");
    }
}

#[test]
fn and_so_is_one_that_is_cut_short_while_tensors_are_read() {
    for copy in Copy::both("while") {
        let checkpoint = Checkpoint::open(&copy.model).unwrap();
        let half = copy.n_bytes() / 2;
        let cut = |i| {
            if i == 5 {
                copy.set_len(half);
            }
        };
        refused(&copy, read_all(&checkpoint, cut), "it ends before byte");
    }
}

/// Nothing is missing from what is read, and yet the file is another.
#[test]
fn a_file_that_grows_is_written_to_or_is_replaced_is_refused() {
    for copy in Copy::both("grows") {
        let checkpoint = Checkpoint::open(&copy.model).unwrap();
        let n_bytes = copy.n_bytes();
        copy.set_len(n_bytes + 1);
        refused(&copy, read_all(&checkpoint, |_| {}), "bytes, but had");
    }
    for copy in Copy::both("written") {
        let checkpoint = Checkpoint::open(&copy.model).unwrap();
        let later = SystemTime::now() + Duration::from_secs(5);
        File::options().write(true).open(&copy.file).unwrap().set_modified(later).unwrap();
        refused(&copy, read_all(&checkpoint, |_| {}), "it has been written to");
    }
    for copy in Copy::both("replaced") {
        let checkpoint = Checkpoint::open(&copy.model).unwrap();
        let other = copy.folder.join("other");
        std::fs::copy(&copy.file, &other).unwrap();
        std::fs::rename(&other, &copy.file).unwrap();
        refused(&copy, read_all(&checkpoint, |_| {}), "another file has replaced it");
    }
    for copy in Copy::both("gone") {
        let checkpoint = Checkpoint::open(&copy.model).unwrap();
        std::fs::remove_file(&copy.file).unwrap();
        refused(&copy, read_all(&checkpoint, |_| {}), "it is gone");
    }
}
