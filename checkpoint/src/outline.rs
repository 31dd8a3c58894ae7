//! Identifies a model before it is read: its shape, and for each weight the name, the type and a sample of its bytes.
//! Proves nothing of the bytes in between; the hashes of what was read do (`hashing.rs`).

use crate::safetensors::SCALES;
use crate::tensor::Tensor;
use crate::{Checkpoint, ModelSpec, Result, WeightFiles, names};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::HashSet;

/// How many of a weight's first bytes are sampled, and of its last.
const SAMPLE_BYTES: usize = 4096;

impl Checkpoint {
    /// Identifies the model: the differences between models of one shape (a training step, a fine-tune, another
    /// quantization) change each matrix from end to end.
    ///
    /// Hashes the spec, and for each tensor of the model its name, type, shape, and first and last 4 KiB, and the same
    /// of its scales if it has some: a start must not read a model twice. Damage in between is found when the bytes are
    /// read.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        let mut hasher = Sha256::new();
        // The name is for people: two folders with the same weights are the same model.
        hasher.update(format!("{:?}", ModelSpec { name: String::new(), ..self.spec.clone() }));
        let mut sampled = HashSet::new();
        for expected in names::required_tensors(&self.spec) {
            let Some(source) = self.sources.get(&expected.name) else { continue };
            let Some(tensor) = self.find_stored(&source.file) else { continue };
            hasher.update(format!("{} {} {:?}\n", expected.name, tensor.dtype.name(), expected.shape));
            // Several may share one tensor of the file.
            if sampled.insert(&source.file) {
                hash_sample(&mut hasher, &tensor)?;
            }
        }
        Ok(hasher.finalize().into())
    }

    /// The file's names of tensors that no rank of any grid reads.
    pub fn unread_tensors(&self) -> Vec<String> {
        let used: HashSet<Cow<'_, str>> =
            self.sources.values().flat_map(|source| crate::names_in_folder(&source.file)).collect();
        let is_used = |name: &str| {
            let scaled = SCALES.iter().find_map(|suffix| name.strip_suffix(suffix));
            used.contains(name) || scaled.is_some_and(|name| used.contains(name))
        };
        let mut unread: Vec<String> = match &self.weights {
            WeightFiles::Folder(shards) => shards.names().filter(|name| !is_used(name)).map(str::to_owned).collect(),
            WeightFiles::Gguf(parts) => {
                parts.header.tensors().map(|(name, _)| name).filter(|name| !is_used(name)).map(str::to_owned).collect()
            }
        };
        unread.sort_unstable();
        unread
    }
}

fn hash_sample(hasher: &mut Sha256, tensor: &Tensor<'_>) -> Result<()> {
    hasher.update(tensor.edge_bytes(SAMPLE_BYTES)?);
    if let Some(scales) = tensor.scales {
        hasher.update(format!("scales {} {:?}\n", scales.dtype.name(), scales.block));
        hasher.update(scales.bytes.edge_bytes(SAMPLE_BYTES)?);
    }
    Ok(())
}
