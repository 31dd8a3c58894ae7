//! CUDA as a device, over a driver that runs its kernels on an emulator: operations beside the CPU's, the cache of
//! compiled kernels, and the errors where something is missing. With NVRTC on this machine also the real compiler.

use crate::emulator::functions::dot;
use crate::fake_cuda::on_fake_cuda;
use crate::{fake_cuda, numbers, on_device};
use backend::cpu::{CpuConfig, Isa};
use backend::cuda::{Arch, Compiler, Cuda, CudaConfig, DeviceColumns, Driver, compile};
use backend::{
    Batch, BatchLimits, BlockTables, Device, Error, Linear, Memory, PassSlice, PassStats, RunOutcome, Weights,
};
use half::bf16;
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;
use types::{Activations, Dtype, KvDtype, NumericsMode, Want};

fn config(cache: Option<PathBuf>) -> CudaConfig {
    let host = CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false };
    CudaConfig { ordinal: 0, cache, mode: NumericsMode::Lockstep, host, graphs: true }
}

fn fast() -> Cuda {
    Cuda::open(&CudaConfig { mode: NumericsMode::Fast, ..config(None) }).unwrap()
}

/// Whether the work was replayed from a record.
fn repeat<E: std::fmt::Debug>(cuda: &Cuda, mut work: impl FnMut() -> Result<(), E>) -> bool {
    let last = match cuda.run_or_replay(&mut work).unwrap() {
        RunOutcome::Recorded => cuda.run_or_replay(&mut work).unwrap(),
        other => other,
    };
    assert!(last != RunOutcome::Recorded, "the pass is recorded at most once");
    last == RunOutcome::Begun
}

#[test]
fn under_fast_products_of_many_rows_are_the_librarys() {
    on_fake_cuda("under_fast_products_of_many_rows_are_the_librarys", &[], || {
        let (fast, lockstep) = (fast(), Cuda::open(&config(None)).unwrap());
        let checks = on_device::fast_checks(&fast, &[1, 33, 70], 3);
        let bad: Vec<_> = checks.iter().filter(|check| !check.is_good()).map(|check| &check.name).collect();
        assert!(bad.is_empty() && checks.len() > 10, "{bad:?}");
        for n_rows in [1, 9, 32, 33, 64] {
            let of = |cuda| on_device::product_of(cuda, 40, 200, n_rows);
            assert_eq!(of(&fast) == of(&lockstep), n_rows <= 32, "{n_rows} rows");
        }
    });
}

/// The bits of a product with eight-bit weights.
fn in_eight_bits(cuda: &Cuda, block: [usize; 2], n_rows: usize) -> Vec<f32> {
    let rng = &mut numbers::Rng(11);
    let (file, x) = (numbers::File::in_eight_bits(rng, 32, 96, block), rng.floats(n_rows * 96));
    let w = cuda.matrix(&[file.stored()]).unwrap();
    let (mut rows, mut out) = (cuda.buffer(n_rows, 96).unwrap(), cuda.buffer(n_rows, 32).unwrap());
    cuda.write(&mut rows, 0, &x);
    cuda.linear(&rows, &w, n_rows, &mut out);
    let mut values = vec![0.0; n_rows * 32];
    cuda.read(&out, 0..n_rows, &mut values);
    cuda.take_failure().unwrap();
    values
}

#[test]
fn weights_of_eight_bits_are_the_librarys_where_it_has_a_way() {
    // A scale for each row, and one for each block: from which row count on the library computes the products.
    let firsts = |at_rows: [bool; 4], at_blocks: [bool; 4]| {
        let (fast, lockstep) = (fast(), Cuda::open(&config(None)).unwrap());
        for (block, expected) in [([1, 96], at_rows), ([16, 32], at_blocks)] {
            for (n_rows, is_the_librarys) in [9, 32, 33, 512].into_iter().zip(expected) {
                let of = |cuda| in_eight_bits(cuda, block, n_rows);
                assert_eq!(of(&fast) != of(&lockstep), is_the_librarys, "{n_rows} rows, a scale for {block:?}");
            }
        }
    };
    let (from_33, from_512) = ([false, false, true, true], [false, false, false, true]);
    let name = "weights_of_eight_bits_are_the_librarys_where_it_has_a_way";
    on_fake_cuda(name, &[], || match std::env::var("EIGHT_BITS").as_deref() {
        Ok("none") => firsts([false; 4], [false; 4]),
        Ok(_) => firsts(from_512, from_512),
        Err(_) => firsts(from_33, from_512),
    });
    if !fake_cuda::is_inside() {
        let without = [
            ("FAKE_CUBLASLT_HAS_NO_WAY", "1", "none"),
            ("FAKE_CUBLASLT_HAS_NO_F8", "1", "bf16"),
            ("FAKE_CUBLASLT_REFUSES_F8", "1", "bf16"),
            ("FAKE_CUDA_SM", "80", "bf16"),
        ];
        for (screw, how, what) in without {
            on_fake_cuda(name, &[(screw, how), ("EIGHT_BITS", what)], || {
                unreachable!("the child process runs the body")
            });
        }
    }
}

#[test]
fn a_record_of_a_pass_has_the_librarys_products_too() {
    on_fake_cuda("a_record_of_a_pass_has_the_librarys_products_too", &[], || {
        let rng = &mut numbers::Rng(1);
        let in_bf16 = numbers::File::random(rng, Dtype::BF16, 16, 64);
        for file in [in_bf16, numbers::File::in_eight_bits(rng, 16, 64, [1, 64])] {
            let (fast, n_rows) = (fast(), 64);
            fast.reserve_batches(BatchLimits { rows_max: n_rows, context: 32, n_groups: 0 }).unwrap();
            let w = fast.matrix(&[file.stored()]).unwrap();
            let (mut x, mut out) = (fast.buffer(n_rows, 64).unwrap(), fast.buffer(n_rows, 16).unwrap());
            let slices = (0..n_rows as u32).map(|row| PassSlice::new(row..row + 1, 3, Want::Nothing)).collect();
            let batch = Batch { tokens: vec![1; n_rows], positions: vec![3; n_rows], slices, ..Batch::default() };
            let mut all = Vec::new();
            for round in 0..4 {
                // A record reads what its buffers hold when it is replayed.
                fast.write(&mut x, 0, &numbers::Rng(round % 2).floats(n_rows * 64));
                fast.begin_pass(&batch.pass());
                let mut work = || -> Result<(), Error> {
                    fast.linear(&x, &w, n_rows, &mut out);
                    Ok(())
                };
                repeat(&fast, &mut work);
                let mut values = vec![0.0; n_rows * 16];
                fast.read(&out, 0..n_rows, &mut values);
                fast.take_failure().unwrap();
                all.push(values);
            }
            assert!(all[0] == all[2] && all[1] == all[3] && all[0] != all[1]);
            let repeats = fast.pass_counts();
            assert_eq!((repeats.plain, repeats.recorded, repeats.replayed), (1, 1, 3));
        }
    });
}

#[test]
fn what_the_library_has_no_way_for_is_computed_here() {
    on_fake_cuda("what_the_library_has_no_way_for_is_computed_here", &[("FAKE_CUBLASLT_HAS_NO_WAY", "1")], || {
        let (fast, lockstep) = (fast(), Cuda::open(&config(None)).unwrap());
        assert_eq!(on_device::product_of(&fast, 40, 200, 70), on_device::product_of(&lockstep, 40, 200, 70));
    });
}

#[test]
fn a_library_that_fails_is_an_error_like_a_kernels() {
    on_fake_cuda("a_library_that_fails_is_an_error_like_a_kernels", &[("FAKE_CUBLASLT_FAILS", "1")], || {
        let fast = fast();
        let (x, mut out) = (fast.buffer(40, 64).unwrap(), fast.buffer(40, 16).unwrap());
        let file = numbers::File::random(&mut numbers::Rng(1), Dtype::BF16, 16, 64);
        let w = fast.matrix(&[file.stored()]).unwrap();
        fast.linear(&x, &w, 40, &mut out);
        let failed = fast.take_failure().err().unwrap();
        assert!(matches!(&failed, Error::Library(why) if why.contains("launch a product")), "{failed}");
        fast.linear(&x, &w, 8, &mut out);
        assert!(fast.take_failure().is_ok(), "the failure is reported once");
    });
}

#[test]
fn operations_are_the_cpus_but_for_bf16() {
    on_fake_cuda("operations_are_the_cpus_but_for_bf16", &[], || {
        let cuda = Cuda::open(&config(None)).unwrap();
        let checks = on_device::checks(&cuda, KvDtype::Bf16, &[1, 11, 20, 70], 3);
        for check in &checks {
            println!("{}: {:.1e}, the same bits: {}", check.name, check.apart, check.same_bits);
        }
        let bad: Vec<_> = checks.iter().filter(|check| !check.is_good()).map(|check| &check.name).collect();
        assert!(bad.is_empty() && checks.len() > 30, "{bad:?}");
    });
}

/// The strands of a k of 352: quarters of its eleven groups.
const STRANDS: [Range<usize>; 4] = [0..64, 64..160, 160..256, 256..352];

#[test]
fn a_product_adds_sixteen_elements_at_once_and_strands_from_the_left() {
    on_fake_cuda("a_product_adds_sixteen_elements_at_once_and_strands_from_the_left", &[], || {
        let (cuda, host) = (Cuda::open(&config(None)).unwrap(), numbers::cpu(Isa::Plain, 1, Activations::F32));
        let (rng, n_out, k) = (&mut numbers::Rng(5), 40, 352);
        let rounded = |x: Vec<f32>| -> Vec<f32> { x.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect() };
        for dtype in [Dtype::BF16, Dtype::Q8_0, Dtype::Q4_0] {
            let file = numbers::File::random(rng, dtype, n_out, k);
            let (weights, w) = (rounded(numbers::dequantized(&host, file.stored())), cuda.matrix(&[file.stored()]));
            for n_rows in [1, 9, 20, 40] {
                let numbers = rounded(rng.floats(n_rows * k));
                let (mut x, mut out) = (cuda.buffer(n_rows, k).unwrap(), cuda.buffer(n_rows, n_out).unwrap());
                cuda.write(&mut x, 0, &numbers);
                cuda.linear(&x, w.as_ref().unwrap(), n_rows, &mut out);
                let mut got = vec![0.0; n_rows * n_out];
                cuda.read(&out, 0..n_rows, &mut got);
                cuda.take_failure().unwrap();
                let of = |i: usize| {
                    let (x, w) = (&numbers[i / n_out * k..][..k], &weights[i % n_out * k..][..k]);
                    let strands = STRANDS.map(|strand| dot(&x[strand.clone()], &w[strand]));
                    ((strands[0] + strands[1]) + strands[2]) + strands[3]
                };
                let expected: Vec<f32> = (0..got.len()).map(of).collect();
                numbers::assert_bits(&format!("{dtype:?}, {n_rows} rows"), &got, &expected);
            }
        }
    });
}

/// `n_rows` sequences, each decoding at this position.
fn decoding(n_rows: u32, position: u32) -> Batch {
    let n_blocks = position / types::BLOCK_TOKENS + 1;
    let rows = 0..n_rows;
    Batch {
        tokens: vec![3; n_rows as usize],
        positions: vec![position; n_rows as usize],
        slices: rows.clone().map(|row| PassSlice::new(row..row + 1, position, Want::Nothing)).collect(),
        tables: vec![BlockTables {
            blocks: rows.clone().flat_map(|_| (0..n_blocks).map(types::BlockId)).collect(),
            bounds: (0..=n_rows).map(|row| row * n_blocks).collect(),
        }],
        ..Batch::default()
    }
}

#[test]
fn graphs_take_only_unpromised_memory() {
    // A sixty-fourth of it is two MiB, and a graph takes 65 KiB.
    on_fake_cuda("graphs_take_only_unpromised_memory", &[("FAKE_CUDA_MIB", "128")], || {
        let cuda = Cuda::open(&config(None)).unwrap();
        cuda.reserve_batches(BatchLimits { rows_max: 128, context: 8192, n_groups: 1 }).unwrap();
        let (from, mut to) = (cuda.buffer(16, 32).unwrap(), cuda.buffer(16, 32).unwrap());
        let free = cuda.free_bytes().unwrap();
        let rows = [1, 2, 4, 8, 16, 32, 64, 96, 128];
        let outlines: Vec<(u32, u32)> =
            rows.into_iter().flat_map(|n_rows| [0, 256, 1024, 4096].map(|at| (n_rows, at))).collect();
        let mut n_begun = 0;
        for (n_rows, position) in outlines.iter().copied().cycle().take(3 * outlines.len()) {
            cuda.begin_pass(&decoding(n_rows, position).pass());
            n_begun += u64::from(repeat(&cuda, || {
                cuda.copy_rows(&from, &mut to, 1);
                Ok::<_, ()>(())
            }));
            cuda.take_failure().unwrap();
            assert_eq!(cuda.free_bytes().unwrap(), free);
        }
        let PassStats { recorded, replayed, refused, .. } = cuda.pass_counts();
        assert_eq!((recorded, refused, replayed), (31, 5, n_begun), "of {} outlines", outlines.len());
    });
}

#[test]
fn what_waits_for_the_device_is_not_recorded() {
    on_fake_cuda("what_waits_for_the_device_is_not_recorded", &[], || {
        let cuda = Cuda::open(&config(None)).unwrap();
        cuda.reserve_batches(BatchLimits { rows_max: 8, context: 64, n_groups: 1 }).unwrap();
        let (mut from, mut to) = (cuda.buffer(1, 32).unwrap(), cuda.buffer(1, 32).unwrap());
        let batch = Batch {
            tokens: vec![3],
            positions: vec![0],
            slices: vec![PassSlice::new(0..1, 0, Want::Nothing)],
            tables: vec![BlockTables { blocks: vec![types::BlockId(0)], bounds: vec![0, 1] }],
            ..Batch::default()
        };
        let first_number = |cuda: &Cuda, buffer: &backend::cuda::Buffer| {
            let mut numbers = [0.0; 32];
            cuda.read(buffer, 0..1, &mut numbers);
            numbers[0]
        };
        let mut pass = |n: f32, waits: bool| {
            cuda.write(&mut from, 0, &[n; 32]);
            cuda.begin_pass(&batch.pass());
            let work = || {
                cuda.copy_rows(&from, &mut to, 1);
                if waits {
                    cuda.write(&mut to, 0, &[-n; 32]);
                }
                Ok::<_, ()>(())
            };
            let is_repeated = repeat(&cuda, work);
            cuda.take_failure().unwrap();
            (is_repeated, first_number(&cuda, &to))
        };
        // Work that waits runs plainly each time, and nothing else suffers.
        assert_eq!([1.0, 2.0, 3.0].map(|n| pass(n, true)), [(false, -1.0), (false, -2.0), (false, -3.0)]);
        cuda.forget_records();
        // The second call is the first from a record, which reads its buffers at that time.
        assert_eq!([4.0, 5.0, 6.0].map(|n| pass(n, false)), [(false, 4.0), (true, 5.0), (true, 6.0)]);
        let PassStats { recorded, replayed, plain, refused, .. } = cuda.pass_counts();
        assert_eq!((recorded, replayed, plain, refused), (1, 2, 4, 1));
    });
}

#[test]
fn compiled_kernels_are_kept_and_what_is_broken_is_made_anew() {
    on_fake_cuda("compiled_kernels_are_kept_and_what_is_broken_is_made_anew", &[], || {
        let folder = std::env::temp_dir().join(format!("lockstep-kernels-{}", std::process::id()));
        let (here, elsewhere) = (Arch(9, 0), Arch(8, 0));
        let made = compile(here, Some(&folder)).unwrap();
        let files = || -> Vec<PathBuf> {
            let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
            files.sort();
            files
        };
        let (first, contents) = (files(), std::fs::read(&files()[0]).unwrap());
        assert_eq!(first.len(), made.len());
        // A planted cubin with the right checksum is loaded, so nothing was compiled.
        let planted = b"planted".to_vec();
        for file in &first {
            std::fs::write(file, [blake3::hash(&planted).as_bytes(), &planted[..]].concat()).unwrap();
        }
        assert!(compile(here, Some(&folder)).unwrap().iter().all(|cubin| *cubin == planted));
        // Truncated, changed and empty.
        std::fs::write(&first[0], &contents[..contents.len() - 1]).unwrap();
        std::fs::write(&first[1], [&[1u8; 32][..], b"planted"].concat()).unwrap();
        std::fs::write(&first[2], b"").unwrap();
        let again = compile(here, Some(&folder)).unwrap();
        assert_eq!(again.iter().filter(|cubin| **cubin == planted).count(), made.len() - 3);
        assert_eq!(std::fs::read(&first[0]).unwrap(), contents);
        compile(elsewhere, Some(&folder)).unwrap();
        assert_eq!(
            files().len(),
            2 * made.len(),
            "each architecture has files of its own, and no partial file is left"
        );
        std::fs::remove_dir_all(&folder).unwrap();
    });
}

#[test]
fn a_compiler_that_refuses_is_quoted() {
    on_fake_cuda("a_compiler_that_refuses_is_quoted", &[("FAKE_NVRTC_FAILS", "1")], || {
        let failed = Cuda::open(&config(None)).err().unwrap();
        assert!(matches!(&failed, Error::Compiler(why) if why.contains("FAKE_NVRTC_FAILS")), "{failed}");
    });
}

#[test]
fn the_newest_compiler_is_taken_whose_code_the_driver_loads() {
    let name = "the_newest_compiler_is_taken_whose_code_the_driver_loads";
    on_fake_cuda(name, &[("FAKE_CUDA_VERSION", "12080")], || {
        let driver = Driver::find().unwrap();
        assert_eq!(Compiler::find().unwrap().to_string(), "13.0");
        assert_eq!(Compiler::find_for(driver).unwrap().to_string(), "12.9");
        Cuda::open(&config(None)).unwrap();
    });
}

#[test]
fn a_compiler_of_a_later_release_is_refused_by_its_version() {
    let name = "a_compiler_of_a_later_release_is_refused_by_its_version";
    on_fake_cuda(name, &[("FAKE_CUDA_VERSION", "12080"), ("FAKE_NVRTC_IS_LATER", "1")], || {
        let failed = Cuda::open(&config(None)).err().unwrap().to_string();
        assert!(failed.contains("NVRTC 13.0") && failed.contains("CUDA 12.8") && failed.contains(".so.12"), "{failed}");
    });
}

#[test]
fn only_columns_are_copied_as_columns() {
    let trace = std::env::temp_dir().join(format!("lockstep-columns-{}", std::process::id()));
    on_fake_cuda("only_columns_are_copied_as_columns", &[("FAKE_CUDA_TRACE", trace.to_str().unwrap())], || {
        let cuda = Cuda::open(&config(None)).unwrap();
        let (from, to) = (cuda.transfer_buffer(60).unwrap(), cuda.transfer_buffer(60).unwrap());
        let side = |room: &backend::cuda::TransferBuffer, stride| {
            let columns = DeviceColumns { floats: room.floats(), stride };
            cuda.copy_columns(columns, DeviceColumns { floats: from.floats(), stride }, 4, 5).unwrap();
            cuda.copy_columns(columns, DeviceColumns { floats: from.floats(), stride }, 4, 1).unwrap();
        };
        side(&to, 10);
        side(&to, 4);
        cuda.take_failure().unwrap();
    });
    // Only the first process reads a trace; the other one wrote it.
    if let Ok(text) = std::fs::read_to_string(&trace) {
        std::fs::remove_file(&trace).unwrap();
        assert_eq!(text.lines().filter(|line| *line == "columns").count(), 1, "{text}");
    }
}

#[test]
fn an_old_driver_is_refused_by_its_version() {
    on_fake_cuda("an_old_driver_is_refused_by_its_version", &[("FAKE_CUDA_VERSION", "12020")], || {
        let failed = Cuda::open(&config(None)).err().unwrap();
        assert!(matches!(&failed, Error::NoCuda(why) if why.contains("CUDA 12.2")), "{failed}");
    });
}

#[test]
fn driver_without_devices_is_an_error() {
    on_fake_cuda("driver_without_devices_is_an_error", &[("FAKE_CUDA_DEVICES", "0")], || {
        assert!(matches!(Driver::find(), Err(Error::NoCuda(_))));
    });
}

#[test]
fn a_device_that_is_not_there_is_named() {
    on_fake_cuda("a_device_that_is_not_there_is_named", &[], || {
        let failed = Cuda::open(&CudaConfig { ordinal: 3, ..config(None) }).err().unwrap();
        assert!(failed.to_string().contains("there is no device 3: the driver has 1"), "{failed}");
        let card = Driver::find().unwrap().card(0).unwrap();
        assert_eq!((card.capability, card.multiprocessors), ((9, 0), 132));
    });
}

#[test]
fn a_machine_without_a_driver_is_an_error_and_no_panic() {
    match Driver::find() {
        Ok(driver) => println!("this machine has a driver, for CUDA {driver}"),
        Err(error) => assert!(matches!(error, Error::NoCuda(_)), "{error}"),
    }
}

#[test]
fn the_real_compiler_takes_every_kernel() {
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(error) => {
            // Straight to stderr: the harness shows a test's output only when it fails, and CI lists these lines.
            let line = format!("NOT RUN: kernels through the real compiler: {error}\n");
            return std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
    };
    for arch in [Arch(8, 0), Arch(9, 0)] {
        let cubins = compile(arch, None).unwrap();
        let sizes: Vec<usize> = cubins.iter().map(Vec::len).collect();
        println!("NVRTC {compiler} for {arch}: {sizes:?} bytes");
        assert!(cubins.iter().all(|cubin| cubin.starts_with(b"\x7fELF")), "{arch}");
    }
}
