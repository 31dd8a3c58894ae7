//! Searches for the scale, or the scale and the minimum, with which digits are closest to the numbers that they
//! replace. Knows no block's layout.
//!
//! Closest is the least sum of `weight × (number - rounded)²`. A search tries scales near the one that covers the
//! numbers' range. For each it rounds, and solves for the scale that fits these digits best. At the end it rounds with
//! the best scale again, until that improves nothing.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of lanes")]

/// Numbers below this are zero in every type: it is far below the least f16.
const LEAST: f32 = 1e-10;
/// Scales are tried so that the largest number gets a digit up to `STEP × STEPS` from the last one.
const STEP: f32 = 0.1;
const STEPS: i32 = 9;
const REFITS_MAX: usize = 4;
/// Adding and subtracting it rounds a number below 2²² to a whole one, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// The digits of a type, as multiples of the scale.
pub(crate) trait DigitGrid {
    fn ends(&self) -> [f32; 2];
    fn nearest(&self, number: f32) -> f32;
}

/// All whole numbers from `least` to `most`.
pub(crate) struct WholeDigits {
    pub least: f32,
    pub most: f32,
}

impl DigitGrid for WholeDigits {
    fn ends(&self) -> [f32; 2] {
        [self.least, self.most]
    }

    #[inline(always)]
    fn nearest(&self, number: f32) -> f32 {
        number.max(self.least).min(self.most) + ROUNDER - ROUNDER
    }
}

/// A sum for each of eight lanes, so that a compiler can use vectors.
type LaneSums = [f32; 8];

fn sum(lanes: LaneSums) -> f32 {
    lanes.iter().sum()
}

/// A scale, and how much smaller it makes the weighted sum of squares than a scale of zero does.
#[derive(Clone, Copy, Default)]
struct ScaleFit {
    scale: f32,
    gain: f32,
}

impl ScaleFit {
    /// The best scale for the digits of `x × inverse`.
    fn of(x: &[f32], weights: &[f32], grid: &impl DigitGrid, inverse: f32) -> ScaleFit {
        let (mut products, mut squares) = (LaneSums::default(), LaneSums::default());
        for (x, w) in x.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0) {
            for i in 0..8 {
                let digit = grid.nearest(x[i] * inverse);
                products[i] += w[i] * digit * x[i];
                squares[i] += w[i] * digit * digit;
            }
        }
        let (product, square) = (sum(products), sum(squares));
        if square > 0.0 {
            ScaleFit { scale: product / square, gain: product / square * product }
        } else {
            ScaleFit::default()
        }
    }
}

/// Returns the scale with which `digit × scale` is closest to `x`. Lengths are multiples of eight.
pub(crate) fn fit_scale(x: &[f32], weights: &[f32], grid: &impl DigitGrid) -> f32 {
    let peak = x.iter().fold(0f32, |peak, x| if x.abs() > peak.abs() { *x } else { peak });
    if peak.abs() < LEAST {
        return 0.0;
    }
    let mut best = ScaleFit::default();
    for end in grid.ends().into_iter().filter(|end| *end != 0.0) {
        for step in -STEPS..=STEPS {
            let inverse = (end + end.signum() * STEP * step as f32) / peak;
            let fit = ScaleFit::of(x, weights, grid, inverse);
            if fit.gain > best.gain {
                best = fit;
            }
        }
    }
    for _ in 0..REFITS_MAX {
        let fit = ScaleFit::of(x, weights, grid, 1.0 / best.scale);
        if fit.gain <= best.gain {
            break;
        }
        best = fit;
    }
    best.scale
}

/// A number is `scale × digit + minimum`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DigitLine {
    pub scale: f32,
    pub minimum: f32,
}

/// Numbers for which a line is searched, as distances from their least.
struct LineSearch<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    /// Subtracted from each number.
    least: f32,
    /// The last digit; the first is zero.
    top: f32,
    /// The largest minimum, as a distance too.
    minimum_max: f64,
    sum_w: f64,
    sum_wy: f64,
}

impl LineSearch<'_> {
    /// The best line for the digits of `(y - from) × inverse`, and its gain.
    fn fit(&self, from: f32, inverse: f32) -> Option<(DigitLine, f64)> {
        let grid = WholeDigits { least: 0.0, most: self.top };
        let (mut digits, mut squares, mut products) = (LaneSums::default(), LaneSums::default(), LaneSums::default());
        for (x, w) in self.x.as_chunks::<8>().0.iter().zip(self.weights.as_chunks::<8>().0) {
            for i in 0..8 {
                let y = x[i] - self.least;
                let digit = grid.nearest((y - from) * inverse);
                let weighted = w[i] * digit;
                digits[i] += weighted;
                squares[i] += weighted * digit;
                products[i] += weighted * y;
            }
        }
        let [l, ll, yl] = [digits, squares, products].map(|lanes| f64::from(sum(lanes)));
        let determinant = self.sum_w * ll - l * l;
        if determinant <= 0.0 || ll <= 0.0 {
            return None;
        }
        let mut minimum = (ll * self.sum_wy - l * yl) / determinant;
        let mut scale = (self.sum_w * yl - l * self.sum_wy) / determinant;
        if minimum > self.minimum_max {
            minimum = self.minimum_max;
            scale = (yl - minimum * l) / ll;
        }
        let gain = 2.0 * (scale * yl + minimum * self.sum_wy)
            - (scale * scale * ll + 2.0 * scale * minimum * l + minimum * minimum * self.sum_w);
        (scale > 0.0).then_some((DigitLine { scale: scale as f32, minimum: minimum as f32 }, gain))
    }
}

/// Returns the line with which digits from zero to `top` are closest to `x`. Its minimum is at most `minimum_max`.
/// Lengths are multiples of eight.
pub(crate) fn fit_line(x: &[f32], weights: &[f32], top: f32, minimum_max: f32) -> DigitLine {
    let least = x.iter().fold(minimum_max, |least, x| least.min(*x));
    let range = x.iter().fold(least, |most, x| most.max(*x)) - least;
    if range < LEAST {
        return DigitLine { scale: 0.0, minimum: least };
    }
    let sum_of = |of: &dyn Fn(f32) -> f32| x.iter().zip(weights).map(|(x, w)| f64::from(w * of(*x))).sum::<f64>();
    let search = LineSearch {
        x,
        weights,
        least,
        top,
        minimum_max: f64::from(minimum_max) - f64::from(least),
        sum_w: sum_of(&|_| 1.0),
        sum_wy: sum_of(&|x| x - least),
    };
    // The line that covers the range exactly, if all others fail.
    let (mut best, mut best_gain) = (DigitLine { scale: range / top, minimum: 0.0 }, f64::NEG_INFINITY);
    for step in -STEPS..=STEPS + 2 {
        let Some((line, gain)) = search.fit(0.0, (top + STEP * step as f32) / range) else { continue };
        if gain > best_gain {
            (best, best_gain) = (line, gain);
        }
    }
    for _ in 0..REFITS_MAX {
        match search.fit(best.minimum, 1.0 / best.scale) {
            Some((line, gain)) if gain > best_gain => (best, best_gain) = (line, gain),
            _ => break,
        }
    }
    DigitLine { scale: best.scale, minimum: best.minimum + least }
}

/// Returns the digit of a number on this line.
#[inline(always)]
pub(crate) fn digit_on(line: DigitLine, digits: &WholeDigits, x: f32) -> f32 {
    let inverse = if line.scale == 0.0 { 0.0 } else { 1.0 / line.scale };
    digits.nearest((x - line.minimum) * inverse)
}
