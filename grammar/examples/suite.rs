//! Runs the JSON-Schema-Test-Suite through masks: `make grammar-suite`. Every accepted schema takes all its valid
//! instances and completes no other; the rest are refused by name. The exit status is 1 if one result is wrong.

use grammar::{GrammarLimits, GrammarRefused, GrammarSpec, Matcher, TokenMask, Vocabulary, compile};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use types::{Grammar, Token};

const END: Token = 256;
/// The most key orders tried for one instance.
const ORDERS_MAX: usize = 150;

#[derive(Default)]
struct Counts {
    accepted: usize,
    refused: Vec<String>,
    n_instances: usize,
    wrong: Vec<String>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("the folder of a draft's tests is missing")?;
    let vocabulary = bytes()?;
    let mut files: Vec<_> = std::fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let mut all = Counts::default();
    for path in &files {
        let file = file(path, &vocabulary)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        println!(
            "{name:26} {:3} accepted, {:2} refused, {} wrong",
            file.accepted,
            file.refused.len(),
            file.wrong.len()
        );
        all.accepted += file.accepted;
        all.n_instances += file.n_instances;
        all.refused.extend(file.refused.into_iter().map(|why| format!("{name}: {why}")));
        all.wrong.extend(file.wrong.into_iter().map(|what| format!("{name}: {what}")));
    }
    let n = all.accepted + all.refused.len();
    println!("\nrefused:\n  {}", all.refused.join("\n  "));
    println!("\nwrong:\n  {}", all.wrong.join("\n  "));
    let share = 100.0 * all.accepted as f64 / n.max(1) as f64;
    let (accepted, wrong) = (all.accepted, all.wrong.len());
    println!("\n{accepted} of {n} schemas accepted ({share:.1}%), {} instances, {wrong} wrong", all.n_instances);
    if n == 0 || wrong > 0 { Err("the suite has failures".into()) } else { Ok(()) }
}

fn file(path: &Path, vocabulary: &Vocabulary) -> Result<Counts, Box<dyn std::error::Error>> {
    let groups: Vec<BTreeMap<String, Value>> = serde_json::from_slice(&std::fs::read(path)?)?;
    let mut counts = Counts::default();
    for group in groups {
        let name = group["description"].as_str().unwrap_or_default().to_owned();
        let grammar = match compile(&GrammarSpec::JsonSchema(group["schema"].clone()), &GrammarLimits::default()) {
            Ok(grammar) => Some(grammar),
            // An unsatisfiable schema is refused as such. That is right if no instance is valid.
            Err(GrammarRefused::Unsatisfiable { .. }) => None,
            Err(refused) => {
                counts.refused.push(format!("{name}: {refused}"));
                continue;
            }
        };
        counts.accepted += 1;
        for test in group["tests"].as_array().into_iter().flatten() {
            counts.n_instances += 1;
            let is_taken = grammar
                .as_ref()
                .is_some_and(|grammar| orders(&test["data"]).iter().any(|text| takes(vocabulary, grammar, text)));
            // The draft leaves open whether a format is enforced, and these tests expect that it is not. Here it is
            // enforced.
            let is_about_formats = test["description"].as_str().is_some_and(|text| text.contains("only an annotation"));
            if is_taken != test["valid"] && !is_about_formats {
                counts.wrong.push(format!("{name}: {} {}: accepted {is_taken}", test["description"], test["data"]));
            }
        }
    }
    Ok(counts)
}

/// A vocabulary in which every byte is a token, and one more token ends the answer.
fn bytes() -> Result<Vocabulary, Box<dyn std::error::Error>> {
    let words: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
    Ok(Vocabulary::new(words.iter().map(|word| (word.as_slice(), false)), 257, &[END])?)
}

fn takes(vocabulary: &Vocabulary, grammar: &Grammar, text: &str) -> bool {
    let Ok(mut matcher) = Matcher::new(vocabulary, grammar, &GrammarLimits::default()) else { return false };
    let mut mask = TokenMask::default();
    text.bytes().all(|byte| matcher.accept(Token::from(byte)).is_ok())
        && matcher.fill_mask(&mut mask).is_ok()
        && mask.allows(END)
}

/// Serializes the value with its keys in this order and in others.
fn orders(value: &Value) -> Vec<String> {
    match value {
        Value::Number(number) => vec![match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 => format!("{float:.0}"),
            Some(float) if number.is_f64() => format!("{float}"),
            _ => number.to_string(),
        }],
        Value::Array(list) => {
            let texts = list.iter().fold(vec![String::new()], |heads, item| joined(&heads, &orders(item)));
            texts.into_iter().map(|text| format!("[{text}]")).collect()
        }
        Value::Object(object) => {
            let names: Vec<&String> = object.keys().collect();
            let mut texts = Vec::new();
            permuted(&names, &mut Vec::new(), &mut |names| {
                let pair = |name: &&String| {
                    let key = Value::from(name.as_str()).to_string();
                    orders(&object[name.as_str()]).into_iter().map(|value| format!("{key}:{value}")).collect()
                };
                let pairs: Vec<Vec<String>> = names.iter().map(pair).collect();
                texts.extend(pairs.iter().fold(vec![String::new()], |heads, pair| joined(&heads, pair)));
                texts.len() < ORDERS_MAX
            });
            texts.into_iter().map(|text| format!("{{{text}}}")).collect()
        }
        other => vec![other.to_string()],
    }
}

fn joined(heads: &[String], tails: &[String]) -> Vec<String> {
    let join = |head: &String, tail: &String| {
        if head.is_empty() { tail.clone() } else { format!("{head},{tail}") }
    };
    let all = heads.iter().flat_map(|head| tails.iter().map(move |tail| join(head, tail)));
    all.take(ORDERS_MAX).collect()
}

fn permuted<'a>(left: &[&'a String], taken: &mut Vec<&'a String>, see: &mut impl FnMut(&[&'a String]) -> bool) -> bool {
    if left.is_empty() {
        return see(taken);
    }
    (0..left.len()).all(|i| {
        let mut rest = left.to_vec();
        taken.push(rest.remove(i));
        let goes_on = permuted(&rest, taken, see);
        taken.pop();
        goes_on
    })
}
