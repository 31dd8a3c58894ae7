//! The lengths of prompts and answers, and the words of prompts, drawn from a seed, so that two servers get the same
//! load.

use std::fmt;
use std::str::FromStr;

/// A small generator (splitmix64) of our own: the same numbers everywhere, for ever.
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64 { state: seed }
    }

    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `(0, 1)`.
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// The time until the next of independent arrivals.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        -libm::log(self.unit()) / rate
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * libm::log(self.unit())).sqrt() * libm::cos(std::f64::consts::TAU * self.unit())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LengthDistribution {
    Fixed(usize),
    Uniform {
        from: usize,
        to: usize,
    },
    Normal {
        mean: f64,
        deviation: f64,
    },
    /// Most lengths are short and few are long, as in real traffic.
    Lognormal {
        mean: f64,
        deviation: f64,
    },
}

impl LengthDistribution {
    /// The longest length, so that a typing mistake does not make a terabyte of prompt.
    const MAX: usize = 1 << 20;

    pub fn draw(&self, random: &mut SplitMix64) -> usize {
        match *self {
            LengthDistribution::Fixed(n) => n,
            LengthDistribution::Uniform { from, to } => from + (random.next() % (to - from + 1) as u64) as usize,
            LengthDistribution::Normal { mean, deviation } => {
                (mean + deviation * random.normal()).round().clamp(1.0, Self::MAX as f64) as usize
            }
            LengthDistribution::Lognormal { mean, deviation } => {
                let variance = libm::log1p((deviation / mean) * (deviation / mean));
                let middle = libm::log(mean) - variance / 2.0;
                libm::exp(middle + variance.sqrt() * random.normal()).round().clamp(1.0, Self::MAX as f64) as usize
            }
        }
    }
}

impl FromStr for LengthDistribution {
    type Err = String;

    fn from_str(text: &str) -> Result<LengthDistribution, String> {
        let wrong = || format!("{text:?} is no length: use 128, uniform:64..256, normal:128,32 or lognormal:128,96");
        let number = |part: &str| part.trim().parse::<usize>().ok().filter(|n| (1..=Self::MAX).contains(n));
        let two = |rest: &str, between: &str| {
            let (a, b) = rest.split_once(between)?;
            Some((number(a)?, number(b)?))
        };
        let lengths = match text.split_once(':') {
            None => number(text).map(LengthDistribution::Fixed),
            Some(("uniform", rest)) => two(rest, "..")
                .filter(|(from, to)| from <= to)
                .map(|(from, to)| LengthDistribution::Uniform { from, to }),
            Some(("normal", rest)) => two(rest, ",")
                .map(|(mean, deviation)| LengthDistribution::Normal { mean: mean as f64, deviation: deviation as f64 }),
            Some(("lognormal", rest)) => two(rest, ",").map(|(mean, deviation)| LengthDistribution::Lognormal {
                mean: mean as f64,
                deviation: deviation as f64,
            }),
            Some(_) => None,
        };
        lengths.ok_or_else(wrong)
    }
}

impl fmt::Display for LengthDistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LengthDistribution::Fixed(n) => write!(f, "{n}"),
            LengthDistribution::Uniform { from, to } => write!(f, "uniform:{from}..{to}"),
            LengthDistribution::Normal { mean, deviation } => write!(f, "normal:{mean},{deviation}"),
            LengthDistribution::Lognormal { mean, deviation } => write!(f, "lognormal:{mean},{deviation}"),
        }
    }
}

/// Common words: with the space before it, each is one token in most vocabularies.
const WORDS: &str = "the of and to in is that it was for on are as with his they be at one have this from or had by \
    not but what some we can out other were all there when up use your how said an each she which do their time if \
    will way about many then them write would like so these her long make thing see him two has look more day could \
    go come did number sound no most people my over know water than call first who may down side been now find any \
    new work part take get place made live where after back little only round man year came show every good me give \
    our under name very through just form great think say help low line turn cause much mean before move right boy \
    old too same tell does set three want air well also play small end put home read hand port large add even land \
    here must big high such follow act why ask men change went light kind off need house picture try again point \
    mother world near build self earth father";

pub fn words(n: usize, random: &mut SplitMix64) -> String {
    let all: Vec<&str> = WORDS.split_ascii_whitespace().collect();
    let chosen: Vec<&str> = (0..n).map(|_| all[(random.next() % all.len() as u64) as usize]).collect();
    chosen.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_display_as_they_are_parsed() {
        for text in ["128", "uniform:64..256", "normal:128,32", "lognormal:512,256"] {
            assert_eq!(text.parse::<LengthDistribution>().unwrap().to_string(), text);
        }
        for text in ["", "0", "-3", "uniform:9..3", "uniform:5", "normal:8", "zipf:3", "99999999999"] {
            assert!(text.parse::<LengthDistribution>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_and_within_bounds() {
        let drawn = |seed| {
            let mut random = SplitMix64::new(seed);
            let lengths = LengthDistribution::Uniform { from: 3, to: 9 };
            (0..500).map(|_| lengths.draw(&mut random)).collect::<Vec<_>>()
        };
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
        assert!((3..=9).all(|n| drawn(1).contains(&n)) && drawn(1).iter().all(|n| (3..=9).contains(n)));
    }

    #[test]
    fn most_lengths_are_short_and_few_are_long() {
        let mut random = SplitMix64::new(3);
        let lengths = LengthDistribution::Lognormal { mean: 500.0, deviation: 500.0 };
        let drawn: Vec<usize> = (0..20_000).map(|_| lengths.draw(&mut random)).collect();
        let mean = drawn.iter().sum::<usize>() as f64 / drawn.len() as f64;
        let shorter = drawn.iter().filter(|n| **n < 500).count();
        assert!((mean - 500.0).abs() < 25.0 && shorter > 12_000, "{mean} {shorter}");
    }

    #[test]
    fn arrivals_have_the_requested_rate() {
        let mut random = SplitMix64::new(7);
        let mean = (0..20_000).map(|_| random.exponential(4.0)).sum::<f64>() / 20_000.0;
        assert!((mean - 0.25).abs() < 0.01, "{mean}");
    }
}
