//! Every quantized type: the numbers of a packed block are the file's, bit for bit, wherever its columns are cut.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use backend::{Activations, Stored, StoredType};
use common::{File, Rng, TYPES, assert_bits, cpus, dequantized, is_quantized};

const N: usize = 512;

/// In the order of the file that `make_quants.py` wrote.
const WRITTEN: [StoredType; 12] = [
    StoredType::Q4_0,
    StoredType::Q4_1,
    StoredType::Q5_0,
    StoredType::Q5_1,
    StoredType::Q8_0,
    StoredType::Q2K,
    StoredType::Q3K,
    StoredType::Q4K,
    StoredType::Q5K,
    StoredType::Q6K,
    StoredType::IQ4NL,
    StoredType::MXFP4,
];

/// A zero may have lost its sign: adding zero makes all zeros alike.
fn without_signs_of_zero(numbers: impl IntoIterator<Item = f32>) -> Vec<f32> {
    numbers.into_iter().map(|number| number + 0.0).collect()
}

#[test]
fn a_packed_number_is_the_files() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/quants.bin");
    let file = std::fs::read(path).unwrap();
    let mut rest = &file[..];
    for dtype in WRITTEN {
        let (bytes, after) = rest.split_at(dtype.row_bytes(N));
        let (numbers, after) = after.split_at(4 * N);
        rest = after;
        let expected = without_signs_of_zero(numbers.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        for (path, cpu) in cpus(Activations::Int8) {
            let got = without_signs_of_zero(dequantized(&cpu, Stored::whole(dtype, 1, N, bytes)));
            assert_bits(&format!("{dtype:?}, {path}"), &got, &expected);
        }
    }
    assert!(rest.is_empty());
}

#[test]
fn columns_may_be_cut_inside_a_block() {
    let mut rng = Rng(6);
    for dtype in TYPES.into_iter().filter(|dtype| is_quantized(*dtype)) {
        let file = File::random(&mut rng, dtype, 21, 768);
        for (path, cpu) in cpus(Activations::Int8) {
            for columns in [0..32, 32..768, 96..352, 224..288, 256..512, 736..768, 288..320] {
                let cut = file.stored().columns(columns.clone()).unwrap();
                let rows = file.values.chunks(768);
                let expected: Vec<f32> = rows.flat_map(|row| row[columns.clone()].to_vec()).collect();
                assert_bits(&format!("{dtype:?}, {columns:?}, {path}"), &dequantized(&cpu, cut), &expected);
            }
        }
        let twice = file.stored().columns(96..768).unwrap().columns(192..480).unwrap();
        let once = file.stored().columns(288..576).unwrap();
        assert_eq!((twice.first, twice.k, twice.row(20)), (once.first, once.k, once.row(20)));
        assert!(file.stored().columns(16..64).is_err() && file.stored().columns(0..800).is_err());
        assert!(file.stored().columns(768..768).unwrap().k == 0);
    }
}
