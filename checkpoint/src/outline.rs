//! Which model is meant, before it is read: its shape, and of each weight the name, the type and a sample of its bytes.
//! Proves nothing of the bytes in between; the hashes of what has been read do (`hashing.rs`).

use crate::safetensors::SCALES;
use crate::tensor::Tensor;
use crate::{Checkpoint, ModelSpec, Result, Weights, names};
use sha2::{Digest, Sha256};
use std::collections::HashSet;

/// Of the first bytes of a weight, and of its last.
const SAMPLE_BYTES: usize = 4096;

impl Checkpoint {
    /// Says which model is meant: what tells two models of one shape apart (a training step, a fine-tune, another
    /// quantization) changes each matrix that it touches from end to end.
    ///
    /// Hashes the spec, and of each tensor that the model uses its name, type, shape and the first and last 4 KiB, and
    /// its scales' where it has some: a start must not read a model twice. Damage in between is found where the bytes
    /// are read.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        let mut hasher = Sha256::new();
        // The name is for people: two folders with the same weights are the same model.
        hasher.update(format!("{:?}", ModelSpec { name: String::new(), ..self.spec.clone() }));
        let mut sampled = HashSet::new();
        for expected in names::expected(&self.spec) {
            let Some(source) = self.sources.get(&expected.name) else { continue };
            let Some(tensor) = self.in_file(&source.file) else { continue };
            hasher.update(format!("{} {} {:?}\n", expected.name, tensor.dtype.name(), expected.shape));
            // Several may be in one.
            if sampled.insert(&source.file) {
                sample(&mut hasher, &tensor)?;
            }
        }
        Ok(hasher.finalize().into())
    }

    /// The files' names for the tensors that no rank of any grid reads: their bytes are of no weight.
    pub fn unread(&self) -> Vec<String> {
        let used: HashSet<&str> = self.sources.values().flat_map(|source| crate::in_folder(&source.file)).collect();
        let is_used = |name: &str| {
            let scaled = SCALES.iter().find_map(|suffix| name.strip_suffix(suffix));
            used.contains(name) || scaled.is_some_and(|name| used.contains(name))
        };
        let mut unread: Vec<String> = match &self.weights {
            Weights::Folder(shards) => shards.names().filter(|name| !is_used(name)).map(str::to_owned).collect(),
            Weights::Gguf(parts) => {
                parts.header.tensors().map(|(name, _)| name).filter(|name| !is_used(name)).map(str::to_owned).collect()
            }
        };
        unread.sort_unstable();
        unread
    }
}

fn sample(hasher: &mut Sha256, tensor: &Tensor<'_>) -> Result<()> {
    hasher.update(tensor.ends(SAMPLE_BYTES)?);
    if let Some(scales) = tensor.scales {
        hasher.update(format!("scales {} {:?}\n", scales.dtype.name(), scales.block));
        hasher.update(scales.bytes.ends(SAMPLE_BYTES)?);
    }
    Ok(())
}
