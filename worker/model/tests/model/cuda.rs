//! Whole tiny models on CUDA's kernels, over a driver that runs them on an emulator: logits equal the CPU's up to the
//! rounding of bf16, and their own bit for bit, in chunks of any length and beside any other sequences.

use crate::fake_cuda::on_fake_cuda;
use crate::whole::{NAMES, bits, distance, distance_of, graphs_keep_bits, keeps_its_bits, log, on_cuda};
use std::path::{Path, PathBuf};
use types::NumericsMode;

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference")
}

#[test]
fn logits_are_the_cpus_but_for_bf16() {
    on_fake_cuda("logits_are_the_cpus_but_for_bf16", &[], || {
        for name in NAMES {
            let distance = distance(&models(), name, NumericsMode::Lockstep, 24, None);
            println!("{name}: {:.1e} of the largest, {:.1e} of a typical row", distance.farthest, distance.typical);
            assert!(distance.is_good(), "{name}: {} and {}", distance.farthest, distance.typical);
        }
    });
}

/// More rows than our own kernels take under `fast`; quantized weights and experts still use them.
#[test]
fn under_fast_logits_are_the_cpus_but_for_bf16() {
    on_fake_cuda("under_fast_logits_are_the_cpus_but_for_bf16", &[], || {
        let in_eight_bits = ["fp8-tensor", "fp8-block"];
        for name in ["llama-bf16-odd", "gemma3", "gpt2", "qwen3-moe", "gguf-k-phi3"].into_iter().chain(in_eight_bits) {
            let distance = distance(&models(), name, NumericsMode::Fast, 40, None);
            println!("{name}: {:.1e} of the largest, {:.1e} of a typical row", distance.farthest, distance.typical);
            assert!(distance.is_good(), "{name}: {} and {}", distance.farthest, distance.typical);
        }
        for name in ["llama-bf16-odd", "fp8-channel"] {
            let at = |mode, chunk| {
                let mut rig = on_cuda(&models(), name, mode, None);
                let log = log(40, 1, rig.n_vocab);
                bits(&rig.in_chunks(&log, chunk))
            };
            let lockstep = at(NumericsMode::Lockstep, 512);
            assert!(at(NumericsMode::Fast, 16) == lockstep, "{name}: the same kernels multiply few rows");
            assert!(at(NumericsMode::Fast, 512) != lockstep, "{name}: the library multiplies many rows");
        }
    });
}

#[test]
fn chunks_and_company_change_no_bit() {
    on_fake_cuda("chunks_and_company_change_no_bit", &[], || {
        for name in ["llama-f32-tied", "gguf-k-mixtral", "gemma3", "fp8-block", "olmo2", "glm4-moe", "gpt-oss"] {
            assert!(keeps_its_bits(&models(), name, None), "{name}");
        }
    });
}

/// A missing barrier between threads of a kernel shows in another thread order.
#[test]
fn the_order_of_threads_changes_no_bit() {
    on_fake_cuda("the_order_of_threads_changes_no_bit", &[("FAKE_CUDA_ORDER", "12345")], || {
        assert!(keeps_its_bits(&models(), "llama-bf16-odd", None));
    });
}

#[test]
fn passes_that_are_begun_again_change_no_bit() {
    on_fake_cuda("passes_that_are_begun_again_change_no_bit", &[], || {
        for name in ["llama-bf16-odd", "gemma2", "gpt2", "qwen3-moe", "cohere2", "ministral3", "gpt-oss"] {
            let (is_same, repeats) = graphs_keep_bits(&models(), name, NumericsMode::Lockstep, None);
            println!("{name}: {repeats:?}");
            assert!(is_same, "{name}");
            assert!(repeats.recorded >= 3 && repeats.replayed >= 8 && repeats.refused == 0, "{name}: {repeats:?}");
        }
    });
}

#[test]
fn without_room_for_graphs_there_are_none() {
    on_fake_cuda("without_room_for_graphs_there_are_none", &[("FAKE_CUDA_MIB", "100")], || {
        let (is_same, repeats) = graphs_keep_bits(&models(), "llama-bf16-odd", NumericsMode::Lockstep, None);
        assert!(is_same && repeats.refused > 0 && repeats.replayed == 0, "{repeats:?}");
    });
}

#[test]
fn one_far_row_is_allowed_and_many_are_not() {
    let check = |got: Vec<f32>, is_good: bool| {
        let expected = vec![vec![1.0, -2.0]; 12];
        let got: Vec<Vec<f32>> = got.into_iter().map(|x| vec![x, -2.0]).collect();
        assert_eq!(distance_of(&expected, &got, (0.04, 0.02)).is_good(), is_good, "{got:?}");
    };
    let with = |n: usize, x: f32| [vec![x; n], vec![1.0; 12 - n]].concat();
    check(with(2, 1.5), true);
    check(with(3, 1.5), false);
    check(with(3, f32::NAN), false);
    check(with(12, 1.05), false);
}
