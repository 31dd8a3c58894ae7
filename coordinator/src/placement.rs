//! Which machine holds what: a pure function from what is there to a blueprint, or to the arithmetic of why not.

use crate::WorkerId;
use checkpoint::Checkpoint;
use std::fmt;
use std::ops::Range;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, Grid, Place, Rank, Unsupported};

/// What placement needs to know of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    pub n_layers: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub vocab: u32,
    /// The positions that it was made for.
    pub context: u32,
    /// As they lie in a worker's memory.
    pub weight_bytes: u64,
}

impl ModelShape {
    pub fn of(checkpoint: &Checkpoint) -> ModelShape {
        let spec = checkpoint.spec();
        ModelShape {
            n_layers: spec.n_layers,
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            vocab: spec.vocab,
            context: spec.context,
            // Packing keeps the size but for padding.
            weight_bytes: checkpoint.sizes().total(),
        }
    }
}

/// What the operator wants of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub grid: Grid,
    /// `int8` or `f32`.
    pub activations: String,
    /// `f16`, `bf16` or `f32`.
    pub kv_dtype: String,
    /// Per rank. None: what eight full contexts need, at most a quarter of the machine's memory.
    pub kv_memory: Option<u64>,
    /// None: the model's, or as much of it as the KV memory holds.
    pub context: Option<u32>,
    pub running_max: u32,
}

/// A worker that could take a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    pub worker: WorkerId,
    pub host: String,
    pub device: String,
    pub memory_bytes: u64,
}

/// In the order in which they joined.
pub type Inventory = [Machine];

/// A replica laid out: the same figures for everybody who reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blueprint {
    pub grid: Grid,
    pub context: u32,
    /// Of every rank.
    pub n_blocks: u32,
    pub shards: Vec<Shard>,
}

/// What one rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    pub rank: Rank,
    pub place: Place,
    pub worker: WorkerId,
    pub host: String,
    pub layers: Range<u32>,
    pub heads: Range<u32>,
    pub kv_heads: Range<u32>,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    pub kv_tokens: u64,
}

/// Why there is no blueprint, with the figures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unplaceable {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    #[error("{needed} workers are needed, {there} are there")]
    TooFew { needed: usize, there: usize },
    #[error("{0:?} is no KV dtype: use f16, bf16 or f32")]
    KvDtype(String),
    #[error("a context of {asked} was asked for, the model was made for {model}: ask for at most that")]
    Context { asked: u32, model: u32 },
    #[error("{host} has {available} bytes, the weights need {needed}: use a larger machine or a smaller quantization")]
    Weights { host: String, needed: u64, available: u64 },
    #[error(
        "{host} has {available} bytes beside {weights} of weights, the KV cache is to have {needed}: \
         ask for less KV memory"
    )]
    KvMemory { host: String, weights: u64, needed: u64, available: u64 },
    #[error(
        "a context of {context} needs {needed} bytes of KV ({block_bytes} per {BLOCK_TOKENS} tokens), \
         {available} are there: ask for a shorter context or more KV memory"
    )]
    Kv { context: u32, block_bytes: u64, needed: u64, available: u64 },
}

/// Lays the replica out on what is there. `now` is the blueprint in force: who holds a rank keeps it.
pub fn plan(
    inventory: &Inventory,
    shape: &ModelShape,
    policy: &Policy,
    now: Option<&Blueprint>,
) -> Result<Blueprint, Unplaceable> {
    policy.grid.supported()?;
    let machine = choose(inventory, shape, now)?;
    let block_bytes = block_bytes(shape, policy)?;
    let available = kv_budget(machine, shape, policy, block_bytes)?;
    let context = context(shape, policy, block_bytes, available)?;
    let useful = u64::from(policy.running_max.max(1)) * u64::from(blocks_for(context));
    let n_blocks = u32::try_from((available / block_bytes).min(useful)).unwrap_or(u32::MAX - 1);
    let shard = Shard {
        rank: Rank(0),
        place: policy.grid.place(Rank(0)),
        worker: machine.worker,
        host: machine.host.clone(),
        layers: 0..shape.n_layers,
        heads: 0..shape.n_heads,
        kv_heads: 0..shape.n_kv_heads,
        weight_bytes: shape.weight_bytes,
        kv_bytes: u64::from(n_blocks) * block_bytes,
        kv_tokens: u64::from(n_blocks) * u64::from(BLOCK_TOKENS),
    };
    Ok(Blueprint { grid: policy.grid, context, n_blocks, shards: vec![shard] })
}

/// The machine that holds the rank now, or else the first that is large enough.
fn choose<'a>(
    inventory: &'a Inventory,
    shape: &ModelShape,
    now: Option<&Blueprint>,
) -> Result<&'a Machine, Unplaceable> {
    let holds =
        |machine: &&Machine| now.is_some_and(|now| now.shards.iter().any(|shard| shard.worker == machine.worker));
    let fits = |machine: &&Machine| machine.memory_bytes >= shape.weight_bytes;
    let largest = inventory.iter().max_by_key(|machine| machine.memory_bytes);
    let largest = largest.ok_or(Unplaceable::TooFew { needed: 1, there: 0 })?;
    let chosen = inventory.iter().filter(fits).find(holds).or_else(|| inventory.iter().find(fits));
    chosen.ok_or_else(|| Unplaceable::Weights {
        host: largest.host.clone(),
        needed: shape.weight_bytes,
        available: largest.memory_bytes,
    })
}

/// K and V of every layer for the positions of one block.
pub fn block_bytes(shape: &ModelShape, policy: &Policy) -> Result<u64, Unplaceable> {
    let element_bytes = match policy.kv_dtype.as_str() {
        "f16" | "bf16" => 2,
        "f32" => 4,
        other => return Err(Unplaceable::KvDtype(other.into())),
    };
    let row = u64::from(shape.n_kv_heads) * u64::from(shape.head_dim) * element_bytes;
    Ok((u64::from(BLOCK_TOKENS) * u64::from(shape.n_layers) * 2 * row).max(1))
}

const CONTEXTS_BY_DEFAULT: u64 = 8;

fn kv_budget(machine: &Machine, shape: &ModelShape, policy: &Policy, block_bytes: u64) -> Result<u64, Unplaceable> {
    let beside_weights = machine.memory_bytes - shape.weight_bytes;
    let context = policy.context.unwrap_or(shape.context);
    let by_default = CONTEXTS_BY_DEFAULT * u64::from(blocks_for(context)) * block_bytes;
    let budget = policy.kv_memory.unwrap_or(by_default.min(machine.memory_bytes / 4).min(beside_weights));
    if budget > beside_weights {
        return Err(Unplaceable::KvMemory {
            host: machine.host.clone(),
            weights: shape.weight_bytes,
            needed: budget,
            available: beside_weights,
        });
    }
    Ok(budget)
}

/// A context that was asked for is given or refused; otherwise it is what the model knows and the memory holds.
fn context(shape: &ModelShape, policy: &Policy, block_bytes: u64, available: u64) -> Result<u32, Unplaceable> {
    let asked = policy.context.unwrap_or(shape.context);
    if asked > shape.context {
        return Err(Unplaceable::Context { asked, model: shape.context });
    }
    let held = (available / block_bytes).saturating_mul(BLOCK_TOKENS.into());
    if held >= u64::from(asked) {
        return Ok(asked);
    }
    if policy.context.is_none() && held > 0 {
        return Ok(held as u32);
    }
    let needed = u64::from(blocks_for(asked)) * block_bytes;
    Err(Unplaceable::Kv { context: asked, block_bytes, needed, available })
}

impl fmt::Display for Blueprint {
    /// The shard table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Grid { pp, tp, ep } = self.grid;
        writeln!(
            f,
            "pp {pp} · tp {tp} · ep {ep} · context {} · {} blocks of {BLOCK_TOKENS}",
            self.context, self.n_blocks
        )?;
        let columns = ["rank", "stage", "tp", "host", "layers", "heads", "kv heads", "weights", "kv", "kv tokens"];
        let rows: Vec<[String; 10]> = self.shards.iter().map(Shard::row).collect();
        let width = |i: usize| rows.iter().map(|row| row[i].len()).chain([columns[i].len()]).max().unwrap_or(0);
        let line = |f: &mut fmt::Formatter<'_>, cells: [&str; 10]| {
            cells.iter().enumerate().try_for_each(|(i, cell)| write!(f, "{cell:>width$}  ", width = width(i)))
        };
        line(f, columns)?;
        rows.iter().try_for_each(|row| {
            writeln!(f)?;
            line(f, row.each_ref().map(String::as_str))
        })
    }
}

impl Shard {
    fn row(&self) -> [String; 10] {
        let range = |range: &Range<u32>| format!("{}..{}", range.start, range.end);
        [
            self.rank.0.to_string(),
            self.place.stage.to_string(),
            self.place.tp.to_string(),
            self.host.clone(),
            range(&self.layers),
            range(&self.heads),
            range(&self.kv_heads),
            mebibytes(self.weight_bytes),
            mebibytes(self.kv_bytes),
            self.kv_tokens.to_string(),
        ]
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{}.{} MiB", bytes >> 20, ((bytes & 0xf_ffff) * 10) >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMOL: ModelShape = ModelShape {
        n_layers: 30,
        n_heads: 9,
        n_kv_heads: 3,
        head_dim: 64,
        vocab: 49152,
        context: 8192,
        weight_bytes: 100 << 20,
    };

    fn policy() -> Policy {
        Policy {
            grid: Grid::SOLO,
            activations: "int8".into(),
            kv_dtype: "f16".into(),
            kv_memory: None,
            context: None,
            running_max: 64,
        }
    }

    fn machine(id: u64, memory_bytes: u64) -> Machine {
        Machine { worker: WorkerId(id), host: format!("host-{id}"), device: "cpu".into(), memory_bytes }
    }

    #[track_caller]
    fn check(memory_bytes: u64, policy: Policy, expect: Result<(u32, u32), &str>) {
        let got = plan(&[machine(1, memory_bytes)], &SMOL, &policy, None);
        match expect {
            Ok(figures) => assert_eq!(got.map(|plan| (plan.context, plan.n_blocks)).unwrap(), figures),
            Err(part) => assert!(got.clone().is_err_and(|e| e.to_string().contains(part)), "{got:?}"),
        }
    }

    #[test]
    fn figures_follow_from_memory() {
        // A block: 16 tokens x 30 layers x 2 x 3 heads x 64 x 2 bytes = 368640 bytes.
        check(64 << 30, policy(), Ok((8192, 8 * 512)));
        check(4 << 30, policy(), Ok((8192, (1 << 30) / 368640)));
        check(64 << 30, Policy { kv_memory: Some(368640 * 600), ..policy() }, Ok((8192, 600)));
        check(64 << 30, Policy { kv_dtype: "f32".into(), kv_memory: Some(368640 * 1200), ..policy() }, Ok((8192, 600)));
        // What all that may run could fill is enough.
        let few = Policy { running_max: 2, context: Some(32), kv_memory: Some(1 << 30), ..policy() };
        check(64 << 30, few, Ok((32, 4)));
        // Nobody asked for the whole context.
        check(64 << 30, Policy { kv_memory: Some(368640 * 10), ..policy() }, Ok((160, 10)));
    }

    #[test]
    fn refusals_show_the_arithmetic() {
        check(50 << 20, policy(), Err("has 52428800 bytes, the weights need 104857600"));
        check(200 << 20, Policy { kv_memory: Some(1 << 30), ..policy() }, Err("104857600 bytes beside 104857600"));
        let long = Policy { context: Some(8192), kv_memory: Some(368640 * 10), ..policy() };
        check(64 << 30, long, Err("needs 188743680 bytes of KV (368640 per 16 tokens), 3686400"));
        check(64 << 30, Policy { context: Some(9000), ..policy() }, Err("asked for, the model was made for 8192"));
        check(64 << 30, Policy { kv_dtype: "int3".into(), ..policy() }, Err("int3"));
        check(64 << 30, Policy { grid: Grid { tp: 2, ..Grid::SOLO }, ..policy() }, Err("tensor parallelism"));
        assert_eq!(plan(&[], &SMOL, &policy(), None), Err(Unplaceable::TooFew { needed: 1, there: 0 }));
    }

    #[test]
    fn who_holds_the_rank_keeps_it() {
        let all = [machine(1, 1 << 20), machine(2, 8 << 30), machine(3, 16 << 30)];
        let first = plan(&all, &SMOL, &policy(), None).unwrap();
        assert_eq!(first.shards[0].worker, WorkerId(2), "the first that is large enough");
        let now = plan(&all[2..], &SMOL, &policy(), None).unwrap();
        assert_eq!(plan(&all, &SMOL, &policy(), Some(&now)).unwrap(), now);
    }

    #[test]
    fn the_table_has_a_row_per_rank() {
        let table = plan(&[machine(1, 64 << 30)], &SMOL, &policy(), None).unwrap().to_string();
        assert_eq!(table.lines().count(), 3, "{table}");
        assert!(table.contains("100.0 MiB") && table.contains("1440.0 MiB") && table.contains("65536"), "{table}");
    }
}
