//! The paged KV that a pass reads and writes. Knows no layer, and not which blocks are whose.

use crate::error::Result;
use backend::{BlockMemory, KvSpec, Memory};
use types::BlockId;

/// The paged KV of a rank's layers, one entry per cache group.
pub struct KvCache<M: Memory> {
    pub(crate) groups: Vec<M::Kv>,
}

impl<M: Memory> KvCache<M> {
    pub fn new(device: &M, specs: &[KvSpec]) -> Result<KvCache<M>> {
        let groups = specs.iter().map(|spec| device.kv(*spec)).collect::<backend::Result<_>>()?;
        Ok(KvCache { groups })
    }

    /// Clears these blocks of each group.
    pub fn clear(&mut self, device: &M, blocks: &[Vec<BlockId>]) {
        self.groups.iter_mut().zip(blocks).for_each(|(kv, blocks)| device.clear(kv, blocks));
    }

    /// The memory of each group's blocks. Empty if the system has given all.
    pub fn block_memories(&self, device: &M) -> Vec<Option<BlockMemory>> {
        let memories: Vec<_> = self.groups.iter().map(|kv| device.block_memory(kv)).collect();
        if memories.iter().any(Option::is_some) { memories } else { Vec::new() }
    }

    pub fn groups(&self) -> &[M::Kv] {
        &self.groups
    }
}
