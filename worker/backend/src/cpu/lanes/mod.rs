//! The arithmetic in which kernels are written: sixteen lanes, or one.
//!
//! Each operation is one IEEE operation (or exact integer arithmetic), so all implementations agree in every bit but
//! the sign and payload of a NaN, which nothing reads.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use plain::PlainFloat;

/// The factor between an f32 and an e4m3 number whose bits were put in an f32's place. Subnormal numbers come out right
/// too, as they were subnormal f32.
const E4M3: f32 = f32::from_bits((127 + 120) << 23);

/// The number of lanes on every machine, whatever its registers hold.
pub(crate) const LANES: usize = 16;

/// The arithmetic of elementwise functions. Also implemented by `f32`, so that a scalar gets the same bits as a lane.
pub(crate) trait Real: Copy {
    fn splat(value: f32) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    fn fma(self, factor: Self, addend: Self) -> Self;
    /// `if self > other { self } else { other }`: a NaN on either side gives `other`.
    fn max(self, other: Self) -> Self;
    /// `if self < other { self } else { other }`
    fn min(self, other: Self) -> Self;
    /// Rounds to the nearest integer, ties to even.
    fn round(self) -> Self;
    /// 2^self for an integer in -126..=127.
    fn pow2(self) -> Self;
    /// self * 2^n, rounded once, for an n in -150..=128 and a positive number in [0.5, 2).
    #[inline(always)]
    fn times_pow2(self, n: Self) -> Self {
        // In two steps: 2^n itself may be out of range where the product is not.
        let half = n.mul(Self::splat(0.5)).round();
        self.mul(half.pow2()).mul(n.sub(half).pow2())
    }
    /// The biased exponent of a positive number: 1..=254 for a normal one.
    fn exponent(self) -> Self;
    /// A positive normal number with its exponent replaced, so that it is in [0.5, 1).
    fn mantissa(self) -> Self;
    /// `if self < limit { below } else { other }`
    fn if_less(self, limit: Self, below: Self, other: Self) -> Self;
    fn abs(self) -> Self;
}

/// Sixteen f32, and the sixteen groups of four bytes that int8 products are made of.
pub(crate) trait Lanes: Real {
    /// Sixteen i32, or sixty-four bytes.
    type Int: Copy;
    /// Words of a panel that a row's pair of bf16 takes: as two f32, or as it is where an instruction multiplies pairs.
    const PAIR_WORDS: usize = 2;
    /// Sums that registers hold beside what is added to them.
    const SUMS: usize = 4;

    fn load(from: &[f32; LANES]) -> Self;
    fn store(self, to: &mut [f32; LANES]);
    fn from_f16(from: &[u16; LANES]) -> Self;
    /// Rounds to the nearest f16, ties to even.
    fn to_f16(self) -> [u16; LANES];
    fn from_bf16(from: &[u16; LANES]) -> Self;
    /// Widens e4m3 numbers, none of which may be NaN.
    fn from_e4m3(from: &[u8; LANES]) -> Self;
    /// Lanes from `n` on become `fill`.
    fn keep_first(self, n: usize, fill: f32) -> Self;

    fn bytes(from: &[u8; 64]) -> Self::Int;
    /// Stores each byte minus `offset`, wrapping.
    fn bytes_minus(bytes: Self::Int, offset: u8, to: &mut [u8; 64]);
    fn int_splat(value: i32) -> Self::Int;
    fn int_add(a: Self::Int, b: Self::Int) -> Self::Int;
    fn low_nibbles(bytes: Self::Int) -> Self::Int;
    fn high_nibbles(bytes: Self::Int) -> Self::Int;
    /// Some bits of each byte: shifted down, and masked by 1 or 3.
    fn bits(from: Self::Int, shift: u32, mask: u8) -> Self::Int;
    /// Each byte of `low` with the same byte of `high`, shifted up, above it.
    fn join(low: Self::Int, high: Self::Int, shift: u32) -> Self::Int;
    /// The byte that each of `names`, which are below 16, names.
    fn look_up(digits: &[u8; 16], names: Self::Int) -> Self::Int;
    /// acc[lane] += sum over j of `w[4 * lane + j] * a[j]`, w unsigned and below 128, a signed and not -128.
    fn dot_small(acc: Self::Int, w: Self::Int, a: i32) -> Self::Int;
    /// The initial sum for `add_small`; `acc` is what the sum will be added to.
    #[inline(always)]
    fn small_start(acc: Self::Int) -> Self::Int {
        acc
    }
    /// Adds the products of `dot_small` to an unfinished sum, at most so often that 2^15 exceeds it in each half word.
    #[inline(always)]
    fn add_small(sum: Self::Int, w: Self::Int, a: i32) -> Self::Int {
        Self::dot_small(sum, w, a)
    }
    /// Returns `acc` and the products of an unfinished sum.
    #[inline(always)]
    fn small_end(_acc: Self::Int, sum: Self::Int) -> Self::Int {
        sum
    }
    /// The initial accumulator for `dot_offset`; `sum_a` is the sum of all a that will be multiplied.
    fn offset_start(sum_a: i32) -> Self::Int;
    /// acc[lane] += sum over j of `(w[4 * lane + j] - 128) * a[j]`, w unsigned, a signed and not -128. Exact once all
    /// terms are in.
    fn dot_offset(acc: Self::Int, w: Self::Int, a: i32) -> Self::Int;
    /// The four unsigned bytes of each lane.
    fn byte_floats(bytes: Self::Int) -> [Self; 4];
    /// The lower and the upper unsigned byte of each.
    fn byte_pairs(from: &[u16; LANES]) -> (Self, Self);
    /// The even and the odd number of each lane's pair of bf16; the even one is the lower half of a word.
    fn pair_floats(pairs: Self::Int) -> [Self; 2];
    fn int_to_float(int: Self::Int) -> Self;
    /// Whole numbers from -128 to 127 as bytes; NaN becomes 0.
    fn to_bytes(self) -> [u8; LANES];
    /// Prefetches a cache line that need not exist.
    fn prefetch(address: *const u8);

    /// acc[m] += odd w × odd x, then += even w × even x, each rounded once, for pairs whose products are not subnormal.
    ///
    /// # Safety
    /// The words of a pair of M rows at `x`, in a panel of `width` rows.
    #[inline(always)]
    unsafe fn add_pairs<const M: usize>(w: Self::Int, x: *const u32, width: usize, acc: &mut [Self; M]) {
        // SAFETY: the caller's promise.
        unsafe { add_in_turn(w, x, width, acc) }
    }

    #[inline(always)]
    fn load_first(from: &[f32]) -> Self {
        let mut lanes = [0.0; LANES];
        lanes[..from.len()].copy_from_slice(from);
        Self::load(&lanes)
    }

    #[inline(always)]
    fn store_first(self, to: &mut [f32]) {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        to.copy_from_slice(&lanes[..to.len()]);
    }

    /// The sum, by the one tree: halves are added to halves.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    /// The largest lane, by the same tree; NaN is skipped.
    #[inline(always)]
    fn largest(self) -> f32 {
        let mut lanes = [0.0; LANES];
        self.max(Self::splat(f32::NEG_INFINITY)).store(&mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = Real::max(lanes[i], lanes[i + half]);
            }
        }
        lanes[0]
    }
}

/// acc[m] += w × x for one k.
///
/// # Safety
/// M words at `x`.
#[inline(always)]
pub(crate) unsafe fn add_products<L: Lanes, const M: usize>(w: L, x: *const u32, acc: &mut [L; M]) {
    for (m, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = f32::from_bits(unsafe { *x.add(m) });
        *acc = w.fma(L::splat(x), *acc);
    }
}

/// `Lanes::add_pairs` of pairs of x that stand as two f32.
///
/// # Safety
/// M words at `x`, and as many `width` words further.
#[inline(always)]
unsafe fn add_in_turn<L: Lanes, const M: usize>(w: L::Int, x: *const u32, width: usize, acc: &mut [L; M]) {
    let [even, odd] = L::pair_floats(w);
    // SAFETY: the caller's promise.
    unsafe {
        add_products(odd, x.add(width), acc);
        add_products(even, x, acc);
    }
}

impl Real for f32 {
    #[inline(always)]
    fn splat(value: f32) -> f32 {
        value
    }
    #[inline(always)]
    fn add(self, other: f32) -> f32 {
        self + other
    }
    #[inline(always)]
    fn sub(self, other: f32) -> f32 {
        self - other
    }
    #[inline(always)]
    fn mul(self, other: f32) -> f32 {
        self * other
    }
    #[inline(always)]
    fn div(self, other: f32) -> f32 {
        self / other
    }
    #[inline(always)]
    fn fma(self, factor: f32, addend: f32) -> f32 {
        self.mul_add(factor, addend)
    }
    #[inline(always)]
    fn max(self, other: f32) -> f32 {
        if self > other { self } else { other }
    }
    #[inline(always)]
    fn min(self, other: f32) -> f32 {
        if self < other { self } else { other }
    }
    #[inline(always)]
    fn round(self) -> f32 {
        self.round_ties_even()
    }
    #[inline(always)]
    fn pow2(self) -> f32 {
        f32::from_bits(((self as i32).wrapping_add(127) as u32) << 23)
    }
    #[inline(always)]
    fn exponent(self) -> f32 {
        ((self.to_bits() >> 23) & 0xff) as f32
    }
    #[inline(always)]
    fn mantissa(self) -> f32 {
        f32::from_bits((self.to_bits() & 0x007f_ffff) | 0x3f00_0000)
    }
    #[inline(always)]
    fn if_less(self, limit: f32, below: f32, other: f32) -> f32 {
        if self < limit { below } else { other }
    }
    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }
}
