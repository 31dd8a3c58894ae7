//! Rust sources for the rules: comments and strings are blanked, and tests are separated from shipped code. A lexer of
//! a few states, and no parser: it understands braces, not grammar.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// One `.rs` file of the workspace. `code` and `shipped` have the same lines and columns as `text`.
pub struct Source {
    /// From the workspace's root, with forward slashes.
    pub path: String,
    pub text: String,
    /// Without comments and without what is inside strings and character literals.
    pub code: String,
    /// `code` without the parts of test builds; empty for a file of tests.
    pub shipped: String,
}

/// A `fn` with a body.
pub struct Function {
    pub name: String,
    pub first_line: usize,
    pub n_lines: usize,
    /// Without `self`; a tuple counts as its elements.
    pub n_parameters: usize,
}

/// The workspace's folder: this package is `tests/tidy` of it.
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).unwrap()
}

/// Every `.rs` file under the workspace, tests and benches included.
pub fn sources() -> Vec<Source> {
    let mut all: Vec<Source> = files(&["rs"]).into_iter().map(|(path, text)| Source::new(path, text)).collect();
    // `#[cfg(test)] mod simulation;` declares a file of tests whose path does not show it.
    let tests: Vec<String> = all.iter().flat_map(test_modules).collect();
    for source in &mut all {
        if tests.iter().any(|module| source.path.starts_with(module)) {
            source.shipped.clear();
        }
    }
    all
}

/// Files with one of these extensions (or names), as (path from the root, text), in the order of their paths.
pub fn files(kinds: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    walk(root(), &mut found);
    found.sort();
    let is_selected = |path: &Path| {
        let of = |part: Option<&std::ffi::OsStr>| part.and_then(|p| p.to_str()).unwrap_or("").to_string();
        kinds.contains(&of(path.extension()).as_str()) || kinds.contains(&of(path.file_name()).as_str())
    };
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (path.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/"), text)
    };
    found.iter().filter(|path| is_selected(path)).map(read).collect()
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name();
        let name = name.to_str().unwrap();
        let kind = entry.file_type().unwrap();
        // Build outputs and tools' folders are not sources; `.ci` is.
        let skipped = name == "target" || name == "__pycache__" || (name.starts_with('.') && name != ".ci");
        if kind.is_dir() && !skipped {
            walk(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
}

impl Source {
    fn new(path: String, text: String) -> Source {
        let code = strip(&text);
        let is_test = path.split('/').any(|part| part == "tests" || part == "benches" || part == "examples");
        let shipped = if is_test { String::new() } else { without_tests(&code) };
        Source { path, text, code, shipped }
    }

    /// A made-up file of shipped code.
    pub fn made(path: &str, code: &str) -> Source {
        Source::new(path.to_owned(), code.to_owned())
    }

    /// Returns the crate by its folder: `worker/backend`; the binary is `src`, its tests are `tests`.
    pub fn folder(&self) -> &str {
        let end = ["/src/", "/tests/", "/benches/", "/build.rs"].iter().filter_map(|part| self.path.find(part)).min();
        &self.path[..end.unwrap_or_else(|| self.path.find('/').unwrap_or(0))]
    }

    /// Returns the number of shipped lines, including comments and blank ones.
    pub fn n_shipped_lines(&self) -> usize {
        if self.shipped.is_empty() {
            return 0;
        }
        let of_tests = test_items(&self.code).into_iter().map(|item| self.code[item].lines().count());
        self.text.lines().count() - of_tests.sum::<usize>()
    }

    /// Returns `path:line`, for messages.
    pub fn at(&self, offset: usize) -> String {
        format!("{}:{}", self.path, line(&self.code, offset))
    }
}

/// The line of a byte, counted from 1.
pub fn line(text: &str, offset: usize) -> usize {
    1 + text[..offset].matches('\n').count()
}

/// Identifiers and keywords with their offsets.
pub fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + code[at..].find(is_word)?;
        let end = code[start..].find(|c| !is_word(c)).map_or(code.len(), |n| start + n);
        at = end;
        Some((start, &code[start..end]))
    })
}

/// Blanks comments and the insides of strings and characters; keeps every line break and every byte's offset.
pub fn strip(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let (end, keep) = token(text, at);
        match keep {
            true => out.push_str(&text[at..end]),
            false => out.extend(text[at..end].bytes().map(|b| if b == b'\n' { '\n' } else { ' ' })),
        }
        at = end;
    }
    out
}

/// Returns the end of the token at `at`, and whether it is code.
fn token(text: &str, at: usize) -> (usize, bool) {
    let rest = &text[at..];
    let first = rest.chars().next().unwrap();
    if rest.starts_with("//") {
        return (at + rest.find('\n').unwrap_or(rest.len()), false);
    }
    if rest.starts_with("/*") {
        return (at + block_comment(rest), false);
    }
    if first == '"' {
        return (at + quoted(rest, '"'), false);
    }
    if first == '\'' {
        return character(rest).map_or((at + 1, true), |n| (at + n, false));
    }
    if first.is_alphabetic() || first == '_' {
        let n = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        return match raw_string(&rest[..n], &rest[n..]) {
            Some(more) => (at + n + more, false),
            None => (at + n, true),
        };
    }
    (at + first.len_utf8(), true)
}

fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match &rest.as_bytes()[at..(at + 2).min(rest.len())] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (i, c) in rest.char_indices().skip(1) {
        if c == quote && !escaped {
            return i + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    rest.len()
}

/// Returns the length of a character literal, or None for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        return Some(quoted(rest, '\''));
    }
    chars.next().filter(|(_, c)| *c == '\'').map(|(i, _)| i + 1)
}

/// Returns the length of the raw string after its prefix (`r`, `br`, `cr`).
fn raw_string(prefix: &str, rest: &str) -> Option<usize> {
    let n_hashes = rest.bytes().take_while(|b| *b == b'#').count();
    if !["r", "br", "cr"].contains(&prefix) || !rest[n_hashes..].starts_with('"') {
        return None;
    }
    let close = format!("\"{}", "#".repeat(n_hashes));
    let from = n_hashes + 1;
    Some(rest[from..].find(&close).map_or(rest.len(), |n| from + n + close.len()))
}

/// Blanks each item under `#[cfg(test)]`.
fn without_tests(code: &str) -> String {
    let mut out = code.to_string();
    for item in test_items(code) {
        let blank: String = code[item.clone()].bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }).collect();
        out.replace_range(item, &blank);
    }
    out
}

fn test_items(code: &str) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (start, _) in code.match_indices("#[cfg(test)]") {
        if found.last().is_none_or(|item| start >= item.end) {
            found.push(start..item_end(code, start));
        }
    }
    found
}

/// An item ends with its block, or at a `;` before one.
fn item_end(code: &str, start: usize) -> usize {
    match body_start(code, start) {
        Some((at, '{')) => block_end(code, at),
        Some((at, _)) => at + 1,
        None => code.len(),
    }
}

/// The first `{` or `;` that is not inside parentheses or brackets.
pub fn body_start(code: &str, from: usize) -> Option<(usize, char)> {
    let mut depth = 0;
    for (i, c) in code[from..].char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            '{' | ';' if depth == 0 => return Some((from + i, c)),
            _ => {}
        }
    }
    None
}

pub fn block_end(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (i, c) in code[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return open + i + 1,
            '}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

/// Returns the paths, without `.rs`, of modules that `source` declares for tests only.
fn test_modules(source: &Source) -> Vec<String> {
    let folder = source.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let stem = source.path.rsplit('/').next().unwrap().trim_end_matches(".rs");
    let base = match stem {
        "lib" | "main" | "mod" => folder.to_string(),
        _ => format!("{folder}/{stem}"),
    };
    let name = |item: Range<usize>| {
        let item = &source.code[item];
        let name = words(item).skip_while(|(_, word)| *word != "mod").nth(1)?.1;
        item.ends_with(';').then(|| [format!("{base}/{name}.rs"), format!("{base}/{name}/")])
    };
    test_items(&source.code).into_iter().filter_map(name).flatten().collect()
}

/// Returns every function with a body, nested ones too. A `$name` of a macro has none.
pub fn functions(code: &str) -> Vec<Function> {
    let mut found = Vec::new();
    let mut words = words(code).peekable();
    while let Some((start, word)) = words.next() {
        let Some((at, name)) = words.peek().copied().filter(|_| word == "fn") else { continue };
        let is_named = code[start + 2..at].trim().is_empty() && !code[start + 2..at].is_empty();
        if let Some((open, '{')) = body_start(code, at).filter(|_| is_named) {
            let body = open..block_end(code, open);
            let first_line = line(code, start);
            let n_lines = line(code, body.end) + 1 - first_line;
            let n_parameters = n_parameters(&code[at + name.len()..open]);
            found.push(Function { name: name.to_string(), first_line, n_lines, n_parameters });
        }
    }
    found
}

/// Counts the parameters in a function's text from behind its name to its body: generics, parameters and result.
fn n_parameters(signature: &str) -> usize {
    let of_parameter = |parameter: &str| {
        let is_colon = |i: usize| !parameter[i + 1..].starts_with(':') && !parameter[..i].ends_with(':');
        let colon = outside_brackets(parameter).into_iter().find(|(i, c)| *c == ':' && is_colon(*i));
        let (pattern, of_type) = parameter.split_at(colon.map_or(parameter.len(), |(i, _)| i));
        let is_self = pattern.trim().split(|c: char| c.is_whitespace() || c == '&').next_back() == Some("self");
        if is_self { 0 } else { n_values(of_type.trim_start_matches(':')) }
    };
    elements(inside(signature, '(')).into_iter().map(of_parameter).sum()
}

/// A tuple, or a reference to one, has as many values as its elements have. Any other type is one value.
fn n_values(of_type: &str) -> usize {
    let before = of_type.split('(').next().unwrap_or("");
    let mut words = before.split(|c: char| c.is_whitespace() || c == '&');
    if !words.all(|word| word.is_empty() || word == "mut" || word.starts_with('\'')) {
        return 1;
    }
    elements(inside(of_type, '(')).into_iter().map(n_values).sum::<usize>().max(1)
}

/// Returns what stands between the commas of a list, such as parameters or fields.
fn elements(list: &str) -> Vec<&str> {
    let commas = outside_brackets(list).into_iter().filter(|(_, c)| *c == ',').map(|(i, _)| i);
    let mut start = 0;
    let parts = commas.chain([list.len()]).map(|end| &list[std::mem::replace(&mut start, end + 1)..end]);
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// Returns the inside of the first group that this bracket opens outside of all others.
fn inside(text: &str, open: char) -> &str {
    let mut outside = outside_brackets(text).into_iter().skip_while(|(_, c)| *c != open).map(|(i, _)| i);
    outside.next().zip(outside.next()).map_or("", |(open, close)| &text[open + 1..close])
}

/// Returns the characters outside of all brackets, the outermost brackets included, with their offsets.
pub fn outside_brackets(text: &str) -> Vec<(usize, char)> {
    let mut depth = 0;
    let is_outside = |(i, c): &(usize, char)| {
        let is_arrow = *c == '>' && text[..*i].ends_with(['-', '=']);
        let closes = matches!(c, ')' | ']' | '}' | '>') && !is_arrow;
        depth -= i32::from(closes);
        let is_outside = depth == 0;
        depth += i32::from(matches!(c, '(' | '[' | '{' | '<'));
        is_outside
    };
    text.char_indices().filter(is_outside).collect()
}

/// The structs that this code defines, each with its name and its fields.
pub fn structs(code: &str) -> Vec<(&str, &str)> {
    let words: Vec<(usize, &str)> = words(code).collect();
    let defines = words.windows(2).filter(|pair| pair[0].1 == "struct").map(|pair| pair[1]);
    let fields = |at: usize| {
        let end = item_end(code, at);
        &code[at..end]
    };
    defines.map(|(at, name)| (name, fields(at + name.len()))).collect()
}

/// Returns the text before the struct of this name, up to the item before it: its attributes and its visibility.
pub fn before_struct<'a>(code: &'a str, name: &str) -> &'a str {
    let words: Vec<(usize, &str)> = words(code).collect();
    let start = words.windows(2).find(|pair| pair[0].1 == "struct" && pair[1].1 == name).map_or(0, |pair| pair[0].0);
    code[..start].rsplit(['}', ';']).next().unwrap_or("")
}

/// Returns the number of fields in the text of a struct behind its name.
pub fn n_fields(text: &str) -> usize {
    elements(inside(text, if text.ends_with('}') { '{' } else { '(' })).len()
}

/// The names of the types that are defined here, with their offsets: private ones too, aliases only if they are public.
pub fn types(code: &str) -> Vec<(usize, &str)> {
    let words: Vec<(usize, &str)> = words(code).collect();
    let defined = words.windows(2).filter(|two| matches!(two[0].1, "struct" | "enum" | "trait")).map(|two| two[1]);
    let is_alias = |three: &&[(usize, &str)]| three[0].1 == "pub" && three[1].1 == "type";
    defined.chain(words.windows(3).filter(is_alias).map(|three| three[2])).collect()
}
