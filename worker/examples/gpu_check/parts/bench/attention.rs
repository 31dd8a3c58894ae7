//! Attention alone: a long prompt, in operations a second, and many decoding sequences, in bytes a second.

use super::super::{Done, Finding, FindingSink, Options, cuda};
use super::{Copies, ROUNDS, Shape, Spread, shares, text};
use crate::numbers::Rng;
use backend::cuda::{Buffer, Cuda, Kv};
use backend::{
    Attention, AttentionCall, AttentionHeads, Batch, BatchLimits, BlockTables, Device, KvPages, KvSpec, Memory,
    PassSlice, ScoreTerms,
};
use serde_json::json;
use types::cache::blocks_for;
use types::{BlockId, KvDtype, KvLayout, NumericsMode, Want};

/// The aim, in operations a second.
const AIM: f64 = 450e12;
const TIMES: usize = 10;
/// Rows stored in one pass.
const STORED_ROWS: usize = 1024;

/// Sequences of equal length; the last rows attend.
struct Attended<'a> {
    cuda: &'a Cuda,
    heads: AttentionHeads,
    kv: Kv,
    qkv: Buffer,
    out: Buffer,
    batch: Batch,
}

fn batch(n_sequences: usize, rows: std::ops::Range<usize>, length: usize) -> Batch {
    let mut batch = Batch { tables: vec![BlockTables::default()], ..Batch::default() };
    let n_blocks = blocks_for(length as u32);
    for sequence in 0..n_sequences as u32 {
        let first = batch.n_rows() as u32;
        batch.tokens.extend(rows.clone().map(|_| 0));
        batch.positions.extend(rows.clone().map(|row| row as u32));
        batch.slices.push(PassSlice::new(first..first + rows.len() as u32, rows.start as u32, Want::Nothing));
        let table = &mut batch.tables[0];
        table.blocks.extend((0..n_blocks).map(|block| BlockId((sequence + 1) * n_blocks - 1 - block)));
        table.bounds.push(table.blocks.len() as u32);
    }
    batch
}

impl Attended<'_> {
    fn new(cuda: &Cuda, shape: Shape, n_sequences: usize, length: usize, n_new: usize) -> Result<Attended<'_>, String> {
        let Shape { n_heads, n_kv_heads, head_dim, .. } = shape;
        let heads = AttentionHeads::whole(n_heads, n_kv_heads, head_dim, 1.0 / (head_dim as f32).sqrt());
        let rows_max = STORED_ROWS.max(n_sequences * n_new);
        cuda.reserve_batches(BatchLimits { rows_max, context: length as u32, n_groups: 1 }).map_err(text)?;
        let n_blocks = n_sequences * blocks_for(length as u32) as usize;
        let spec = KvSpec {
            n_layers: 1,
            n_blocks,
            layout: KvLayout::heads(n_kv_heads as u32, head_dim as u32),
            dtype: KvDtype::Bf16,
        };
        let mut kv = cuda.kv(spec).map_err(text)?;
        let cols = heads.qkv_cols();
        let mut store = |batch: &Batch, rng: &mut Rng| -> Result<Buffer, String> {
            let mut qkv = cuda.buffer(batch.n_rows(), cols).map_err(text)?;
            cuda.write(&mut qkv, 0, &rng.floats(batch.n_rows() * cols));
            cuda.begin_pass(&batch.pass());
            cuda.rope_store(
                &mut qkv,
                None,
                &AttentionCall { pass: &batch.pass(), heads: &heads, group: 0, layer: 0 },
                &mut kv,
            );
            Ok(qkv)
        };
        let (rng, at_once) = (&mut Rng(7), (STORED_ROWS / n_sequences).max(1));
        for start in (0..length - n_new).step_by(at_once) {
            let rows = start..(start + at_once).min(length - n_new);
            store(&batch(n_sequences, rows, length), rng)?;
        }
        let batch = batch(n_sequences, length - n_new..length, length);
        let qkv = store(&batch, rng)?;
        let out = cuda.buffer(batch.n_rows(), n_heads * head_dim).map_err(text)?;
        let mut attended = Attended { cuda, heads, kv, qkv, out, batch };
        attended.seconds()?;
        Ok(attended)
    }

    /// Returns the seconds of one attention.
    fn seconds(&mut self) -> Result<f64, String> {
        let Attended { cuda, heads, kv, qkv, out, batch } = self;
        cuda.begin_pass(&batch.pass());
        let seconds = cuda.seconds(|| {
            (0..TIMES).for_each(|_| {
                cuda.attend(
                    qkv,
                    kv,
                    &AttentionCall { pass: &batch.pass(), heads, group: 0, layer: 0 },
                    &ScoreTerms::NONE,
                    out,
                )
            })
        });
        cuda.take_failure().map_err(text)?;
        Ok(seconds.map_err(text)? / TIMES as f64)
    }
}

pub fn measure(options: &Options, report: FindingSink<'_>) -> Done {
    let (shape, cuda) = (Shape::of(options), cuda(options, NumericsMode::Lockstep)?);
    let [n_prompt, n_sequences, length] = shape.attended;
    let mut prompt = Attended::new(&cuda, shape, 1, n_prompt, n_prompt)?;
    // Scores and values of all pairs of a row and a position to which it attends.
    let pairs = n_prompt as f64 * (n_prompt as f64 + 1.0) / 2.0;
    let operations = 4.0 * pairs * (shape.n_heads * shape.head_dim) as f64;
    let speeds = (0..ROUNDS).map(|_| Ok(operations / prompt.seconds()?)).collect::<Result<_, String>>()?;
    let speed = Spread::of(speeds);
    let details = json!({ "operations_per_second": speed.to_json(), "aim": AIM });
    report(Finding::aimed(format!("attention of a prompt of {n_prompt}"), speed.median(), AIM, details));
    drop(prompt);
    let (mut copies, mut speeds, mut copied) = (Copies::new(options)?, Vec::new(), Vec::new());
    let mut together = Attended::new(&cuda, shape, n_sequences, length, 1)?;
    let n_bytes = (n_sequences * length * 2 * shape.kv() * 2) as f64;
    for _ in 0..ROUNDS {
        copied.push(copies.round()?);
        speeds.push(n_bytes / together.seconds()?);
    }
    let of_copy = shares(&speeds, &copied);
    let details = json!({ "bytes_per_second": Spread::of(speeds).to_json(), "of_copy": of_copy.to_json() });
    report(Finding::measured(format!("attention of {n_sequences} sequences of {length}"), details));
    Ok(())
}
