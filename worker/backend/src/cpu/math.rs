//! Elementary functions of our own: the same operations in a scalar and in lanes of any width, so the same bits.

use super::lanes::Real;

const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Below this e^x rounds to zero.
const EXP_MIN: f32 = -104.0;
/// Above this e^x is infinite.
const EXP_MAX: f32 = 89.0;

/// e^x within 2 ulp; exactly 0 where it underflows, infinity where it overflows.
#[inline(always)]
pub(crate) fn exp<R: Real>(x: R) -> R {
    // The constant is the first operand, so that a NaN in x comes through.
    let x = R::splat(EXP_MAX).min(R::splat(EXP_MIN).max(x));
    let n = x.mul(R::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fma(R::splat(-LN_2_HIGH), x);
    let r = n.fma(R::splat(-LN_2_LOW), r);
    let p = R::splat(1.987_569_1e-4);
    let p = p.fma(r, R::splat(1.398_199_9e-3));
    let p = p.fma(r, R::splat(8.333_452e-3));
    let p = p.fma(r, R::splat(4.166_579_6e-2));
    let p = p.fma(r, R::splat(1.666_666_5e-1));
    let p = p.fma(r, R::splat(0.5));
    p.fma(r.mul(r), r).add(R::splat(1.0)).times_pow2(n)
}

/// The natural logarithm within 2 ulp: -infinity for 0, NaN for negative numbers.
#[inline(always)]
pub(crate) fn ln<R: Real>(x: R) -> R {
    const SUBNORMAL_SCALE: f32 = (1u64 << 25) as f32;
    let (zero, one) = (R::splat(0.0), R::splat(1.0));
    let least = R::splat(f32::MIN_POSITIVE);
    let scaled = x.if_less(least, x.mul(R::splat(SUBNORMAL_SCALE)), x);
    let bias = x.if_less(least, R::splat(126.0 + 25.0), R::splat(126.0));
    let e = scaled.exponent().sub(bias);
    let m = scaled.mantissa();
    // Maps [0.5, 1) to [sqrt(1/2), sqrt(2)), minus one.
    let below = R::splat(std::f32::consts::FRAC_1_SQRT_2);
    let e = m.if_less(below, e.sub(one), e);
    let f = m.if_less(below, m.add(m), m).sub(one);
    let z = f.mul(f);
    let p = R::splat(7.037_683_6e-2);
    let p = p.fma(f, R::splat(-1.151_461e-1));
    let p = p.fma(f, R::splat(1.167_699_9e-1));
    let p = p.fma(f, R::splat(-1.242_014_1e-1));
    let p = p.fma(f, R::splat(1.424_932_3e-1));
    let p = p.fma(f, R::splat(-1.666_805_8e-1));
    let p = p.fma(f, R::splat(2.000_071_5e-1));
    let p = p.fma(f, R::splat(-2.499_999_4e-1));
    let p = p.fma(f, R::splat(3.333_333e-1));
    let y = e.fma(R::splat(LN_2_LOW), p.mul(f).mul(z));
    let y = z.fma(R::splat(-0.5), y);
    let y = e.fma(R::splat(LN_2_HIGH), f.add(y));
    ln_special_cases(x, y, zero)
}

/// The cases outside the polynomial: zero, negative numbers, infinity and NaN.
#[inline(always)]
fn ln_special_cases<R: Real>(x: R, y: R, zero: R) -> R {
    let largest = R::splat(f32::MAX);
    // Greater than the largest number, or not comparable: x itself. NaN is not less than anything.
    let y = x.if_less(R::splat(f32::INFINITY), y, x);
    let y = zero.if_less(x, y, R::splat(f32::NEG_INFINITY));
    let y = x.if_less(zero, R::splat(f32::NAN), y);
    // A NaN has become -infinity two lines above.
    let is_number = x.if_less(zero, R::splat(1.0), zero.sub(largest).if_less(x, R::splat(1.0), zero));
    zero.if_less(is_number, y, x)
}

/// x / (1 + e^-x)
#[inline(always)]
pub(crate) fn silu<R: Real>(x: R) -> R {
    let one = R::splat(1.0);
    x.div(one.add(exp(R::splat(0.0).sub(x))))
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub(crate) fn sigmoid<R: Real>(x: R) -> R {
    let one = R::splat(1.0);
    one.div(one.add(exp(R::splat(0.0).sub(x))))
}

/// ln(1 + e^x), of which e^x does not overflow.
#[inline(always)]
pub(crate) fn softplus<R: Real>(x: R) -> R {
    let zero = R::splat(0.0);
    x.max(zero).add(ln(R::splat(1.0).add(exp(zero.sub(x.abs())))))
}

/// The hyperbolic tangent within a few ulp.
#[inline(always)]
pub(crate) fn tanh<R: Real>(x: R) -> R {
    let (zero, one) = (R::splat(0.0), R::splat(1.0));
    let size = x.abs();
    let z = x.mul(x);
    let p = R::splat(-5.704_988_7e-3);
    let p = p.fma(z, R::splat(2.063_909e-2));
    let p = p.fma(z, R::splat(-5.373_971_6e-2));
    let p = p.fma(z, R::splat(1.333_144_2e-1));
    let p = p.fma(z, R::splat(-3.333_328e-1));
    let small = p.mul(z).fma(x, x);
    let large = one.sub(R::splat(2.0).div(exp(size.add(size)).add(one)));
    let large = x.if_less(zero, zero.sub(large), large);
    size.if_less(R::splat(0.625), small, large)
}

/// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
#[inline(always)]
pub(crate) fn gelu<R: Real>(x: R) -> R {
    let inner = x.mul(x).mul(x).fma(R::splat(0.044_715), x).mul(R::splat(0.797_884_6));
    x.mul(R::splat(0.5)).mul(R::splat(1.0).add(tanh(inner)))
}

/// The error function, at most 2e-7 off: 7.1.26 of Abramowitz and Stegun.
#[inline(always)]
pub(crate) fn erf<R: Real>(x: R) -> R {
    let (zero, one) = (R::splat(0.0), R::splat(1.0));
    let size = x.abs();
    let t = one.div(size.fma(R::splat(0.327_591_1), one));
    let p = R::splat(1.061_405_4);
    let p = p.fma(t, R::splat(-1.453_152));
    let p = p.fma(t, R::splat(1.421_413_8));
    let p = p.fma(t, R::splat(-0.284_496_74));
    let p = p.fma(t, R::splat(0.254_829_6));
    let y = one.sub(p.mul(t).mul(exp(zero.sub(size.mul(size)))));
    x.if_less(zero, zero.sub(y), y)
}

/// x / 2 * (1 + erf(x / sqrt(2)))
#[inline(always)]
pub(crate) fn gelu_erf<R: Real>(x: R) -> R {
    let one = R::splat(1.0);
    x.mul(R::splat(0.5)).mul(one.add(erf(x.mul(R::splat(std::f32::consts::FRAC_1_SQRT_2)))))
}

/// (up + 1) * gate * sigmoid(alpha * gate), clamped
#[inline(always)]
pub(crate) fn clamped_silu<R: Real>(gate: R, up: R, alpha: R, limit: R) -> R {
    let (zero, one) = (R::splat(0.0), R::splat(1.0));
    let gate = limit.min(gate);
    let up = limit.min(zero.sub(limit).max(up));
    let glu = gate.div(one.add(exp(zero.sub(gate.mul(alpha)))));
    up.add(one).mul(glu)
}

/// cap * tanh(x / cap)
#[inline(always)]
pub(crate) fn soft_cap<R: Real>(x: R, cap: R) -> R {
    tanh(x.div(cap)).mul(cap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::{LANES, Lanes};
    use crate::cpu::{Isa, Kernel, dispatch};

    struct All<'a> {
        x: &'a [f32; LANES],
        exp: &'a mut [f32; LANES],
        ln: &'a mut [f32; LANES],
        tanh: &'a mut [f32; LANES],
    }

    impl Kernel for All<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            exp(L::load(self.x)).store(self.exp);
            ln(L::load(self.x)).store(self.ln);
            tanh(L::load(self.x)).store(self.tanh);
        }
    }

    /// The difference in units of the last place of the result.
    fn ulps(got: f32, expected: f64) -> f64 {
        let expected_f32 = expected as f32;
        if got.to_bits() == expected_f32.to_bits() || got.is_nan() && expected.is_nan() {
            return 0.0;
        }
        let ulp = f64::from(expected_f32.abs().next_up()) - f64::from(expected_f32.abs());
        (f64::from(got) - expected).abs() / ulp
    }

    fn check(x: f32, function: &str, got: f32, expected: f64, ulps_max: f64) {
        assert!(ulps(got, expected) < ulps_max, "{function}({x}) is {got} and should be {expected}");
    }

    #[test]
    fn functions_are_accurate_and_equal_in_lanes() {
        let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_supported()).collect();
        // Every 4099th pattern of bits: all exponents, both signs, the subnormal, infinities and NaN.
        let mut patterns = (0..u32::MAX).step_by(4099).chain([0x7f80_0000, 0xff80_0000, 0x8000_0000]);
        loop {
            let mut x = [0.0; LANES];
            x.iter_mut().zip(&mut patterns).for_each(|(x, bits)| *x = f32::from_bits(bits));
            if x == [0.0; LANES] {
                return;
            }
            for x in x {
                check(x, "exp", exp(x), f64::from(x).exp(), 2.0);
                check(x, "ln", ln(x), f64::from(x).ln(), 2.0);
                check(x, "tanh", tanh(x), f64::from(x).tanh(), 4.0);
            }
            for &isa in &isas {
                let (mut got_exp, mut got_ln, mut got_tanh) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
                dispatch(isa, All { x: &x, exp: &mut got_exp, ln: &mut got_ln, tanh: &mut got_tanh });
                for i in 0..LANES {
                    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(same(got_exp[i], exp(x[i])) && same(got_ln[i], ln(x[i])), "{isa:?} at {}", x[i]);
                    assert!(same(got_tanh[i], tanh(x[i])), "{isa:?} at {}", x[i]);
                }
            }
        }
    }

    #[test]
    fn ends_are_exact() {
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-1000.0f32).to_bits(), 0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0f32), 1.0);
        assert!(exp(f32::NAN).is_nan() && ln(f32::NAN).is_nan() && ln(-1.0f32).is_nan());
        assert_eq!(ln(0.0f32), f32::NEG_INFINITY);
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
        assert_eq!(ln(1.0f32).to_bits(), 0);
    }
}
