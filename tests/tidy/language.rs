//! Rules for words: names that an engineer with experience of vLLM and Rust understands, and prose in which no process
//! is a person.

use super::{SOURCES, hold};
use crate::source::{files, line, strip, words};

/// Parts of names that make a process a person. A name describes what a thing is or does.
const BANNED_PARTS: &[&str] = &[
    "told", "tell", "tells", "telling", "said", "say", "says", "saying", "heard", "hear", "hears", "hearing", "asked",
    "ask", "asks", "asking", "wanted", "wish", "wishes", "wished", "befell", "befall", "heed", "heeds", "heeded",
    "who", "whoever", "nobody",
];
/// The limit of their number, which may only decrease.
const N_BANNED_PARTS_MAX: usize = 0;

const PERSON_WORDS: &[&str] =
    &["who", "whoever", "whom", "nobody", "everybody", "somebody", "anybody", "told", "said", "heard"];
/// For each kind of prose, the limit in 10,000 words, which may only decrease.
const N_PERSON_WORDS_MAX: &[(&str, usize)] =
    &[("comments", 0), ("documents", 0), ("protos", 0), ("strings", 2), ("scripts", 1)];
/// Texts in which these words are data: the words of English by frequency, and these rules.
const WORD_LISTS: &[&str] = &["tools/src/bench/lengths.rs", "tests/tidy/language.rs"];
/// Kinds of files with comments and texts in other languages than Rust.
const SCRIPTS: &[&str] =
    &["py", "sh", "js", "css", "html", "yaml", "tpl", "toml", "cu", "cuh", "cpp", "h", "Makefile", "NOTES.txt"];

const COLUMNS_MAX: usize = 120;

#[test]
fn names_describe_what_things_are() {
    let protos = files(&["proto"]).into_iter().map(|(path, text)| (path, strip(&text)));
    let rust = SOURCES.iter().map(|source| (source.path.clone(), source.code.clone()));
    let mut found = Vec::new();
    for (path, code) in rust.chain(protos) {
        for (at, word) in words(&code) {
            let banned = parts(word).into_iter().filter(|part| BANNED_PARTS.contains(&part.as_str()));
            found.extend(banned.map(|_| format!("{path}:{} names {word}", line(&code, at))));
        }
    }
    let n = found.len();
    hold(
        &format!("{n} parts of names name speech; at most {N_BANNED_PARTS_MAX} may be (tests/tidy/language.rs)."),
        if n > N_BANNED_PARTS_MAX { found } else { Vec::new() },
    );
}

/// `is_told` and `IsTold` have the parts `is` and `told`.
fn parts(word: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut before = '_';
    for c in word.chars() {
        if c == '_' || c.is_uppercase() && before.is_lowercase() {
            parts.push(String::new());
        }
        if c != '_' {
            parts.last_mut().unwrap().extend(c.to_lowercase());
        }
        before = c;
    }
    parts
}

#[test]
fn processes_are_no_persons() {
    let mut broken = Vec::new();
    let texts = [comments(), documents(), protos(), strings(), scripts()];
    for ((kind, max), texts) in N_PERSON_WORDS_MAX.iter().zip(texts) {
        let mut n_words = 0;
        let mut found = Vec::new();
        for (path, text) in texts {
            for (i, line) in text.lines().enumerate() {
                for word in prose_words(line) {
                    n_words += 1;
                    found.extend(PERSON_WORDS.contains(&word.as_str()).then(|| format!("{path}:{} {word}", i + 1)));
                }
            }
        }
        if found.len() * 10_000 > max * n_words {
            broken.push(format!("{kind}: {} in {n_words} words, over {max} in 10,000", found.len()));
            broken.extend(found);
        }
    }
    hold("A process is not a person: name the rank, the client or the request, and what it sends or returns.", broken);
}

/// Returns the words outside of code spans, in lower case.
fn prose_words(line: &str) -> impl Iterator<Item = String> {
    let spans = line.split('`').step_by(2);
    let words = spans.flat_map(|span| span.split(|c: char| !c.is_alphabetic() && c != '\''));
    words.filter(|word| !word.is_empty()).map(str::to_lowercase)
}

fn comments() -> Vec<(String, String)> {
    SOURCES.iter().map(|source| (source.path.clone(), comment_lines(&source.text))).collect()
}

fn protos() -> Vec<(String, String)> {
    files(&["proto"]).into_iter().map(|(path, text)| (path, comment_lines(&text))).collect()
}

/// Returns the insides of string literals, at their places.
fn strings() -> Vec<(String, String)> {
    let sources = SOURCES.iter().filter(|source| !WORD_LISTS.contains(&&*source.path));
    sources.map(|source| (source.path.clone(), blank_code(&source.text, &source.code))).collect()
}

/// Blanks what is code, and lines that are comments.
fn blank_code(text: &str, code: &str) -> String {
    let literals = |(line, code): (&str, &str)| {
        let is_comment = line.trim_start().starts_with("//");
        let chars = line.char_indices().map(|(i, c)| if code[i..].starts_with(c) { ' ' } else { c });
        if is_comment { String::new() } else { chars.collect() }
    };
    text.lines().zip(code.lines()).map(literals).collect::<Vec<_>>().join("\n")
}

fn scripts() -> Vec<(String, String)> {
    files(SCRIPTS)
}

/// Keeps only the lines that are comments, at their places.
fn comment_lines(text: &str) -> String {
    let of = |line: &str| line.trim_start().strip_prefix("//").unwrap_or("").to_string();
    text.lines().map(of).collect::<Vec<_>>().join("\n")
}

/// Returns Markdown without blocks of code. Results are left out, because they quote measurements.
fn documents() -> Vec<(String, String)> {
    let prose = |text: &str| {
        let mut is_code = false;
        let keep = |line: &str| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            if is_code || is_fence { String::new() } else { line.to_string() }
        };
        text.lines().map(keep).collect::<Vec<_>>().join("\n")
    };
    let pages = files(&["md"]).into_iter().filter(|(path, _)| !path.contains("results/"));
    pages.map(|(path, text)| (path, prose(&text))).collect()
}

#[test]
fn prose_fits() {
    let mut broken = Vec::new();
    for (path, text) in documents() {
        // A row of a table, or a link, cannot be broken.
        let is_long = |line: &&str| line.chars().count() > COLUMNS_MAX && !line.starts_with('|') && line.contains(' ');
        for (i, line) in text.lines().enumerate().filter(|(_, line)| is_long(line)) {
            broken.push(format!("{path}:{} has {} columns", i + 1, line.chars().count()));
        }
    }
    hold("Prose has at most 120 columns, so that a change of a sentence is a change of few lines.", broken);
}

#[test]
fn names_have_their_parts() {
    for (word, expect) in [("is_told", vec!["is", "told"]), ("IsTold", vec!["is", "told"]), ("N_MAX", vec!["n", "max"])]
    {
        assert_eq!(parts(word), expect, "{word}");
    }
}

#[test]
fn code_in_prose_is_no_prose() {
    let found: Vec<String> = prose_words("The `who` of a rank's file: it's 3.").collect();
    assert_eq!(found, ["the", "of", "a", "rank's", "file", "it's"]);
}
