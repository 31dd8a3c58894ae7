//! Operations on each row alone: in f32 the CPU backend's bits, in bf16 those rounded.

use super::device::{Launch, Memory, ORDERS, UNWRITTEN, bf16_rows, rounded};
use super::linear::{KINDS, Packed};
use crate::arguments;
use crate::numbers::{Rng, all, assert_bits, cpu, filled};
use backend::cpu::{Buffer, Cpu, Isa, Vector};
use backend::{AttentionHeads, Batch, Clamp, ElementOp, Gate, HeadNorms, Memory as _, Pointwise};
use types::Activations;

/// Rows shorter than the lanes, uneven, longer than a block of threads, and a long one. (n_rows, cols)
const SHAPES: [(usize, usize); 5] = [(1, 7), (7, 64), (17, 33), (2, 576), (1, 1000)];
const X_BF16: u32 = 1;
const OUT_BF16: u32 = 2;

/// As `HeadShape`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HeadShape {
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub per_kv: u32,
    pub first: u32,
    pub head_dim: u32,
    pub window: u32,
    pub scale: f32,
    pub cap: f32,
    pub sinks: u64,
}

impl HeadShape {
    pub fn of(heads: &AttentionHeads) -> HeadShape {
        HeadShape {
            n_heads: heads.n_heads as u32,
            n_kv_heads: heads.n_kv_heads as u32,
            per_kv: heads.per_kv as u32,
            first: heads.first as u32,
            head_dim: heads.head_dim as u32,
            window: heads.window.map_or(0, |window| window as u32),
            scale: heads.scale,
            cap: heads.cap.unwrap_or(0.0),
            sinks: 0,
        }
    }
}

fn host() -> Cpu {
    cpu(Isa::Plain, 1, Activations::F32)
}

/// The CPU's result: `[n_rows, cols]`.
fn on_cpu(n_rows: usize, cols: usize, op: impl Fn(&Cpu, &mut Buffer)) -> Vec<f32> {
    let cpu = host();
    let mut out = filled(&cpu, n_rows, &vec![UNWRITTEN; n_rows * cols]);
    op(&cpu, &mut out);
    all(&cpu, &out, n_rows)
}

/// Numbers of all magnitudes, some of them special cases of a function.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let rng = &mut Rng(seed);
    let mut numbers: Vec<f32> = (0..n).map(|_| rng.unit() * [0.01, 1.0, 20.0][rng.below(3)]).collect();
    let special = [0.0, -0.0, 0.625, -0.625, 88.9, -103.9, 200.0, -200.0, 1e-30];
    numbers.iter_mut().step_by(5).zip(special.into_iter().cycle()).for_each(|(number, special)| *number = special);
    numbers
}

/// Runs a kernel on every shape in every order, with its output in both forms. The arguments are made from x, out and
/// forms; x may be wider than out.
fn in_both_forms(
    name: &str,
    wider: usize,
    shared: bool,
    x_forms: &[u32],
    run: impl Fn(Launch, *const u8, *mut u8, u32, usize),
    expected: impl Fn(&[f32], usize, usize) -> Vec<f32>,
) {
    for (i, (n_rows, cols)) in SHAPES.into_iter().enumerate() {
        let x = numbers(i as u64, n_rows * cols * wider);
        for form in x_forms {
            let x: Vec<f32> = if *form == X_BF16 { x.iter().copied().map(rounded).collect() } else { x.clone() };
            let expected = expected(&x, n_rows, cols);
            let halves = Memory::of(&bf16_rows(&x, cols * wider));
            let floats = Memory::of(&x);
            let from = if *form == X_BF16 { halves.start().cast() } else { floats.start().cast::<u8>() };
            let order = ORDERS[i % ORDERS.len()];
            let shared = if shared { 4 * cols } else { 0 };
            let launch = Launch { order, shared, ..Launch::new([n_rows, 1, 1], 256) };
            let out = Memory::filled(n_rows * cols, UNWRITTEN);
            run(launch, from.cast_const(), out.start().cast(), *form, cols);
            assert_bits(&format!("{name} of {n_rows} x {cols}"), &out.read(), &expected);
            let out = Memory::filled(n_rows * cols.next_multiple_of(32), 0xffffu16);
            run(launch, from.cast_const(), out.start().cast(), *form | OUT_BF16, cols);
            assert_eq!(out.read(), bf16_rows(&expected, cols), "{name} of {n_rows} x {cols} in bf16");
        }
    }
}

#[test]
fn norms_are_the_cpus() {
    let weight = numbers(91, 1000);
    let bias = numbers(92, 1000);
    let (w, b) = (Memory::of(&weight), Memory::of(&bias));
    let rms = |launch: Launch, x: *const u8, out: *mut u8, forms: u32, cols: usize| {
        launch.ok("rms_norm", arguments![x, w.start(), 1e-5f32, cols as u32, out, forms]);
    };
    in_both_forms("rms_norm", 1, true, &[0, X_BF16], rms, |x, n_rows, cols| {
        on_cpu(n_rows, cols, |cpu, out| {
            cpu.rms_norm(&filled(cpu, n_rows, x), &Vector::new(&weight[..cols]), 1e-5, n_rows, out)
        })
    });
    let layer = |launch: Launch, x: *const u8, out: *mut u8, forms: u32, cols: usize| {
        launch.ok("layer_norm", arguments![x, w.start(), b.start(), 1e-5f32, cols as u32, out, forms]);
    };
    in_both_forms("layer_norm", 1, true, &[0, X_BF16], layer, |x, n_rows, cols| {
        let (weight, bias) = (weight[..cols].to_vec(), bias[..cols].to_vec());
        on_cpu(n_rows, cols, |cpu, out| {
            cpu.layer_norm(&filled(cpu, n_rows, x), &Vector::new(&weight), &Vector::new(&bias), 1e-5, n_rows, out)
        })
    });
}

#[test]
fn the_stream_and_its_norm_are_the_cpus() {
    let (weight, before) = (numbers(93, 1000), numbers(94, 2000));
    let w = Memory::of(&weight);
    let cpu = host();
    let sums = |x: &[f32], n_rows: usize, cols: usize| {
        let mut residual = filled(&cpu, n_rows, &before[..n_rows * cols]);
        let mut out = cpu.buffer(n_rows, cols).unwrap();
        cpu.add_rms_norm(
            &filled(&cpu, n_rows, x),
            &mut residual,
            &Vector::new(&weight[..cols]),
            1e-5,
            n_rows,
            &mut out,
        );
        (all(&cpu, &residual, n_rows), all(&cpu, &out, n_rows))
    };
    let fused = |launch: Launch, x: *const u8, out: *mut u8, forms: u32, cols: usize| {
        let n_rows = launch.grid[0];
        let residual = Memory::of(&before[..n_rows * cols]);
        launch.ok("add_rms_norm", arguments![x, residual.start(), w.start(), 1e-5f32, cols as u32, out, forms]);
        let apart = Memory::of(&before[..n_rows * cols]);
        launch.ok("add_rows", arguments![x, apart.start(), cols as u32, forms]);
        assert_bits("the same stream", &apart.read(), &residual.read());
    };
    in_both_forms("add_rms_norm", 1, true, &[0, X_BF16], fused, |x, n_rows, cols| sums(x, n_rows, cols).1);
    let x = numbers(95, 7 * 64);
    let (at, residual) = (Memory::of(&x), Memory::of(&before[..7 * 64]));
    Launch::new([7, 1, 1], 256).ok("add_rows", arguments![at.start(), residual.start(), 64u32, 0u32]);
    assert_bits("the stream", &residual.read(), &sums(&x, 7, 64).0);
}

#[test]
fn gates_are_the_cpus() {
    let silu = |launch: Launch, x: *const u8, out: *mut u8, forms: u32, cols: usize| {
        launch.ok("silu_mul", arguments![x, cols as u32, out, forms]);
    };
    in_both_forms("silu_mul", 2, false, &[0], silu, |x, n_rows, cols| {
        on_cpu(n_rows, cols, |cpu, out| cpu.apply_gate(&filled(cpu, n_rows, x), Gate::Silu, n_rows, out))
    });
    let gelu = |launch: Launch, x: *const u8, out: *mut u8, forms: u32, cols: usize| {
        launch.ok("gelu_mul", arguments![x, cols as u32, out, forms]);
    };
    in_both_forms("gelu_mul", 2, false, &[0], gelu, |x, n_rows, cols| {
        on_cpu(n_rows, cols, |cpu, out| cpu.apply_gate(&filled(cpu, n_rows, x), Gate::Gelu, n_rows, out))
    });
}

#[test]
fn clamped_gates_are_the_cpus() {
    let clamp = Clamp { alpha: 1.702, limit: 7.0 };
    let run = |launch: Launch, x: *const u8, out: *mut u8, forms: u32, cols: usize| {
        launch.ok("clamped_silu_mul", arguments![x, cols as u32, clamp.alpha, clamp.limit, out, forms]);
    };
    in_both_forms("clamped_silu_mul", 2, false, &[0], run, |x, n_rows, cols| {
        on_cpu(n_rows, cols, |cpu, out| cpu.apply_gate(&filled(cpu, n_rows, x), Gate::Clamped(clamp), n_rows, out))
    });
}

#[test]
fn columns_are_copied_scaled_and_normed_as_on_the_cpu() {
    let (n_rows, cols, heads) = (5, 96, AttentionHeads::whole(3, 1, 20, 1.0));
    let (x, whole, weight) = (numbers(60, n_rows * 100), numbers(61, n_rows * cols), numbers(62, 40));
    let cpu = host();
    let launch = Launch { order: 2, ..Launch::new([n_rows, 1, 1], 256) };
    let mut expected = filled(&cpu, n_rows, &x);
    cpu.norm_columns(&mut expected, 30..70, &filled(&cpu, n_rows, &whole), &Vector::new(&weight), 1e-6, n_rows);
    let (out, of, w) = (Memory::of(&x), Memory::of(&whole), Memory::of(&weight));
    // SAFETY: 30 numbers further on is within the first row.
    let at = unsafe { out.start().add(30) };
    launch.ok("norm_columns", arguments![at, 100u32, 40u32, of.start(), cols as u32, w.start(), 1e-6f32]);
    assert_bits("normed columns", &out.read(), &all(&cpu, &expected, n_rows));

    let mut expected = filled(&cpu, n_rows, &x);
    cpu.copy_columns(&filled(&cpu, n_rows, &whole), 0..n_rows, 10..50, &mut expected, 0, 60);
    let out = Memory::of(&x);
    // SAFETY: likewise.
    let (from, to) = unsafe { (of.start().add(10), out.start().add(60)) };
    launch.ok("copy_columns", arguments![from, cols as u32, to, 100u32, 40u32]);
    assert_bits("copied columns", &out.read(), &all(&cpu, &expected, n_rows));

    let (positions, factors) = ([7u32, 0, 3, 3, 9], numbers(63, 10));
    let batch = Batch { tokens: vec![0; n_rows], positions: positions.to_vec(), ..Batch::default() };
    let mut expected = filled(&cpu, n_rows, &x);
    cpu.scale_queries(&mut expected, &heads, &Vector::new(&factors), &batch.pass());
    let (out, at, by) = (Memory::of(&x), Memory::of(&positions), Memory::of(&factors));
    launch.ok("scale_queries", arguments![out.start(), 100u32, 60u32, by.start(), at.start()]);
    assert_bits("scaled queries", &out.read(), &all(&cpu, &expected, n_rows));
}

#[test]
fn what_is_done_in_place_is_the_cpus() {
    for (i, (n_rows, cols)) in SHAPES.into_iter().enumerate() {
        let x = numbers(20 + i as u64, n_rows * cols);
        let launch = Launch { order: ORDERS[i % ORDERS.len()], ..Launch::new([n_rows, 1, 1], 256) };
        let bias = numbers(30, cols);
        let expected = |op: &dyn Fn(&Cpu, &mut Buffer)| {
            let cpu = host();
            let mut buffer = filled(&cpu, n_rows, &x);
            op(&cpu, &mut buffer);
            all(&cpu, &buffer, n_rows)
        };
        let out = Memory::of(&x);
        launch.ok("gelu_rows", arguments![out.start(), cols as u32]);
        assert_bits("gelu", &out.read(), &expected(&|cpu, x| cpu.map(x, ElementOp::Gelu, n_rows)));
        let out = Memory::of(&x);
        launch.ok("gelu_erf_rows", arguments![out.start(), cols as u32]);
        assert_bits("gelu with erf", &out.read(), &expected(&|cpu, x| cpu.map(x, ElementOp::GeluErf, n_rows)));
        let out = Memory::of(&x);
        launch.ok("scale_rows", arguments![out.start(), cols as u32, 0.37f32]);
        assert_bits("scale", &out.read(), &expected(&|cpu, x| cpu.map(x, ElementOp::Scale(0.37), n_rows)));
        let out = Memory::of(&x);
        launch.ok("soft_cap_rows", arguments![out.start(), cols as u32, 30.0f32]);
        assert_bits("soft cap", &out.read(), &expected(&|cpu, x| cpu.map(x, ElementOp::SoftCap(30.0), n_rows)));
        let (out, b) = (Memory::of(&x), Memory::of(&bias));
        launch.ok("add_bias", arguments![out.start(), b.start(), cols as u32]);
        assert_bits("bias", &out.read(), &expected(&|cpu, x| cpu.add_bias(x, &Vector::new(&bias), n_rows)));
    }
}

#[test]
fn heads_are_normed_as_on_the_cpu() {
    for (n_heads, n_kv_heads, head_dim) in [(3, 1, 64), (1, 1, 20), (2, 2, 256)] {
        let heads = AttentionHeads::whole(n_heads, n_kv_heads, head_dim, 1.0);
        let (x, q, k) = (numbers(40, 5 * heads.qkv_cols()), numbers(41, head_dim), numbers(42, head_dim));
        let cpu = host();
        let mut expected = filled(&cpu, 5, &x);
        let norms = HeadNorms { q: &Vector::new(&q), k: &Vector::new(&k), v: None, eps: 1e-6 };
        cpu.norm_heads(&mut expected, &heads, &norms, 5);
        for order in ORDERS {
            let (out, q, k) = (Memory::of(&x), Memory::of(&q), Memory::of(&k));
            Launch { order, ..Launch::new([5, n_heads + n_kv_heads, 1], 32) }
                .ok("norm_heads", arguments![out.start(), q.start(), k.start(), 1e-6f32, HeadShape::of(&heads)]);
            assert_bits("norm_heads", &out.read(), &all(&cpu, &expected, 5));
        }
    }
}

#[test]
fn rows_change_their_form_and_move() {
    for (n_rows, cols) in SHAPES {
        let x = numbers(50, n_rows * cols);
        let halves = Memory::filled(n_rows * cols.next_multiple_of(32), 0xffffu16);
        let (from, back) = (Memory::of(&x), Memory::filled(n_rows * cols, UNWRITTEN));
        let launch = Launch { order: 3, ..Launch::new([n_rows, 1, 1], 256) };
        launch.ok("round_rows", arguments![from.start(), cols as u32, halves.start()]);
        assert_eq!(halves.read(), bf16_rows(&x, cols));
        launch.ok("widen_rows", arguments![halves.start(), cols as u32, back.start()]);
        assert_bits("back", &back.read(), &x.iter().copied().map(rounded).collect::<Vec<_>>());
        let rows: Vec<u32> = (0..n_rows as u32).rev().chain([0, 0]).collect();
        let (indices, out) = (Memory::of(&rows), Memory::filled(rows.len() * cols, UNWRITTEN));
        Launch::new([rows.len(), 1, 1], 256)
            .ok("gather_rows", arguments![from.start(), indices.start(), cols as u32, out.start()]);
        let expected: Vec<f32> = rows.iter().flat_map(|row| x[*row as usize * cols..][..cols].to_vec()).collect();
        assert_bits("gathered", &out.read(), &expected);
    }
}

#[test]
fn tokens_become_the_tables_numbers() {
    let (n_table, k) = (37, 72);
    for (i, kind) in KINDS.into_iter().enumerate() {
        let table = Packed::random(&mut Rng(60), kind, n_table, k);
        // The table begins at token 100; rows of tokens outside it stay unchanged.
        let tokens = [100u32, 136, 99, 137, 115, 116, u32::MAX, 0];
        let (at, out) = (Memory::of(&tokens), Memory::filled(tokens.len() * k, UNWRITTEN));
        Launch { order: ORDERS[i % ORDERS.len()], ..Launch::new([tokens.len(), 1, 1], 256) }.ok(
            &format!("embed_{kind}"),
            arguments![
                table.digits.start(),
                table.scales.start(),
                at.start(),
                100u32,
                n_table as u32,
                k as u32,
                out.start()
            ],
        );
        let of = |token: &u32| match token.checked_sub(100) {
            Some(row) if row < n_table as u32 => table.weights[row as usize * k..][..k].to_vec(),
            _ => vec![UNWRITTEN; k],
        };
        assert_bits(kind, &out.read(), &tokens.iter().flat_map(of).collect::<Vec<_>>());
    }
}
