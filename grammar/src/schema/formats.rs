//! Named formats of strings as sets of texts. Every generated text has the format. A few texts that are never used in
//! practice, such as leap seconds, are left out.

use crate::words::TextSet;

const DATE: &str = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
    |02-(?:0[1-9]|1[0-9]|2[0-8]))\
    |(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?\
    (?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const BYTE: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const LABEL: &str = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?";
const HOST: &str = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?";
const NAME: &str = "[a-zA-Z0-9!#$%&'*+\\x2F=?^_`{|}~-]+";

/// Returns the JSON strings that have the format; None if the format is not known.
pub(super) fn strings_with_format(format: &str) -> Option<TextSet> {
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
        // No lengths are enforced: an automaton that counts has states for each count, and each is new work for a mask.
        "email" => format!("{NAME}(?:\\.{NAME})*@{HOST}(?:\\.{HOST})+"),
        "uri" => uri(""),
        "iri" => uri(UNICODE),
        "uri-reference" => reference(""),
        "iri-reference" => reference(UNICODE),
        "uri-template" => uri_template(),
        "json-pointer" => POINTER.to_owned(),
        "relative-json-pointer" => format!("(?:0|[1-9][0-9]*)(?:#|{POINTER})"),
        _ => return None,
    };
    Some(TextSet::Regex(format!("\"(?:{inner})\"")))
}

/// Whether the format is known here.
pub(crate) fn is_known(format: &str) -> bool {
    strings_with_format(format).is_some()
}

/// Whether the set contains all texts of the format, so that any text outside it does not have the format.
pub(super) fn is_exact(format: &str) -> bool {
    matches!(format, "date" | "uuid" | "ipv4")
}

/// The third and fourth characters of a label are not both hyphens: such labels have a meaning of their own.
fn hostname() -> TextSet {
    let names = TextSet::Regex(format!("\"{LABEL}(?:\\.{LABEL}){{0,8}}\""));
    let coded = TextSet::regex("\"(?:[^\"]*\\.)?[^\".]{2}--[^\"]*\"");
    TextSet::All(vec![names, TextSet::not(coded), TextSet::regex("\"[^\"]{1,253}\"")])
}

fn duration() -> String {
    let (n, date) = ("[0-9]+", "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)");
    let time = format!("T(?:{n}H(?:{n}M(?:{n}S)?)?|{n}M(?:{n}S)?|{n}S)");
    format!("P(?:{n}W|{date}(?:{time})?|{time})")
}

const CODED: &str = "%[0-9A-Fa-f]{2}";
/// The characters that IRIs have beside those of URIs, without planes that are not used in practice.
const UNICODE: &str = "\\u{A0}-\\u{D7FF}\\u{F900}-\\u{FDCF}\\u{FDF0}-\\u{FFEF}\\u{10000}-\\u{1FFFD}";
/// Texts with quotes or backslashes are left out, as JSON escapes them.
const POINTER: &str = "(?:\\x2F(?:[^\"\\\\~\\x2F\\x00-\\x1F\\x7F]|~[01])*)*";

/// The characters of a path, and `more`.
fn path_chars(more: &str) -> String {
    format!("(?:[a-zA-Z0-9._~!$&'()*+,;=:@{more}-]|{CODED})")
}

/// The part behind `//`, and the path.
fn authority(more: &str) -> String {
    let named = format!("(?:[a-zA-Z0-9._~!$&'()*+,;={more}-]|{CODED})*");
    let user = format!("(?:[a-zA-Z0-9._~!$&'()*+,;=:{more}-]|{CODED})*");
    let future = "[vV][0-9A-Fa-f]+\\.[a-zA-Z0-9._~!$&'()*+,;=:-]+";
    let char = path_chars(more);
    format!("\\x2F\\x2F(?:{user}@)?(?:\\[(?:{}|{future})\\]|{named})(?::[0-9]*)?(?:\\x2F{char}*)*", ipv6())
}

fn query_and_fragment(more: &str) -> String {
    let char = path_chars(more);
    format!("(?:\\?(?:{char}|[\\x2F?])*)?(?:#(?:{char}|[\\x2F?])*)?")
}

/// RFC 3986, and RFC 3987 with Unicode.
fn uri(more: &str) -> String {
    let (char, authority, rest) = (path_chars(more), authority(more), query_and_fragment(more));
    let path = format!("\\x2F(?:{char}+(?:\\x2F{char}*)*)?|{char}+(?:\\x2F{char}*)*");
    format!("[a-zA-Z][a-zA-Z0-9+.-]*:(?:{authority}|{path})?{rest}")
}

fn reference(more: &str) -> String {
    let (char, authority, rest) = (path_chars(more), authority(more), query_and_fragment(more));
    let first = format!("(?:[a-zA-Z0-9._~!$&'()*+,;=@{more}-]|{CODED})+");
    let path = format!("\\x2F(?:{char}+(?:\\x2F{char}*)*)?|{first}(?:\\x2F{char}*)*");
    format!("(?:{}|(?:{authority}|{path})?{rest})", uri(more))
}

/// RFC 6570.
fn uri_template() -> String {
    let literal = format!("[!#$&(-;=?-\\[\\]_a-z~{UNICODE}]|{CODED}");
    let char = format!("(?:[a-zA-Z0-9_]|{CODED})");
    let variable = format!("{char}(?:\\.?{char})*(?::[1-9][0-9]{{0,3}}|\\*)?");
    format!("(?:{literal}|\\{{[+#.\\x2F;?&]?{variable}(?:,{variable})*\\}})*")
}

fn ipv6() -> String {
    let h = "[0-9a-fA-F]{1,4}";
    let mut ways = vec![format!("(?:{h}:){{7}}{h}"), format!("(?:{h}:){{6}}{BYTE}(?:\\.{BYTE}){{3}}")];
    // This many groups before the gap, and at most the rest after it.
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
        // The last two groups may be written as their four bytes.
        if before <= 5 {
            let middle = if before == 5 { String::new() } else { format!("(?:{h}:){{0,{}}}", 5 - before) };
            ways.push(format!("{head}::{middle}{BYTE}(?:\\.{BYTE}){{3}}"));
        }
    }
    ways.join("|")
}
