//! Draws: on the device where a draw sees its row as it is and orders nothing; by the processor, from the same bits,
//! where tokens are sorted, counted or told beside the drawn one.

use super::driver::{Bytes, Context, Shape};
use super::kernels::arguments;
use super::{Buffer, Cuda, lock};
use crate::cpu::sample::{Plain, plain};
use crate::{Draw, Result, Sample};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;
use types::TokenOut;

/// What a row's draw depends on besides its logits; as in the header.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct DrawRow {
    key: u64,
    scale: f64,
    least: f64,
    is_greedy: u32,
    wants_logprob: u32,
}

/// Likewise.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Drawn {
    token: u32,
    logprob: f32,
    largest: f32,
    log_sum: f32,
}

const NONE: u32 = u32::MAX;
const THREADS: u32 = 512;

/// Room for the draws of a pass.
pub(super) struct Room {
    drawn: Bytes,
    n_max: usize,
    // Kept for their memory.
    asked: Vec<DrawRow>,
    answers: Vec<Drawn>,
    logits: Vec<f32>,
    by_host: Vec<Option<TokenOut>>,
}

impl Room {
    pub fn new(context: &Arc<Context>) -> Result<Room> {
        let mut room = Room {
            drawn: Bytes::new(context, "draws", 0)?,
            n_max: 0,
            asked: Vec::new(),
            answers: Vec::new(),
            logits: Vec::new(),
            by_host: Vec::new(),
        };
        room.reserve(context, 1)?;
        Ok(room)
    }

    pub fn reserve(&mut self, context: &Arc<Context>, n_max: usize) -> Result<()> {
        if n_max > self.n_max {
            self.drawn = Bytes::new(context, "draws", n_max * size_of::<Drawn>())?;
            self.n_max = n_max;
            self.asked.reserve(n_max);
            self.answers.reserve(n_max);
        }
        Ok(())
    }
}

impl DrawRow {
    /// None where the kernel cannot draw so.
    fn of(draw: &Draw<'_>) -> Option<DrawRow> {
        let Plain { key, scale, least } = plain(draw)?;
        let wants_logprob = draw.sampling.logprobs.is_some().into();
        Some(DrawRow { key, scale, least, is_greedy: draw.sampling.is_greedy().into(), wants_logprob })
    }

    /// A row that the host draws: the device finds its largest and goes on.
    fn idle() -> DrawRow {
        DrawRow { key: 0, scale: 1.0, least: f64::NEG_INFINITY, is_greedy: 1, wants_logprob: 0 }
    }
}

impl Drawn {
    fn told(self, draw: &Draw<'_>) -> Option<TokenOut> {
        let logprob = draw.sampling.logprobs.map(|_| self.logprob);
        (self.token != NONE).then(|| TokenOut { token: self.token, logprob, top: Vec::new() })
    }
}

impl Cuda {
    /// All rows, whoever draws them in the end. The answers are there when it returns.
    fn draw_on_device(&self, logits: &Buffer, draws: &[Draw<'_>], room: &mut Room) -> Result<()> {
        room.reserve(&self.context, draws.len())?;
        room.asked.clear();
        room.asked.extend(draws.iter().map(|draw| DrawRow::of(draw).unwrap_or_else(DrawRow::idle)));
        room.answers.clear();
        room.answers.resize(draws.len(), Drawn::default());
        let rows = self.upload(bytemuck::cast_slice(&room.asked));
        let (from, n_vocab, drawn) = (logits.at(), logits.cols as u32, room.drawn.at(0));
        let shape = Shape { grid: [draws.len() as u32, 1, 1], block: [THREADS, 1, 1], shared_bytes: 0 };
        // SAFETY: there are logits, questions and room for answers for so many rows.
        unsafe { self.launch("draw", shape, arguments![from, n_vocab, rows, drawn]) };
        // SAFETY: `answers` is borrowed until the stream is through.
        unsafe { self.stream.read(&room.drawn, 0, bytemuck::cast_slice_mut(&mut room.answers)) }?;
        self.stream.finish()
    }

    /// One row, by the processor.
    fn draw_by_host(&self, logits: &Buffer, row: usize, draw: &Draw<'_>, room: &mut Room) -> Result<Option<TokenOut>> {
        room.logits.resize(logits.cols, 0.0);
        // SAFETY: `logits` is borrowed until the stream is through.
        unsafe {
            self.stream.read(&logits.bytes, row * logits.cols * 4, bytemuck::cast_slice_mut(&mut room.logits))
        }?;
        self.stream.finish()?;
        self.host.draw_rows(&room.logits, logits.cols, std::slice::from_ref(draw), &mut room.by_host);
        Ok(room.by_host.pop().flatten())
    }
}

impl Sample for Cuda {
    fn draw(&self, logits: &Buffer, draws: &[Draw<'_>], out: &mut Vec<Option<TokenOut>>) {
        logits.check(draws.len(), logits.cols);
        out.clear();
        if draws.is_empty() || logits.cols == 0 {
            return out.resize_with(draws.len(), || None);
        }
        self.to_f32(logits, draws.len());
        let mut room = lock(&self.draws);
        // What fails is told by `settle`; until then nothing is drawn.
        let on_device = self.draw_on_device(logits, draws, &mut room);
        let is_drawn = self.note(on_device).is_some();
        for (row, draw) in draws.iter().enumerate() {
            out.push(match DrawRow::of(draw) {
                Some(_) if is_drawn => room.answers[row].told(draw),
                None if is_drawn => {
                    let drawn = self.draw_by_host(logits, row, draw, &mut room);
                    self.note(drawn).flatten()
                }
                _ => None,
            });
        }
    }
}
