//! Serves the model's files to workers that have no copy. Knows which files they are and where their layers lie, and
//! reads no other files.

use crate::event::ModelOnDisk;
use checkpoint::{Checkpoint, FileStamp, SourceFile, spans};
use proto::cluster::{LayerBytes, ModelBytes, ModelFile, ModelFiles, ReadModelRequest};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// The bytes that are read and checked at once.
const MESSAGE_BYTES: usize = 1 << 20;
/// Messages that wait for one reader.
const MESSAGES_UNREAD_MAX: usize = 4;
/// The most reads at once; each has a thread for as long as its reader takes bytes.
const READS_MAX: usize = 64;
/// A worker that waits for its turn longer than this is refused, and may try again.
const TURN_MAX: Duration = Duration::from_secs(20);

pub(crate) type ModelStream = ReceiverStream<Result<ModelBytes, Status>>;

pub(crate) struct ModelLibrary {
    model: PathBuf,
    /// Opened at the first request: most clusters have the model on every machine.
    shared: OnceCell<Arc<SharedFiles>>,
    reads: Arc<Semaphore>,
}

struct SharedFiles {
    files: ModelFiles,
    /// The paths, and their stamps when they were opened: all that is served belongs to one model.
    lent: Vec<(PathBuf, FileStamp)>,
}

impl ModelLibrary {
    pub fn new(model: PathBuf) -> ModelLibrary {
        ModelLibrary { model, shared: OnceCell::new(), reads: Arc::new(Semaphore::new(READS_MAX)) }
    }

    pub async fn files(&self) -> Result<ModelFiles, Status> {
        Ok(self.shared().await?.files.clone())
    }

    /// Reads all of the model at its path as it is now.
    pub async fn read_from_disk(&self) -> Result<ModelOnDisk, Status> {
        let model = self.model.clone();
        let found = tokio::task::spawn_blocking(move || read_model_at(&model)).await;
        let found = found.map_err(|_| Status::internal("the model's files cannot be read"))?;
        found.map_err(|error| {
            Status::failed_precondition(format!("the model cannot be read: {error}. Nothing has changed"))
        })
    }

    async fn shared(&self) -> Result<Arc<SharedFiles>, Status> {
        let open = async {
            let model = self.model.clone();
            let opened = tokio::task::spawn_blocking(move || SharedFiles::open(&model)).await;
            let opened = opened.map_err(|_| Status::internal("the model's files cannot be listed"))?;
            opened
                .map(Arc::new)
                .map_err(|error| Status::internal(format!("the model's files cannot be shared: {error}")))
        };
        self.shared.get_or_try_init(|| open).await.cloned()
    }

    pub async fn read(&self, request: &ReadModelRequest) -> Result<ModelStream, Status> {
        let shared = self.shared().await?;
        if request.digest != shared.files.digest {
            return Err(Status::failed_precondition("this replica serves another model"));
        }
        let file = request.file as usize;
        let Some(known) = shared.files.files.get(file) else {
            return Err(Status::invalid_argument(format!("the model has no file {file}")));
        };
        if request.start > request.end || request.end > known.n_bytes {
            let (start, end, n_bytes) = (request.start, request.end, known.n_bytes);
            return Err(Status::invalid_argument(format!(
                "bytes {start}..{end} are outside the file of {n_bytes} bytes"
            )));
        }
        let turn = tokio::time::timeout(TURN_MAX, self.reads.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(Status::resource_exhausted("too many workers read the model at once"));
        };
        let (messages, stream) = mpsc::channel(MESSAGES_UNREAD_MAX);
        let range = request.start..request.end;
        tokio::task::spawn_blocking(move || send_range(&shared.lent[file], range, &messages, turn));
        Ok(ReceiverStream::new(stream))
    }
}

fn read_model_at(model: &Path) -> checkpoint::Result<ModelOnDisk> {
    let checkpoint = Checkpoint::open(model)?;
    Ok(ModelOnDisk { fingerprint: checkpoint.fingerprint()?, runs: checkpoint.hash_weights()? })
}

impl SharedFiles {
    fn open(model: &Path) -> checkpoint::Result<SharedFiles> {
        let digest = Checkpoint::open(model)?.fingerprint()?.to_vec();
        let (mut files, mut lent) = (Vec::new(), Vec::new());
        for file in spans::of_model(model)? {
            let span = |span: &spans::TensorSpan| LayerBytes {
                layer: span.layer,
                start: span.bytes.start,
                end: span.bytes.end,
            };
            files.push(ModelFile {
                name: file.name.clone(),
                n_bytes: file.stamp.n_bytes(),
                spans: file.spans.iter().map(span).collect(),
            });
            lent.push((file.path, file.stamp));
        }
        let files = ModelFiles { digest, name: name_of(model), is_folder: model.is_dir(), files };
        Ok(SharedFiles { files, lent })
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Ends when the range is read or the reader is gone.
fn send_range(
    (path, stamp): &(PathBuf, FileStamp),
    range: std::ops::Range<u64>,
    messages: &mpsc::Sender<Result<ModelBytes, Status>>,
    _turn: OwnedSemaphorePermit,
) {
    let mut start = range.start;
    let read = || {
        let file = SourceFile::open_again(path, stamp)?;
        while start < range.end {
            let n_bytes = usize::try_from(range.end - start).unwrap_or(usize::MAX).min(MESSAGE_BYTES);
            let mut bytes = vec![0; n_bytes];
            file.read_at(start, &mut bytes)?;
            // Checked before the bytes are sent: whatever a reader has was checked.
            file.check_unchanged()?;
            let checksum = blake3::hash(&bytes).as_bytes().to_vec();
            if messages.blocking_send(Ok(ModelBytes { start, bytes, checksum })).is_err() {
                break;
            }
            start += n_bytes as u64;
        }
        checkpoint::Result::Ok(())
    };
    if let Err(error) = { read }() {
        let _gone = messages.blocking_send(Err(Status::data_loss(error.to_string())));
    }
}

#[cfg(test)]
mod tests;
