//! How files are served while another program changes them.

use super::*;
use tokio_stream::StreamExt;

/// A copy of a model of one file, and a library that has opened it.
struct Copy {
    folder: PathBuf,
    model: PathBuf,
    library: ModelLibrary,
    files: ModelFiles,
}

impl Copy {
    async fn listed(name: &str) -> Copy {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/gguf-llama3/model.gguf");
        let folder = std::env::temp_dir().join(format!("lockstep-library-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let model = folder.join("model.gguf");
        std::fs::copy(from, &model).unwrap();
        let library = ModelLibrary::new(model.clone());
        let files = library.files().await.unwrap();
        Copy { folder, model, library, files }
    }

    async fn read_all(&self) -> Result<u64, Status> {
        let end = self.files.files[0].n_bytes;
        let request = ReadModelRequest { digest: self.files.digest.clone(), file: 0, start: 0, end };
        let (mut stream, mut n_bytes) = (self.library.read(&request).await?, 0);
        while let Some(message) = stream.next().await {
            n_bytes += message?.bytes.len() as u64;
        }
        Ok(n_bytes)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test]
async fn changed_file_is_not_served() {
    let copy = Copy::listed("changed").await;
    assert_eq!(copy.read_all().await.unwrap(), copy.files.files[0].n_bytes);
    let file = std::fs::File::options().write(true).open(&copy.model).unwrap();
    file.set_len(copy.files.files[0].n_bytes / 2).unwrap();
    let refused = copy.read_all().await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::DataLoss);
    for expect in ["model.gguf has changed while it was read", "bytes, but had"] {
        assert!(refused.message().contains(expect), "{refused}");
    }
    // It is no longer a valid model either, which a reload would require.
    let refused = copy.library.read_from_disk().await.unwrap_err();
    assert!(refused.message().contains("is it cut off?"), "{refused}");
    assert!(refused.message().contains("Nothing has changed"), "{refused}");
}
