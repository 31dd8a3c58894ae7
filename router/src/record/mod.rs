//! Keeps finished answers in files of JSON lines. Knows lines, files and their sizes; the caller defines a line's
//! content.
//!
//! ```text
//! DIR/answers-00000192f3a1b2c4-8f3e21aa.jsonl   whole: renamed from .open when it was full or its router ended
//! DIR/answers-00000192f3b77e01-8f3e21aa.open    the one that is written; its last line may be half
//! ```
//! Names begin with the milliseconds since 1970 in hexadecimal, so their order is that of time.

mod find;
mod folder;

pub use find::{find, lines};
pub use folder::{RecordConfig, RecordFolder};

use std::io;
use std::thread::JoinHandle;
use telemetry::metrics;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Writes what comes, on a thread of its own, until it is ended and has written what came before.
pub fn start<T: Send + 'static>(
    config: &RecordConfig,
    nonce: u32,
    mut answers: mpsc::Receiver<T>,
    until: CancellationToken,
    line: impl Fn(&T) -> String + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let mut folder = RecordFolder::open(config, nonce)?;
    let runtime = Handle::current();
    let write = move || {
        let mut next = || match runtime.block_on(until.run_until_cancelled(answers.recv())) {
            Some(answer) => answer,
            None => answers.try_recv().ok(),
        };
        let mut is_failing = false;
        while let Some(answer) = next() {
            let written = folder.add(&line(&answer));
            metrics::records(if written.is_ok() { "written" } else { "failed" }, 1);
            let n_removed = folder.take_removed();
            if n_removed > 0 {
                metrics::records("removed", n_removed);
                tracing::warn!(n_removed, "the open record file was removed: starting another");
            }
            match &written {
                Err(error) if !is_failing => tracing::warn!(%error, "answers cannot be recorded"),
                Ok(()) if is_failing => tracing::info!("answers are recorded again"),
                _ => {}
            }
            is_failing = written.is_err();
        }
        if let Err(error) = folder.close() {
            tracing::warn!(%error, "the record could not be closed: its last file keeps the ending .open");
        }
    };
    std::thread::Builder::new().name("record".into()).spawn(write)
}
