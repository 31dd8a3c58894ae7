//! Working memory for the draws of a pass.

use super::driver::{Context, CudaEvent, DeviceMemory, PinnedMemory};
use crate::cpu::sample::{UneditedDraw, unedited};
use crate::{Draw, DrawError, Result};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;
use types::TokenOut;

/// The inputs of a row's draw besides its logits; as in the header.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct DrawRow {
    pub key: u64,
    pub scale: f64,
    pub least: f64,
    pub is_greedy: u32,
    pub wants_logprob: u32,
}

/// The same, where tokens have to be ordered.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct FilterRow {
    pub key: u64,
    pub scale: f64,
    pub least: f64,
    pub top_p: f64,
    pub scale_f32: f32,
    pub top_k: u32,
    pub wants_logprob: u32,
    pub unused: u32,
}

/// The result of a draw; as in the header.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(super) struct DrawResult {
    pub token: u32,
    pub logprob: f32,
    pub largest: f32,
    pub log_sum: f32,
}

/// Working memory for the draws of a pass.
pub(super) struct DrawScratch {
    /// The results of both kernels for each row. [2, n_max]
    pub drawn: DeviceMemory,
    n_max: usize,
    // Kept to reuse their memory.
    pub plain: Vec<DrawRow>,
    pub filtered: Vec<FilterRow>,
    /// The answers of the one kernel, then of the other; two passes alternate.
    pub answers: [DrawReadback; 2],
    pub turn: usize,
    /// The vocabulary of the last logits.
    pub n_vocab: usize,
    /// The index of the answer to each draw of the last pass.
    entries: Vec<u32>,
    pub logits: Vec<f32>,
    pub by_host: Vec<std::result::Result<TokenOut, DrawError>>,
}

pub(super) struct DrawReadback {
    pub pinned: PinnedMemory,
    /// Marks the point behind the copy.
    pub passed: CudaEvent,
    /// The pass of these answers.
    pub pass: u64,
}

impl DrawReadback {
    fn new(context: &Arc<Context>, n_bytes: usize) -> Result<DrawReadback> {
        Ok(DrawReadback {
            pinned: PinnedMemory::zeroed(context, "draws", n_bytes)?,
            passed: CudaEvent::new(context)?,
            pass: 0,
        })
    }
}

impl DrawScratch {
    pub fn new(context: &Arc<Context>) -> Result<DrawScratch> {
        let mut room = DrawScratch {
            drawn: DeviceMemory::new(context, "draws", 0)?,
            n_max: 0,
            plain: Vec::new(),
            filtered: Vec::new(),
            answers: [DrawReadback::new(context, 0)?, DrawReadback::new(context, 0)?],
            turn: 0,
            n_vocab: 0,
            entries: Vec::new(),
            logits: Vec::new(),
            by_host: Vec::new(),
        };
        room.reserve(context, 1)?;
        Ok(room)
    }

    pub fn reserve(&mut self, context: &Arc<Context>, n_max: usize) -> Result<()> {
        if n_max > self.n_max {
            let n_bytes = 2 * n_max * size_of::<DrawResult>();
            self.drawn = DeviceMemory::new(context, "draws", n_bytes)?;
            self.answers = [DrawReadback::new(context, n_bytes)?, DrawReadback::new(context, n_bytes)?];
            self.n_max = n_max;
            self.plain.reserve(n_max);
            self.filtered.reserve(n_max);
            self.entries.reserve(n_max);
        }
        Ok(())
    }

    pub fn answer(&self, of: usize, i: usize) -> Option<DrawResult> {
        bytemuck::cast_slice(self.answers[of].pinned.bytes()).get(i).copied()
    }

    pub fn drawn_entries(&self) -> &[u32] {
        &self.entries
    }

    pub fn device_address(&self) -> u64 {
        self.drawn.address(0)
    }

    /// Writes the kernels' inputs for each row. For a row of another kernel they find the largest logit and go on.
    pub fn prepare(&mut self, draws: &[Draw<'_>], n_vocab: usize) {
        self.plain.clear();
        self.filtered.clear();
        self.entries.clear();
        for (row, draw) in draws.iter().enumerate() {
            let path = DrawPath::of(draw, n_vocab);
            let plain = DrawRow { key: 0, scale: 1.0, least: f64::NEG_INFINITY, is_greedy: 1, wants_logprob: 0 };
            let (key, scale, least) = (0, 1.0, f64::NEG_INFINITY);
            let rest =
                FilterRow { key, scale, least, top_p: 1.0, scale_f32: 1.0, top_k: 1, wants_logprob: 0, unused: 0 };
            let behind = if matches!(path, DrawPath::Filtered(_)) { draws.len() } else { 0 };
            self.entries.push((behind + row) as u32);
            self.plain.push(if let DrawPath::Plain(row) = path { row } else { plain });
            self.filtered.push(if let DrawPath::Filtered(row) = path { row } else { rest });
        }
    }
}

/// Which code draws a row.
pub(super) enum DrawPath {
    Plain(DrawRow),
    Filtered(FilterRow),
    Host,
}

impl DrawPath {
    pub fn of(draw: &Draw<'_>, n_vocab: usize) -> DrawPath {
        let Some(UneditedDraw { key, scale, scale_f32, least, top_p, top_k }) = unedited(draw) else {
            return DrawPath::Host;
        };
        let wants_logprob = draw.sampling.logprobs.is_some().into();
        let top_k = if top_k as usize >= n_vocab { 0 } else { top_k };
        if top_k == 0 && top_p >= 1.0 {
            let is_greedy = draw.sampling.is_greedy().into();
            return DrawPath::Plain(DrawRow { key, scale, least, is_greedy, wants_logprob });
        }
        DrawPath::Filtered(FilterRow { key, scale, least, top_p, scale_f32, top_k, wants_logprob, unused: 0 })
    }
}
