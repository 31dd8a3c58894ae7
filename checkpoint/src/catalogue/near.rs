//! Finds catalogue names similar to an unknown one: other sizes of the same family, or a typing error.

use crate::catalogue::entries::{CATALOGUE, CatalogueEntry};

/// The most names in a suggestion.
const NAMED_MAX: usize = 4;
/// The most wrong letters in a typing error.
const SLIP_MAX: usize = 2;

/// The nearest names, best first; none if nothing is near.
pub fn nearest_names(query: &str) -> Vec<&'static str> {
    let query = query.to_ascii_lowercase();
    let mut near: Vec<(usize, &CatalogueEntry)> =
        CATALOGUE.iter().filter_map(|entry| Some((distance(&query, entry)?, entry))).collect();
    near.sort_by_key(|(distance, _)| *distance);
    near.into_iter().take(NAMED_MAX).map(|(_, entry)| entry.name).collect()
}

/// Returns the distance to an entry: that of its name or, for another size, of its family's name, with dashes and dots
/// left out.
fn distance(query: &str, entry: &CatalogueEntry) -> Option<usize> {
    let plain = |name: &str| name.replace(['-', '.', '_', ':'], "");
    let family = |name: &str| plain(name.split(':').next().unwrap_or(name));
    let whole = edit_distance(&plain(query), &plain(entry.name));
    if family(query) == family(entry.name) {
        return Some(whole);
    }
    let slip = whole.min(edit_distance(&family(query), &family(entry.name)));
    // A short word with this many wrong letters could be any other word.
    let is_slip = slip <= SLIP_MAX && 3 * slip <= family(query).len();
    // A name without a size matches any size.
    is_slip.then_some(slip + if query.contains(':') { whole } else { slip })
}

/// Returns how many letters were inserted, removed or changed between two words.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let changed = before + usize::from(x != y);
            before = row[j + 1];
            row[j + 1] = changed.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_sizes_and_slips_are_near_and_other_words_are_not() {
        let check = |query, best: Option<&str>| assert_eq!(nearest_names(query).first().copied(), best, "{query}");
        check("qwen3:5b", Some("qwen3:4b"));
        check("Qwen3:4B", Some("qwen3:4b"));
        check("qwen3-4b", Some("qwen3:4b"));
        check("lama3.2:1b", Some("llama3.2:1b"));
        check("lama3.3", Some("llama3.3:70b"));
        check("smolm2:360m", Some("smollm2:360m"));
        check("gptoss:20b", Some("gpt-oss:20b"));
        check("deepseek-r1:7b", None);
        check("no-such-model", None);
        check("", None);
        assert!(
            nearest_names("qwen3:99b").iter().all(|name| name.starts_with("qwen3:")),
            "{:?}",
            nearest_names("qwen3:99b")
        );
        assert!(nearest_names("qwen3:99b").len() == NAMED_MAX);
    }

    #[test]
    fn steps_are_letters() {
        for (a, b, expected) in [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("a", "a", 0)] {
            assert_eq!(edit_distance(a, b), expected, "{a} {b}");
        }
    }
}
