//! A model of random weights as a GGUF file. All layers share the same bytes of the file, so that writing takes a
//! second or two; on the device each layer has its own bytes.

use super::Shape;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Digits {
    Bf16,
    Int4,
    F32,
}

impl Digits {
    /// Returns the format's number, the elements of a block, and its bytes.
    fn stored(self) -> (u32, usize, usize) {
        match self {
            Digits::F32 => (0, 1, 4),
            Digits::Int4 => (2, 32, 18),
            Digits::Bf16 => (30, 1, 2),
        }
    }

    /// Returns the bytes that `n` weights take on the device.
    pub fn device_bytes(self, n: usize) -> f64 {
        match self {
            Digits::F32 => n as f64 * 4.0,
            Digits::Bf16 => n as f64 * 2.0,
            // Sixteen rows of 32: 256 bytes of digits, and 64 of scales.
            Digits::Int4 => n as f64 * 0.625,
        }
    }
}

/// A temporary file, removed when this is dropped.
pub struct Random {
    pub path: PathBuf,
}

impl Drop for Random {
    fn drop(&mut self) {
        // A leftover temporary file does no harm.
        let _gone = std::fs::remove_file(&self.path);
    }
}

/// A tensor's name, its bytes in the file, and its shape: rows and columns.
struct Tensor {
    name: String,
    bytes: &'static str,
    shape: [usize; 2],
    digits: Digits,
}

/// A multiple of every block's size.
const PIECE: usize = 18 << 18;
const ALIGNMENT: usize = 32;

impl Random {
    pub fn write(folder: &Path, shape: &Shape, digits: Digits, context: u32) -> io::Result<Random> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("random-{digits:?}-{}.gguf", std::process::id()));
        let random = Random { path };
        let tensors = tensors(shape, digits);
        let (mut places, mut end) = (BTreeMap::new(), 0usize);
        for Tensor { bytes, shape: [rows, cols], digits, .. } in &tensors {
            let (_, block, block_bytes) = digits.stored();
            let n = rows * cols / block * block_bytes;
            places.entry(*bytes).or_insert_with(|| {
                let at = end;
                end = (end + n).next_multiple_of(ALIGNMENT);
                (at, n, *digits)
            });
        }
        let mut header = header(shape, context, &tensors, |tensor| places.get(tensor.bytes).map_or(0, |place| place.0));
        header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
        let file = File::create(&random.path)?;
        file.set_len((header.len() + end) as u64)?;
        file.write_all_at(&header, 0)?;
        for (at, n, digits) in places.values() {
            fill(&file, header.len() + at, *n, *digits)?;
        }
        Ok(random)
    }
}

fn tensors(shape: &Shape, digits: Digits) -> Vec<Tensor> {
    let Shape { n_layers, hidden, inner, vocab, .. } = *shape;
    let matrix = |name: String, bytes, rows, cols| Tensor { name, bytes, shape: [rows, cols], digits };
    let norm = |name: String| Tensor { name, bytes: "norm", shape: [1, hidden], digits: Digits::F32 };
    let mut all = vec![
        matrix("token_embd.weight".into(), "vocab", vocab, hidden),
        matrix("output.weight".into(), "vocab", vocab, hidden),
        norm("output_norm.weight".into()),
    ];
    for i in 0..n_layers {
        let of = |bytes, rows, cols| matrix(format!("blk.{i}.{bytes}.weight"), bytes, rows, cols);
        all.extend(["attn_norm", "ffn_norm"].map(|name| norm(format!("blk.{i}.{name}.weight"))));
        all.extend([
            of("attn_q", hidden, hidden),
            of("attn_k", shape.kv(), hidden),
            of("attn_v", shape.kv(), hidden),
            of("attn_output", hidden, hidden),
            of("ffn_gate", inner, hidden),
            of("ffn_up", inner, hidden),
            of("ffn_down", hidden, inner),
        ]);
    }
    all
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn header(shape: &Shape, context: u32, tensors: &[Tensor], place: impl Fn(&Tensor) -> usize) -> Vec<u8> {
    const U32: u32 = 4;
    const F32: u32 = 6;
    const TEXT: u32 = 8;
    let number = |key: &str, kind: u32, bytes: [u8; 4]| [&text(key)[..], &kind.to_le_bytes(), &bytes].concat();
    let count = |key: &str, n: usize| number(key, U32, (n as u32).to_le_bytes());
    let values = [
        [&text("general.architecture")[..], &TEXT.to_le_bytes(), &text("llama")].concat(),
        count("llama.block_count", shape.n_layers as usize),
        count("llama.context_length", context as usize),
        count("llama.embedding_length", shape.hidden),
        count("llama.feed_forward_length", shape.inner),
        count("llama.attention.head_count", shape.n_heads),
        count("llama.attention.head_count_kv", shape.n_kv_heads),
        count("llama.attention.key_length", shape.head_dim),
        count("llama.attention.value_length", shape.head_dim),
        count("llama.rope.dimension_count", shape.head_dim),
        number("llama.attention.layer_norm_rms_epsilon", F32, 1e-5f32.to_le_bytes()),
        number("llama.rope.freq_base", F32, 500_000f32.to_le_bytes()),
    ];
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((values.len() as u64).to_le_bytes());
    out.extend(values.concat());
    for tensor in tensors {
        let [rows, cols] = tensor.shape;
        // Fastest dimension first; a vector has one.
        let dims = [cols as u64, rows as u64];
        let dims = &dims[..if tensor.digits == Digits::F32 { 1 } else { 2 }];
        out.extend(text(&tensor.name));
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend(tensor.digits.stored().0.to_le_bytes());
        out.extend((place(tensor) as u64).to_le_bytes());
    }
    out
}

/// Fills the file on all cores; each takes one piece after another.
fn fill(file: &File, start: usize, n_bytes: usize, digits: Digits) -> io::Result<()> {
    let n_threads = super::super::cores().min(n_bytes.div_ceil(PIECE));
    std::thread::scope(|scope| {
        let fill = |thread: usize| {
            let mut bytes = vec![0; PIECE.min(n_bytes)];
            for at in (thread * PIECE..n_bytes).step_by(n_threads * PIECE) {
                let piece = &mut bytes[..PIECE.min(n_bytes - at)];
                draw(piece, digits, at as u64);
                file.write_all_at(piece, (start + at) as u64)?;
            }
            Ok(())
        };
        let threads: Vec<_> = (0..n_threads).map(|thread| scope.spawn(move || fill(thread))).collect();
        let failed = |_| Err(io::Error::other("a thread panicked"));
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(failed))
    })
}

/// Weights around 1/64, of either sign; ones for norms.
fn draw(piece: &mut [u8], digits: Digits, seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    match digits {
        Digits::F32 => piece.chunks_exact_mut(4).for_each(|to| to.copy_from_slice(&1f32.to_le_bytes())),
        Digits::Bf16 => piece.chunks_mut(8).for_each(|to| {
            let four = 0x3c80_3c80_3c80_3c80 | next() & 0x807f_807f_807f_807f;
            to.copy_from_slice(&four.to_le_bytes()[..to.len()]);
        }),
        Digits::Int4 => piece.chunks_exact_mut(18).for_each(|to| {
            // A scale of 1/256 as f16, and digits from -8 to 7.
            to[..2].copy_from_slice(&0x1c00u16.to_le_bytes());
            to[2..10].copy_from_slice(&next().to_le_bytes());
            to[10..].copy_from_slice(&next().to_le_bytes());
        }),
    }
}
