//! Facts in documents that the code defines. A test compares them with the code, and with `LOCKSTEP_WRITE=1` writes
//! them into the document.

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

/// One document at a time: tests run in parallel, and several may write the same one.
static DOCUMENT: Mutex<()> = Mutex::new(());

/// Compares facts with a document of the repository. A fact is a sentence with `{}` at the place of a value, or the two
/// markers around a section, and the value. A space of a sentence may be a line break in the document.
pub fn check(document: &str, facts: &[(&str, String)]) {
    let _one = DOCUMENT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|folder| folder.join("Cargo.lock").exists());
    let path = path.unwrap().join(document);
    let mut page = std::fs::read_to_string(&path).unwrap();
    let (mut missing, mut wrong) = (Vec::new(), Vec::new());
    for (sentence, value) in facts {
        match find_value(&page, sentence) {
            None => missing.push(format!("it lacks: {sentence}")),
            Some(at) if page[at.clone()] != *value => {
                wrong.push(difference(sentence, &page[at.clone()], value));
                page.replace_range(at, value);
            }
            Some(_) => {}
        }
    }
    if std::env::var_os("LOCKSTEP_WRITE").is_some() {
        std::fs::write(&path, page).unwrap();
        wrong.clear();
    }
    let differences = [missing, wrong].concat().join("\n");
    assert!(
        differences.is_empty(),
        "{document} is not what the code does; LOCKSTEP_WRITE=1 corrects it:\n{differences}"
    );
}

/// Returns the place of a sentence's value: one word, or anything between markers.
fn find_value(page: &str, sentence: &str) -> Option<Range<usize>> {
    let (before, after) = sentence.split_once("{}")?;
    page.char_indices().find_map(|(start, _)| {
        let at = start + match_length(&page[start..], before)?;
        let n = page[at..].char_indices().find_map(|(n, _)| match_length(&page[at + n..], after).map(|_| n))?;
        let is_value = before.starts_with("<!--") || !page[at..at + n].contains(char::is_whitespace);
        is_value.then_some(at..at + n)
    })
}

/// Returns the length of the words with which the text begins, if it begins with them.
fn match_length(text: &str, words: &str) -> Option<usize> {
    let mut rest = text;
    for (i, word) in words.split(' ').enumerate() {
        if i > 0 {
            rest = rest.strip_prefix(char::is_whitespace)?.trim_start();
        }
        rest = rest.strip_prefix(word)?;
    }
    Some(text.len() - rest.len())
}

fn difference(sentence: &str, found: &str, expect: &str) -> String {
    if !expect.contains('\n') {
        return format!("{sentence}\n- {found}\n+ {expect}");
    }
    let missing = |from: &str, other: &str, sign: &str| -> String {
        let lines = from.lines().filter(|line| !other.lines().any(|known| known == *line));
        lines.map(|line| format!("{sign} {line}\n")).collect()
    };
    format!("{sentence}\n{}{}", missing(found, expect, "-"), missing(expect, found, "+"))
}
