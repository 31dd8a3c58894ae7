//! Operations on a rank's share of a model: tables that begin in the middle, sums added apart from a norm, biases, and
//! empty matrices, heads and leaves.

use crate::numbers::{File, Rng, all, assert_bits, cpus, filled};
use backend::{
    Attention, AttentionCall, AttentionHeads, Batch, Gate, KvPages, KvSpec, Linear, Memory, Pointwise, RopeStyle,
    ScoreTerms, Weights,
};
use types::{Activations, KvDtype, KvLayout, Leaves};

#[test]
fn add_gives_the_residual_that_the_norm_would() {
    let (x, residual, weight) = (Rng(1).floats(3 * 70), Rng(2).floats(3 * 70), Rng(3).floats(70));
    for (path, cpu) in cpus(Activations::F32) {
        let weight = cpu.vector(&weight).unwrap();
        let (mut fused, mut apart) = (filled(&cpu, 3, &residual), filled(&cpu, 3, &residual));
        let (mut fused_out, mut apart_out) = (cpu.buffer(3, 70).unwrap(), cpu.buffer(3, 70).unwrap());
        cpu.add_rms_norm(&filled(&cpu, 3, &x), &mut fused, &weight, 1e-5, 3, &mut fused_out);
        cpu.add(&filled(&cpu, 3, &x), &mut apart, 3);
        cpu.rms_norm(&apart, &weight, 1e-5, 3, &mut apart_out);
        assert_bits(&path, &all(&cpu, &apart, 3), &all(&cpu, &fused, 3));
        assert_bits(&path, &all(&cpu, &apart_out, 3), &all(&cpu, &fused_out, 3));
    }
}

#[test]
fn a_bias_is_added_to_each_row() {
    for (path, cpu) in cpus(Activations::F32) {
        let mut x = filled(&cpu, 2, &[0.5, 1.0, 2.0, 4.0, 8.0, 16.0]);
        cpu.add_bias(&mut x, &cpu.vector(&[1.0, -1.0, 0.25]).unwrap(), 2);
        assert_bits(&path, &all(&cpu, &x, 2), &[1.5, 0.0, 2.25, 5.0, 7.0, 16.25]);
    }
}

#[test]
fn a_table_leaves_the_rows_of_others_as_they_are() {
    let file = File::random(&mut Rng(4), types::Dtype::Q8_0, 40, 32);
    let tokens = [0, 16, 17, 30, 31, u32::MAX];
    for (path, cpu) in cpus(Activations::Int8) {
        let table = cpu.matrix(&[file.stored().rows(17..31).unwrap()]).unwrap();
        let mut out = filled(&cpu, tokens.len(), &[7.0; 6 * 32]);
        cpu.embed(&table, 17, &tokens, &mut out);
        let row = |token: u32| file.values[token as usize * 32..][..32].to_vec();
        let others = vec![7.0; 2 * 32];
        let expected = [others.clone(), row(17), row(30), others].concat();
        assert_bits(&path, &all(&cpu, &out, tokens.len()), &expected);
    }
}

#[test]
fn nothing_is_done_with_nothing() {
    let file = File::random(&mut Rng(5), types::Dtype::Q8_0, 40, 64);
    let mut batch = Batch { tables: vec![Default::default()], ..Batch::default() };
    batch.tokens.extend([1, 2, 3]);
    for (_, cpu) in cpus(Activations::Int8) {
        let (x, mut none) = (filled(&cpu, 3, &[1.0; 3 * 64]), cpu.buffer(3, 0).unwrap());
        let no_rows = cpu.matrix(&[file.stored().rows(9..9).unwrap(), file.stored().rows(40..40).unwrap()]).unwrap();
        assert_eq!(cpu.matrix_bytes(&no_rows), 0);
        cpu.linear(&x, &no_rows, 3, &mut none);
        let leaves = Leaves::on_grain(64, 2);
        let no_leaves = cpu.matrix_leaves(file.stored().columns(32..32).unwrap(), &leaves, 1..1).unwrap();
        let mut out = filled(&cpu, 3, &[5.0; 3 * 40]);
        cpu.linear_runs(&none, &no_leaves, 3, &mut out);
        assert_eq!(all(&cpu, &out, 3), [5.0; 3 * 40]);
        cpu.embed(&no_rows, 9, &[8, 9, 10], &mut filled(&cpu, 3, &[1.0; 3 * 64]));
        let spec = KvSpec { n_layers: 2, n_blocks: 4, layout: KvLayout::heads(0, 16), dtype: KvDtype::F16 };
        let heads = AttentionHeads {
            n_heads: 0,
            n_kv_heads: 0,
            per_kv: 3,
            first: 0,
            head_dim: 16,
            scale: 1.0,
            window: None,
            is_causal: true,
            cap: None,
            is_reader: false,
        };
        let (mut kv, mut qkv) = (cpu.kv(spec).unwrap(), cpu.buffer(3, 0).unwrap());
        let rope = cpu.rope(&[1.0; 8], &[0.0; 8], 8, RopeStyle::Halves).unwrap();
        cpu.rope_store(
            &mut qkv,
            Some(&rope),
            &AttentionCall { pass: &batch.pass(), heads: &heads, group: 0, layer: 1 },
            &mut kv,
        );
        cpu.attend(
            &mut qkv,
            &kv,
            &AttentionCall { pass: &batch.pass(), heads: &heads, group: 0, layer: 1 },
            &ScoreTerms::NONE,
            &mut none,
        );
        cpu.apply_gate(&qkv, Gate::Silu, 3, &mut none);
    }
}
