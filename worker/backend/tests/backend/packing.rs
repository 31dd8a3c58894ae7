//! The packed forms of matrices: a version names them all, and a matrix is the same from its packed bytes.

use crate::numbers::{File, Rng, all, assert_bits, cpus, filled, kinds};
use backend::cpu::{Cpu, Matrix, PACKING_VERSION};
use backend::{Linear, MatrixShape, Memory, StoredMatrix, Weights};
use std::ops::Range;
use types::{Activations, Leaves};

/// The packed bytes, and a matrix made of them.
fn restored(cpu: &Cpu, matrix: &Matrix, parts: &[StoredMatrix<'_>], leaves: Option<(&Leaves, Range<u32>)>) -> Matrix {
    let packed = cpu.packed_bytes(matrix).unwrap();
    let bytes = packed.bytes();
    // The shape has no bytes.
    let parts: Vec<_> = parts.iter().map(|part| StoredMatrix { bytes: &[], scales: None, ..*part }).collect();
    let shape = MatrixShape { parts: &parts, leaves };
    let fill = |at: usize, to: &mut [u8]| to.copy_from_slice(&bytes[at..at + to.len()]);
    let other = cpu.matrix_of_packed(&shape, bytes.len() + 64, &|_, _| panic!("is not filled")).unwrap();
    assert!(other.is_none(), "another number of bytes");
    let matrix = cpu.matrix_of_packed(&shape, bytes.len(), &fill).unwrap().unwrap();
    assert!(cpu.packed_bytes(&matrix).unwrap().bytes() == bytes);
    matrix
}

#[test]
fn products_are_the_same_bits_from_packed_bytes() {
    const K: usize = 512;
    for dtype in kinds() {
        let (file, other) = (File::random(&mut Rng(1), dtype, 37, K), File::random(&mut Rng(2), dtype, 600, K));
        let leaves = Leaves::on_grain(K as u32, 2);
        let x = Rng(3).floats(5 * K);
        for (path, cpu) in cpus(Activations::Int8) {
            let x = filled(&cpu, 5, &x);
            let parts = [file.stored(), other.stored()];
            let stacked = cpu.matrix(&parts).unwrap();
            let in_leaves = cpu.matrix_leaves(file.stored(), &leaves, 0..leaves.len() as u32).unwrap();
            let again = restored(&cpu, &stacked, &parts, None);
            let leaves_again = restored(&cpu, &in_leaves, &parts[..1], Some((&leaves, 0..leaves.len() as u32)));
            let out = |n_out| cpu.buffer(5, n_out).unwrap();
            let [mut expected, mut got] = [out(637), out(637)];
            cpu.linear(&x, &stacked, 5, &mut expected);
            cpu.linear(&x, &again, 5, &mut got);
            assert_bits(&format!("{path}, {dtype:?}"), &all(&cpu, &got, 5), &all(&cpu, &expected, 5));
            let [mut expected, mut got] = [out(37), out(37)];
            cpu.linear_runs(&x, &in_leaves, 5, &mut expected);
            cpu.linear_runs(&x, &leaves_again, 5, &mut got);
            assert_bits(&format!("{path}, {dtype:?} in leaves"), &all(&cpu, &got, 5), &all(&cpu, &expected, 5));
        }
    }
}

/// Files of packed weights outlive a program. If this fails, raise `PACKING_VERSION` and record the new hash.
#[test]
fn packed_bytes_change_only_with_their_version() {
    const RECORDED: (u32, &str) = (1, "f81bdb760c54444de3817ca9b84a562c82d4bbd3a85b1c3d6a4c9dc8ce77a0f7");
    let mut hasher = blake3::Hasher::new();
    let (_, cpu) = cpus(Activations::Int8).into_iter().next().unwrap();
    for dtype in kinds() {
        let file = File::random(&mut Rng(7), dtype, 37, 512);
        hasher.update(cpu.packed_bytes(&cpu.matrix(&[file.stored()]).unwrap()).unwrap().bytes());
    }
    assert_eq!((PACKING_VERSION, hasher.finalize().to_hex().as_str()), RECORDED);
}
