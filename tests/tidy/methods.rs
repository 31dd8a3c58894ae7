//! Laws of types and functions: over how many files a type's methods spread, how these files call each other, and how
//! many values a struct or a call has. Reads words and braces, and no types.

use super::{SOURCES, hold};
use crate::modules::circles;
use crate::source::{
    Source, before_struct, block_end, body_start, functions, line, n_fields, outside_brackets, structs, types, words,
};
use std::collections::{BTreeMap, BTreeSet};

/// What breaks a law today: a type or a function, and what it has. The list only gets shorter: a test fails if an entry
/// is no longer true.
const STILL: &[(&str, &str)] = &[
    ("Generation", "21 fields"),
    // A model's fingerprint hashes its debug text.
    ("ModelSpec", "26 fields"),
    ("Sampling", "19 fields"),
    ("Assignment", "19 fields"),
    ("worker/collective/src/carriers/nccl/meet.rs fn connect", "7 parameters"),
];

const IMPL_FILES_MAX: usize = 4;
/// Its operations are methods of a device, with a file for each kind of operation.
const BACKEND: &str = "worker/backend/";
const CIRCLE_FILES_MAX: usize = 3;
const FIELDS_MAX: usize = 18;
/// Files of settings, which are flat because each field is a flag, and of metrics.
const FLAT_FILES: &[&str] = &["config.rs", "stats.rs"];
/// Traits of types whose fields are flags, or keys of a message.
const FLAT_TRAITS: &[&str] = &["Args", "Serialize", "Deserialize"];
const PARAMETERS_MAX: usize = 6;

/// The methods of a type that one file defines.
#[derive(Default)]
struct MethodFile<'a> {
    defined: BTreeSet<&'a str>,
    /// What these methods call on `self` or on `Self`.
    called: BTreeSet<&'a str>,
    n_lines: usize,
}

/// A type with its inherent impls.
struct TypeMethods<'a> {
    name: &'a str,
    n_fields: usize,
    files: BTreeMap<&'a str, MethodFile<'a>>,
}

impl TypeMethods<'_> {
    /// Returns each file with each other file whose methods it calls.
    fn arrows(&self) -> BTreeSet<(&str, &str)> {
        let pairs = self.files.iter().flat_map(|from| self.files.iter().map(move |to| (from, to)));
        let arrows = pairs.filter(|((from, of), (to, other))| from != to && !of.called.is_disjoint(&other.defined));
        arrows.map(|((from, _), (to, _))| (*from, *to)).collect()
    }

    /// Returns the files of the largest circle.
    fn circle(&self) -> BTreeSet<&str> {
        circles(&self.arrows()).into_iter().max_by_key(BTreeSet::len).unwrap_or_default()
    }

    fn n_lines(&self) -> usize {
        self.files.values().map(|file| file.n_lines).sum()
    }
}

/// The types of the shipped code that have methods.
fn types_with_methods(sources: &[Source]) -> Vec<TypeMethods<'_>> {
    let mut homes: BTreeMap<(&str, &str), Vec<&Source>> = BTreeMap::new();
    for source in sources {
        for (_, name) in types(&source.shipped) {
            homes.entry((source.folder(), name)).or_default().push(source);
        }
    }
    let mut found: BTreeMap<(&str, &str), TypeMethods> = BTreeMap::new();
    for source in sources {
        for (name, body) in inherent_impls(&source.shipped) {
            // Two folders of a crate may define a type of one name.
            let of_name = homes.get(&(source.folder(), name)).into_iter().flatten();
            let Some(home) = of_name.max_by_key(|home| n_shared(&home.path, &source.path)) else { continue };
            let new = || TypeMethods { name, n_fields: fields_of(home, name), files: BTreeMap::new() };
            let file = found.entry((&home.path, name)).or_insert_with(new).files.entry(&source.path).or_default();
            file.defined.extend(defined(body));
            file.called.extend(called(name, body));
            file.n_lines += line(body, body.len());
        }
    }
    found.into_values().collect()
}

fn fields_of(home: &Source, name: &str) -> usize {
    structs(&home.shipped).into_iter().find(|(of, _)| *of == name).map_or(0, |(_, text)| n_fields(text))
}

/// Returns the length of the common beginning.
fn n_shared(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}

/// Returns each `impl` without a trait, as (name of the type, body).
fn inherent_impls(code: &str) -> Vec<(&str, &str)> {
    let is_item = |before: &str| before.is_empty() || before.ends_with(['{', '}', ';', ']']);
    let impls = words(code).filter(|(at, word)| *word == "impl" && is_item(code[..*at].trim_end()));
    let of = |(at, word): (usize, &str)| {
        let (open, _) = body_start(code, at).filter(|(_, c)| *c == '{')?;
        let name = implemented(&code[at + word.len()..open])?;
        Some((name, &code[open..block_end(code, open)]))
    };
    impls.filter_map(of).collect()
}

/// Returns the type's name in the text between `impl` and `{`, or None if it names a trait.
fn implemented(header: &str) -> Option<&str> {
    let outside: BTreeSet<usize> = outside_brackets(header).into_iter().map(|(i, _)| i).collect();
    let path: Vec<&str> = words(header)
        .filter(|(at, _)| outside.contains(at))
        .map(|(_, word)| word)
        .take_while(|word| *word != "where")
        .collect();
    path.last().copied().filter(|_| !path.contains(&"for"))
}

fn defined(body: &str) -> Vec<&str> {
    let words: Vec<(usize, &str)> = words(body).collect();
    words.windows(2).filter(|two| two[0].1 == "fn").map(|two| two[1].1).collect()
}

/// Returns the names behind `self.` that are called, and those behind `Self::` or the type's name.
fn called<'a>(name: &str, body: &'a str) -> Vec<&'a str> {
    let words: Vec<(usize, &str)> = words(body).collect();
    let is_call = |two: &&[(usize, &str)]| {
        let [(at, owner), (next, method)] = two else { return false };
        let between = body[at + owner.len()..*next].trim();
        let after = body[next + method.len()..].trim_start();
        match between {
            "." => *owner == "self" && (after.starts_with('(') || after.starts_with("::")),
            "::" => *owner == "Self" || *owner == name,
            _ => false,
        }
    };
    words.windows(2).filter(is_call).map(|two| two[1].1).collect()
}

/// Fails with what breaks the law and is not in `STILL`, and with entries of `STILL` that are not true.
fn hold_new(law: &str, of: &str, found: Vec<(String, usize)>) {
    let found: BTreeSet<(String, String)> = found.into_iter().map(|(name, n)| (name, format!("{n} {of}"))).collect();
    let still = STILL.iter().filter(|(_, what)| what.split_once(' ').is_some_and(|(_, still)| still == of));
    let still: BTreeSet<(String, String)> = still.map(|(name, what)| (name.to_string(), what.to_string())).collect();
    let new = found.difference(&still).map(|(name, what)| format!("{name} has {what}"));
    let gone = still.difference(&found).map(|(name, what)| format!("{name} has no longer {what}: STILL lists it"));
    hold(law, new.chain(gone).collect());
}

#[test]
fn a_type_has_its_methods_in_few_files() {
    print_largest();
    hold_new(
        "At most four files have methods of a type, outside of backend: a larger type is composed of types.",
        "files",
        spread(&SOURCES),
    );
}

fn spread(sources: &[Source]) -> Vec<(String, usize)> {
    let all = types_with_methods(sources).into_iter();
    let spread = all.filter(|of| of.files.len() > IMPL_FILES_MAX && !of.files.keys().any(|f| f.starts_with(BACKEND)));
    spread.map(|of| (of.name.to_owned(), of.files.len())).collect()
}

#[test]
fn methods_call_each_other_in_no_large_circle() {
    hold_new(
        "At most three files of a type's methods call each other in a circle, because none can be read first.",
        "files in a circle",
        circling(&SOURCES),
    );
}

fn circling(sources: &[Source]) -> Vec<(String, usize)> {
    let sizes = types_with_methods(sources).into_iter().map(|of| (of.name.to_owned(), of.circle().len()));
    sizes.filter(|(_, n_files)| *n_files > CIRCLE_FILES_MAX).collect()
}

#[test]
fn a_struct_has_few_fields() {
    hold_new("At most 18 fields: group those that change together in a type with methods.", "fields", wide(&SOURCES));
}

fn wide(sources: &[Source]) -> Vec<(String, usize)> {
    let is_flat = |source: &Source, name: &str| {
        let is_flat_file = FLAT_FILES.iter().any(|file| source.path.ends_with(&format!("/{file}")));
        is_flat_file || words(before_struct(&source.shipped, name)).any(|(_, word)| FLAT_TRAITS.contains(&word))
    };
    let of = |source: &Source| {
        let sizes = structs(&source.shipped).into_iter().map(|(name, text)| (name, n_fields(text)));
        let wide = sizes.filter(|(name, n_fields)| *n_fields > FIELDS_MAX && !is_flat(source, name));
        wide.map(|(name, n_fields)| (name.to_owned(), n_fields)).collect::<Vec<_>>()
    };
    sources.iter().flat_map(of).collect()
}

#[test]
fn a_function_has_few_parameters() {
    hold_new(
        "At most six parameters beside `self`, where a tuple counts as its elements: group more of them in a type.",
        "parameters",
        greedy(&SOURCES),
    );
}

fn greedy(sources: &[Source]) -> Vec<(String, usize)> {
    let of = |source: &Source| {
        let many = functions(&source.shipped).into_iter().filter(|f| f.n_parameters > PARAMETERS_MAX);
        many.map(|f| (format!("{} fn {}", source.path, f.name), f.n_parameters)).collect::<Vec<_>>()
    };
    sources.iter().flat_map(of).collect()
}

/// Prints the types with the most files: `cargo test -p tidy few_files -- --nocapture` shows them.
fn print_largest() {
    let mut all = types_with_methods(&SOURCES);
    all.sort_by_key(|of| std::cmp::Reverse((of.files.len(), of.n_lines())));
    println!("| type | fields | impl files | lines | files in the largest circle |");
    for of in &all[..10] {
        let (n_files, n_lines) = (of.files.len(), of.n_lines());
        println!("| {} | {} | {n_files} | {n_lines} | {} |", of.name, of.n_fields, of.circle().len());
    }
}

/// Files of a crate, each with an `impl` of a type `A`, whose struct is in the first.
fn made(krate: &str, impls: &[&str]) -> Vec<Source> {
    let file = |(i, body): (usize, &&str)| {
        let before = if i == 0 { "pub struct A<'a> { b: &'a u8, c: (u8, u8) }" } else { "use super::f0::A;" };
        Source::made(&format!("{krate}/src/f{i}.rs"), &format!("{before}\nimpl A<'_> {{ {body} }}"))
    };
    impls.iter().enumerate().map(file).collect()
}

#[test]
fn spread_types_are_found() {
    assert_eq!(spread(&made("x", &["", "", "", "", ""])), [("A".to_owned(), 5)]);
    assert_eq!(spread(&made("x", &["", "", "", ""])), []);
    assert_eq!(spread(&made("worker/backend", &["", "", "", "", ""])), []);
    // An implementation of a trait is its own subject.
    let mut with_trait = made("x", &["", "", "", ""]);
    with_trait.push(Source::made("x/src/t.rs", "impl<T> From<T> for A<'_> { fn from(t: T) -> impl B { t } }"));
    assert_eq!(spread(&with_trait), []);
}

#[test]
fn circles_of_methods_are_found() {
    let chain = ["fn a(&self) { self.b() }", "fn b(&self) { self\n.c::<u8>() }", "fn c<T>(&self) { [0].map(Self::d) }"];
    let check = |last: &str, expect: &[(String, usize)]| {
        assert_eq!(circling(&made("x", &[chain[0], chain[1], chain[2], last])), expect, "{last}");
    };
    check("fn d(i: u8) { A::a(&x) }", &[("A".to_owned(), 4)]);
    check("fn d(i: u8) { self.a() }", &[("A".to_owned(), 4)]);
    check("fn d(i: u8) { self.c() }", &[]);
    // A field's method of the same name, a method that is not called, and one of another type.
    check("fn d(i: u8) { self.b.a(); self.a; B::a() }", &[]);
}

#[test]
fn wide_structs_are_found() {
    let of = |path: &str, before: &str, n: usize| {
        let fields: String = (0..n).map(|i| format!("f{i}: Map<u8, (u8, u8)>,")).collect();
        wide(&[Source::made(path, &format!("{before} pub struct A<T> where T: Fn(u8) -> u8 {{ {fields} }}"))])
    };
    assert_eq!(of("x/src/a.rs", "#[derive(Clone)]", 19), [("A".to_owned(), 19)]);
    assert_eq!(of("x/src/a.rs", "#[derive(Serialize)] struct B(u8);", 19), [("A".to_owned(), 19)]);
    assert_eq!(of("x/src/a.rs", "", 18), []);
    assert_eq!(of("x/src/config.rs", "", 19), []);
    assert_eq!(of("x/src/a.rs", "#[derive(Clone, Serialize)]", 19), []);
    assert_eq!(wide(&[Source::made("x/src/a.rs", "struct A(u8, [u8; 2], (u8, u8));")]), []);
}

#[test]
fn functions_of_many_parameters_are_found() {
    let of = |parameters: &str| greedy(&[Source::made("x/src/a.rs", &format!("fn f({parameters}) {{}}"))]);
    let expect = ("x/src/a.rs fn f".to_owned(), 7);
    assert_eq!(of("&self, a: u8, b: u8, c: u8, d: u8, (e, f, g): (u8, u8, u8)"), [expect]);
    assert_eq!(of("&self, a: u8, b: u8, c: u8, d: u8, (e, f): (u8, u8)"), []);
}
