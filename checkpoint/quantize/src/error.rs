//! What can be wrong with a model that is written again, or with the place where it is written.

use crate::encode::EncodeError;
use crate::recipe::Recipe;
use std::path::{Path, PathBuf};
use types::Dtype;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no type {name}: the types are {}", Recipe::names())]
    UnknownRecipe { name: String },
    #[error(
        "{} is a folder, and only a GGUF can be written with other types: make one with llama.cpp's \
        `convert_hf_to_gguf.py {} --outfile model.gguf`", path.display(), path.display()
    )]
    Folder { path: PathBuf },
    #[error("{} is the model itself: give another path for the result", path.display())]
    SameFile { path: PathBuf },
    #[error(transparent)]
    Model(#[from] checkpoint::Error),
    #[error("{}: the metadata key {key} is not what it should be", path.display())]
    Metadata { path: PathBuf, key: String },
    #[error("{}: the tensor {tensor} has the type {}, which cannot be read as numbers", path.display(), dtype.name())]
    NoDecoder { path: PathBuf, tensor: String, dtype: Dtype },
    #[error("row {row} of the tensor {tensor} cannot be written")]
    Row {
        tensor: String,
        row: usize,
        #[source]
        source: EncodeError,
    },
    #[error("{} cannot be written", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn write(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        |source| Error::Write { path: path.to_owned(), source }
    }
}
