//! A step allocates nothing: everything is made at load.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../tests/common/allocations.rs"]
mod allocations;
mod common;

use allocations::n_allocations;
use backend::cpu::{Cpu, Isa, Kv, Vector};
use backend::{
    Attention, AttentionCall, AttentionHeads, Batch, BlockTables, Gate, KvPages, KvSpec, Linear, Memory, PassSlice,
    Pointwise, Recurrence, RecurrenceCall, RecurrentHeads, RecurrentWeights, RopeStyle, ScoreTerms, StateRule, Weights,
};
use common::{File, Rng, cpu, filled};
use types::{Activations, BlockId, Dtype, KvDtype, KvLayout, Leaves, Want};

fn batch(n_rows: u32) -> Batch {
    let tables = vec![BlockTables { blocks: vec![BlockId(1), BlockId(0)], bounds: vec![0, 2] }];
    Batch {
        tokens: (0..n_rows).collect(),
        positions: (0..n_rows).collect(),
        types: vec![],
        slices: vec![PassSlice::new(0..n_rows, 0, Want::Nothing)],
        tables,
        outputs: vec![n_rows - 1],
        n_padding: 0,
        drawn: vec![],
    }
}

fn recurrence() -> (RecurrentHeads, RecurrentWeights<Vector>) {
    let heads = RecurrentHeads {
        n_heads: 4,
        n_key_heads: 2,
        per_key: 2,
        first: 0,
        key_dim: 16,
        value_dim: 32,
        taps: 4,
        has_steps: true,
    };
    let weights = RecurrentWeights {
        conv: Vector::new(&vec![0.5; 4 * heads.n_channels()]),
        conv_bias: None,
        rate: Vector::new(&[-0.1; 4]),
        rate_bias: Vector::new(&[0.0; 4]),
        rule: StateRule::Delta { norm: Vector::new(&[1.0; 32]), eps: 1e-6, step_max: 1.0 },
    };
    (heads, weights)
}

fn states_of(cpu: &Cpu, heads: &RecurrentHeads) -> Kv {
    cpu.kv(KvSpec { n_layers: 1, n_blocks: 2, layout: heads.layout(), dtype: KvDtype::F16 }).unwrap()
}

#[test]
fn ops_allocate_nothing() {
    const ROWS_MAX: usize = 20;
    let mut rng = Rng(1);
    let heads = AttentionHeads::whole(8, 4, 32, 0.2);
    let files = Dtype::ALL.map(|dtype| File::random(&mut rng, dtype, 48, 256));
    for (activations, dtype) in [(Activations::Int8, KvDtype::Int8), (Activations::F32, KvDtype::F16)] {
        let cpu = cpu(Isa::detect(), 3, activations);
        let table = cpu.matrix(&files.each_ref().map(File::stored)).unwrap();
        let leaves = Leaves::o_proj(types::DeviceClass::Cpu, 8, 32);
        let rows = cpu.matrix_leaves(files[4].stored(), &leaves, 0..8).unwrap();
        let weight = cpu.vector(&[1.0; 256]).unwrap();
        let (cos, sin) = (vec![1.0; 32 * 16], vec![0.0; 32 * 16]);
        let rope = cpu.rope(&cos, &sin, 16, RopeStyle::Halves).unwrap();
        let mut kv = cpu.kv(KvSpec { n_layers: 1, n_blocks: 2, layout: KvLayout::heads(4, 32), dtype }).unwrap();
        let mut x = filled(&cpu, ROWS_MAX, &rng.floats(ROWS_MAX * 256));
        let mut qkv = filled(&cpu, ROWS_MAX, &rng.floats(ROWS_MAX * heads.qkv_cols()));
        let mut residual = cpu.buffer(ROWS_MAX, 256).unwrap();
        let mut logits = cpu.buffer(ROWS_MAX, Dtype::ALL.len() * 48).unwrap();
        let mut planes = cpu.buffer(ROWS_MAX, 48).unwrap();
        let mut half = cpu.buffer(ROWS_MAX, 128).unwrap();
        let mut normed = cpu.buffer(ROWS_MAX, 256).unwrap();
        let (states, of_states) = recurrence();
        let mut pages = states_of(&cpu, &states);
        let projected = filled(&cpu, ROWS_MAX, &rng.floats(ROWS_MAX * states.n_cols()));
        let mut gated = cpu.buffer(ROWS_MAX, states.n_cols()).unwrap();
        let mut recurred = cpu.buffer(ROWS_MAX, states.n_heads * states.value_dim).unwrap();
        let batches = [batch(1), batch(3), batch(ROWS_MAX as u32)];
        let mut step = |batch: &Batch| {
            let n = batch.n_rows();
            cpu.embed(&table, 0, &batch.tokens, &mut residual);
            cpu.linear(&residual, &table, n, &mut logits);
            cpu.rope_store(
                &mut qkv,
                Some(&rope),
                &AttentionCall { pass: &batch.pass(), heads: &heads, group: 0, layer: 0 },
                &mut kv,
            );
            cpu.attend(
                &mut qkv,
                &kv,
                &AttentionCall { pass: &batch.pass(), heads: &heads, group: 0, layer: 0 },
                &ScoreTerms::NONE,
                &mut x,
            );
            let call = RecurrenceCall { pass: &batch.pass(), heads: &states, group: 0, layer: 0 };
            cpu.recur(&projected, &of_states, &call, &mut pages, &mut recurred);
            cpu.sigmoid_mul(&projected, n, &mut gated);
            cpu.linear_runs(&x, &rows, n, &mut planes);
            cpu.rms_norm(&residual, &weight, 1e-5, n, &mut x);
            cpu.apply_gate(&x, Gate::Silu, n, &mut half);
            cpu.add_rms_norm(&x, &mut residual, &weight, 1e-5, n, &mut normed);
            cpu.gather(&residual, &batch.outputs, &mut x);
        };
        batches.iter().for_each(&mut step);
        let before = n_allocations();
        batches.iter().cycle().take(30).for_each(&mut step);
        assert_eq!(n_allocations() - before, 0, "{activations:?}");
    }
}
