//! Named formats of strings as sets of texts. A text that is written has the format; a few that nobody writes, such
//! as leap seconds, are not among them.

use crate::words::Words;

const DATE: &str = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
    |02-(?:0[1-9]|1[0-9]|2[0-8]))\
    |(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?\
    (?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const BYTE: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const LABEL: &str = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?";
const HOST: &str = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?";
const NAME: &str = "[a-zA-Z0-9!#$%&'*+\\x2F=?^_`{|}~-]+";

/// JSON strings that have the format; none if the format is not known.
pub(super) fn words(format: &str) -> Option<Words> {
    let hex = |n: usize| format!("[0-9a-fA-F]{{{n}}}");
    let inner = match format {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}[Tt]{TIME}"),
        "duration" => duration(),
        "uuid" => format!("{}-{}-{}-{}-{}", hex(8), hex(4), hex(4), hex(4), hex(12)),
        "ipv4" => format!("{BYTE}(?:\\.{BYTE}){{3}}"),
        "ipv6" => ipv6(),
        "hostname" => return Some(hostname()),
        // Without lengths: an automaton that counts has states for each count, and each is new work for a mask.
        "email" => format!("{NAME}(?:\\.{NAME})*@{HOST}(?:\\.{HOST})+"),
        _ => return None,
    };
    Some(Words::Regex(format!("\"(?:{inner})\"")))
}

/// The third and fourth characters of a label are not both hyphens: such labels have a meaning of their own.
fn hostname() -> Words {
    let names = Words::Regex(format!("\"{LABEL}(?:\\.{LABEL}){{0,8}}\""));
    let coded = Words::regex("\"(?:[^\"]*\\.)?[^\".]{2}--[^\"]*\"");
    Words::All(vec![names, Words::not(coded), Words::regex("\"[^\"]{1,253}\"")])
}

fn duration() -> String {
    let (n, date) = ("[0-9]+", "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)");
    let time = format!("T(?:{n}H(?:{n}M(?:{n}S)?)?|{n}M(?:{n}S)?|{n}S)");
    format!("P(?:{n}W|{date}(?:{time})?|{time})")
}

fn ipv6() -> String {
    let h = "[0-9a-fA-F]{1,4}";
    let mut ways = vec![format!("(?:{h}:){{7}}{h}"), format!("(?:{h}:){{6}}{BYTE}(?:\\.{BYTE}){{3}}")];
    // So many groups before the gap, and at most the rest after it.
    for before in 0..=7usize {
        let head = match before {
            0 => String::new(),
            n => format!("{h}(?::{h}){{{}}}", n - 1),
        };
        let tail = match 7 - before {
            0 => String::new(),
            n => format!("(?:{h}(?::{h}){{0,{}}})?", n - 1),
        };
        ways.push(format!("{head}::{tail}"));
        // The last two groups may be written as the four bytes that they are.
        if before <= 5 {
            let middle = if before == 5 { String::new() } else { format!("(?:{h}:){{0,{}}}", 5 - before) };
            ways.push(format!("{head}::{middle}{BYTE}(?:\\.{BYTE}){{3}}"));
        }
    }
    ways.join("|")
}
