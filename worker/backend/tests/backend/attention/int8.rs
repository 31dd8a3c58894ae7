//! K and V of eight bits: each row of a head has its own scale, independent of its neighbours, and keys are turned.

use super::*;

const PAGE_POSITIONS: usize = 16;

/// Each run of numbers, as long as the largest power of two that divides the row, times a Hadamard matrix.
fn turned(row: &[f64]) -> Vec<f64> {
    let n = 1 << row.len().trailing_zeros();
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let product = |run: &[f64], i: usize| run.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum::<f64>();
    row.chunks(n).flat_map(|run| (0..n).map(move |i| product(run, i))).collect()
}

/// Returns a key as it is read back: it is rounded in turned form, and turned back.
pub(super) fn stored_key(row: &[f64]) -> Vec<f64> {
    let n = f64::from(1u32 << row.len().trailing_zeros());
    turned(&stored(&turned(row))).iter().map(|x| x / n).collect()
}

/// A row of V, rounded by its own largest number.
pub(super) fn stored(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().fold(0.0f32, |largest, x| largest.max((*x as f32).abs()));
    let (scale, inverse) = if largest > 0.0 { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };
    row.iter().map(|x| f64::from((*x as f32 * inverse).round_ties_even()) * f64::from(scale)).collect()
}

/// Rows of very different sizes, so that a neighbour's scale, or another head's, is far off.
fn case(rng: &mut Rng, shape: (usize, usize, usize), lengths: &[usize]) -> Case {
    let mut case = Case::new(rng, shape, KvDtype::Int8, RopeStyle::Halves, lengths);
    let AttentionHeads { n_heads, head_dim, .. } = case.heads;
    for sequence in &mut case.sequences {
        for (i, head) in sequence.qkv.chunks_exact_mut(head_dim).enumerate() {
            let is_query = i % (n_heads + 2 * shape.1) < n_heads;
            let size = if is_query { 1.0 } else { [0.02, 1.0, 0.3, 0.0, 1.5][rng.below(5)] };
            head.iter_mut().for_each(|x| *x *= size);
        }
    }
    case
}

#[test]
fn every_path_gives_the_bits_of_the_plain_one() {
    let mut rng = Rng(21);
    for shape in SHAPES {
        for (window, cap) in [(None, None), (Some(37), Some(20.0))] {
            let n = 1 + rng.below(150);
            let mut case = case(&mut rng, shape, &[n]);
            case.heads = AttentionHeads { window, cap, ..case.heads };
            let cpus = cpus(Activations::F32);
            for has_rope in [true, false] {
                case.has_rope = has_rope;
                let expected = case.whole(&cpus[0].1, 0);
                let name = format!("{shape:?}, a window of {window:?}, {} positions", case.length(0));
                for (path, cpu) in &cpus[1..] {
                    assert_bits(&format!("{name}, {path}"), &case.whole(cpu, 0), &expected);
                }
                // A turned K may be rounded to the other side.
                let tolerance = if has_rope { 3e-2 } else { 4e-3 };
                assert_close(&name, &expected, &case.naive(0), tolerance);
            }
        }
    }
}

/// Keys of real models have columns that are always large: their neighbours must keep their precision.
#[test]
fn a_large_column_of_every_key_takes_little_from_the_others() {
    let mut rng = Rng(28);
    for head_dim in [64, 80, 128] {
        let mut case = Case::new(&mut rng, (2, 1, head_dim), KvDtype::Int8, RopeStyle::Halves, &[100]);
        case.has_rope = false;
        let key = 2 * head_dim..3 * head_dim;
        for row in case.sequences[0].qkv.chunks_exact_mut(4 * head_dim) {
            [row[3], row[head_dim + 3], row[key.start + 3]] = [0.01, 0.01, 40.0];
        }
        let got = case.whole(&cpu(Isa::detect(), 1, Activations::F32), 0);
        case.dtype = KvDtype::F32;
        let exact = case.naive(0);
        let off = |x: &[f64]| x.iter().zip(&exact).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
        let off_turned = off(&got.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
        for row in case.sequences[0].qkv.chunks_exact_mut(4 * head_dim) {
            let rounded = stored(&row[key.clone()].iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
            row[key.clone()].iter_mut().zip(rounded).for_each(|(x, rounded)| *x = rounded as f32);
        }
        let off_plain = off(&case.naive(0));
        assert!(2.0 * off_turned < off_plain, "{head_dim}: {off_turned}, and {off_plain} as they are");
    }
}

#[test]
fn sinks_count_as_they_do_with_other_caches() {
    let mut rng = Rng(22);
    let mut case = case(&mut rng, (6, 2, 24), &[300]);
    case.has_rope = false;
    case.sinks = Some(vec![-40.0, 0.0, 1.5, 3.0, 8.0, 30.0]);
    let cpu = cpu(Isa::detect(), 2, Activations::F32);
    assert_close("sinks", &case.whole(&cpu, 0), &case.naive(0), 4e-3);
}

#[test]
fn chunks_and_neighbours_change_nothing() {
    let mut rng = Rng(23);
    const N: usize = 4200;
    for window in [None, Some(290)] {
        let mut case = case(&mut rng, (3, 1, 32), &[N, 500, 33]);
        case.heads = AttentionHeads { window, ..case.heads };
        let cpu = cpu(Isa::detect(), 2, Activations::F32);
        let alone: Vec<Vec<f32>> = (0..3).map(|i| case.whole(&cpu, i)).collect();
        let mut kv = case.kv(&cpu);
        let (mut done, mut got) = ([0; 3], vec![Vec::new(); 3]);
        while (0..3).any(|i| done[i] < case.length(i)) {
            let mut slices = Vec::new();
            for (i, done) in done.iter_mut().enumerate() {
                let n = [1, 17, 300, 2000][rng.below(4)].min(case.length(i) - *done);
                if n > 0 {
                    slices.push((i, *done..*done + n));
                    *done += n;
                }
            }
            let out = case.step(&cpu, &mut kv, &slices);
            let mut rows = out.chunks(3 * 32);
            for (i, range) in slices {
                rows.by_ref().take(range.len()).for_each(|row| got[i].extend(row));
            }
        }
        for i in 0..3 {
            assert_bits(&format!("a window of {window:?}, sequence {i}"), &got[i], &alone[i]);
        }
    }
}

/// The bytes of a block depend only on its rows, not on earlier contents or on how rows were cut into steps.
#[test]
fn a_row_is_stored_by_itself() {
    let mut rng = Rng(24);
    let case = case(&mut rng, (4, 2, 24), &[PAGE_POSITIONS]);
    let block = case.sequences[0].blocks[0];
    let bytes = |cpu: &Cpu, steps: &[usize], is_dirty: bool| {
        let mut kv = case.kv(cpu);
        if is_dirty {
            let mut other = Case::new(&mut Rng(25), (4, 2, 24), KvDtype::Int8, RopeStyle::Halves, &[PAGE_POSITIONS]);
            other.sequences[0].blocks = vec![block];
            other.step(cpu, &mut kv, &[(0, 0..PAGE_POSITIONS)]);
        }
        let mut at = 0;
        for n in steps {
            case.step(cpu, &mut kv, &[(0, at..at + n)]);
            at += n;
        }
        cpu.read_block(&kv, LAYER, block)
    };
    let cpus = cpus(Activations::F32);
    let expected = bytes(&cpus[0].1, &[PAGE_POSITIONS], false);
    // Two heads of K and V, each of sixteen rows: 32 digits (24, as whole lanes) and a scale.
    assert_eq!(expected.len(), 2 * 2 * PAGE_POSITIONS * (32 + 4));
    for (path, cpu) in &cpus {
        for steps in [&[PAGE_POSITIONS][..], &[1, 9, 6], &[1; PAGE_POSITIONS]] {
            for is_dirty in [false, true] {
                assert!(bytes(cpu, steps, is_dirty) == expected, "{path}, steps of {steps:?}, dirty: {is_dirty}");
            }
        }
    }
}

#[test]
fn nan_reaches_only_its_readers() {
    let mut rng = Rng(26);
    let clean = case(&mut rng, (2, 1, 32), &[40]);
    for (path, cpu) in cpus(Activations::F32) {
        let expected = clean.whole(&cpu, 0);
        // A number of K at position 20, then one of V.
        for column in [2 * 32 + 5, 3 * 32 + 5] {
            for none in [f32::NAN, f32::INFINITY] {
                let sequences =
                    vec![Sequence { qkv: clean.sequences[0].qkv.clone(), blocks: clean.sequences[0].blocks.clone() }];
                let (cos, sin) = (clean.cos.clone(), clean.sin.clone());
                let mut case = Case { sequences, cos, sin, sinks: None, ..clean };
                case.sequences[0].qkv[20 * 4 * 32 + column] = none;
                let got = case.whole(&cpu, 0);
                assert_bits(&format!("{path}, before it"), &got[..20 * 64], &expected[..20 * 64]);
                assert!(got[20 * 64..].iter().all(|x| x.is_nan()), "{path}: {none} in column {column}");
                case.sequences[0].qkv = clean.sequences[0].qkv.clone();
                let mut kv = clean.kv(&cpu);
                let mut dirty = Case::new(&mut Rng(27), (2, 1, 32), KvDtype::Int8, RopeStyle::Halves, &[48]);
                dirty.sequences[0].qkv.fill(none);
                dirty.sequences[0].blocks.clone_from(&clean.sequences[0].blocks);
                dirty.step(&cpu, &mut kv, &[(0, 0..48)]);
                assert_bits(&format!("{path}, after {none}"), &case.step(&cpu, &mut kv, &[(0, 0..40)]), &expected);
            }
        }
    }
}
