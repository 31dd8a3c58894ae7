//! Paged K and V on the device, and attention over them. A block of threads computes some rows of a sequence and a KV
//! head or, where rows are few and late in the sequence, one tile of positions too. All ways give the same bits.

use super::buffer::{Buffer, Vector};
use super::device::Cuda;
use super::driver::{DeviceMemory, LaunchShape, PitchedRows, Stream};
use super::kernels::{HeadShape, arguments, attend_shared_bytes};
use super::lock::lock;
use super::outline::{PassOutline, TILE, n_tiles};
use super::scratch::DeviceScratch;
use super::table::Kernel;
use super::uploads;
use super::weights::GROUP;
use crate::{Attention, AttentionCall, AttentionHeads, Error, KvSpec, Pass, Result, RopeStyle, ScoreTerms};
use std::sync::Arc;
use types::{BLOCK_TOKENS, BlockId, KvDtype, Unsupported};

const POSITIONS: usize = BLOCK_TOKENS as usize;
const HEAD_DIM_MAX: usize = 256;
const FEW: u32 = 16;

/// `[layer][block][KV head][K: [16, D] | V: [D, 16]]`, the rows of K by lane.
pub struct Kv {
    spec: KvSpec,
    n_kv_heads: usize,
    head_dim: usize,
    /// Shared with the threads that move pages.
    pub(super) bytes: Arc<DeviceMemory>,
    layer_bytes: usize,
}

impl Kv {
    pub(super) fn new(cuda: &Cuda, spec: KvSpec) -> Result<Kv> {
        if spec.dtype == KvDtype::Int8 {
            return Err(Unsupported("a KV cache of int8 on CUDA").into());
        }
        if spec.dtype != KvDtype::Bf16 {
            return Err(Unsupported("a KV cache other than bf16 on CUDA").into());
        }
        if spec.layout.is_state() {
            return Err(super::recurrence::NO_RECURRENCE.into());
        }
        let (n_kv_heads, head_dim) = spec.heads()?;
        if head_dim == 0 || head_dim > HEAD_DIM_MAX || !head_dim.is_multiple_of(2) {
            return Err(Error::Shape(format!("a head of {head_dim} (even, at most {HEAD_DIM_MAX})")));
        }
        let too_big = || Error::Shape(format!("a cache of {spec:?}"));
        // A slot's number is a word.
        spec.n_blocks.checked_mul(POSITIONS).filter(|n| u32::try_from(*n).is_ok()).ok_or_else(too_big)?;
        let page_bytes = spec.layout.padded(GROUP as u32).page_bytes(spec.dtype);
        let (layer_bytes, n_bytes) = spec.sizes(page_bytes).ok_or_else(too_big)?;
        cuda.forget_graphs();
        let bytes = Arc::new(DeviceMemory::new(&cuda.context, "the KV cache", n_bytes)?);
        cuda.stream.fill(&bytes, 0)?;
        Ok(Kv { spec, n_kv_heads, head_dim, bytes, layer_bytes })
    }

    /// The operation's layer must match the layer that the cache was made for.
    fn layer_address(&self, heads: &AttentionHeads, layer: usize) -> u64 {
        let fits = self.n_kv_heads == heads.n_kv_heads && self.head_dim == heads.head_dim;
        let is_read = heads.n_heads > 0 && heads.per_kv > 0 && heads.kv_head_of(heads.n_heads - 1) < heads.n_kv_heads;
        let is_there = fits && is_read && layer < self.spec.n_layers;
        assert!(is_there, "{heads:?} of layer {layer} in a cache of {:?}", self.spec);
        self.bytes.address(layer * self.layer_bytes)
    }

    /// Zeroes the blocks in every layer. Adjacent blocks are filled at once.
    pub(super) fn clear(&self, stream: &Stream, blocks: &[BlockId]) -> Result<()> {
        for run in blocks.chunk_by(|block, next| block.0 + 1 == next.0) {
            let (at, n_bytes) = self.block_span(0, run[0]);
            let columns = PitchedRows { bytes: &self.bytes, at, pitch: self.layer_bytes };
            stream.clear_columns(columns, n_bytes * run.len(), self.spec.n_layers)?;
        }
        Ok(())
    }

    /// Returns where a block of a layer is, and its length.
    pub(super) fn block_span(&self, layer: usize, block: BlockId) -> (usize, usize) {
        let n_bytes = self.layer_bytes / self.spec.n_blocks;
        (layer * self.layer_bytes + block.0 as usize * n_bytes, n_bytes)
    }

    /// Returns the bytes of a layer and of a block of it, and the number of layers.
    pub(super) fn sizes(&self) -> (usize, usize, usize) {
        (self.layer_bytes, self.layer_bytes / self.spec.n_blocks, self.spec.n_layers)
    }

    /// Checks that all blocks of the pass are in the cache.
    fn check_blocks(&self, pass: &Pass<'_>, group: usize) {
        let n_blocks = self.spec.n_blocks;
        let is_inside = |block: &BlockId| *block == BlockId::NONE || (block.0 as usize) < n_blocks;
        assert!(pass.tables.group(group).blocks.iter().all(is_inside), "a block is beyond the {n_blocks} of the cache");
    }
}

/// Cosines and sines, `[n_positions, half_dim]` each.
pub struct Rope {
    cos: DeviceMemory,
    sin: DeviceMemory,
    half_dim: usize,
    n_positions: usize,
    style: RopeStyle,
}

impl Rope {
    pub(super) fn new(cuda: &Cuda, cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Rope> {
        if let RopeStyle::Apart(_) = style {
            return Err(Unsupported("a rope that turns the first pairs of a head only, on a GPU").into());
        }
        if half_dim == 0 || cos.len() != sin.len() || !cos.len().is_multiple_of(half_dim) {
            return Err(Error::Shape(format!("a rope of {} and {} turns by {half_dim}", cos.len(), sin.len())));
        }
        let n_positions = cos.len() / half_dim;
        Ok(Rope { cos: cuda.floats("a rope", cos)?, sin: cuda.floats("a rope", sin)?, half_dim, n_positions, style })
    }
}

/// The way to compute attention for a pass.
struct AttentionPlan {
    head_dim: usize,
    queries: u32,
    rows_per_item: u32,
    /// The first tile that some row sees.
    tile_first: u32,
    n_tiles: u32,
}

impl AttentionPlan {
    /// Returns the plan, which is the same for all passes of an outline.
    fn of(pass: &Pass<'_>, heads: &AttentionHeads, outline: Option<PassOutline>) -> AttentionPlan {
        let head_dim = heads.head_dim.next_multiple_of(GROUP);
        let many = if head_dim <= 128 { 64 } else { 32 };
        let rows_max = pass.slices.iter().map(|slice| slice.rows.len()).max().unwrap_or(0);
        let queries = if rows_max * heads.per_kv.max(1) > FEW as usize { many } else { FEW };
        let rows_per_item = queries / (heads.per_kv as u32).clamp(1, queries);
        let window = heads.window.map_or(u32::MAX, |window| window as u32);
        let first = |position: u32| (position + 1).saturating_sub(window) / TILE;
        let tile_first = pass.slices.iter().map(|slice| first(slice.range.start)).min().unwrap_or(0);
        let (tile_first, n_tiles) = match outline {
            Some(outline) => (0, outline.n_tiles),
            None => (tile_first, n_tiles(pass) - tile_first),
        };
        AttentionPlan { head_dim, queries, rows_per_item, tile_first, n_tiles }
    }

    fn grid(&self, heads: &AttentionHeads, n_items: u32, depth: u32) -> LaunchShape {
        let columns = heads.n_kv_heads as u32 * (heads.per_kv as u32).div_ceil(self.queries);
        let shared_bytes = attend_shared_bytes(self.head_dim as u32, self.queries);
        LaunchShape { grid: [n_items, columns, depth], block: [128, 1, 1], shared_bytes }
    }

    /// Returns the bytes of the partial results of tiles.
    fn partial_bytes(&self, heads: &AttentionHeads, n_rows: usize) -> usize {
        n_rows * heads.n_heads * self.n_tiles as usize * (self.head_dim + 2) * 4
    }

    fn kernel(&self) -> Kernel {
        Kernel::attend(self.head_dim, self.queries == FEW)
    }
}

/// The inputs of both ways to compute attention.
struct AttentionInputs {
    qkv: u64,
    kv: u64,
    heads: HeadShape,
    items: u64,
    n_items: u32,
    blocks: u64,
    positions: u64,
    n_rows: u32,
}

impl Cuda {
    fn attend_whole(&self, plan: &AttentionPlan, heads: &AttentionHeads, reads: &AttentionInputs, out: u64) {
        let AttentionInputs { qkv, kv, items, blocks, .. } = *reads;
        let args = arguments![qkv, kv, reads.heads, items, blocks, out];
        // SAFETY: items name rows of the pass, whose buffers and tables were checked to be large enough.
        unsafe { self.launch(plan.kernel(), plan.grid(heads, reads.n_items, 1), args) };
    }

    fn attend_split(
        &self,
        plan: &AttentionPlan,
        heads: &AttentionHeads,
        reads: &AttentionInputs,
        scratch: &DeviceScratch,
        out: u64,
    ) {
        let AttentionInputs { qkv, kv, items, blocks, positions, .. } = *reads;
        let partial = scratch.partial.address(0);
        let (tile_first, n_tiles) = (plan.tile_first, plan.n_tiles);
        let args = arguments![qkv, kv, reads.heads, items, blocks, tile_first, n_tiles, partial];
        // SAFETY: as above, and `partial` was checked to have room for all rows, heads and tiles.
        unsafe { self.launch(Kernel::attend_split(plan.head_dim), plan.grid(heads, reads.n_items, n_tiles), args) };
        let shape = LaunchShape { grid: [reads.n_rows, heads.n_heads as u32, 1], block: [32, 1, 1], shared_bytes: 0 };
        let args = arguments![partial, reads.heads, positions, tile_first, n_tiles, out];
        // SAFETY: as above.
        unsafe { self.launch(Kernel::AttendMerge, shape, args) };
    }
}

impl Attention for Cuda {
    fn check_attention(&self, heads: &AttentionHeads, norms_values: bool) -> Result<()> {
        match (heads.is_reader, norms_values) {
            _ if !heads.is_causal => Err(Unsupported("encoders, on CUDA").into()),
            (true, _) => Err(Unsupported("layers that share keys and values, on CUDA").into()),
            (_, true) => Err(Unsupported("norms of values, on CUDA").into()),
            _ => Ok(()),
        }
    }

    fn rope_store(&self, qkv: &mut Buffer, rope: Option<&Rope>, call: &AttentionCall<'_>, kv: &mut Kv) {
        let AttentionCall { pass, heads, group, layer } = *call;
        let n_rows = pass.n_rows();
        if heads.n_heads == 0 || n_rows == 0 {
            return;
        }
        qkv.check(n_rows, heads.qkv_cols());
        self.to_f32(qkv, n_rows);
        kv.check_blocks(pass, group);
        let known = rope.map_or(usize::MAX, |rope| rope.n_positions);
        assert!(pass.rows.positions.iter().all(|position| (*position as usize) < known), "positions that the rope has");
        let kv = kv.layer_address(heads, layer);
        let uploads = lock(&self.uploads);
        let Some(tables) = tables(&uploads, pass, group) else { return };
        let (positions, slots) = (uploads.batch.positions, tables.slots);
        let (cos, sin, half_dim, style) = rope.map_or((0, 0, 0, 0), |rope| {
            (rope.cos.address(0), rope.sin.address(0), rope.half_dim as u32, u32::from(rope.style == RopeStyle::Pairs))
        });
        let n_columns = (heads.n_heads + 2 * heads.n_kv_heads) as u32;
        let shape = LaunchShape { grid: [n_rows as u32, n_columns, 1], block: [32, 1, 1], shared_bytes: 0 };
        let (qkv, heads) = (qkv.address(), HeadShape::of(heads));
        let args = arguments![qkv, cos, sin, half_dim, style, heads, positions, slots, kv];
        // SAFETY: qkv has the pass's rows, the rope its positions, and every slot is in a block of the cache.
        unsafe { self.launch(Kernel::RopeStore, shape, args) };
    }

    fn attend(
        &self,
        qkv: &mut Buffer,
        kv: &Kv,
        call: &AttentionCall<'_>,
        terms: &ScoreTerms<'_, Vector>,
        out: &mut Buffer,
    ) {
        let AttentionCall { pass, heads, group, layer } = *call;
        let (n_rows, sinks) = (pass.n_rows(), terms.sinks);
        if heads.n_heads == 0 || n_rows == 0 {
            return;
        }
        qkv.check(n_rows, heads.qkv_cols());
        out.check(n_rows, heads.n_heads * heads.head_dim);
        assert!(sinks.is_none_or(|sinks| sinks.len == heads.n_heads), "a sink for each query head");
        self.to_f32(qkv, n_rows);
        out.set_bf16(true);
        let mut uploads = lock(&self.uploads);
        let plan = AttentionPlan::of(pass, heads, uploads.batch.outline);
        let Some(tables) = tables(&uploads, pass, group) else { return };
        let Some((items, n_items)) = self.keep_error(uploads.items(&self.stream, pass, group, plan.rows_per_item))
        else {
            return;
        };
        let kv = kv.layer_address(heads, layer);
        let (positions, n_rows, blocks) = (uploads.batch.positions, n_rows as u32, tables.blocks);
        let shape = HeadShape::of(heads).with_sinks(sinks.map_or(0, Vector::address));
        let reads = AttentionInputs { qkv: qkv.address(), kv, heads: shape, items, n_items, blocks, positions, n_rows };
        let scratch = self.scratch();
        let n_blocks = n_items.saturating_mul(heads.n_kv_heads as u32);
        let is_idle = n_blocks < 2 * self.card.multiprocessors && plan.queries == FEW && plan.n_tiles > 1;
        match is_idle && plan.partial_bytes(heads, pass.n_rows()) <= scratch.partial.len() {
            true => self.attend_split(&plan, heads, &reads, &scratch, out.address()),
            false => self.attend_whole(&plan, heads, &reads, out.address()),
        }
    }
}

/// Returns the tables of the current pass; None if their upload has failed.
fn tables(uploads: &uploads::Uploads, pass: &Pass<'_>, group: usize) -> Option<uploads::UploadedGroup> {
    let tables = uploads.batch.groups.get(group).copied();
    assert!(tables.is_none() || uploads.batch.n_rows == pass.n_rows(), "the tables belong to another pass");
    tables
}
