//! Multiples of a number as a set of texts: an automaton that divides digit by digit, turned into an expression.

use super::decimal::Decimal;
use crate::words::TextSet;
use std::collections::BTreeMap;

/// A step that needs more states, or a longer expression, is refused.
const STATES_MAX: u64 = 400;
const EXPRESSION_MAX: usize = 40_000;

/// Returns the numbers that are multiples of the step. None if there is no expression of acceptable size.
pub(super) fn multiples_of(step: &Decimal) -> Option<TextSet> {
    let (mut left, places) = step.to_scaled_integer().filter(|(digits, _)| *digits > 0)?;
    let mut all = Vec::new();
    if left == 1 {
        all.push(decimals_divisible_by(1, places)?);
    }
    let mut prime = 2;
    while left > 1 {
        let mut power = 1;
        while left % prime == 0 {
            (left, power) = (left / prime, power * prime);
        }
        if power > 1 {
            all.push(decimals_divisible_by(power, places)?);
        }
        prime += 1;
        if prime > STATES_MAX && left > 1 {
            return None;
        }
    }
    Some(if all.len() == 1 { all.remove(0) } else { TextSet::All(all) })
}

/// Numbers whose first `places` digits behind the point make a multiple of `by`; any further digits are zeros.
fn decimals_divisible_by(by: u64, places: usize) -> Option<TextSet> {
    if by * (places as u64 + 2) > STATES_MAX {
        return None;
    }
    let expression = automaton_to_regex(&minimize(&automaton(by, places as u64)))?;
    Some(TextSet::Regex(format!("-?(?:{expression})")))
}

/// The next state for each digit (10 is the point), and whether a number may end there. State 0 is the start.
struct DigitAutomaton {
    steps: Vec<[Option<usize>; 11]>,
    is_end: Vec<bool>,
}

/// A state is the remainder and the number of digits read behind the point. That number is none before the point.
fn automaton(by: u64, places: u64) -> DigitAutomaton {
    let state = |rest: u64, read: u64| (1 + read * by + rest) as usize;
    let n = state(by - 1, places + 1) + 1;
    let mut automaton = DigitAutomaton { steps: vec![[None; 11]; n], is_end: vec![false; n] };
    for digit in 0..10 {
        automaton.steps[0][digit as usize] = Some(state(digit % by, 0));
    }
    for rest in 0..by {
        for read in 0..=places + 1 {
            // `read` is 0 before the point, and one more than the digits after it.
            let at = state(rest, read);
            let missing = places - read.saturating_sub(1);
            let padded = (0..missing).fold(rest, |rest, _| rest * 10 % by);
            automaton.is_end[at] = padded == 0;
            for digit in 0..10u64 {
                automaton.steps[at][digit as usize] = match read {
                    0 => Some(state((rest * 10 + digit) % by, 0)),
                    _ if missing > 0 => Some(state((rest * 10 + digit) % by, read + 1)),
                    _ => (digit == 0).then_some(at),
                };
            }
            if read == 0 {
                automaton.steps[at][10] = Some(state(rest, 1));
            }
        }
    }
    automaton
}

/// Minimizes the automaton: merges states that no text distinguishes.
fn minimize(automaton: &DigitAutomaton) -> DigitAutomaton {
    let n = automaton.steps.len();
    let mut class: Vec<usize> = automaton.is_end.iter().map(|is| usize::from(*is)).collect();
    let mut n_classes = 0;
    loop {
        let mut known = BTreeMap::new();
        let key = |state: usize| (class[state], automaton.steps[state].map(|to| to.map(|to| class[to])));
        let next: Vec<usize> = (0..n)
            .map(|state| {
                let fresh = known.len();
                *known.entry(key(state)).or_insert(fresh)
            })
            .collect();
        class = next;
        if known.len() == n_classes {
            break;
        }
        n_classes = known.len();
    }
    let mut small = DigitAutomaton { steps: vec![[None; 11]; n_classes], is_end: vec![false; n_classes] };
    for state in 0..n {
        small.steps[class[state]] = automaton.steps[state].map(|to| to.map(|to| class[to]));
        small.is_end[class[state]] = automaton.is_end[state];
    }
    small
}

/// Converts an automaton to an expression by removing its states, those with the fewest paths through them first.
fn automaton_to_regex(automaton: &DigitAutomaton) -> Option<String> {
    let n = automaton.steps.len();
    let (start, end) = (n, n + 1);
    let mut edges: BTreeMap<(usize, usize), String> = BTreeMap::new();
    for (from, steps) in automaton.steps.iter().enumerate() {
        let mut to: BTreeMap<usize, String> = BTreeMap::new();
        for (digit, target) in steps.iter().enumerate().filter_map(|(digit, to)| Some((digit, (*to)?))) {
            to.entry(target).or_default().push(if digit == 10 { '.' } else { (b'0' + digit as u8) as char });
        }
        edges.extend(to.into_iter().map(|(target, digits)| ((from, target), format!("[{digits}]"))));
        if automaton.is_end[from] {
            edges.insert((from, end), String::new());
        }
    }
    edges.insert((start, 0), String::new());
    let mut left: Vec<usize> = (0..n).collect();
    while !left.is_empty() {
        let cost = |state: usize| {
            let into = edges.iter().filter(|((from, to), _)| *to == state && *from != state);
            let out = edges.iter().filter(|((from, to), _)| *from == state && *to != state);
            let (n_in, long_in) = into.fold((0, 0), |(n, long), (_, text)| (n + 1, long + text.len()));
            let (n_out, long_out) = out.fold((0, 0), |(n, long), (_, text)| (n + 1, long + text.len()));
            long_in * n_out + long_out * n_in + edges.get(&(state, state)).map_or(0, String::len) * n_in * n_out
        };
        let at = (0..left.len()).min_by_key(|i| cost(left[*i]))?;
        eliminate_state(left.remove(at), &mut edges)?;
    }
    edges.remove(&(start, end))
}

fn eliminate_state(state: usize, edges: &mut BTreeMap<(usize, usize), String>) -> Option<()> {
    let round = edges.remove(&(state, state)).map_or(String::new(), |text| format!("(?:{text})*"));
    let take = |edges: &mut BTreeMap<(usize, usize), String>, is: &dyn Fn(&(usize, usize)) -> bool| {
        let keys: Vec<(usize, usize)> = edges.keys().filter(|key| is(key)).copied().collect();
        keys.into_iter().filter_map(|key| Some((key, edges.remove(&key)?))).collect::<Vec<_>>()
    };
    let into = take(edges, &|(_, to)| *to == state);
    let out = take(edges, &|(from, _)| *from == state);
    for ((from, _), first) in &into {
        for ((_, to), last) in &out {
            let way = format!("{first}{round}{last}");
            let known = edges.remove(&(*from, *to));
            let both = known.map_or(way.clone(), |known| format!("(?:{known}|{way})"));
            if both.len() > EXPRESSION_MAX {
                return None;
            }
            edges.insert((*from, *to), both);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiples_are_those_that_divide() {
        for step in ["1", "2", "3", "5", "10", "12", "60", "100", "0.01", "0.5", "1.5", "0.25"] {
            let step = Decimal::read(step).unwrap();
            let words = multiples_of(&step).unwrap_or_else(|| panic!("{step:?}"));
            let mut automaton = words.automaton(1_000_000).unwrap();
            for n in -300..300 {
                for text in [format!("{n}"), format!("{n}.0"), format!("{n}.5"), format!("{n}.25"), format!("{n}.010")]
                {
                    let expect = Decimal::read(&text).unwrap().is_multiple_of(&step).unwrap();
                    assert_eq!(automaton.has(&text), expect, "{text} of {step:?}");
                }
            }
        }
        for step in ["7", "0.123456789", "0"] {
            assert!(multiples_of(&Decimal::read(step).unwrap()).is_none(), "{step}");
        }
    }
}
