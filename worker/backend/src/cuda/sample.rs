//! Draws: on the device where a draw sees its row as it is and orders nothing; by the processor, from the same bits,
//! where tokens are sorted, counted or told beside the drawn one.

use super::driver::{Bytes, Context, Event, Pinned, Shape};
use super::kernels::arguments;
use super::table::Kernel;
use super::{Buffer, Cuda, lock};
use crate::cpu::sample::{Unedited, unedited};
use crate::{Draw, Drawing, Result, Sample};
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

/// Likewise, where tokens have to be ordered.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct FilterRow {
    key: u64,
    scale: f64,
    least: f64,
    top_p: f64,
    scale_f32: f32,
    top_k: u32,
    wants_logprob: u32,
    unused: u32,
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
/// A filter keeps more than the device has room to order.
const BY_HOST: u32 = u32::MAX - 1;
const THREADS: u32 = 512;
/// As in the header: tokens that a filter keeps on the device.
const SURVIVORS_MAX: usize = 1024;

/// What the draws of a pass work in.
pub(super) struct DrawScratch {
    /// Of each row what either kernel has drawn. [2, n_max]
    drawn: Bytes,
    n_max: usize,
    // Kept for their memory.
    plain: Vec<DrawRow>,
    filtered: Vec<FilterRow>,
    /// Of the one kernel, then of the other; for two passes by turns.
    answers: [Answers; 2],
    turn: usize,
    /// Of the last logits.
    n_vocab: usize,
    /// Which of what is drawn is the answer to each draw of the last pass.
    entries: Vec<u32>,
    logits: Vec<f32>,
    by_host: Vec<Option<TokenOut>>,
}

struct Answers {
    pinned: Pinned,
    /// Behind the copy.
    passed: Event,
    /// Whose they are.
    pass: u64,
}

impl Answers {
    fn new(context: &Arc<Context>, n_bytes: usize) -> Result<Answers> {
        Ok(Answers { pinned: Pinned::zeroed(context, "draws", n_bytes)?, passed: Event::new(context)?, pass: 0 })
    }
}

impl DrawScratch {
    pub fn new(context: &Arc<Context>) -> Result<DrawScratch> {
        let mut room = DrawScratch {
            drawn: Bytes::new(context, "draws", 0)?,
            n_max: 0,
            plain: Vec::new(),
            filtered: Vec::new(),
            answers: [Answers::new(context, 0)?, Answers::new(context, 0)?],
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
            let n_bytes = 2 * n_max * size_of::<Drawn>();
            self.drawn = Bytes::new(context, "draws", n_bytes)?;
            self.answers = [Answers::new(context, n_bytes)?, Answers::new(context, n_bytes)?];
            self.n_max = n_max;
            self.plain.reserve(n_max);
            self.filtered.reserve(n_max);
            self.entries.reserve(n_max);
        }
        Ok(())
    }

    fn answer(&self, of: usize, i: usize) -> Option<Drawn> {
        bytemuck::cast_slice(self.answers[of].pinned.bytes()).get(i).copied()
    }

    pub fn entries(&self) -> &[u32] {
        &self.entries
    }

    pub fn on_device(&self) -> u64 {
        self.drawn.at(0)
    }

    /// What the kernels are asked of each row. Of one that is not theirs they find the largest logit and go on.
    fn ask(&mut self, draws: &[Draw<'_>], n_vocab: usize) {
        self.plain.clear();
        self.filtered.clear();
        self.entries.clear();
        for (row, draw) in draws.iter().enumerate() {
            let way = Way::of(draw, n_vocab);
            let plain = DrawRow { key: 0, scale: 1.0, least: f64::NEG_INFINITY, is_greedy: 1, wants_logprob: 0 };
            let (key, scale, least) = (0, 1.0, f64::NEG_INFINITY);
            let rest =
                FilterRow { key, scale, least, top_p: 1.0, scale_f32: 1.0, top_k: 1, wants_logprob: 0, unused: 0 };
            let behind = if matches!(way, Way::Filtered(_)) { draws.len() } else { 0 };
            self.entries.push((behind + row) as u32);
            self.plain.push(if let Way::Plain(row) = way { row } else { plain });
            self.filtered.push(if let Way::Filtered(row) = way { row } else { rest });
        }
    }
}

/// Who draws a row.
enum Way {
    Plain(DrawRow),
    Filtered(FilterRow),
    Host,
}

impl Way {
    fn of(draw: &Draw<'_>, n_vocab: usize) -> Way {
        let Some(Unedited { key, scale, scale_f32, least, top_p, top_k }) = unedited(draw) else { return Way::Host };
        let wants_logprob = draw.sampling.logprobs.is_some().into();
        let top_k = if top_k as usize >= n_vocab { 0 } else { top_k };
        if top_k == 0 && top_p >= 1.0 {
            let is_greedy = draw.sampling.is_greedy().into();
            return Way::Plain(DrawRow { key, scale, least, is_greedy, wants_logprob });
        }
        Way::Filtered(FilterRow { key, scale, least, top_p, scale_f32, top_k, wants_logprob, unused: 0 })
    }
}

impl Drawn {
    fn told(self, draw: &Draw<'_>) -> Option<TokenOut> {
        let logprob = draw.sampling.logprobs.map(|_| self.logprob);
        (self.token != NONE).then(|| TokenOut { token: self.token, logprob, top: Vec::new() })
    }
}

impl Cuda {
    /// All rows, whoever draws them in the end; and where the answers will be: of the one kernel, then of the other.
    fn draw_on_device(&self, logits: &Buffer, draws: &[Draw<'_>], room: &mut DrawScratch) -> Result<usize> {
        room.reserve(&self.context, draws.len())?;
        room.ask(draws, logits.cols);
        room.n_vocab = logits.cols;
        let is_filtered = draws.iter().any(|draw| matches!(Way::of(draw, logits.cols), Way::Filtered(_)));
        let (from, n_vocab) = (logits.at(), logits.cols as u32);
        let shape = Shape { grid: [draws.len() as u32, 1, 1], block: [THREADS, 1, 1], shared_bytes: 0 };
        let (rows, drawn) = (self.upload(bytemuck::cast_slice(&room.plain)), room.drawn.at(0));
        // SAFETY: there are logits, questions and room for answers for so many rows.
        unsafe { self.launch(Kernel::Draw, shape, arguments![from, n_vocab, rows, drawn]) };
        if is_filtered {
            let rows = self.upload(bytemuck::cast_slice(&room.filtered));
            let drawn = room.drawn.at(draws.len() * size_of::<Drawn>());
            // SAFETY: as above; the second half of the answers is this kernel's.
            unsafe { self.launch(Kernel::DrawFiltered, shape, arguments![from, n_vocab, rows, drawn]) };
        }
        let n_bytes = if is_filtered { 2 } else { 1 } * draws.len() * size_of::<Drawn>();
        room.turn = 1 - room.turn;
        let Answers { pinned, passed, pass } = &mut room.answers[room.turn];
        // SAFETY: nobody looks at these answers before `passed` is, and the pass before the last has been answered.
        unsafe { self.stream.read(&room.drawn, 0, &mut pinned.bytes_mut()[..n_bytes]) }?;
        *pass = lock(&self.clock).end(&self.stream)?;
        passed.record(&self.stream)?;
        Ok(room.turn)
    }

    /// The answers, once they are there; of rows that are the host's, its own.
    fn collect(
        &self,
        logits: Option<&Buffer>,
        draws: &[Draw<'_>],
        n_vocab: usize,
        room: &mut DrawScratch,
        of: usize,
        out: &mut Vec<Option<TokenOut>>,
    ) {
        let waited = match room.answers[of].passed.is_passed() {
            Ok(false) => room.answers[of].passed.wait(),
            known => known.map(|_| ()),
        };
        if waited.is_ok() {
            // What could not be measured is no fault of the pass.
            let _unmeasured = lock(&self.clock).is_through(room.answers[of].pass);
        }
        // What fails is told by `settle`; until then nothing is drawn.
        let is_drawn = self.note(waited).is_some() && self.is_well();
        for (row, draw) in draws.iter().enumerate() {
            let answer = match Way::of(draw, n_vocab) {
                Way::Plain(_) => room.answer(of, row),
                Way::Filtered(_) => room.answer(of, draws.len() + row).filter(|drawn| drawn.token != BY_HOST),
                Way::Host => None,
            };
            out.push(match (answer, logits) {
                _ if !is_drawn => None,
                (Some(answer), _) => answer.told(draw),
                (None, Some(logits)) => {
                    let drawn = self.draw_by_host(logits, row, draw, room);
                    self.note(drawn).flatten()
                }
                (None, None) => unreachable!("only what the device draws alone is answered later"),
            });
        }
    }

    /// One row, by the processor.
    fn draw_by_host(
        &self,
        logits: &Buffer,
        row: usize,
        draw: &Draw<'_>,
        room: &mut DrawScratch,
    ) -> Result<Option<TokenOut>> {
        room.logits.resize(logits.cols, 0.0);
        // SAFETY: `logits` is borrowed until the stream is through.
        unsafe { self.stream.read(&logits.bytes, row * logits.cols * 4, bytemuck::cast_slice_mut(&mut room.logits)) }?;
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
        let begun = self.draw_on_device(logits, draws, &mut room);
        match self.note(begun) {
            Some(of) => self.collect(Some(logits), draws, logits.cols, &mut room, of, out),
            None => out.resize_with(draws.len(), || None),
        }
    }

    fn draws_alone(&self, draw: &Draw<'_>, n_vocab: usize) -> bool {
        match Way::of(draw, n_vocab) {
            Way::Plain(_) => true,
            // No more can be kept than it orders.
            Way::Filtered(FilterRow { top_k, .. }) => {
                n_vocab <= SURVIVORS_MAX || (1..=SURVIVORS_MAX).contains(&(top_k as usize))
            }
            Way::Host => false,
        }
    }

    fn begin_draws(&self, logits: &Buffer, draws: &[Draw<'_>]) -> Option<Drawing> {
        logits.check(draws.len(), logits.cols);
        if draws.is_empty() || !draws.iter().all(|draw| self.draws_alone(draw, logits.cols)) {
            return None;
        }
        self.to_f32(logits, draws.len());
        let mut room = lock(&self.draws);
        let begun = self.draw_on_device(logits, draws, &mut room);
        self.note(begun).map(Drawing)
    }

    fn are_drawn(&self, drawing: &Drawing) -> bool {
        let passed = lock(&self.draws).answers[drawing.0].passed.is_passed();
        self.note(passed).unwrap_or(true)
    }

    fn drawn(&self, drawing: &Drawing, draws: &[Draw<'_>], out: &mut Vec<Option<TokenOut>>) {
        out.clear();
        let mut room = lock(&self.draws);
        let n_vocab = room.n_vocab;
        self.collect(None, draws, n_vocab, &mut room, drawing.0, out);
    }
}
