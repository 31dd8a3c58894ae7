//! Operations on each row alone: every path gives the bits of the plain one.

use crate::numbers::{File, Rng, all, assert_bits, assert_close, cpu, cpus, filled};
use backend::cpu::{Buffer, Cpu, Isa, Vector};
use backend::{AttentionHeads, Batch, Clamp, ElementOp, Gate, HeadNorms, Memory, Pointwise, Weights};
use types::{Activations, Dtype};

/// Runs `op` on all paths: equal bits, and close to `expected`.
fn check(name: &str, expected: &[f64], tolerance: f64, op: impl Fn(&Cpu) -> Vec<f32>) {
    let cpus = cpus(Activations::Int8);
    let plain = op(&cpus[0].1);
    assert_close(name, &plain, expected, tolerance);
    cpus[1..].iter().for_each(|(path, cpu)| assert_bits(&format!("{name}, {path}"), &op(cpu), &plain));
}

fn widths() -> [usize; 8] {
    [1, 5, 15, 16, 17, 64, 100, 576]
}

#[test]
fn rms_norm() {
    let mut rng = Rng(1);
    for n in widths() {
        let (x, y, weight) = (rng.floats(5 * n), rng.floats(5 * n), rng.floats(n));
        let sum: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        let expected = |x: &[f32]| -> Vec<f64> {
            let row = |x: &[f32]| {
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
                let scale = 1.0 / (mean + 1e-5).sqrt();
                x.iter().zip(&weight).map(|(x, w)| f64::from(*x) * scale * f64::from(*w)).collect::<Vec<_>>()
            };
            x.chunks(n).flat_map(row).collect()
        };
        check(&format!("norm of {n}"), &expected(&x), 1e-5, |cpu| {
            let mut out = cpu.buffer(5, n).unwrap();
            cpu.rms_norm(&filled(cpu, 5, &x), &cpu.vector(&weight).unwrap(), 1e-5, 5, &mut out);
            all(cpu, &out, 5)
        });
        check(&format!("norm of a sum of {n}"), &expected(&sum), 1e-5, |cpu| {
            let (mut residual, mut out) = (filled(cpu, 5, &y), cpu.buffer(5, n).unwrap());
            cpu.add_rms_norm(&filled(cpu, 5, &x), &mut residual, &cpu.vector(&weight).unwrap(), 1e-5, 5, &mut out);
            assert_bits("residual", &all(cpu, &residual, 5), &sum);
            all(cpu, &out, 5)
        });
    }
}

#[test]
fn silu_mul() {
    let mut rng = Rng(2);
    for n in widths() {
        let gate_up: Vec<f32> = rng.floats(3 * 2 * n).iter().map(|x| x * 20.0).collect();
        let row = |row: &[f32]| {
            let silu = |x: f32| f64::from(x) / (1.0 + (-f64::from(x)).exp());
            (0..n).map(|i| silu(row[i]) * f64::from(row[n + i])).collect::<Vec<_>>()
        };
        let expected: Vec<f64> = gate_up.chunks(2 * n).flat_map(row).collect();
        check(&format!("silu of {n}"), &expected, 1e-4, |cpu| {
            let mut out = cpu.buffer(3, n).unwrap();
            cpu.apply_gate(&filled(cpu, 3, &gate_up), Gate::Silu, 3, &mut out);
            all(cpu, &out, 3)
        });
    }
}

#[test]
fn silu_of_extremes_is_a_number() {
    let gate = [f32::MAX, f32::MIN, f32::INFINITY, -1e3, 1e3, -0.0];
    let gate_up: Vec<f32> = gate.into_iter().chain([1.0; 6]).collect();
    for (path, cpu) in cpus(Activations::F32) {
        let mut out = cpu.buffer(1, 6).unwrap();
        cpu.apply_gate(&filled(&cpu, 1, &gate_up), Gate::Silu, 1, &mut out);
        assert_bits(&path, &all(&cpu, &out, 1), &[f32::MAX, -0.0, f32::INFINITY, -0.0, 1e3, -0.0]);
    }
}

#[test]
fn embed_reads_stored_values() {
    // The widest block of any type.
    const WIDTH: usize = 256;
    let mut rng = Rng(3);
    for dtype in Dtype::ALL {
        let files = [File::random(&mut rng, dtype, 21, WIDTH), File::random(&mut rng, dtype, 18, WIDTH)];
        let tokens = [0u32, 20, 15, 16, 38, 21, 5, 5];
        let values: Vec<f32> = files.iter().flat_map(|file| file.values.clone()).collect();
        let expected: Vec<f32> = tokens.iter().flat_map(|&t| values[t as usize * WIDTH..][..WIDTH].to_vec()).collect();
        for (path, cpu) in cpus(Activations::Int8) {
            let table = cpu.matrix(&[files[0].stored(), files[1].stored()]).unwrap();
            let mut out = cpu.buffer(tokens.len(), WIDTH).unwrap();
            cpu.embed(&table, 0, &tokens, &mut out);
            assert_bits(&format!("{dtype:?}, {path}"), &all(&cpu, &out, tokens.len()), &expected);
        }
    }
}

#[test]
fn gather_picks_rows() {
    let cpu = cpu(Isa::detect(), 2, Activations::Int8);
    let x = filled(&cpu, 4, &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]);
    let mut out = cpu.buffer(3, 2).unwrap();
    cpu.gather(&x, &[3, 0, 3], &mut out);
    assert_eq!(all(&cpu, &out, 3), [3.0, 3.5, 0.0, 0.5, 3.0, 3.5]);
}

#[test]
fn layer_norm() {
    let mut rng = Rng(11);
    for n in widths() {
        let (x, weight, bias) = (rng.floats(4 * n), rng.floats(n), rng.floats(n));
        let row = |x: &[f32]| {
            let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
            let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n as f64;
            let scale = 1.0 / (variance + 1e-5).sqrt();
            let normed = |i: usize| (f64::from(x[i]) - mean) * scale * f64::from(weight[i]) + f64::from(bias[i]);
            (0..n).map(normed).collect::<Vec<_>>()
        };
        let expected: Vec<f64> = x.chunks(n).flat_map(row).collect();
        check(&format!("layer norm of {n}"), &expected, 2e-5, |cpu| {
            let (weight, bias) = (cpu.vector(&weight).unwrap(), cpu.vector(&bias).unwrap());
            let mut out = cpu.buffer(4, n).unwrap();
            cpu.layer_norm(&filled(cpu, 4, &x), &weight, &bias, 1e-5, 4, &mut out);
            all(cpu, &out, 4)
        });
    }
}

#[test]
fn norm_heads() {
    let mut rng = Rng(12);
    let shapes = [(2, false, false), (16, false, true), (24, true, false), (256, false, false), (512, false, true)];
    for (head_dim, is_reader, has_values) in shapes {
        let heads = AttentionHeads { is_reader, ..AttentionHeads::whole(4, 2, head_dim, 1.0) };
        let n = heads.qkv_cols();
        let (qkv, q, k) = (rng.floats(3 * n), rng.floats(head_dim), rng.floats(head_dim));
        let v = rng.floats(head_dim);
        let head = |(i, x): (usize, &[f32])| {
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / head_dim as f64;
            let scale = 1.0 / (mean + 1e-6).sqrt();
            let weight = |j: usize| match i % (n / head_dim) {
                0..4 => f64::from(q[j]) * scale,
                4..6 => f64::from(k[j]) * scale,
                _ if has_values => f64::from(v[j]) * scale,
                _ => 1.0,
            };
            (0..head_dim).map(|j| f64::from(x[j]) * weight(j)).collect::<Vec<_>>()
        };
        let expected: Vec<f64> = qkv.chunks(head_dim).enumerate().flat_map(head).collect();
        check(&format!("heads of {head_dim}"), &expected, 1e-5, |cpu| {
            let mut x = filled(cpu, 3, &qkv);
            let [q, k, v] = [&q, &k, &v].map(|weight| cpu.vector(weight).unwrap());
            let norms = HeadNorms { q: &q, k: &k, v: has_values.then_some(&v), eps: 1e-6 };
            cpu.norm_heads(&mut x, &heads, &norms, 3);
            all(cpu, &x, 3)
        });
    }
}

#[test]
fn what_is_done_to_each_number() {
    let mut rng = Rng(13);
    let gelu = |x: f64| 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x.powi(3))).tanh());
    for n in widths() {
        let x: Vec<f32> = rng.floats(3 * 2 * n).iter().map(|x| x * 8.0).collect();
        let each = |f: &dyn Fn(f64) -> f64| x.iter().map(|x| f(f64::from(*x))).collect::<Vec<_>>();
        let in_place = |cpu: &Cpu, op: &dyn Fn(&mut Buffer)| {
            let mut x = filled(cpu, 3, &x);
            op(&mut x);
            all(cpu, &x, 3)
        };
        check("gelu", &each(&gelu), 1e-5, |cpu| in_place(cpu, &|x| cpu.map(x, ElementOp::Gelu, 3)));
        // The error function by Simpson's rule, in f64.
        let erf = |x: f64| {
            const STEPS: u32 = 1000;
            let x = x.clamp(-6.0, 6.0);
            let (step, bell) = (x / f64::from(STEPS), |t: f64| (-t * t).exp());
            let weighted = |i: u32| bell(f64::from(i) * step) * f64::from(2 * (i % 2 + 1));
            let inner = (1..STEPS).map(weighted).sum::<f64>();
            (inner + bell(0.0) + bell(x)) * step / 3.0 * std::f64::consts::FRAC_2_SQRT_PI
        };
        let gelu_erf = |x: f64| 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
        check("gelu with erf", &each(&gelu_erf), 1e-5, |cpu| in_place(cpu, &|x| cpu.map(x, ElementOp::GeluErf, 3)));
        let squared = each(&|x| x.max(0.0).powi(2));
        check("relu squared", &squared, 1e-5, |cpu| in_place(cpu, &|x| cpu.map(x, ElementOp::ReluSquared, 3)));
        check("scale", &each(&|x| x * 2.5), 1e-5, |cpu| in_place(cpu, &|x| cpu.map(x, ElementOp::Scale(2.5), 3)));
        let capped = each(&|x| 3.0 * (x / 3.0).tanh());
        check("cap", &capped, 1e-5, |cpu| in_place(cpu, &|x| cpu.map(x, ElementOp::SoftCap(3.0), 3)));
        let row = |row: &[f32]| (0..n).map(|i| gelu(f64::from(row[i])) * f64::from(row[n + i])).collect::<Vec<_>>();
        let gated: Vec<f64> = x.chunks(2 * n).flat_map(row).collect();
        let clamp = Clamp { alpha: 1.702, limit: 2.0 };
        let clamped = |(gate, up): (f64, f64)| {
            let gate = gate.min(2.0);
            (up.clamp(-2.0, 2.0) + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
        };
        let row = |row: &[f32]| (0..n).map(|i| clamped((row[i].into(), row[n + i].into()))).collect::<Vec<_>>();
        let expected: Vec<f64> = x.chunks(2 * n).flat_map(row).collect();
        check("clamped silu", &expected, 1e-4, |cpu| {
            let mut out = cpu.buffer(3, n).unwrap();
            cpu.apply_gate(&filled(cpu, 3, &x), Gate::Clamped(clamp), 3, &mut out);
            all(cpu, &out, 3)
        });
        check("gated gelu", &gated, 1e-4, |cpu| {
            let mut out = cpu.buffer(3, n).unwrap();
            cpu.apply_gate(&filled(cpu, 3, &x), Gate::Gelu, 3, &mut out);
            all(cpu, &out, 3)
        });
    }
}

#[test]
fn columns_are_normed_by_the_whole_row() {
    let mut rng = Rng(14);
    let (x, whole, weight) = (rng.floats(4 * 50), rng.floats(4 * 70), rng.floats(20));
    let row = |(x, whole): (&[f32], &[f32])| {
        let mean = whole.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 70.0;
        let scale = 1.0 / (mean + 1e-6).sqrt();
        let of = |(i, x): (usize, &f32)| match i {
            10..30 => f64::from(*x) * scale * f64::from(weight[i - 10]),
            _ => f64::from(*x),
        };
        x.iter().enumerate().map(of).collect::<Vec<_>>()
    };
    let expected: Vec<f64> = x.chunks(50).zip(whole.chunks(70)).flat_map(row).collect();
    check("columns", &expected, 1e-5, |cpu| {
        let mut x = filled(cpu, 4, &x);
        cpu.norm_columns(&mut x, 10..30, &filled(cpu, 4, &whole), &Vector::new(&weight), 1e-6, 4);
        all(cpu, &x, 4)
    });
}

#[test]
fn queries_are_scaled_by_their_positions_and_columns_copied() {
    let cpu = cpu(Isa::detect(), 2, Activations::F32);
    let heads = AttentionHeads::whole(1, 1, 2, 1.0);
    let batch = Batch { tokens: vec![0; 2], positions: vec![2, 0], ..Batch::default() };
    let mut x = filled(&cpu, 2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    cpu.scale_queries(&mut x, &heads, &Vector::new(&[1.0, 9.0, 0.5]), &batch.pass());
    assert_eq!(all(&cpu, &x, 2), [0.5, 1.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let mut to = filled(&cpu, 2, &[0.0; 6]);
    cpu.copy_columns(&x, 0..1, 4..6, &mut to, 1, 1);
    assert_eq!(all(&cpu, &to, 2), [0.0, 0.0, 0.0, 0.0, 5.0, 6.0]);
}
