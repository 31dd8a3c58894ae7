//! What documents list of this crate: the types of a KV cache, and the constants of sums and steps.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../tests/common/documents.rs"]
mod documents;

use documents::check;
use types::{BLOCK_TOKENS, DRAFT_ROWS_MAX, KvDtype, Numerics};

/// Returns the bytes of a head of `n` numbers as a part of those in f16.
fn part(dtype: KvDtype, n: u32) -> String {
    format!("{:.2}", dtype.row_bytes(n) as f64 / KvDtype::F16.row_bytes(n) as f64)
}

fn row(dtype: KvDtype) -> String {
    let [narrow, wide] = [64, 128].map(|n| format!("{} ({})", dtype.row_bytes(n), part(dtype, n)));
    format!("| `{dtype}` | {narrow} | {wide} |\n")
}

#[test]
fn the_documents_list_the_types_of_a_kv_cache() {
    let rows: String = KvDtype::ALL.iter().map(|dtype| row(*dtype)).collect();
    let head = "| `--kv-dtype` | bytes of a head of 64 (part of f16) | of 128 |\n|---|---|---|";
    check("docs/formats.md", &[("<!-- kv: begin -->{}<!-- kv: end -->", format!("\n\n{head}\n{rows}\n"))]);
    check(
        "docs/limits.md",
        &[("An int8 cache takes {} of the memory of f16 with heads of 64", part(KvDtype::Int8, 64))],
    );
}

#[test]
fn the_documents_have_the_constants_of_steps() {
    let block = BLOCK_TOKENS.to_string();
    check("docs/glossary.md", &[("| block | {} positions of a sequence;", block.clone())]);
    check(
        "docs/numerics.md",
        &[
            ("| block | {} positions of a sequence,", block.clone()),
            ("The chunk of a recurrence is a block of {} positions.", block),
            ("(`Numerics::VERSION`, which is {} for all devices)", Numerics::VERSION.to_string()),
        ],
    );
    let drafts = DRAFT_ROWS_MAX.to_string();
    check(
        "docs/speculation.md",
        &[("| a number up to {} |", drafts.clone()), ("A step has at most {} drafts.", drafts)],
    );
}
