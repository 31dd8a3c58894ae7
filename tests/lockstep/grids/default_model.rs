//! The default model, as an operator starts it: `lockstep serve` with a process for each rank, used over HTTP.

use crate::common::node::{Node, complete, cpu_ticks};
use crate::common::smollm2;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const GRIDS: [(&str, &str, &str); 5] =
    [("2", "1", "auto"), ("1", "2", "auto"), ("2", "2", "auto"), ("3", "1", "auto"), ("2", "1", "tcp")];
/// Each process must use at least this fraction of the processor time of all.
const PARTS_OF_TIME: u64 = 10;

const PROMPTS: [&str; 6] = [
    "The capital of France is",
    "Once upon a time there was a king who",
    "def fibonacci(n):",
    "1 2 3 4 5 6 7",
    "Dear friend, I am writing to you because",
    "The same request gives the same tokens: the same request gives the same tokens, and",
];

fn serve(more: &[&str]) -> Node {
    let model = smollm2();
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1", "--kv-memory", "64MiB"];
    Node::start(&[&["serve", model.to_str().unwrap()], &doors[..], more].concat())
}

/// Token ids, logprobs and text of all prompts, sent at once.
fn answers(http: &str) -> Vec<Value> {
    let request = |i: usize| {
        let temperature = [0.0, 0.8, 1.2][i % 3];
        let body = json!({
            "prompt": PROMPTS[i], "max_tokens": 24, "seed": i, "temperature": temperature, "logprobs": 3,
            "return_token_ids": true,
        });
        complete(http, &body)
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..PROMPTS.len()).map(|i| scope.spawn(move || request(i))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

#[test]
fn smollm2_on_processes() {
    let expected = {
        let mut alone = serve(&[]);
        let http = alone.http();
        alone.until_ready(&http);
        answers(&http)
    };
    assert!(expected.iter().all(|choices| choices[0]["token_ids"].as_array().is_some_and(|ids| ids.len() > 1)));
    for (tp, pp, wire) in GRIDS {
        check(tp, pp, wire, &expected);
    }
}

fn check(tp: &str, pp: &str, wire: &str, expected: &[Value]) {
    let way = format!("tp {tp}, pp {pp}, {wire}");
    let mut grid = serve(&["--tp", tp, "--pp", pp, "--wire", wire]);
    let http = grid.http();
    grid.until_ready(&http);
    let workers = grid.workers();
    let all: Vec<u32> = workers.iter().copied().chain([grid.pid()]).collect();
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{way}: distinct processes");
    assert_eq!(workers.len(), tp.parse::<usize>().unwrap() * pp.parse::<usize>().unwrap());
    let before: Vec<u64> = all.iter().map(|pid| cpu_ticks(*pid)).collect();
    assert_eq!(answers(&http), expected, "{way}");
    let used: Vec<u64> = all.iter().zip(before).map(|(pid, before)| cpu_ticks(*pid) - before).collect();
    println!("{way}: {used:?} ticks of {} workers and the parent", workers.len());
    let total: u64 = used.iter().sum();
    assert!(used[..workers.len()].iter().all(|used| used * PARTS_OF_TIME >= total && *used > 0), "{way}: {used:?}");
    // Both ranks map shared memory; ranks that use sockets do not.
    let shares = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("memfd:lockstep");
    assert!(workers.iter().all(|pid| shares(pid) == (wire != "tcp")), "{way}: what the ranks exchange numbers over");
}
