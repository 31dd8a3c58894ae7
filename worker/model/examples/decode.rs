//! Measures what a step of one row costs at a context, by type of KV cache: processor time, not wall time, in turns.
//! Many short sequences fill the cache, as one long sequence would take minutes.
//!
//!     cargo run -p model --example decode -- MODEL CONTEXT KV_DTYPE.. [INSTRUCTIONS]

use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::{Batch, BlockTables, PassSlice};
use checkpoint::Checkpoint;
use collective::Ranks;
use model::{KvCache, Model, PassLimits};
use std::error::Error;
use std::ops::Range;
use std::path::Path;
use types::cache::blocks_for;
use types::{Activations, BLOCK_TOKENS, BlockId, DeviceClass, KvDtype, Want};

const ROUNDS: usize = 9;
const STEPS: u32 = 4;
/// Positions of the sequences that fill the cache.
const FILLING: u32 = 256;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Bench {
    dtype: KvDtype,
    kv: KvCache<Cpu>,
    /// Seconds per step, by round.
    seconds: Vec<f64>,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, context, words @ ..] = &arguments[..] else {
        return Err("MODEL CONTEXT KV_DTYPE.. [plain|avx2|avx512|avx512bf16|amx]".into());
    };
    let named = |word: &String| Isa::ALL.into_iter().find(|isa| isa.name() == word);
    let (isa, dtypes) = match words.split_last() {
        Some((last, dtypes)) if named(last).is_some() => (named(last).unwrap_or(Isa::Plain), dtypes),
        _ => (Isa::detect(), words),
    };
    let (checkpoint, context) = (Checkpoint::open(Path::new(path))?, context.parse::<u32>()?);
    let (spec, device) =
        (checkpoint.spec(), Cpu::new(CpuConfig { threads: 1, activations: Activations::Int8, isa, spin: false })?);
    let mut ranks = Ranks::solo(spec.n_layers);
    let limits = PassLimits { rows_max: FILLING as usize, outputs_max: 1, context: context + STEPS };
    let mut model = Model::load(&checkpoint, &device, ranks.part(), limits)?;
    let pools = vec![blocks_for(context + STEPS); spec.cache_groups().groups().len()];
    let blocks: Vec<BlockId> = (0..pools[0]).map(BlockId).collect();
    let mut benches = Vec::new();
    for dtype in dtypes {
        let dtype = dtype.parse()?;
        let specs = model::kv_specs(spec, ranks.part(), DeviceClass::Cpu, dtype, &pools);
        let mut kv = KvCache::new(&device, &specs)?;
        for blocks in blocks.chunks(blocks_for(FILLING) as usize) {
            let batch = rows(0..blocks.len() as u32 * BLOCK_TOKENS, blocks, pools.len());
            model.forward(&device, &mut ranks, &batch.pass(), &mut kv)?;
        }
        benches.push(Bench { dtype, kv, seconds: Vec::new() });
    }
    for _ in 0..ROUNDS {
        for bench in &mut benches {
            let begun = on_processor()?;
            for position in context..context + STEPS {
                let batch = rows(position..position + 1, &blocks, pools.len());
                model.forward(&device, &mut ranks, &batch.pass(), &mut bench.kv)?;
            }
            bench.seconds.push((on_processor()? - begun) / f64::from(STEPS));
        }
    }
    report(&mut benches, isa);
    Ok(())
}

fn report(benches: &mut [Bench], isa: Isa) {
    for bench in benches.iter_mut() {
        bench.seconds.sort_by(f64::total_cmp);
    }
    let first = benches.first().map_or(0.0, |bench| bench.seconds[ROUNDS / 2]);
    for Bench { dtype, seconds, .. } in benches {
        let (least, median) = (seconds[0] * 1e3, seconds[ROUNDS / 2] * 1e3);
        let times = first * 1e3 / median;
        println!("{}, {dtype}: median {median:.2} ms a step, least {least:.2}; {times:.2}x the first", isa.name());
    }
}

/// Seconds that this thread has computed.
fn on_processor() -> Result<f64> {
    let stats = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanos: u64 = stats.split(' ').next().ok_or("no time")?.parse()?;
    Ok(nanos as f64 * 1e-9)
}

/// Returns positions of one sequence, with the logits of the last one requested.
fn rows(positions: Range<u32>, blocks: &[BlockId], n_groups: usize) -> Batch {
    let (blocks, n_rows) = (blocks[..blocks_for(positions.end) as usize].to_vec(), positions.len() as u32);
    let bounds = vec![0, blocks.len() as u32];
    Batch {
        tokens: positions.clone().map(|position| position * 31 % 1000).collect(),
        types: vec![],
        positions: positions.clone().collect(),
        slices: vec![PassSlice::new(0..n_rows, positions.start, Want::Nothing)],
        tables: vec![BlockTables { blocks, bounds }; n_groups],
        outputs: vec![n_rows - 1],
        n_padding: 0,
        drawn: vec![],
    }
}
