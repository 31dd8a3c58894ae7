//! Draws: on the device where a draw uses its row unedited and orders nothing. The processor draws, from the same bits,
//! where tokens are sorted, counted or returned beside the drawn one.

use super::buffer::Buffer;
use super::device::Cuda;
use super::draws::{DrawPath, DrawReadback, DrawResult, DrawScratch, FilterRow};
use super::driver::LaunchShape;
use super::kernels::arguments;
use super::lock::lock;
use super::table::Kernel;
use crate::{Draw, DrawError, DrawMask, DrawsInFlight, Sample};
use types::TokenOut;

const NONE: u32 = u32::MAX;
/// A filter keeps more tokens than the device has room to order.
const BY_HOST: u32 = u32::MAX - 1;
const THREADS: u32 = 512;
/// As in the header: the most tokens that a filter keeps on the device.
const SURVIVORS_MAX: usize = 1024;

impl DrawResult {
    fn token_out(self, draw: &Draw<'_>) -> Result<TokenOut, DrawError> {
        let logprob = draw.sampling.logprobs.map(|_| self.logprob);
        let out = TokenOut { token: self.token, logprob, top: Vec::new() };
        if self.token == NONE { Err(DrawError::NotNumbers) } else { Ok(out) }
    }
}

impl Cuda {
    /// Launches the draws of all rows, even of those that the host draws in the end. The answers are first those of one
    /// kernel, then of the other.
    fn draw_on_device(&self, logits: &Buffer, draws: &[Draw<'_>], room: &mut DrawScratch) -> crate::Result<usize> {
        room.reserve(&self.context, draws.len())?;
        room.prepare(draws, logits.cols);
        room.n_vocab = logits.cols;
        let is_filtered = draws.iter().any(|draw| matches!(DrawPath::of(draw, logits.cols), DrawPath::Filtered(_)));
        let (from, n_vocab) = (logits.address(), logits.cols as u32);
        let shape = LaunchShape { grid: [draws.len() as u32, 1, 1], block: [THREADS, 1, 1], shared_bytes: 0 };
        let (rows, drawn) = (self.upload(bytemuck::cast_slice(&room.plain)), room.drawn.address(0));
        // SAFETY: there are logits, inputs and room for answers for this many rows.
        unsafe { self.launch(Kernel::Draw, shape, arguments![from, n_vocab, rows, drawn]) };
        if is_filtered {
            let rows = self.upload(bytemuck::cast_slice(&room.filtered));
            let drawn = room.drawn.address(draws.len() * size_of::<DrawResult>());
            // SAFETY: as above; the second half of the answers is this kernel's.
            unsafe { self.launch(Kernel::DrawFiltered, shape, arguments![from, n_vocab, rows, drawn]) };
        }
        let n_bytes = if is_filtered { 2 } else { 1 } * draws.len() * size_of::<DrawResult>();
        room.turn = 1 - room.turn;
        let DrawReadback { pinned, passed, pass } = &mut room.answers[room.turn];
        // SAFETY: these answers are not read before `passed` is, and the pass before the last has been answered.
        unsafe { self.stream.read(&room.drawn, 0, &mut pinned.bytes_mut()[..n_bytes]) }?;
        *pass = lock(&self.clock).end(&self.stream)?;
        passed.record(&self.stream)?;
        Ok(room.turn)
    }

    /// Returns the answers, once they are there; for rows of the host, its own.
    fn collect(
        &self,
        logits: Option<&Buffer>,
        draws: &[Draw<'_>],
        n_vocab: usize,
        room: &mut DrawScratch,
        of: usize,
        out: &mut Vec<Result<TokenOut, DrawError>>,
    ) {
        let waited = match room.answers[of].passed.is_passed() {
            Ok(false) => room.answers[of].passed.wait(),
            known => known.map(|_| ()),
        };
        if waited.is_ok() {
            // A failed measurement is no failure of the pass.
            let _unmeasured = lock(&self.clock).add_finished(room.answers[of].pass);
        }
        // `settle` reports a failure; until then nothing is drawn.
        let is_drawn = self.keep_error(waited).is_some() && self.is_well();
        for (row, draw) in draws.iter().enumerate() {
            let answer = match DrawPath::of(draw, n_vocab) {
                DrawPath::Plain(_) => room.answer(of, row),
                DrawPath::Filtered(_) => room.answer(of, draws.len() + row).filter(|drawn| drawn.token != BY_HOST),
                DrawPath::Host => None,
            };
            out.push(match (answer, logits) {
                _ if !is_drawn => Err(DrawError::NotNumbers),
                _ if draw.mask == DrawMask::Late => Err(DrawError::Late),
                (Some(answer), _) => answer.token_out(draw),
                (None, Some(logits)) => {
                    let drawn = self.draw_by_host(logits, row, draw, room);
                    self.keep_error(drawn).unwrap_or(Err(DrawError::NotNumbers))
                }
                (None, None) => unreachable!("a draw by the host has its logits"),
            });
        }
    }

    /// Draws one row on the processor.
    fn draw_by_host(
        &self,
        logits: &Buffer,
        row: usize,
        draw: &Draw<'_>,
        room: &mut DrawScratch,
    ) -> crate::Result<Result<TokenOut, DrawError>> {
        room.logits.resize(logits.cols, 0.0);
        // SAFETY: `logits` is borrowed until the stream has finished.
        unsafe { self.stream.read(&logits.bytes, row * logits.cols * 4, bytemuck::cast_slice_mut(&mut room.logits)) }?;
        self.stream.finish()?;
        self.host.draw_rows(&room.logits, logits.cols, std::slice::from_ref(draw), &mut room.by_host);
        Ok(room.by_host.pop().unwrap_or(Err(DrawError::NotNumbers)))
    }
}

impl Sample for Cuda {
    fn draw(&self, logits: &Buffer, draws: &[Draw<'_>], out: &mut Vec<Result<TokenOut, DrawError>>) {
        logits.check(draws.len(), logits.cols);
        out.clear();
        if draws.is_empty() || logits.cols == 0 {
            return out.resize_with(draws.len(), || Err(DrawError::NotNumbers));
        }
        self.to_f32(logits, draws.len());
        let mut room = lock(&self.draws);
        let begun = self.draw_on_device(logits, draws, &mut room);
        match self.keep_error(begun) {
            Some(of) => self.collect(Some(logits), draws, logits.cols, &mut room, of, out),
            None => out.resize_with(draws.len(), || Err(DrawError::NotNumbers)),
        }
    }

    fn can_draw_alone(&self, draw: &Draw<'_>, n_vocab: usize) -> bool {
        match DrawPath::of(draw, n_vocab) {
            DrawPath::Plain(_) => true,
            // The filter cannot keep more tokens than the device can order.
            DrawPath::Filtered(FilterRow { top_k, .. }) => {
                n_vocab <= SURVIVORS_MAX || (1..=SURVIVORS_MAX).contains(&(top_k as usize))
            }
            DrawPath::Host => false,
        }
    }

    fn begin_draws(&self, logits: &Buffer, draws: &[Draw<'_>]) -> Option<DrawsInFlight> {
        logits.check(draws.len(), logits.cols);
        if draws.is_empty() || !draws.iter().all(|draw| self.can_draw_alone(draw, logits.cols)) {
            return None;
        }
        self.to_f32(logits, draws.len());
        let mut room = lock(&self.draws);
        let begun = self.draw_on_device(logits, draws, &mut room);
        self.keep_error(begun).map(DrawsInFlight)
    }

    fn are_drawn(&self, drawing: &DrawsInFlight) -> bool {
        let passed = lock(&self.draws).answers[drawing.0].passed.is_passed();
        self.keep_error(passed).unwrap_or(true)
    }

    fn collect_draws(&self, drawing: &DrawsInFlight, draws: &[Draw<'_>], out: &mut Vec<Result<TokenOut, DrawError>>) {
        out.clear();
        let mut room = lock(&self.draws);
        let n_vocab = room.n_vocab;
        self.collect(None, draws, n_vocab, &mut room, drawing.0, out);
    }
}
