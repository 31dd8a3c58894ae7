//! The instruction sets that kernels are compiled for; one is chosen at run time.
//!
//! A kernel is written once over `Lanes` and instantiated for each set of instructions. Every operation of `Lanes`
//! gives the same bits in each, and so does every kernel.

use super::lanes::{Lanes, PlainFloat};

/// The instruction sets, in ascending order of width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Rust without intrinsics: the reference, and the fallback for machines without the sets below.
    Plain,
    Avx2,
    Avx512,
    /// With an instruction for pairs of bf16.
    Avx512Bf16,
    /// AVX-512, with tiles of int8.
    Amx,
}

impl Isa {
    pub const ALL: [Isa; 5] = [Isa::Plain, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    pub fn name(self) -> &'static str {
        match self {
            Isa::Plain => "plain",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }

    /// The fastest set that this machine has.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_supported() && isa.is_fast()).unwrap_or(Isa::Plain)
    }

    /// Intel's processors take two cycles for each instruction on pairs of bf16, and so are faster without it.
    fn is_fast(self) -> bool {
        self != Isa::Avx512Bf16 || !is_from_intel()
    }

    pub fn is_supported(self) -> bool {
        match self {
            Isa::Plain => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => has_avx2() && has_avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.is_supported() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512.is_supported() && super::amx::is_supported(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => false,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn is_from_intel() -> bool {
    let of = std::arch::x86_64::__cpuid(0);
    [of.ebx, of.edx, of.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_from_intel() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// Work that can be compiled for any instruction set.
pub(crate) trait Kernel {
    /// Must be `#[inline(always)]`: the body is compiled for the instructions of the function that it is inlined into.
    fn run<L: Lanes>(self);
}

/// `isa` is one that `Isa::is_supported` affirmed.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) {
    debug_assert!(isa.is_supported());
    match isa {
        Isa::Plain => kernel.run::<PlainFloat>(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instructions were found.
        Isa::Avx2 => unsafe { with_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instructions were found.
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unsafe { with_avx512(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unreachable!("not supported on this architecture"),
    }
}

/// `dispatch` for what has to do with pairs of bf16. Other kernels are not compiled for the instruction.
pub(crate) fn dispatch_pairs<K: Kernel>(isa: Isa, kernel: K) {
    debug_assert!(isa.is_supported());
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instructions were found.
        Isa::Avx512Bf16 => unsafe { with_avx512_bf16(kernel) },
        _ => dispatch(isa, kernel),
    }
}

/// Work with tiles of int8, which is compiled for `Isa::Amx` alone.
pub(crate) fn dispatch_tiles<K: Kernel>(kernel: K) {
    debug_assert!(Isa::Amx.is_supported());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instructions were found.
    unsafe {
        with_avx512(kernel)
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("no tiles on this architecture: {}", std::any::type_name_of_val(&kernel));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<K: Kernel>(kernel: K) {
    kernel.run::<super::lanes::Avx2>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn with_avx512<K: Kernel>(kernel: K) {
    kernel.run::<super::lanes::Avx512<false>>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
fn with_avx512_bf16<K: Kernel>(kernel: K) {
    kernel.run::<super::lanes::Avx512<true>>();
}
