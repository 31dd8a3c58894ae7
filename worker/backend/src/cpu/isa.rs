//! Which instructions the kernels are compiled for, chosen once at run time.
//!
//! A kernel is written once over `Lanes` and instantiated for each set of instructions. Every operation of `Lanes` gives
//! the same bits in each, and so does every kernel.

use super::lanes::{Lanes, Plain};

/// In ascending order of width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Rust without intrinsics: the reference, and every machine that is not listed below.
    Plain,
    Avx2,
    Avx512,
}

impl Isa {
    /// The widest that this machine has.
    pub fn detect() -> Isa {
        [Isa::Avx512, Isa::Avx2].into_iter().find(|isa| isa.is_supported()).unwrap_or(Isa::Plain)
    }

    pub fn is_supported(self) -> bool {
        match self {
            Isa::Plain => true,
            _ => false,
        }
    }
}

/// A piece of work that any set of instructions can do.
pub(crate) trait Kernel {
    /// Must be `#[inline(always)]`: the body is compiled for the instructions of the function that it is inlined into.
    fn run<L: Lanes>(self);
}

/// `isa` is one that `Isa::is_supported` affirmed.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) {
    match isa {
        _ => kernel.run::<Plain>(),
    }
}
