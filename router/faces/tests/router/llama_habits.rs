//! What clients of llama.cpp's server are used to: a prompt's progress, names of metrics, pages that may be off, other
//! names and tags of a model, and an answer that the chat has begun.

use crate::client::{Reply, get, post, post_and_leave_open};
use crate::fake::Fake;
use crate::grpc::client;
use crate::{House, config, eventually, model, run};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use router::DisabledPages;
use serde_json::{Value, json};
use std::sync::Arc;

fn events(reply: &Reply) -> Vec<Value> {
    reply
        .events()
        .iter()
        .filter(|event| **event != "[DONE]")
        .map(|event| serde_json::from_str(event).unwrap())
        .collect()
}

/// Returns `processed` and `cache` of each event that reports how far the prompt is, and how many events there are by
/// the last.
fn progress(events: &[Value]) -> (Vec<(u64, u64)>, usize) {
    let read_counts = |event: &Value| {
        let counts = &event["prompt_progress"];
        Some((counts["processed"].as_u64()?, counts["cache"].as_u64()?))
    };
    let all: Vec<_> = events.iter().filter_map(read_counts).collect();
    (all, events.iter().rposition(|event| read_counts(event).is_some()).map_or(0, |last| last + 1))
}

#[test]
fn over_grpc_a_prompt_s_progress_comes_before_its_answer() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| (script.n_cached, script.computed) = (1, vec![1, 3, 4]));
        for (progress, expect) in [(true, vec![(5, 1, 1), (5, 1, 3), (5, 1, 4), (5, 1, 5)]), (false, vec![])] {
            let input = Some(Input::Text("Hello".into()));
            let request = v1::GenerateRequest { input, progress, ..v1::GenerateRequest::default() };
            let mut replies = client(&house).generate(request).await.unwrap().into_inner();
            let (mut reports, mut n_deltas) = (Vec::new(), 0);
            while let Some(reply) = replies.message().await.unwrap() {
                match reply.event.unwrap() {
                    Event::PromptProgress(prompt) => {
                        assert_eq!(n_deltas, 0, "before the first token");
                        reports.push((prompt.total, prompt.cached, prompt.processed));
                    }
                    Event::Delta(_) => n_deltas += 1,
                    _ => {}
                }
            }
            assert_eq!(reports, expect);
        }
        house.close().await;
    });
}

/// The list of requests shows it; the client reads it only with `return_progress`.
#[test]
fn a_long_prompt_is_watched_in_any_case() {
    run(async {
        let fake = Fake::start();
        fake.script(|script| (script.context, script.computed) = (4000, vec![512, 1024]));
        fake.welcome();
        let members = vec![fake.coordinator()].into();
        let house = House::with_texts(config(), vec![fake], members, model::text()).await;
        house.wait_until_ready().await;
        for (n_tokens, is_watched) in [(1000, false), (1100, true)] {
            let body = json!({ "prompt": "x".repeat(n_tokens), "stream": true, "max_tokens": 2 });
            let events = events(&post(house.http, "/v1/completions", &body).await);
            assert_eq!(progress(&events).0, vec![], "without return_progress");
            assert_eq!(house.fake.submits().last().unwrap().needs_progress, is_watched, "{n_tokens}");
        }
        house.close().await;
    });
}

#[test]
fn prompt_progress_is_sent_before_the_answer() {
    run(async {
        let house = House::open(config()).await;
        // A replica that was lost in between begins again: the client receives nothing twice.
        house.fake.script(|script| (script.n_cached, script.computed) = (1, vec![1, 3, 2, 4]));
        let body = json!({ "prompt": "Hello", "stream": true, "return_progress": true, "timings_per_token": true });
        for path in ["/completion", "/v1/completions"] {
            let events = events(&post(house.http, path, &body).await);
            assert_eq!(progress(&events), (vec![(1, 1), (3, 1), (4, 1), (5, 1)], 4), "{path}: {events:?}");
            let progress_events: Vec<&Value> =
                events.iter().filter(|event| !event["prompt_progress"].is_null()).collect();
            assert!(progress_events.iter().all(|event| event["prompt_progress"]["total"] == 5), "{progress_events:?}");
            let first = &progress_events[0]["timings"];
            assert_eq!((&first["prompt_n"], &first["prompt_ms"]), (&json!(0), &json!(0.0)), "{first}");
            let second = &progress_events[1]["timings"];
            assert_eq!((&second["prompt_n"], &second["predicted_n"]), (&json!(2), &json!(0)));
            assert!(second["prompt_ms"].as_f64().unwrap() > 0.0, "{second}");
        }
        let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "input": "Hi", "stream": true,
            "return_progress": true, "timings_per_token": true });
        for path in ["/v1/chat/completions", "/chat/completions", "/v1/responses"] {
            let events = events(&post(house.http, path, &chat).await);
            let (reports, _) = progress(&events);
            assert_eq!((reports.len(), reports[0]), (4, (1, 1)), "{path}: {events:?}");
            assert!(events.last().unwrap()["timings"]["prompt_per_second"].as_f64().is_some(), "{path}: {events:?}");
        }
        assert!(house.fake.submits().iter().all(|submit| submit.needs_progress));
        house.close().await;
    });
}

#[test]
fn response_has_timings_with_its_text() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "input": "Hi", "stream": true, "timings_per_token": true });
        let count_events = |events: &[Value], kind: &str| {
            let of_kind: Vec<_> = events.iter().filter(|event| event["type"] == kind).collect();
            (of_kind.len(), of_kind.iter().filter(|event| event["timings"].is_object()).count())
        };
        let timed = events(&post(house.http, "/v1/responses", &body).await);
        let (n, n_timed) = count_events(&timed, "response.output_text.delta");
        assert!(n > 1 && n == n_timed, "{timed:?}");
        assert_eq!(count_events(&timed, "response.completed"), (1, 1));
        let plain = events(&post(house.http, "/v1/responses", &json!({ "input": "Hi", "stream": true })).await);
        assert_eq!(
            (count_events(&plain, "response.output_text.delta").1, count_events(&plain, "response.completed").1),
            (0, 0)
        );
        house.close().await;
    });
}

#[test]
fn progress_needs_request_and_older_replica_reports_only_end() {
    run(async {
        let house = House::open(config()).await;
        let request_body = |more: Value| {
            let mut body = json!({ "prompt": "Hello", "stream": true });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        let silent = events(&post(house.http, "/completion", &request_body(json!({ "return_progress": false }))).await);
        assert_eq!(progress(&silent), (vec![], 0));
        let whole = post(house.http, "/completion", &json!({ "prompt": "Hello", "return_progress": true })).await;
        assert_eq!((whole.status, whole.json()["content"].take()), (200, json!("Hello, world")));
        assert!(!house.fake.submits().iter().any(|submit| submit.needs_progress));
        house.fake.script(|script| script.n_cached = 2);
        let old = events(&post(house.http, "/completion", &request_body(json!({ "return_progress": true }))).await);
        assert_eq!(progress(&old), (vec![(5, 2)], 1));
        house.close().await;
    });
}

#[test]
fn pages_are_switched_off_one_by_one() {
    run(async {
        for (off, page, status) in [
            (DisabledPages { metrics: true, ..DisabledPages::default() }, "/metrics", 501),
            (DisabledPages { slots: true, ..DisabledPages::default() }, "/slots", 501),
            (DisabledPages { ui: true, ..DisabledPages::default() }, "/", 404),
        ] {
            let mut config = config();
            config.pages_off = off;
            let house = House::open(config).await;
            for other in ["/metrics", "/slots", "/"] {
                let reply = get(house.http, other).await;
                assert_eq!(reply.status, if other == page { status } else { 200 }, "{off:?}: {other}");
                assert!(other != page || reply.json()["error"]["message"].is_string(), "{reply:?}");
            }
            let script = get(house.http, "/page/main.js").await.status;
            assert_eq!(script, if off.ui { 404 } else { 200 });
            house.close().await;
        }
    });
}

#[test]
fn metrics_have_llama_cpps_names_too() {
    run(async {
        let mut config = config();
        let own = "lockstep:requests_waiting{replica=\"a\"} 0\nlockstep:step_tokens_count{replica=\"a\"} 7\n";
        config.metrics = Arc::new(|| own.to_owned());
        let house = House::open(config).await;
        let reply = get(house.http, "/metrics").await;
        assert!(reply.headers["process-start-time-unix"].parse::<u64>().unwrap() > 1_700_000_000);
        for line in ["llamacpp:n_decode_total 7", "llamacpp:requests_processing 0", own.lines().next().unwrap()] {
            assert!(reply.body.lines().any(|metric_line| metric_line == line), "{line} is not in {}", reply.body);
        }
        house.fake.script(|script| script.hold_at = 0);
        let held = post_and_leave_open(house.http, "/completion", &json!({ "prompt": "Hello", "stream": true })).await;
        eventually(|| async { get(house.http, "/metrics").await.body.contains("llamacpp:requests_processing 1\n") })
            .await;
        drop(held);
        house.close().await;
    });
}

#[test]
fn a_model_is_listed_with_all_its_names_and_tags() {
    run(async {
        let mut config = config();
        config.tags = vec!["chat".into(), "small".into()];
        let house = House::open(config).await;
        let listed = get(house.http, "/models").await.json();
        assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed}");
        let model = &listed["data"][0];
        assert_eq!((&model["id"], &model["aliases"]), (&json!("toy"), &json!(["toy", "alias"])));
        assert_eq!(model["tags"], json!(["chat", "small"]));
        // OpenAI's list names each.
        assert_eq!(get(house.http, "/v1/models").await.json()["data"].as_array().unwrap().len(), 2);
        house.close().await;
    });
}

#[test]
fn an_answer_that_the_chat_has_begun_is_continued_on_llama_cpps_page_alone() {
    run(async {
        let house = House::open(config()).await;
        let user = json!({ "role": "user", "content": "Hi" });
        let assistant_message = |content: Value| json!({ "role": "assistant", "content": content });
        let parts = json!([{ "type": "text", "text": "Wh" }, { "type": "text", "text": "ill" }]);
        let prompt = async |path: &str, body: Value| {
            house.fake.forget();
            let reply = post(house.http, path, &body).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let bytes = house.fake.submits()[0].prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
            String::from_utf8(bytes).unwrap()
        };
        let begun = |content: Value| json!({ "messages": [user, assistant_message(content)] });
        assert!(prompt("/chat/completions", begun(json!("Whi"))).await.ends_with("assistant:Whi"));
        assert!(prompt("/chat/completions", begun(parts)).await.ends_with("assistant:Wh\n\nill"));
        let ours = prompt("/v1/chat/completions", begun(json!("Whi"))).await;
        let mut with_generation_prompt = begun(json!("Whi"));
        with_generation_prompt["add_generation_prompt"] = true.into();
        assert_eq!(prompt("/chat/completions", with_generation_prompt).await, ours);
        let twice = json!({ "messages": [user, assistant_message(json!("a")), assistant_message(json!("b"))] });
        let refused = post(house.http, "/chat/completions", &twice).await;
        assert!(refused.status == 400 && refused.body.contains("messages"), "{refused:?}");
        assert_eq!(post(house.http, "/v1/chat/completions", &twice).await.status, 200);
        house.close().await;
    });
}
