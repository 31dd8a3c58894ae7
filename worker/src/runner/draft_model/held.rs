//! The sequences for which a model guesses, and the blocks of its cache. Has no knowledge of passes.

use super::drafted::{DraftMemory, FreeDraftBlocks};
use backend::Device;
use model::KvCache;
use std::collections::HashMap;
use types::{Goal, Request, RequestId, Step};

/// One sequence's part of a cache of guesses.
pub(in crate::runner) trait CachedLog: Default {
    fn restart(&mut self, request: &Request, context: usize);

    fn memory(&mut self) -> &mut DraftMemory;
}

pub(in crate::runner) struct CachedLogs<S> {
    pub held: HashMap<RequestId, S>,
    /// Ended sequences, reused for their memory.
    spare: Vec<S>,
    pub free: FreeDraftBlocks,
}

impl<S: CachedLog> CachedLogs<S> {
    pub fn new(running_max: usize, free: FreeDraftBlocks) -> CachedLogs<S> {
        CachedLogs { held: HashMap::with_capacity(running_max), spare: Vec::with_capacity(running_max), free }
    }

    /// Applies the ends and starts of a step.
    pub fn begin<D: Device>(&mut self, step: &Step, context: usize, kv: &mut KvCache<D>, device: &D) {
        step.ends.iter().for_each(|id| self.forget(*id));
        for request in step.starts.iter().filter(|request| request.goal == Goal::Generate) {
            self.forget(request.id);
            let mut sequence = self.spare.pop().unwrap_or_default();
            sequence.restart(request, context);
            self.held.insert(request.id, sequence);
        }
        self.clear_freed_blocks(kv, device);
    }

    /// Forgets all sequences.
    pub fn forget_all<D: Device>(&mut self, kv: &mut KvCache<D>, device: &D) {
        for (_, mut sequence) in self.held.drain() {
            self.free.take_back(sequence.memory());
        }
        self.clear_freed_blocks(kv, device);
    }

    fn forget(&mut self, id: RequestId) {
        if let Some(mut sequence) = self.held.remove(&id) {
            self.free.take_back(sequence.memory());
            self.spare.push(sequence);
        }
    }

    fn clear_freed_blocks<D: Device>(&mut self, kv: &mut KvCache<D>, device: &D) {
        if let Some(blocks) = self.free.uncleared() {
            kv.clear(device, blocks);
            blocks.iter_mut().for_each(Vec::clear);
        }
    }
}
