//! Paged K and V on the CPU, and rotary positions.
//!
//! ```text
//! layer · block · KV head ·  K  [head_dim, 16 positions]     sixteen positions are sixteen lanes of a score
//!                            V  [16 positions, head_dim]     and head_dim the lanes of a weighted sum
//! ```
//! So a page of a head is one run of bytes, and so is a block of a layer. The layout in eight bits is in `int8`.

pub(crate) mod int8;

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::memory::{HostMemory, SharedPtr};
use super::vector::Vector;
use crate::{
    AttentionCall, AttentionHeads, BlockMemory, ChangeBlocks, Error, KvSpec, PackedBytes, PageCopy, PageMover, Result,
    RopeStyle, WritePage,
};
use std::ops::Range;
use std::sync::{Arc, Mutex, TryLockError};
use types::{BLOCK_TOKENS, BlockId, KvDtype, KvLayout};

const POSITIONS: usize = BLOCK_TOKENS as usize;

/// The largest head dimension, which attention keeps on its stack.
pub(crate) const HEAD_DIM_MAX: usize = 512;

/// Room for the weighted values of a query. One register more than a head, so that those of several queries do not
/// share the lines of a cache.
pub(crate) const VALUES_MAX: usize = HEAD_DIM_MAX + LANES;

pub(crate) const WORKING_BYTES: usize = 2 << 20;

pub struct Kv {
    pub(crate) spec: KvSpec,
    n_kv_heads: usize,
    head_dim: usize,
    /// Elements of one head's K (or V) in one block; bytes in int8, whose scales are among them.
    half_page: usize,
    /// Shared with the thread that commits them.
    pages: Arc<HostMemory>,
    /// Working memory for each thread, where the pages are those of recurrent layers.
    spare: Vec<Mutex<HostMemory>>,
    /// Working memory of attention. What it does not touch is not taken from the system.
    pub(crate) working: Mutex<HostMemory>,
}

/// The blocks of a cache, for copies from and to other threads.
pub(crate) struct CpuPages {
    pages: Arc<HostMemory>,
    spec: KvSpec,
}

impl PageMover for CpuPages {
    fn block_bytes(&self) -> usize {
        self.spec.layout.page_bytes(self.spec.dtype) as usize
    }

    fn copy(&self, block: BlockId) -> Option<PageCopy> {
        let layers = (0..self.spec.n_layers).map(|layer| &self.pages.bytes()[block_range(&self.spec, layer, block)]);
        let page = layers.collect::<Vec<_>>().concat();
        Some(Box::new(move || Ok(page)))
    }

    fn writer(&self) -> Result<WritePage> {
        let (pages, spec, n_bytes) = (self.pages.clone(), self.spec, self.block_bytes());
        Ok(Box::new(move |block, page| {
            assert!(page.len() == n_bytes * spec.n_layers, "a page of {spec:?}");
            let memory = SharedPtr::new(pages.start());
            for (layer, from) in page.chunks_exact(n_bytes).enumerate() {
                let bytes = block_range(&spec, layer, block);
                // SAFETY: `block_range` checked its indices, and by the contract of `WritePage` nothing else uses it.
                unsafe { memory.part(bytes.start, bytes.len()) }.copy_from_slice(from);
            }
            Ok(())
        }))
    }
}

/// K or V of a page, `F16` as bits.
pub(crate) enum KvPlane<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
}

impl Kv {
    /// At most `n_threads` work on it at the same time.
    pub fn new(spec: KvSpec, n_threads: usize) -> Result<Kv> {
        match spec.dtype {
            KvDtype::F16 | KvDtype::F32 | KvDtype::Int8 => {}
            KvDtype::Bf16 => return Err(types::Unsupported("a KV cache of bf16 on the CPU").into()),
            KvDtype::Fp8 => return Err(types::Unsupported("a KV cache of fp8 on the CPU").into()),
        }
        let (n_kv_heads, head_dim) = spec.heads()?;
        if head_dim > HEAD_DIM_MAX || !head_dim.is_multiple_of(2) {
            return Err(Error::Shape(format!("a head of {head_dim} (even, at most {HEAD_DIM_MAX})")));
        }
        let sizes = spec.sizes(spec.layout.page_bytes(spec.dtype));
        let (_, n_bytes) = sizes.ok_or_else(|| Error::Shape(format!("a cache of {spec:?}")))?;
        let spare = match spec.layout {
            KvLayout::State { n: 1.., state, row } => {
                // Two pages, and the values computed from the rows of a block.
                let n_numbers = 2 * (state as usize + POSITIONS * row as usize) + 2 * POSITIONS * row as usize;
                (0..n_threads)
                    .map(|_| Ok(Mutex::new(HostMemory::zeroed("scratch", n_numbers * 4)?)))
                    .collect::<Result<_>>()?
            }
            _ => Vec::new(),
        };
        let half_page = POSITIONS * (spec.dtype.row_bytes(head_dim as u32) as usize / spec.dtype.bytes());
        let pages = Arc::new(HostMemory::zeroed("the KV cache", n_bytes)?);
        let working = Mutex::new(HostMemory::zeroed("scratch", WORKING_BYTES)?);
        Ok(Kv { spec, n_kv_heads, head_dim, half_page, pages, spare, working })
    }

    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    /// Checks that an operation's layer and heads are those of this cache.
    pub(crate) fn check(&self, heads: &AttentionHeads, layer: usize) {
        let fits = self.n_kv_heads == heads.n_kv_heads && self.head_dim == heads.head_dim;
        let is_read = heads.n_heads > 0 && heads.per_kv > 0 && heads.kv_head_of(heads.n_heads - 1) < heads.n_kv_heads;
        assert!(
            fits && is_read && layer < self.spec.n_layers,
            "{heads:?} of layer {layer} in a cache of {:?}",
            self.spec
        );
    }

    /// Checks that the state of a recurrent layer has the layout that this cache was made for.
    pub(crate) fn check_recurrent(&self, layout: KvLayout, layer: usize) {
        let fits = self.spec.layout == layout && layer < self.spec.n_layers;
        assert!(fits, "{layout:?} of layer {layer} in a cache of {:?}", self.spec);
    }

    /// Calls `work` with memory for a thread that works on pages of recurrent layers.
    pub(crate) fn with_spare(&self, work: impl FnOnce(&mut [f32])) {
        let mut free = self.spare.iter().find_map(|spare| match spare.try_lock() {
            Ok(spare) => Some(spare),
            // An aborted operation's leftovers are overwritten.
            Err(TryLockError::Poisoned(spare)) => Some(spare.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        });
        work(free.as_mut().expect("as many as there are threads").floats_mut());
    }

    /// Returns all numbers of a recurrent head's page.
    ///
    /// # Safety
    /// No other thread writes the page while it lives, and a writer has exclusive access.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller promises exclusive access to this part")]
    pub(crate) unsafe fn recurrent_page(&self, layer: usize, block: BlockId, head: usize) -> &mut [f32] {
        let (bytes, n) =
            (block_range(&self.spec, layer, block), self.spec.layout.page_bytes(self.spec.dtype) as usize / 4);
        let n_numbers = n / self.n_kv_heads;
        debug_assert!(self.spec.layout.is_state() && head < self.n_kv_heads);
        // SAFETY: inside the block, whose indices were checked; pages are aligned for f32. The rest is promised.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.pages.start().cast::<f32>().add(bytes.start / 4 + head * n_numbers),
                n_numbers,
            )
        }
    }

    /// Clears these blocks in every layer.
    pub(crate) fn clear(&mut self, blocks: &[BlockId]) {
        let pages = SharedPtr::new(self.pages.start());
        for layer in 0..self.spec.n_layers {
            for block in blocks {
                let bytes = block_range(&self.spec, layer, *block);
                // SAFETY: `block` checked its indices, and `&mut self` keeps operations away; committing reads nothing.
                unsafe { pages.part(bytes.start, bytes.len()) }.fill(0);
            }
        }
    }

    /// Returns the memory of its blocks. None if the system has already provided all of it.
    pub(crate) fn block_memory(&self) -> Option<BlockMemory> {
        // SAFETY: `BlockMemory::release` is for blocks that no pass uses.
        let release = |pages: &HostMemory, bytes| unsafe { pages.release(bytes) };
        self.pages.is_lazy().then(|| BlockMemory {
            commit: self.change_every_layer(HostMemory::populate),
            release: self.change_every_layer(release),
        })
    }

    /// Calls `change` with the bytes of a range of blocks, once for each layer.
    fn change_every_layer(
        &self,
        change: impl Fn(&HostMemory, Range<usize>) -> std::io::Result<()> + Send + 'static,
    ) -> ChangeBlocks {
        let (pages, KvSpec { n_layers, n_blocks, .. }) = (self.pages.clone(), self.spec);
        let n_bytes = self.spec.layout.page_bytes(self.spec.dtype) as usize;
        Box::new(move |blocks| {
            let of_layer = |layer: usize| {
                let first = layer * n_blocks;
                let end = first + (blocks.end as usize).min(n_blocks);
                change(&pages, (first + blocks.start as usize) * n_bytes..end * n_bytes)
            };
            (0..n_layers).try_for_each(of_layer)
        })
    }

    pub(crate) fn read_block(&self, layer: usize, block: BlockId) -> Vec<u8> {
        self.pages.bytes()[block_range(&self.spec, layer, block)].to_vec()
    }

    pub(crate) fn page_mover(&self) -> CpuPages {
        CpuPages { pages: self.pages.clone(), spec: self.spec }
    }

    /// Returns the distance from K to V.
    pub(crate) fn k_to_v_distance(&self) -> usize {
        self.half_page
    }

    /// Returns the element at which a head's page begins: K, then V.
    #[inline(always)]
    pub(crate) fn page_start(&self, layer: usize, block: u32, head: usize) -> usize {
        debug_assert!(layer < self.spec.n_layers && head < self.n_kv_heads);
        assert!((block as usize) < self.spec.n_blocks, "block {block} of {}", self.spec.n_blocks);
        ((layer * self.spec.n_blocks + block as usize) * self.n_kv_heads + head) * 2 * self.k_to_v_distance()
    }

    /// Converts a half page to f32.
    #[inline(always)]
    pub(crate) fn widen<L: Lanes>(&self, start: usize, to: &mut [f32]) {
        let n = to.len();
        match self.spec.dtype {
            KvDtype::F32 => to.copy_from_slice(&self.pages.floats()[start..start + n]),
            KvDtype::F16 => {
                let from = &self.f16_bits()[start..start + n];
                for (from, to) in from.as_chunks::<LANES>().0.iter().zip(to.as_chunks_mut::<LANES>().0) {
                    L::from_f16(from).store(to);
                }
            }
            KvDtype::Int8 => unreachable!("int8 is read without conversion"),
            KvDtype::Bf16 | KvDtype::Fp8 => unreachable!("`new` refuses it"),
        }
    }

    /// Returns `n` stored numbers of half a page.
    #[inline(always)]
    pub(crate) fn half(&self, start: usize, n: usize) -> KvPlane<'_> {
        match self.spec.dtype {
            KvDtype::F32 => KvPlane::F32(&self.pages.floats()[start..start + n]),
            KvDtype::F16 => KvPlane::F16(&self.f16_bits()[start..start + n]),
            KvDtype::Int8 => unreachable!("int8 is read without conversion"),
            KvDtype::Bf16 | KvDtype::Fp8 => unreachable!("`new` refuses it"),
        }
    }

    fn f16_bits(&self) -> &[u16] {
        bytemuck::cast_slice(self.pages.bytes())
    }
}

/// Returns the bytes of all heads' pages of a block.
fn block_range(spec: &KvSpec, layer: usize, block: BlockId) -> Range<usize> {
    let (KvSpec { n_layers, n_blocks, .. }, block) = (*spec, block.0 as usize);
    assert!(layer < n_layers && block < n_blocks, "block {block} of {n_blocks}, layer {layer} of {n_layers}");
    let n_bytes = spec.layout.page_bytes(spec.dtype) as usize;
    let start = (layer * n_blocks + block) * n_bytes;
    start..start + n_bytes
}

/// Cosines and sines, `[n_positions, half_dim]` each.
pub struct Rope {
    cos: Vector,
    sin: Vector,
    half_dim: usize,
    style: RopeStyle,
}

impl Rope {
    pub fn new(cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Rope> {
        let overlaps = matches!(style, RopeStyle::Apart(n) if n < half_dim);
        if cos.len() != sin.len() || half_dim == 0 || !cos.len().is_multiple_of(half_dim) || overlaps {
            return Err(Error::Shape(format!("{} cosines, {} sines, rows of {half_dim}", cos.len(), sin.len())));
        }
        Ok(Rope { cos: Vector::new(cos), sin: Vector::new(sin), half_dim, style })
    }

    pub fn bytes(&self) -> [PackedBytes; 2] {
        [self.cos.bytes(), self.sin.bytes()]
    }

    /// Turns `half_dim` pairs of a head.
    #[inline(always)]
    fn rotate(&self, head: &mut [f32], position: usize) {
        let cos = &self.cos[position * self.half_dim..][..self.half_dim];
        let sin = &self.sin[position * self.half_dim..][..self.half_dim];
        let apart = if let RopeStyle::Apart(n) = self.style { n } else { self.half_dim };
        match self.style {
            RopeStyle::Halves | RopeStyle::Apart(_) => {
                let (low, high) = head[..apart + self.half_dim].split_at_mut(apart);
                for (((x, y), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    (*x, *y) = turned(*x, *y, *c, *s);
                }
            }
            RopeStyle::Pairs => {
                for ((pair, c), s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                    *pair = turned(pair[0], pair[1], *c, *s).into();
                }
            }
        }
    }
}

#[inline(always)]
fn turned(x: f32, y: f32, cos: f32, sin: f32) -> (f32, f32) {
    (x.mul_add(cos, -(y * sin)), y.mul_add(cos, x * sin))
}

/// Applies the rope to Q and K of some rows, if there is one, and stores K and V.
pub(crate) struct RopeStore<'a> {
    pub qkv: SharedPtr<f32>,
    pub rope: Option<&'a Rope>,
    pub call: &'a AttentionCall<'a>,
    pub kv: &'a Kv,
    pub rows: Range<usize>,
}

impl Kernel for RopeStore<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let AttentionCall { pass, group, .. } = *self.call;
        for (i, slice) in pass.slices.iter().enumerate() {
            let start = self.rows.start.max(slice.rows.start as usize);
            let end = self.rows.end.min(slice.rows.end as usize);
            let blocks = pass.tables.group(group).blocks_of(i);
            for row in start..end {
                let position = slice.range.start as usize + row - slice.rows.start as usize;
                self.row::<L>(row, position, blocks[position / POSITIONS].0);
            }
        }
    }
}

impl RopeStore<'_> {
    #[inline(always)]
    fn row<L: Lanes>(&self, row: usize, position: usize, block: u32) {
        let AttentionHeads { n_heads, head_dim, .. } = *self.call.heads;
        let (n_cols, n_kv_heads) = (self.call.heads.qkv_cols(), self.call.heads.n_stored());
        // SAFETY: the op checked the shape; one thread has each row.
        let row = unsafe { self.qkv.part(row * n_cols, n_cols) };
        let (turning, v) = row.split_at_mut((n_heads + n_kv_heads) * head_dim);
        if let Some(rope) = self.rope {
            turning.chunks_exact_mut(head_dim).for_each(|head| rope.rotate(head, position));
        }
        let k = &turning[n_heads * head_dim..];
        for head in 0..n_kv_heads {
            let heads = head * head_dim..(head + 1) * head_dim;
            let page = self.kv.page_start(self.call.layer, block, head);
            // SAFETY: a (block, position) belongs to one row of a step, and nothing reads it before the op is over.
            unsafe { self.kv.store::<L>(page, position % POSITIONS, &k[heads.clone()], &v[heads]) };
        }
    }
}

impl Kv {
    /// # Safety
    /// No other thread touches this position of this page.
    #[inline(always)]
    unsafe fn store<L: Lanes>(&self, page: usize, slot: usize, k: &[f32], v: &[f32]) {
        let v_start = page + self.k_to_v_distance() + slot * self.head_dim;
        debug_assert!((v_start + v.len()) * self.spec.dtype.bytes() <= self.pages.n_bytes());
        // SAFETY: inside the page, which is inside the pages: `page` checked its indices.
        unsafe {
            match self.spec.dtype {
                KvDtype::F16 => {
                    let to = self.pages.start().cast::<u16>();
                    narrow::<L>(k, |i, x| *to.add(page + i * POSITIONS + slot) = x);
                    narrow::<L>(v, |i, x| *to.add(v_start + i) = x);
                }
                KvDtype::F32 => {
                    let to = self.pages.start().cast::<f32>();
                    k.iter().enumerate().for_each(|(i, x)| *to.add(page + i * POSITIONS + slot) = *x);
                    v.iter().enumerate().for_each(|(i, x)| *to.add(v_start + i) = *x);
                }
                KvDtype::Int8 => {
                    let to = self.pages.start();
                    int8::store_k::<L>(to.add(page), slot, k);
                    int8::store_v::<L>(to.add(page + self.half_page), slot, v);
                }
                KvDtype::Bf16 | KvDtype::Fp8 => unreachable!("`new` refuses it"),
            }
        }
    }
}

#[inline(always)]
fn narrow<L: Lanes>(from: &[f32], mut put: impl FnMut(usize, u16)) {
    for (i, from) in from.chunks(LANES).enumerate() {
        let halves = L::load_first(from).to_f16();
        halves[..from.len()].iter().enumerate().for_each(|(j, half)| put(i * LANES + j, *half));
    }
}
