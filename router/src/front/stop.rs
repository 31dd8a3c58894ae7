//! Finds the first of many stop strings in a text that comes in pieces. Knows nothing of tokens.
//!
//! All strings are in one automaton (Aho-Corasick), so that thousands cost no more per byte than one. Its state is the
//! longest suffix of the text that is a prefix of some stop string: exactly what may not be shown yet.
//!
//! `[0, shown) given out · [shown, len - depth) given out now · [len - depth, len) may become a stop string`

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

const ROOT: u32 = 0;

/// The stop strings of a request, as an automaton.
#[derive(Debug)]
pub struct Stops {
    strings: Vec<String>,
    nodes: Vec<StopNode>,
    edges: BTreeMap<(u32, u8), u32>,
    /// Whether the matched stop string is part of the text.
    included: bool,
}

#[derive(Clone, Copy, Debug)]
struct StopNode {
    /// The number of bytes from the root.
    depth: u32,
    /// The node of the longest proper suffix of this one's string.
    fallback: u32,
    /// The longest stop string that ends here.
    stop: Option<u32>,
}

impl Stops {
    /// The caller refuses empty strings.
    pub fn new(strings: Vec<String>) -> Stops {
        let root = StopNode { depth: 0, fallback: ROOT, stop: None };
        let mut stops = Stops { strings: Vec::new(), nodes: vec![root], edges: BTreeMap::new(), included: false };
        for (i, string) in strings.iter().enumerate() {
            debug_assert!(!string.is_empty(), "an empty string would stop every answer");
            stops.add(i as u32, string.as_bytes());
        }
        stops.strings = strings;
        stops.link();
        stops
    }

    /// Sets whether the matched stop string is shown too.
    pub fn included(self, included: bool) -> Stops {
        Stops { included, ..self }
    }

    pub fn are_included(&self) -> bool {
        self.included
    }

    pub fn strings(&self) -> impl Iterator<Item = &str> {
        self.strings.iter().map(String::as_str)
    }

    pub fn string(&self, stop: usize) -> &str {
        &self.strings[stop]
    }

    fn add(&mut self, i: u32, bytes: &[u8]) {
        let mut at = ROOT;
        for byte in bytes {
            let depth = self.nodes[at as usize].depth + 1;
            let next = self.nodes.len() as u32;
            at = *self.edges.entry((at, *byte)).or_insert(next);
            if at == next {
                self.nodes.push(StopNode { depth, fallback: ROOT, stop: None });
            }
        }
        // Among equal strings, the first counts.
        self.nodes[at as usize].stop.get_or_insert(i);
    }

    /// Links fallbacks level by level, because a node's fallback is always nearer to the root.
    fn link(&mut self) {
        let mut level = VecDeque::from([ROOT]);
        while let Some(parent) = level.pop_front() {
            let children: Vec<(u8, u32)> =
                self.edges.range((parent, 0)..=(parent, u8::MAX)).map(|((_, byte), child)| (*byte, *child)).collect();
            for (byte, child) in children {
                let fallback =
                    if parent == ROOT { ROOT } else { self.next(self.nodes[parent as usize].fallback, byte) };
                let inherited = self.nodes[fallback as usize].stop;
                let node = &mut self.nodes[child as usize];
                node.fallback = fallback;
                // Its own string is longer than any inherited one.
                node.stop = node.stop.or(inherited);
                level.push_back(child);
            }
        }
    }

    fn next(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            if let Some(next) = self.edges.get(&(state, byte)) {
                return *next;
            }
            if state == ROOT {
                return ROOT;
            }
            state = self.nodes[state as usize].fallback;
        }
    }
}

/// Filters one text. The stop string that ends first counts, and among those that end together the longest: so the
/// result does not depend on how the text was cut into pieces.
#[derive(Debug)]
pub struct StopFilter {
    stops: Arc<Stops>,
    state: u32,
    /// The text that was not shown yet.
    held: String,
}

impl StopFilter {
    pub fn new(stops: Arc<Stops>) -> StopFilter {
        StopFilter { stops, state: ROOT, held: String::new() }
    }

    /// Appends to `shown` what can be shown. Returns the index of a stop string that ends in this piece: the text ends
    /// before it, and nothing may be pushed after.
    pub fn push(&mut self, piece: &str, shown: &mut String) -> Option<usize> {
        let scanned = self.held.len();
        self.held.push_str(piece);
        for (i, byte) in piece.bytes().enumerate() {
            self.state = self.stops.next(self.state, byte);
            if let Some(stop) = self.stops.nodes[self.state as usize].stop {
                let end = scanned + i + 1;
                let hidden = if self.stops.included { 0 } else { self.stops.strings[stop as usize].len() };
                shown.push_str(&self.held[..end - hidden]);
                self.held.clear();
                return Some(stop as usize);
            }
        }
        let depth = self.stops.nodes[self.state as usize].depth as usize;
        let safe = self.held.len() - depth;
        shown.extend(self.held.drain(..safe));
        None
    }

    /// Ends the text: what was held back was no stop string.
    pub fn finish(&mut self, shown: &mut String) {
        shown.push_str(&self.held);
        self.held.clear();
        self.state = ROOT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes the pieces, and checks what was shown after each and which stop string ended the text.
    fn check(stops: &[&str], pieces: &[&str], shown_after: &[&str], stopped: Option<&str>) {
        let stops = Arc::new(Stops::new(stops.iter().map(|stop| stop.to_string()).collect()));
        let mut filter = StopFilter::new(stops.clone());
        let mut shown = String::new();
        for (piece, expected) in pieces.iter().zip(shown_after) {
            let stop = filter.push(piece, &mut shown);
            assert_eq!(&shown, expected, "after {piece:?} of {pieces:?}");
            if let Some(stop) = stop {
                assert_eq!(Some(stops.string(stop)), stopped);
                return;
            }
        }
        filter.finish(&mut shown);
        assert_eq!(&shown, shown_after.last().unwrap());
        assert_eq!(stopped, None);
    }

    #[test]
    fn text_is_held_back_no_longer_than_needed() {
        check(&[], &["ab", "c"], &["ab", "abc"], None);
        check(&["END"], &["a E", "N", "D b"], &["a ", "a ", "a "], Some("END"));
        check(&["END"], &["a E", "N", "d b"], &["a ", "a ", "a ENd b"], None);
        check(&["END"], &["EEN", "EN", "D"], &["E", "EEN", "EEN"], Some("END"));
        check(&["aab"], &["aaaa", "b"], &["aa", "aa"], Some("aab"));
        check(&["\n\n"], &["one\n", "two\n", "\nthree"], &["one", "one\ntwo", "one\ntwo"], Some("\n\n"));
        check(&["é!"], &["caf", "é", "?", "é!"], &["caf", "caf", "café?", "café?"], Some("é!"));
        check(&["è"], &["é", "è"], &["é", "é"], Some("è"));
    }

    #[test]
    fn stop_string_is_included_on_request() {
        let mut filter = StopFilter::new(Arc::new(Stops::new(vec!["END".into()]).included(true)));
        let mut shown = String::new();
        assert_eq!(filter.push("a EN", &mut shown), None);
        assert_eq!((filter.push("D b", &mut shown), shown.as_str()), (Some(0), "a END"));
    }

    #[test]
    fn text_held_back_at_the_end_is_shown() {
        let mut filter = StopFilter::new(Arc::new(Stops::new(vec!["xEND".into()])));
        let mut shown = String::new();
        assert_eq!(filter.push("a xEN", &mut shown), None);
        assert_eq!(shown, "a ");
        filter.finish(&mut shown);
        assert_eq!(shown, "a xEN");
    }

    #[test]
    fn the_string_that_ends_first_counts() {
        check(&["abcd", "bc"], &["xabc"], &["xa"], Some("bc"));
        check(&["bc", "abc"], &["xabc"], &["x"], Some("abc"));
        check(&["b", "abcd"], &["ab"], &["a"], Some("b"));
        check(&["she", "he", "hers"], &["us", "hers"], &["u", "u"], Some("she"));
    }

    /// The expected result, by the definition.
    fn naive(stops: &[String], text: &str) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let ends_here = |stop: &&String| text.as_bytes()[..end].ends_with(stop.as_bytes());
            if let Some(stop) = stops.iter().filter(ends_here).max_by_key(|stop| stop.len()) {
                let i = stops.iter().position(|other| other == stop);
                return (text[..end - stop.len()].to_owned(), i);
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn any_cut_of_any_text_gives_what_the_definition_gives() {
        let mut random = WordRng(7);
        for _ in 0..3000 {
            let stops: Vec<String> = (0..random.below(5)).map(|_| random.word(1, 5)).collect();
            let text = random.word(0, 40);
            let expected = naive(&stops, &text);
            let filter_stops = Arc::new(Stops::new(stops.clone()));
            let mut filter = StopFilter::new(filter_stops);
            let (mut shown, mut stopped, mut rest) = (String::new(), None, text.as_str());
            while !rest.is_empty() && stopped.is_none() {
                let cut = rest.char_indices().map(|(i, _)| i).nth(1 + random.below(4)).unwrap_or(rest.len());
                stopped = filter.push(&rest[..cut], &mut shown);
                rest = &rest[cut..];
                assert!(expected.0.starts_with(&shown), "{shown:?} shown of {text:?} with {stops:?}");
            }
            if stopped.is_none() {
                filter.finish(&mut shown);
            }
            assert_eq!((shown, stopped), expected, "{text:?} with {stops:?}");
        }
    }

    #[test]
    fn thousands_of_strings_cost_what_one_costs() {
        let stops: Vec<String> = (0..4096).map(|i| format!("{}{i:05}", "x".repeat(50))).collect();
        let mut filter = StopFilter::new(Arc::new(Stops::new(stops)));
        let mut shown = String::new();
        assert_eq!(filter.push(&"x".repeat(100_000), &mut shown), None);
        assert_eq!(shown.len(), 100_000 - 50);
        assert_eq!(filter.push("04095", &mut shown), Some(4095));
        assert_eq!(shown.len(), 100_000 - 50);
    }

    struct WordRng(u64);

    impl WordRng {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % n
        }

        fn word(&mut self, min: usize, max: usize) -> String {
            let n = min + self.below(max - min + 1);
            (0..n).map(|_| ['a', 'b', 'é', 'è'][self.below(4)]).collect()
        }
    }
}
