//! Bytes of each part of a model as stored: what a shard table is made of. Knows no ranks.

use crate::{Checkpoint, names};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub embedding: u64,
    /// By layer, in order.
    pub layers: Vec<u64>,
    pub norm: u64,
    /// Zero where the head is the embedding.
    pub head: u64,
}

impl Sizes {
    pub(crate) fn of(checkpoint: &Checkpoint) -> Sizes {
        let mut sizes = Sizes { layers: vec![0; checkpoint.spec().n_layers as usize], ..Sizes::default() };
        for expected in names::expected(checkpoint.spec()) {
            let n = (expected.shape[0] * expected.shape[1]) as u64;
            let dtype = checkpoint.stored(&expected.name).map(|(_, dtype)| dtype);
            let bytes = dtype.and_then(|dtype| dtype.bytes_of(n)).unwrap_or(0);
            match (expected.layer, expected.name.as_str()) {
                (Some(layer), _) => sizes.layers[layer as usize] += bytes,
                (None, names::EMBEDDING | names::POSITIONS) => sizes.embedding += bytes,
                (None, names::HEAD) => sizes.head += bytes,
                (None, _) => sizes.norm += bytes,
            }
        }
        sizes
    }

    pub fn total(&self) -> u64 {
        self.embedding + self.layers.iter().sum::<u64>() + self.norm + self.head
    }
}
