//! A fake CUDA driver and compiler for machines without a GPU, built for a test, which finds them like the real ones:
//! they behave the same for host code. Kernels run on the emulator.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Set in the process that runs over the fake driver.
const MARK: &str = "LOCKSTEP_TEST_FAKE_CUDA";

/// The libraries beside the driver, each built from one source.
const LIBRARIES: [(&str, &str); 4] = [
    ("nvrtc.cpp", "libnvrtc.so.13"),
    ("nvrtc.cpp", "libnvrtc.so.12"),
    ("cublaslt.cpp", "libcublasLt.so.13"),
    ("nccl.cpp", "libnccl.so.2"),
];

/// Runs `body` in a process of its own, which is this test again and finds the fake driver; `test` is the test's own
/// name. `screws` are environment variables that control the driver.
pub fn on_fake_cuda<Body: FnOnce()>(test: &str, screws: &[(&str, &str)], body: Body) {
    if std::env::var_os(MARK).is_some() {
        return body();
    }
    let test = &in_its_module::<Body>(test);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(MARK, "1").env("LD_LIBRARY_PATH", folder());
    let output = command.envs(screws.iter().copied()).output().unwrap();
    let streams = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{test} over the fake driver:\n{}\n{}", streams[0], streams[1]);
    assert!(streams[0].contains("1 passed"), "there is no test {test}:\n{}", streams[0]);
}

/// Returns the test's name in the harness: with the module of its body's closure, without the crate.
fn in_its_module<Body>(test: &str) -> String {
    let body = std::any::type_name::<Body>();
    let function = body.split(['<', '{']).next().unwrap_or(body).trim_end_matches(':');
    let module = function.rsplit_once("::").map_or("", |(module, _)| module);
    module.split_once("::").map_or_else(|| test.to_owned(), |(_, module)| format!("{module}::{test}"))
}

/// Whether this is the process that runs a test's body.
pub fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// The folder of `libcuda.so` and the other libraries, built once from the current sources.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(build)
}

fn backend() -> PathBuf {
    // The test may be in any crate, as all crates are in one repository.
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = own.ancestors().find(|folder| folder.join("worker/backend/tests/fake_cuda").exists());
    root.expect("tests run in a checkout of the repository").join("worker/backend")
}

fn build() -> PathBuf {
    let backend = backend();
    let folders = ["emulator", "src/cuda/kernels", "tests/fake_cuda"].map(|folder| backend.join(folder));
    let mut sources: Vec<PathBuf> = folders.iter().flat_map(|folder| files(folder)).collect();
    sources.sort();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_cuda");
    fs::create_dir_all(&target).unwrap();
    // Several tests may need it at the same time; the first one builds it. The lock is released with the file.
    let lock = File::create(target.join("lock")).unwrap();
    lock.lock().unwrap();
    let made = target.join(digest(&sources));
    if !made.join(LIBRARIES[LIBRARIES.len() - 1].1).exists() {
        fs::create_dir_all(&made).unwrap();
        let driver = folders[2].join("driver.cpp");
        run(Command::new("sh").arg(folders[0].join("build.sh")).arg(made.join("libcuda.so")).arg(driver));
        let flags = ["-std=c++17", "-O1", "-fPIC", "-shared"];
        for (source, name) in LIBRARIES {
            let (source, partial) = (folders[2].join(source), made.join("partial"));
            run(Command::new("c++").args(flags).arg(source).arg("-o").arg(&partial));
            fs::rename(partial, made.join(name)).unwrap();
        }
    }
    made
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect()
}

/// FNV-1a over names and contents: other sources get another folder.
fn digest(sources: &[PathBuf]) -> String {
    let mut state = 0xcbf2_9ce4_8422_2325u64;
    for path in sources {
        let name = path.file_name().unwrap().as_encoded_bytes().to_vec();
        for byte in name.into_iter().chain(fs::read(path).unwrap()) {
            state = (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    format!("{state:016x}")
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "the fake driver needs a C++ compiler, as `c++`: {command:?}");
}
