//! The record: each checkpoint's answers, as hashes of token ids and the bits of logprobs. Defines its lines and the
//! hash of an answer; has no knowledge of the server.
//!
//! ```text
//! gemma2 int8 f16                    a checkpoint, activations, the type of its cache
//!   2x1 in chunks 0123456789abcdef   all requests on a grid, tp x pp; the same hash on each of them
//!   00 01234567 12                   a request: its answer, and how many tokens it has
//! ```

use crate::common::{Answer, Drawn};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use types::Finish;

const HEAD: &str = "\
# What 64 requests are answered by every tiny checkpoint. oracle.rs above compares; record.rs beside this says what a
# line is. A line that changes is a change of bits: where that is meant, LOCKSTEP_ORACLE=write writes this file anew.
";
const ALL_DIGITS: usize = 16;
const ANSWER_DIGITS: usize = 8;

/// The lines of each checkpoint under a policy, without indentation.
pub type Record = BTreeMap<String, Vec<String>>;

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lockstep/oracle/record.txt")
}

pub fn read() -> Record {
    let text = std::fs::read_to_string(path()).expect("a record; LOCKSTEP_ORACLE=write makes one");
    let mut record = Record::new();
    let mut last = String::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.strip_prefix("  ") {
            Some(line) => record.get_mut(&last).expect("a name comes first").push(line.to_string()),
            None => {
                last = line.to_string();
                record.insert(last.clone(), Vec::new());
            }
        }
    }
    record
}

pub fn write(record: &Record) {
    let mut text = HEAD.to_string();
    for (name, lines) in record {
        writeln!(text, "{name}").unwrap();
        lines.iter().for_each(|line| writeln!(text, "  {line}").unwrap());
    }
    std::fs::write(path(), text).unwrap();
}

/// The line for all answers on one grid.
pub fn grid_line(way: &str, answers: &[Answer]) -> String {
    let mut bytes = Vec::new();
    answers.iter().for_each(|answer| put_answer(&mut bytes, answer));
    format!("{way} {}", digits(&bytes, ALL_DIGITS))
}

pub fn answer_line(i: usize, answer: &Answer) -> String {
    let mut bytes = Vec::new();
    put_answer(&mut bytes, answer);
    format!("{i:02} {} {}", digits(&bytes, ANSWER_DIGITS), answer.drawn.len())
}

fn digits(bytes: &[u8], n: usize) -> String {
    blake3::hash(bytes).to_hex()[..n].to_string()
}

fn put_answer(bytes: &mut Vec<u8>, answer: &Answer) {
    put_rows(bytes, &answer.drawn);
    bytes.push(match answer.finish {
        Some(Finish::Stop) => b's',
        Some(Finish::Length) => b'l',
        // None of these requests may end in another way.
        other => panic!("ended by {other:?}"),
    });
    put_rows(bytes, &answer.scored);
    put(bytes, answer.pooled.len() as u32);
    answer.pooled.iter().for_each(|value| put(bytes, *value));
}

fn put_rows(bytes: &mut Vec<u8>, rows: &[Drawn]) {
    put(bytes, rows.len() as u32);
    for row in rows {
        put(bytes, row.token);
        bytes.push(u8::from(row.logprob.is_some()));
        put(bytes, row.logprob.unwrap_or_default());
        put(bytes, row.top.len() as u32);
        row.top.iter().for_each(|(token, logprob)| {
            put(bytes, *token);
            put(bytes, *logprob);
        });
    }
}

fn put(bytes: &mut Vec<u8>, value: u32) {
    bytes.extend(value.to_le_bytes());
}
