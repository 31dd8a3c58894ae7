//! The cost of a draft model beside the model that it guesses for: memory on the sampling rank, and the time of each
//! pass. Knows no machines.

use super::blueprint::PlacementPolicy;
use super::shape::{ModelShape, PartMeasurer};
use types::cache::{DRAFT_STATES_MAX, blocks_for};
use types::{DeviceClass, Unsupported};

/// The KV cache of a draft model, unless a size is given: so many whole contexts, and no more than these bytes. Beside
/// it the states of as many sequences.
const CONTEXTS_BY_DEFAULT: u32 = 8;
const KV_BYTES_BY_DEFAULT_MAX: u64 = 256 << 20;

/// The cost of a draft model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftModelCost {
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    /// One of its passes, in thousandths of the target's: by the bytes that each reads.
    pub pass_permille: u32,
}

impl DraftModelCost {
    /// `kv_memory` is the size of its KV cache, if it was given.
    pub fn of(
        draft: &ModelShape,
        target: &ModelShape,
        policy: &PlacementPolicy,
        class: DeviceClass,
        kv_memory: Option<u64>,
    ) -> Result<DraftModelCost, Unsupported> {
        let whole =
            |shape: &ModelShape| PartMeasurer::new(shape, class, policy.kv_dtype).stage(0, 1, 0..shape.n_layers);
        let (of_draft, of_target) = (whole(draft), whole(target));
        let bytes = |is_state: bool| -> u64 {
            let groups = draft.cache.groups().iter().zip(&of_draft.block_bytes);
            groups.filter(|(group, _)| group.is_state() == is_state).map(|(_, bytes)| bytes).sum()
        };
        let (block_bytes, state_bytes) = (bytes(false), bytes(true).saturating_mul(DRAFT_STATES_MAX.into()));
        let context = policy.context.unwrap_or(target.context).min(draft.context);
        let n_sequences = u64::from(policy.running_max.clamp(1, CONTEXTS_BY_DEFAULT));
        let by_default = || {
            let n_blocks = n_sequences * u64::from(blocks_for(context));
            let of_blocks = n_blocks.saturating_mul(block_bytes).min(KV_BYTES_BY_DEFAULT_MAX).max(block_bytes);
            of_blocks.saturating_add(n_sequences.saturating_mul(state_bytes))
        };
        let kv_bytes = kv_memory.unwrap_or_else(by_default);
        if kv_bytes < block_bytes.saturating_add(state_bytes) {
            return Err(Unsupported(
                "a KV cache of a draft model that is smaller than one block and a sequence's states",
            ));
        }
        let pass_permille = of_draft.read.saturating_mul(1000) / of_target.read.max(1);
        let pass_permille = u32::try_from(pass_permille).unwrap_or(u32::MAX);
        Ok(DraftModelCost { weight_bytes: of_draft.weights, kv_bytes, pass_permille })
    }

    /// The bytes on the rank that samples.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.kv_bytes)
    }
}
