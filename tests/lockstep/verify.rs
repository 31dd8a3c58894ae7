//! `lockstep verify` and `replay`, as processes: an answer of one rank is equal on every grid and after a kill, and
//! every change in its record is found, with the position.

use crate::common::node::{BINARY, Folder, Node, post};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Output};

const MODEL: &str = "tests/reference/llama-f32-tied";
/// Its heads can be cut into four.
const FOUR_HEADS: &str = "tests/reference/qwen3-yarn";
const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];

/// A server and its address, ready.
fn serve(more: &[&str]) -> (Node, String) {
    serve_model(MODEL, more)
}

fn serve_model(model: &str, more: &[&str]) -> (Node, String) {
    let mut node = Node::start(&[&["serve", model, "--activations", "f32"], &DOORS[..], more].concat());
    let http = node.http();
    node.until_ready(&http);
    (node, http)
}

/// Servers with other instructions than this machine's best ones, if it has them.
fn other_instructions() -> Vec<(Node, String)> {
    let mut all = vec![serve(&["--isa", "plain", "--inproc"])];
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let has_avx512 = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni");
        for (isa, is_here) in [("avx2", has_avx2), ("avx512", has_avx512)] {
            match is_here {
                true => all.push(serve(&["--isa", isa, "--inproc"])),
                false => std::io::stderr().write_all(format!("NOT RUN: verify with {isa}\n").as_bytes()).unwrap(),
            }
        }
    }
    all
}

/// A request and what a server answers: the body as JSON, or a stream's events as one string.
fn record(http: &str, request: &Value) -> Value {
    let text = post(http, request).body_mut().read_to_string().unwrap();
    let response = serde_json::from_str(&text).unwrap_or_else(|_| Value::from(text.clone()));
    assert!(text.contains("certificate"), "{text}");
    json!({ "request": request, "response": response })
}

fn requests() -> [Value; 3] {
    let request = |more: Value| {
        let mut request = json!({ "max_tokens": 24, "ignore_eos": true, "certificate": true });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    [
        request(json!({ "prompt": "hello", "return_token_ids": true })),
        request(json!({ "prompt": ["a b c d", "the grid"], "n": 2, "seed": 7, "stop": "zzz" })),
        request(json!({ "prompt": "x", "presence_penalty": 0.7, "return_token_ids": true, "stream": true })),
    ]
}

struct Records(Folder);

impl Records {
    fn verify(&self, record: &Value, more: &[&str]) -> Output {
        let file = self.0.write("answer.json", &record.to_string());
        let mut command = Command::new(BINARY);
        command.args(["verify", &file]).args(more).current_dir(env!("CARGO_MANIFEST_DIR"));
        command.output().unwrap()
    }

    /// Verifies, and expects this exit code and these parts of its output.
    fn check(&self, record: &Value, more: &[&str], code: i32, parts: &[&str]) {
        let Output { status, stdout, stderr } = self.verify(record, more);
        let all_output = [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert_eq!(status.code(), Some(code), "{all_output}");
        assert!(parts.iter().all(|part| all_output.contains(part)), "{all_output} has not all of {parts:?}");
    }
}

#[test]
fn an_answer_is_equal_on_every_grid_and_after_a_kill() {
    let records = Records(Folder::new("verify-grids"));
    let (_alone, alone) = serve(&[]);
    let (mut wide, wide_http) = serve(&["--tp", "2"]);
    let (_deep, deep_http) = serve(&["--pp", "2", "--inproc"]);
    let others = other_instructions();
    let all = requests().map(|request| record(&alone, &request));
    for (record, n_tokens) in all.iter().zip([24, 96, 24]) {
        let equal = format!("equal: {n_tokens} tokens, digest ");
        let own = [&alone, &wide_http, &deep_http];
        for http in own.into_iter().chain(others.iter().map(|(_, http)| http)) {
            records.check(record, &["--url", http], 0, &[&equal]);
        }
    }
    let worker = wide.workers()[1];
    let pid = rustix::process::Pid::from_raw(worker.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    wide.until(&["a worker process ended"]);
    wide.until_ready(&wide_http);
    records.check(&all[0], &["--url", &wide_http], 0, &["equal: 24 tokens"]);
    // A private server serves the model under another name than the request has.
    let mut named = all[1].clone();
    named["request"]["model"] = "some-name".into();
    let own = [MODEL, "--activations", "f32", "--threads", "1", "--tp", "2", "--pp", "2", "--inproc"];
    records.check(&named, &own, 0, &["equal: 96 tokens"]);
    records.check(
        &named,
        &[MODEL, "--activations", "int8", "--threads", "1"],
        1,
        &["different: the policy digest was"],
    );
}

#[test]
fn an_answer_is_equal_on_four_ranks() {
    let records = Records(Folder::new("verify-four"));
    let (_alone, alone) = serve_model(FOUR_HEADS, &["--inproc"]);
    let (_four, four) = serve_model(FOUR_HEADS, &["--tp", "4", "--inproc"]);
    let body = json!({ "prompt": [7, 8, 9, 10], "max_tokens": 24, "ignore_eos": true, "certificate": true,
        "return_token_ids": true });
    let [of_one, of_four] = [&alone, &four].map(|http| record(http, &body));
    records.check(&of_one, &["--url", &four], 0, &["equal: 24 tokens"]);
    records.check(&of_four, &["--url", &alone], 0, &["equal: 24 tokens"]);
}

/// Runs `verify` or `replay` of a recorded folder, and returns its exit code and all of its output.
fn run_command(words: &[&str]) -> (i32, String) {
    let Output { status, stdout, stderr } =
        Command::new(BINARY).args(words).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    (status.code().unwrap(), [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat())
}

#[test]
fn a_recorded_day_is_equal_on_other_grids_and_a_changed_token_of_it_is_found() {
    let folder = Folder::new("replay");
    let dir = folder.0.join("records");
    let dir = dir.to_str().unwrap();
    let mut ids = Vec::new();
    {
        let (_node, http) = serve(&["--record", dir, "--record-prompts", "--pp", "2", "--inproc"]);
        for request in requests() {
            let text = post(&http, &request).body_mut().read_to_string().unwrap();
            let event = text.strip_prefix("id: ").map_or(&*text, |events| events.split("data: ").nth(1).unwrap());
            let first: Value = serde_json::from_str(event.lines().next().unwrap()).unwrap();
            ids.push(first["id"].as_str().unwrap().to_owned());
        }
        // The server finds its own, also before their file is complete.
        for id in &ids {
            let (code, output) = run_command(&["verify", id, "--url", &http]);
            assert!(code == 0 && output.contains("equal: "), "{output}");
        }
        let (code, output) = run_command(&["verify", "cmpl-00000000", "--url", &http]);
        assert!(code == 2 && output.contains("there is no record"), "{output}");
    }
    // The server was killed: its file is not complete, but every line of it is.
    let (_other, http) = serve(&["--tp", "2"]);
    let (code, output) = run_command(&["verify", &ids[1], "--record", dir, "--url", &http]);
    assert!(code == 0 && output.contains("equal: 96 tokens"), "{output}");
    for order in [&["--order", "shuffled"][..], &["--order", "reversed", "--concurrency", "1"], &["--speed", "50"]] {
        let (code, output) = run_command(&[&["replay", dir, "--url", &http], order].concat());
        assert!(code == 0 && output.contains("6 equal (") && output.contains(" 0 different"), "{order:?}: {output}");
    }
    let own = ["replay", dir, MODEL, "--activations", "int8", "--threads", "1", "--inproc"];
    let (code, output) = run_command(&own);
    assert!(code == 2 && output.contains("0 different, 6 of another digest"), "{output}");
    let open = std::fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    let text = std::fs::read_to_string(&open).unwrap();
    let mut first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let token = &mut first["response"]["choices"][0]["token_ids"][5];
    *token = (token.as_u64().unwrap() ^ 1).into();
    let rest = text.split_once('\n').unwrap().1;
    std::fs::write(&open, format!("{first}\n{rest}{{\"half")).unwrap();
    let (code, output) = run_command(&["replay", dir, "--url", &http]);
    let parts = ["different: choice 0, position 5: the token was", "(logprob -", "5 equal (", " 1 different"];
    assert!(code == 1 && parts.iter().all(|part| output.contains(part)), "{output}");
    // The verified requests were answered, and recorded, too: there the first id has its own record.
    let id = first["id"].as_str().unwrap();
    let (code, output) = run_command(&["verify", id, "--record", dir, "--url", &http]);
    assert!(code == 1 && output.contains("position 5"), "{output}");
}

#[test]
fn whatever_was_changed_is_found() {
    let records = Records(Folder::new("verify-changed"));
    let (_node, http) = serve(&[]);
    let [whole, _, streamed] = requests().map(|request| record(&http, &request));
    let check = |change: &dyn Fn(&mut Value), code, parts: &[&str]| {
        let mut changed = whole.clone();
        change(&mut changed);
        records.check(&changed, &["--url", &http], code, parts);
    };
    let token = whole["response"]["choices"][0]["token_ids"][5].as_u64().unwrap();
    let other = token ^ 1;
    let was = format!("choice 0, position 5: the token was {other} \"");
    let is = format!("and is {token} \"");
    let flip = |record: &mut Value| record["response"]["choices"][0]["token_ids"][5] = other.into();
    check(&flip, 1, &["different: ", &was, &is, "(logprob -"]);
    let shorten = |record: &mut Value| {
        record["response"]["choices"][0]["token_ids"].as_array_mut().unwrap().pop();
    };
    check(&shorten, 1, &["position 23: the token was none, the answer has ended"]);
    let seed = |record: &mut Value| {
        record["response"]["seed"] = 1.into();
        record["response"]["choices"][0]["certificate"]["seed"] = 1.into();
    };
    check(&seed, 1, &["different: choice 0, position ", "the token was"]);
    check(&|record| record["request"]["seed"] = 1.into(), 1, &["it has the seeds "]);
    check(&|record| record["request"]["prompt"] = "hallo".into(), 1, &["the prompt has other token ids"]);
    let certified = |name: &'static str, value: Value| {
        move |record: &mut Value| record["response"]["choices"][0]["certificate"][name] = value.clone()
    };
    check(&certified("policy_digest", "00".repeat(32).into()), 1, &["the policy digest was 0000", "nothing was run"]);
    check(&certified("answer_hash", "00".into()), 1, &["answer_hash was \"00\""]);
    check(&certified("tokens", 25.into()), 1, &["tokens was 25, and is 24"]);
    let text = |record: &mut Value| {
        let text = record["response"]["choices"][0]["text"].as_str().unwrap();
        let at = text.char_indices().nth(3).unwrap().0;
        record["response"]["choices"][0]["text"] = format!("{}\u{1f600}{}", &text[..at], &text[at..]).into();
    };
    check(&text, 1, &["choice 0, character 3: the text was \"\u{1f600}"]);
    // Without ids the text and the certificate's hash remain.
    let bare = |record: &mut Value| {
        let choice = record["response"]["choices"][0].as_object_mut().unwrap();
        for name in ["token_ids", "prompt_token_ids"] {
            choice.remove(name).unwrap();
        }
    };
    check(&bare, 0, &["equal: 24 tokens"]);
    let bare_text = |record: &mut Value| {
        bare(record);
        text(record);
    };
    check(&bare_text, 1, &["character 3"]);
    let mut broken = streamed.clone();
    let events = streamed["response"].as_str().unwrap();
    broken["response"] = events.split_inclusive("\n\n").take(5).collect::<String>().into();
    records.check(&broken, &["--url", &http], 2, &["cannot be compared", "ends before"]);
    records.check(&streamed, &["--url", "http://127.0.0.1:9"], 2, &["cannot be compared", "does not answer"]);
    check(&|record| record["response"] = Value::Null, 2, &["it has no `response`"]);
}
