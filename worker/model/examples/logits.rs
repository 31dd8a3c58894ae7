//! A model's logits at every position of a text whose tokens are given: rows of f32 on stdout, as
//! `tests/reference/kl.py` reads them. Knows nothing of texts or of what the logits are compared with.
//!
//!     cargo run -p model --example logits -- MODEL IDS WINDOW int8|f32 f16|f32 THREADS [INSTRUCTIONS]
//!
//! IDS is a file of token ids with spaces between them. Each window of WINDOW tokens is a sequence of its own.

use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::{Batch, BlockTables, Memory, PassSlice};
use checkpoint::Checkpoint;
use collective::Ranks;
use model::{KvCache, Model, PassLimits};
use std::error::Error;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use types::cache::blocks_for;
use types::{Activations, BlockId, DeviceClass, KvDtype, Token, Want};

/// Rows of one pass.
const CHUNK: usize = 64;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Arguments {
    checkpoint: Checkpoint,
    ids: Vec<Token>,
    window: usize,
    kv_dtype: KvDtype,
    cpu: CpuConfig,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    write_logits(&parse(&arguments)?)
}

fn parse(arguments: &[String]) -> Result<Arguments> {
    let [model, ids, window, activations, kv_dtype, threads, isa @ ..] = arguments else {
        return Err("MODEL IDS WINDOW int8|f32 f16|f32 THREADS [plain|avx2|avx512|avx512bf16|amx]".into());
    };
    let (activations, kv_dtype) = (activations.parse::<Activations>()?, kv_dtype.parse::<KvDtype>()?);
    let named = |name: &String| Isa::ALL.into_iter().find(|isa| isa.name() == name);
    let isa = match isa.first() {
        None => Isa::detect(),
        Some(name) => named(name).ok_or_else(|| format!("unknown instruction set {name}"))?,
    };
    let ids = std::fs::read_to_string(ids)?;
    Ok(Arguments {
        checkpoint: Checkpoint::open(Path::new(model))?,
        ids: ids.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?,
        window: window.parse()?,
        kv_dtype,
        cpu: CpuConfig { threads: threads.parse()?, activations, isa, spin: false },
    })
}

fn write_logits(arguments: &Arguments) -> Result<()> {
    let spec = arguments.checkpoint.spec();
    let n_blocks = blocks_for(u32::try_from(arguments.window)?);
    let device = Cpu::new(arguments.cpu)?;
    let mut collective = Ranks::solo(spec.n_layers);
    let limits = PassLimits { rows_max: CHUNK, outputs_max: CHUNK, context: u32::try_from(arguments.window)? };
    let mut model = Model::load(&arguments.checkpoint, &device, collective.part(), limits)?;
    let pools = vec![n_blocks; spec.cache_groups().groups().len()];
    let specs = model::kv_specs(spec, collective.part(), DeviceClass::Cpu, arguments.kv_dtype, &pools);
    let mut kv = KvCache::new(&device, &specs)?;
    let mut rows = vec![0.0; CHUNK * spec.vocab as usize];
    let mut out = BufWriter::new(io::stdout().lock());
    for window in arguments.ids.chunks(arguments.window) {
        for (i, chunk) in window.chunks(CHUNK).enumerate() {
            let batch = batch_of(chunk, i * CHUNK, pools.len())?;
            let logits = model.forward(&device, &mut collective, &batch.pass(), &mut kv)?;
            let logits = logits.ok_or("the pass returns all logits")?;
            let rows = &mut rows[..chunk.len() * spec.vocab as usize]; // [chunk, vocab]
            device.read(logits, 0..chunk.len(), rows);
            for logit in rows {
                out.write_all(&logit.to_le_bytes())?;
            }
        }
    }
    Ok(out.flush()?)
}

/// Returns the next tokens of the only sequence, with all their logits requested.
fn batch_of(tokens: &[Token], start: usize, n_groups: usize) -> Result<Batch> {
    let (start, n_rows) = (u32::try_from(start)?, u32::try_from(tokens.len())?);
    let blocks: Vec<_> = (0..blocks_for(start + n_rows)).map(BlockId).collect();
    let bounds = vec![0, u32::try_from(blocks.len())?];
    Ok(Batch {
        tokens: tokens.to_vec(),
        positions: (start..start + n_rows).collect(),
        types: vec![],
        slices: vec![PassSlice::new(0..n_rows, start, Want::Nothing)],
        tables: vec![BlockTables { blocks, bounds }; n_groups],
        outputs: (0..n_rows).collect(),
        n_padding: 0,
        drawn: vec![],
    })
}
