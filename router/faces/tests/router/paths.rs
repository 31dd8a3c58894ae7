//! The paths and limits in documents, compared with those of the router.

use crate::client::get;
use crate::documents::check;
use crate::{House, config, run};
use router::{RouterLimits, Timeouts};
use serde_json::Value;
use std::collections::BTreeSet;

/// Every page of a router, as `/openapi.json` describes it.
fn described() -> Value {
    let document = async {
        let house = House::open(config()).await;
        let document = get(house.http, "/openapi.json").await.json();
        house.close().await;
        document
    };
    run(document)
}

fn row(path: &str, method: &str, operation: &Value) -> String {
    let key = match operation["security"].as_array().map_or(0, Vec::len) {
        0 => "no",
        2 => "yes",
        _ => "yes, also as `x-api-key`",
    };
    let text = |of: &Value| of.as_str().unwrap().to_owned();
    let (api, about) = (text(&operation["tags"][0]), text(&operation["summary"]));
    format!("| {} | `{path}` | {api} | {about} | {key} |\n", method.to_uppercase())
}

#[test]
fn the_page_of_paths_lists_every_path() {
    let described = described();
    let paths = described["paths"].as_object().unwrap().iter();
    // The files of the web page are no API.
    let rows: String = paths
        .filter(|(path, _)| !path.starts_with("/page/"))
        .flat_map(|(path, methods)| {
            methods.as_object().unwrap().iter().map(move |(method, operation)| row(path, method, operation))
        })
        .collect();
    let head = "| method | path | API | returns or does | key |\n|---|---|---|---|---|";
    check("docs/paths.md", &[("<!-- paths: begin -->{}<!-- paths: end -->", format!("\n\n{head}\n{rows}\n"))]);
}

/// Returns the paths in the first column of a document's tables.
fn listed(document: &str) -> BTreeSet<String> {
    let first_cells = document.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let spans = first_cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let paths = spans.map(|span| span.trim_start_matches("HEAD ").split('?').next().unwrap_or_default());
    paths.filter(|path| path.starts_with('/')).map(|path| parameters_as_id(path).replace("..", "")).collect()
}

/// Writes `/requests/{number or answer's id}` as `/requests/{id}`.
fn parameters_as_id(path: &str) -> String {
    let parts = path.split('/').map(|part| if part.starts_with('{') { "{id}" } else { part });
    parts.collect::<Vec<_>>().join("/")
}

#[test]
fn every_path_in_a_table_of_the_documents_is_served() {
    let described = described();
    let served: BTreeSet<&str> = described["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    let documents = [include_str!("../../../../docs/apis.md"), include_str!("../../../../docs/page.md")];
    for path in documents.into_iter().flat_map(listed) {
        // A path that ends in a slash stands for all below it.
        let is_served =
            |known: &&&str| **known == path || path.len() > 1 && path.ends_with('/') && known.starts_with(&path);
        assert!(served.iter().any(|known| is_served(&known)), "no page {path}");
    }
    assert!(listed(documents[0]).len() > 40);
}

/// Writes a number as documents do: 4,096.
fn grouped(n: usize) -> String {
    if n < 1000 { n.to_string() } else { format!("{},{:03}", grouped(n / 1000), n % 1000) }
}

#[test]
fn the_documents_have_the_limits_of_a_router() {
    let (limits, timeouts) = (RouterLimits::default(), Timeouts::default());
    let mib = |n: usize| (n >> 20).to_string();
    let resumed =
        ("A stream with more than {} choices carries no resume handles.", grouped(limits.choices_resumed_max));
    check("docs/limits.md", &[resumed]);
    check(
        "docs/apis.md",
        &[
            ("the body is larger than `--max-body-bytes` ({} MiB)", mib(limits.body_bytes_max)),
            ("stores at most `--stored-responses` ({}; 0 stores none)", grouped(limits.stored.responses_max)),
            ("in `--stored-bytes` ({} MiB)", mib(limits.stored.bytes_max)),
            ("for `--stored-seconds` ({}).", limits.stored.age_max.as_secs().to_string()),
            ("of these tokens (at most {})", limits.logprobs_max.to_string()),
        ],
    );
    let absence = timeouts.replica_absence_max.as_secs().to_string();
    check("docs/cluster.md", &[("or wait for `--failover-max` seconds ({}).", absence)]);
}
