//! The uses between a crate's files: its modules, the paths that each names, and the circles among them. Follows
//! re-exports to the file that defines a name. Reads paths, and no types.

use crate::source::Source;
use std::collections::{BTreeMap, BTreeSet};

/// A module's path from the crate's root, or a name's.
type Path = Vec<String>;

/// The modules of one crate.
pub struct Modules {
    /// The file of each module.
    files: BTreeMap<Path, String>,
    /// The name in a module, to the path that it stands for.
    names: BTreeMap<(Path, String), Path>,
    /// Paths that a module names, without its re-exports.
    named: BTreeMap<Path, Vec<Path>>,
}

impl Modules {
    /// The crate whose sources stand in `root`, which ends with a slash.
    pub fn of(sources: &[Source], root: &str) -> Modules {
        let shipped = sources.iter().filter(|source| source.path.starts_with(root) && !source.shipped.is_empty());
        let shipped: Vec<(Path, &Source)> =
            shipped.map(|source| (module(&source.path[root.len()..]), source)).collect();
        let files = shipped.iter().map(|(module, source)| (module.clone(), source.path.clone())).collect();
        let mut modules = Modules { files, names: BTreeMap::new(), named: BTreeMap::new() };
        let read: Vec<(&Path, Read)> =
            shipped.iter().map(|(module, source)| (module, Read::of(&tokens(&source.shipped)))).collect();
        for (module, read) in &read {
            for item in &read.uses {
                if let Some(path) = modules.absolute(module, &item.path) {
                    modules.names.insert(((*module).clone(), item.name.clone()), path);
                }
            }
        }
        for (module, read) in read {
            let used = read.uses.iter().filter(|item| !item.is_public).map(|item| &item.path);
            let paths = used.chain(&read.paths).filter_map(|path| modules.absolute(module, path)).collect();
            modules.named.insert(module.clone(), paths);
        }
        modules
    }

    /// Returns the path from the root, or None for a path of another crate.
    fn absolute(&self, module: &Path, path: &[String]) -> Option<Path> {
        let (first, rest) = path.split_first()?;
        let within = |base: &[String]| [base, rest].concat();
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some(within(module)),
            "super" => {
                let parent = &module[..module.len().checked_sub(1)?];
                let more = rest.first().is_some_and(|next| next == "super");
                if more { self.absolute(&parent.to_vec(), rest) } else { Some(within(parent)) }
            }
            _ => {
                let child = [module.as_slice(), &path[..1]].concat();
                let known = self.names.get(&(module.clone(), first.clone()));
                if self.files.contains_key(&child) { Some(within(&child)) } else { known.map(|base| within(base)) }
            }
        }
    }

    /// Returns the module that defines the name at the end of a path.
    fn defining(&self, path: &[String], n_hops: usize) -> Path {
        let n = (0..=path.len()).rev().find(|n| self.files.contains_key(&path[..*n])).unwrap_or(0);
        let (module, rest) = path.split_at(n);
        let alias = rest.first().and_then(|name| self.names.get(&(module.to_vec(), name.clone())));
        match alias {
            Some(target) if n_hops < 8 && target != path => {
                self.defining(&[target.as_slice(), &rest[1..]].concat(), n_hops + 1)
            }
            _ => module.to_vec(),
        }
    }

    /// Returns each module with each other module that it names.
    pub fn edges(&self) -> BTreeSet<(Path, Path)> {
        let all = self.named.iter().flat_map(|(from, paths)| paths.iter().map(move |path| (from, path)));
        let edges = all.map(|(from, path)| (from.clone(), self.defining(path, 0)));
        edges.filter(|(from, to)| from != to).collect()
    }

    pub fn file(&self, module: &Path) -> &str {
        self.files.get(module).map_or("", String::as_str)
    }

    /// Returns the circles among the modules.
    pub fn circles(&self) -> BTreeSet<BTreeSet<Path>> {
        circles(&self.edges())
    }
}

/// Returns groups of more than one node in which every node reaches every other one.
pub fn circles<T: Ord + Clone>(edges: &BTreeSet<(T, T)>) -> BTreeSet<BTreeSet<T>> {
    let reached: BTreeMap<&T, BTreeSet<&T>> = edges.iter().map(|(of, _)| (of, reach(edges, of))).collect();
    let circle = |of: &&T| {
        let back = reached[*of].iter().filter(|other| reached.get(**other).is_some_and(|back| back.contains(of)));
        back.map(|other| (*other).clone()).collect::<BTreeSet<T>>()
    };
    reached.keys().map(circle).filter(|circle| circle.len() > 1).collect()
}

fn reach<'a, T: Ord>(edges: &'a BTreeSet<(T, T)>, from: &'a T) -> BTreeSet<&'a T> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        next.extend(edges.iter().filter(|(of, _)| of == at).map(|(_, to)| to).filter(|to| seen.insert(*to)));
    }
    seen
}

/// `link/mod.rs` is `link`; `lib.rs` is the root, and so is `main.rs`.
fn module(file: &str) -> Path {
    let mut parts: Path = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

/// One name that a `use` brings in.
struct Used {
    path: Path,
    name: String,
    is_public: bool,
}

/// What a file names.
#[derive(Default)]
struct Read {
    uses: Vec<Used>,
    paths: Vec<Path>,
}

impl Read {
    fn of(tokens: &[&str]) -> Read {
        let mut read = Read::default();
        let mut at = 0;
        while at < tokens.len() {
            let is_first = at == 0 || tokens[at - 1] != "::";
            // `use<'a>` is no import: it names the lifetimes that a type captures.
            if tokens[at] == "use" && tokens.get(at + 1) != Some(&"<") {
                let is_public = at > 0 && matches!(tokens[at - 1], "pub" | ")");
                at = read.tree(tokens, at + 1, &[], is_public);
            } else if is_word(tokens[at]) && is_first && tokens.get(at + 1) == Some(&"::") {
                let segments = tokens[at..].chunks(2).take_while(|pair| is_word(pair[0]));
                let n = segments.clone().take_while(|pair| pair.get(1) == Some(&"::")).count();
                read.paths.push(segments.take(n + 1).map(|pair| pair[0].to_owned()).collect());
            }
            at += 1;
        }
        read
    }

    /// Parses a tree of a `use`; returns the place of the `,`, `}` or `;` behind it.
    fn tree(&mut self, tokens: &[&str], mut at: usize, prefix: &[String], is_public: bool) -> usize {
        let mut path = prefix.to_vec();
        let mut name = None;
        while !matches!(tokens[at], "," | "}" | ";") {
            match tokens[at] {
                "{" => {
                    while tokens[at] != "}" {
                        at = self.tree(tokens, at + 1, &path, is_public);
                    }
                    (name, path) = (None, Vec::new());
                }
                "as" => {
                    at += 1;
                    name = Some(tokens[at].to_owned());
                }
                "self" if !path.is_empty() => name = path.last().cloned(),
                word if is_word(word) => {
                    path.push(word.to_owned());
                    name = Some(word.to_owned());
                }
                _ => {}
            }
            at += 1;
        }
        if let Some(name) = name.filter(|_| !path.is_empty()) {
            self.uses.push(Used { path, name, is_public });
        }
        at
    }
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, `::`, and every other character alone.
fn tokens(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let n_word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let n = if n_word > 0 {
            n_word
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        found.push(&rest[..n]);
        rest = rest[n..].trim_start();
    }
    found
}

/// The modules of a made-up crate, given as (file, code).
#[test]
fn circles_are_found_through_reexports_and_aliases() {
    let source = |(path, code): &(&str, &str)| Source::made(&format!("made/src/{path}"), code);
    let check = |files: &[(&str, &str)], expect: &[&[&str]]| {
        let sources: Vec<Source> = files.iter().map(source).collect();
        let circles = Modules::of(&sources, "made/src/").circles();
        let circles: Vec<Vec<String>> =
            circles.iter().map(|circle| circle.iter().map(|path| path.join("::")).collect()).collect();
        assert_eq!(circles, expect, "{files:?}");
    };
    check(&[("lib.rs", "mod a; mod b;"), ("a.rs", "use crate::b::B;"), ("b.rs", "use std::io;")], &[]);
    check(&[("main.rs", "mod a; use a::A;"), ("a.rs", "use crate::B;")], &[&["", "a"]]);
    check(&[("a.rs", "use crate::b::{self, B};"), ("b.rs", "fn f() { crate::a::g() }")], &[&["a", "b"]]);
    // Through a re-export, an alias, a child, and `super`.
    let room = [("r/mod.rs", "mod x; pub use x::X;"), ("r/x.rs", "use crate::y;"), ("y.rs", "use crate::r::X;")];
    check(&room, &[&["r::x", "y"]]);
    check(&[("a.rs", "use crate::b as c; fn f() { c::g() }"), ("b.rs", "use super::a::{A as B, C};")], &[&["a", "b"]]);
    check(&[("r/mod.rs", "mod x; fn f() { x::g() }"), ("r/x.rs", "use super::f;")], &[&["r", "r::x"]]);
    check(
        &[("a.rs", "use crate::b::B;"), ("b.rs", "use crate::c::C;"), ("c.rs", "use crate::a;")],
        &[&["a", "b", "c"]],
    );
}
