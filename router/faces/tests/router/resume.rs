//! A stream that broke off with its router is resumed at another one, after the part that the client has: byte for byte
//! like the undisturbed one, wherever it broke off.

use crate::client::{Reply, post, post_after, post_with_key};
use crate::fake::Fake;
use crate::grpc::{client, generate, text_request};
use crate::{House, config, eventually, model, run_within};
use checkpoint::ChatTemplate;
use proto::v1;
use proto::v1::generate_reply::Event;
use router::{ApiKeys, Config, ResumeKey};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tonic::Code;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const PATIENCE: Duration = Duration::from_secs(120);

/// Two routers of one cluster, with the same replica behind them.
async fn open_both(config: Config) -> (House, House) {
    let first = House::open(config.clone()).await;
    let second = House::of(config, vec![first.fake.clone()]).await;
    second.wait_until_ready().await;
    (first, second)
}

async fn close_both(houses: (House, House)) {
    houses.0.close().await;
    houses.1.close().await;
}

/// The chunks of each choice, and those of none. Choices may come in any order, so each is compared separately.
fn by_choice(events: &[String]) -> BTreeMap<Option<u64>, Vec<&str>> {
    let mut all: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    for event in events {
        let chunk: Value = serde_json::from_str(event).unwrap_or_default();
        all.entry(chunk["choices"][0]["index"].as_u64()).or_default().push(event);
    }
    all
}

fn bodies() -> Vec<(&'static str, Value)> {
    let stream = |mut body: Value| {
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": body["n"].is_null() });
        if body["max_tokens"].is_null() {
            body["max_tokens"] = 40.into();
        }
        body
    };
    let messages = json!([{ "role": "user", "content": "A" }]);
    vec![
        (COMPLETIONS, stream(json!({ "prompt": "x" }))),
        (COMPLETIONS, stream(json!({ "prompt": "x", "seed": 7, "return_token_ids": true }))),
        (COMPLETIONS, stream(json!({ "prompt": "xy", "presence_penalty": 1.0, "max_tokens": 5 }))),
        (COMPLETIONS, stream(json!({ "prompt": ["x", "yz"], "n": 2, "logprobs": 2 }))),
        (COMPLETIONS, stream(json!({ "prompt": "x", "logprobs": 0, "echo": true }))),
        (COMPLETIONS, stream(json!({ "prompt": "x", "stop": ["wor", "Hellx"] }))),
        (COMPLETIONS, stream(json!({ "prompt": "x", "stop": ["worldly"], "include_stop_str_in_output": true }))),
        (COMPLETIONS, stream(json!({ "prompt": "x", "echo": true, "max_tokens": 0 }))),
        (COMPLETIONS, stream(json!({ "prompt": ["x", "yz"], "n": 2, "stop": "wor", "certificate": true }))),
        (CHAT, stream(json!({ "messages": messages, "n": 2, "stop": "zzz" }))),
        (CHAT, stream(json!({ "messages": messages, "certificate": true }))),
        (CHAT, stream(json!({ "messages": messages, "logprobs": true, "top_logprobs": 2 }))),
    ]
}

#[test]
fn a_stream_that_breaks_off_anywhere_resumes_with_the_same_rest() {
    run_within(PATIENCE, async {
        for (tokens_per_frame, answer) in [(1, "Hello, world"), (5, "h\u{e9}llo w\u{f6}rld \u{1f600}")] {
            let (first, second) = open_both(config()).await;
            first.fake.answer(answer);
            first.fake.script(|script| script.tokens_per_frame = tokens_per_frame);
            for (path, body) in bodies() {
                let whole = post(first.http, path, &body).await;
                check_every_cut(&second, path, &body, &whole).await;
            }
            close_both((first, second)).await;
        }
    });
}

/// A template that reads the time, as Llama 3.1's does for the date, gets the time at which the stream began.
#[test]
fn a_prompt_with_the_time_in_it_is_the_same_when_its_stream_is_resumed_later() {
    run_within(PATIENCE, async {
        let text = || {
            let template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{{ messages[0].content }}";
            model::text().with_template(ChatTemplate::new(template, None, None).unwrap())
        };
        let fake = Fake::start();
        fake.welcome();
        let members = || -> router::Membership { vec![fake.coordinator()].into() };
        let first = House::with_texts(config(), vec![fake.clone()], members(), text()).await;
        let second = House::with_texts(config(), vec![fake.clone()], members(), text()).await;
        first.wait_until_ready().await;
        second.wait_until_ready().await;
        let body = json!({ "messages": [{ "role": "user", "content": "A" }], "stream": true });
        let whole = post(first.http, CHAT, &body).await;
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let rest = post_after(second.http, CHAT, &whole.identified()[3].0, &body).await;
        assert_eq!(rest.events(), whole.events()[4..], "{}", rest.body);
        let prompts: Vec<_> = fake.submits().into_iter().map(|submit| submit.prompt).collect();
        assert_eq!(prompts.iter().filter(|prompt| **prompt == prompts[0]).count(), prompts.len(), "{prompts:?}");
        assert_eq!(prompts[0].len(), "2026-01-01 00:00:00A".len());
        close_both((first, second)).await;
    });
}

async fn check_every_cut(second: &House, path: &str, body: &Value, whole: &Reply) {
    let events = whole.events();
    let identified = whole.identified();
    assert_eq!(identified.len() + 1, events.len(), "each event but the last has an id: {}", whole.body);
    let blocks: Vec<&str> = whole.body.split_terminator("\n\n").collect();
    let has_it_first = |block: &&str| block.starts_with("id: ") && block.lines().last().unwrap().starts_with("data: ");
    assert!(blocks[..identified.len()].iter().all(has_it_first), "the data comes last: {}", whole.body);
    for (cut, (id, _)) in identified.iter().enumerate() {
        let rest = post_after(second.http, path, id, body).await;
        assert_eq!(rest.status, 200, "{}", rest.body);
        let joined: Vec<String> = events[..=cut].iter().cloned().chain(rest.events()).collect();
        assert_eq!(by_choice(&joined), by_choice(&events), "cut behind event {cut} of {path} {body}");
        // The final position is the same too, so the stream may break off again.
        let (last, _) = identified.last().unwrap();
        let ends = |id: &str| id.split_once(':').unwrap().1.to_owned();
        let last_position = rest.identified().last().map_or_else(|| ends(id), |(id, _)| ends(id));
        assert_eq!(last_position, ends(last));
    }
}

#[test]
fn a_second_break_is_as_good_as_the_first_and_the_seed_stays() {
    run_within(PATIENCE, async {
        let (first, second) = open_both(config()).await;
        let body = json!({ "prompt": "x", "stream": true });
        let whole = post(first.http, COMPLETIONS, &body).await;
        let mut id = whole.identified()[0].0.clone();
        for at in 1..whole.identified().len() {
            let house = if at % 2 == 1 { &second } else { &first };
            let rest = post_after(house.http, COMPLETIONS, &id, &body).await;
            assert_eq!(rest.events(), whole.events()[at..]);
            id = rest.identified()[0].0.clone();
        }
        let seeds: Vec<u64> = first.fake.submits().iter().map(|of| of.sampling.as_ref().unwrap().seed).collect();
        assert!(seeds.len() > 10 && seeds.iter().all(|seed| *seed == seeds[0]), "{seeds:?}");
        // The replica may have had each of them before, and is sent the former id.
        let ids: Vec<u64> = first.fake.submits().iter().map(|of| of.id).collect();
        assert_eq!(first.fake.adopted(), ids[..ids.len() - 1]);
        close_both((first, second)).await;
    });
}

#[test]
fn a_stream_that_was_read_to_its_end_ends_at_once() {
    run_within(PATIENCE, async {
        let (first, second) = open_both(config()).await;
        let body = json!({ "prompt": "x", "stream": true, "n": 2, "stream_options": { "include_usage": true } });
        let whole = post(first.http, COMPLETIONS, &body).await;
        let identified = whole.identified();
        let [.., (all_ended, _), (usage, usage_chunk)] = &identified[..] else { panic!("{}", whole.body) };
        let n_submits = first.fake.submits().len();
        let rest = post_after(second.http, COMPLETIONS, all_ended, &body).await;
        assert_eq!(rest.events(), [usage_chunk.as_str(), "[DONE]"]);
        assert_eq!(post_after(second.http, COMPLETIONS, usage, &body).await.events(), ["[DONE]"]);
        assert_eq!(first.fake.submits().len(), n_submits);
        close_both((first, second)).await;
    });
}

#[test]
fn grpc_streams_go_on_too() {
    run_within(PATIENCE, async {
        let (first, second) = open_both(config()).await;
        let sampling = v1::Sampling { logprobs: Some(1), prompt_logprobs: Some(0), ..Default::default() };
        let stopping = v1::Sampling { stop: vec!["wor".into()], ..Default::default() };
        for (sampling, n_tokens) in [(v1::Sampling::default(), 13), (sampling, 13), (stopping, 10)] {
            let request = v1::GenerateRequest { sampling: Some(sampling), ..text_request("prompt") };
            let (started, whole) = collect_stream(&first, request.clone()).await;
            let handle = started.resume.as_ref().unwrap().handle.clone();
            for position in 0..=n_tokens {
                let resume = Some(v1::Resume { handle: handle.clone(), position });
                let (resumed, rest) = collect_stream(&second, v1::GenerateRequest { resume, ..request.clone() }).await;
                assert_eq!((&resumed.id, resumed.seed), (&started.id, started.seed));
                let before = whole.deltas.iter().filter(|delta| delta.position < position).cloned();
                let joined: Vec<v1::Delta> = before.chain(rest.deltas).collect();
                assert_eq!(joined, whole.deltas, "behind {position}");
                assert_eq!(rest.finished, whole.finished);
                assert_eq!(rest.n_scored, if position == 0 { whole.n_scored } else { 0 });
            }
            let resume = Some(v1::Resume { handle, position: n_tokens + 1 });
            let beyond = try_collect_stream(&second, v1::GenerateRequest { resume, ..request }).await.unwrap_err();
            assert_eq!(beyond.code(), Code::InvalidArgument);
            assert!(beyond.message().contains("beyond"), "{beyond:?}");
        }
        close_both((first, second)).await;
    });
}

#[derive(Debug)]
struct CollectedStream {
    deltas: Vec<v1::Delta>,
    finished: v1::Finished,
    n_scored: usize,
}

async fn collect_stream(house: &House, request: v1::GenerateRequest) -> (v1::Started, CollectedStream) {
    try_collect_stream(house, request).await.unwrap()
}

async fn try_collect_stream(
    house: &House,
    request: v1::GenerateRequest,
) -> Result<(v1::Started, CollectedStream), tonic::Status> {
    let mut replies = client(house).generate(request).await?.into_inner();
    let Some(Event::Started(started)) = replies.message().await?.unwrap().event else { panic!("no Started") };
    let mut collected = CollectedStream { deltas: Vec::new(), finished: v1::Finished::default(), n_scored: 0 };
    while let Some(reply) = replies.message().await? {
        match reply.event.unwrap() {
            Event::Delta(delta) => collected.deltas.push(delta),
            Event::Finished(finished) => collected.finished = finished,
            Event::PromptLogprobs(scored) => collected.n_scored += scored.logprobs.len(),
            Event::Started(_) | Event::PromptProgress(_) => panic!("a second Started, or an unexpected event"),
        }
    }
    Ok((started, collected))
}

#[test]
fn a_handle_of_another_request_is_refused_by_name() {
    run_within(PATIENCE, async {
        let (first, second) = open_both(config()).await;
        let body = json!({ "prompt": "x", "stream": true });
        let whole = post(first.http, COMPLETIONS, &body).await;
        let (id, _) = whole.identified()[2].clone();
        let (handle, _) = id.split_once(':').unwrap();
        // This changes a letter of the digest.
        let letter = if &handle[6..7] == "A" { "B" } else { "A" };
        let changed = format!("{}{letter}{}", &handle[..6], &handle[7..]);
        let check = async |id: &str, body: &Value, status: u16, code: Option<&str>| {
            let reply = post_after(second.http, COMPLETIONS, id, body).await;
            assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (status, code), "{id}: {}", reply.body);
            assert_eq!(reply.json()["error"]["param"], "Last-Event-ID");
        };
        check("1", &body, 400, Some("resume_garbled")).await;
        check(&format!("{handle}:"), &body, 400, Some("resume_garbled")).await;
        check(&format!("{handle}:x"), &body, 400, Some("resume_garbled")).await;
        check(&format!("{changed}:3"), &body, 403, Some("resume_forged")).await;
        check(&format!("{handle}:3,3"), &body, 400, Some("resume_other_request")).await;
        check(&format!("{handle}:200"), &body, 400, Some("resume_beyond_end")).await;
        check(&format!("{handle}:14"), &body, 400, Some("resume_beyond_end")).await;
        for (field, value) in [("prompt", json!("y")), ("seed", json!(3)), ("stop", json!("w")), ("top_k", json!(3))] {
            let mut other = body.clone();
            other[field] = value;
            check(&id, &other, 400, Some("resume_other_request")).await;
        }
        check(&id, &json!({ "prompt": "x" }), 400, None).await;
        // The replica's policy differs from the handle's.
        first.fake.script(|script| script.digest = [8; 32]);
        first.fake.die();
        first.fake.welcome();
        let is_new = async || {
            let page = crate::client::get(second.http, "/cluster").await.json();
            page["replicas"][0]["policy_digest"].as_str().is_some_and(|digest| digest.starts_with("08"))
        };
        eventually(is_new).await;
        check(&id, &body, 409, Some("resume_other_policy")).await;
        close_both((first, second)).await;
    });
}

#[test]
fn no_tenant_resumes_another_tenants_stream() {
    run_within(PATIENCE, async {
        let keys = ApiKeys::parse("alice:k1\nbob:k2\nalice:k3").unwrap();
        let (first, second) = open_both(Config { keys, ..config() }).await;
        let stranger = Config { resume_key: ResumeKey::of(b"another cluster"), ..config() };
        let stranger = House::of(stranger, vec![first.fake.clone()]).await;
        stranger.wait_until_ready().await;
        let body = json!({ "prompt": "x", "stream": true });
        let whole = post_with_key(first.http, COMPLETIONS, "k1", &body).await;
        let (id, _) = whole.identified()[2].clone();
        let after = |key: &str| format!("{key}\r\nlast-event-id: {id}");
        assert_eq!(post_with_key(second.http, COMPLETIONS, &after("k2"), &body).await.status, 403);
        assert_eq!(post_after(stranger.http, COMPLETIONS, &id, &body).await.status, 403);
        // Another key of the same tenant.
        let rest = post_with_key(second.http, COMPLETIONS, &after("k3"), &body).await;
        assert_eq!(rest.events(), whole.events()[3..]);
        stranger.close().await;
        close_both((first, second)).await;
    });
}

#[test]
fn another_replica_of_the_same_policy_goes_on_and_one_with_less_room_does_not() {
    run_within(PATIENCE, async {
        let house = House::open_two(config()).await;
        let reply = generate(&house, text_request("x")).await.unwrap();
        let resume = reply.started.resume.unwrap();
        assert_eq!(resume.replica, "one");
        house.fake.die();
        house.wait_for_phases(["absent", "ready"]).await;
        let resume = v1::Resume { handle: resume.handle, position: 5 };
        let request = v1::GenerateRequest { resume: Some(resume), ..text_request("x") };
        let (_, rest) = collect_stream(&house, request.clone()).await;
        assert_eq!(rest.deltas.iter().map(|delta| delta.text.as_str()).collect::<String>(), ", world");
        assert!(house.other().adopted().is_empty());
        // While a replica that can continue may come, the client gets a time to retry. Afterwards it is refused.
        house.other().script(|script| script.context = 100);
        house.other().die();
        house.wait_for_phases(["absent", "absent"]).await;
        house.other().welcome();
        house.wait_for_phases(["absent", "ready"]).await;
        assert_eq!(try_collect_stream(&house, request.clone()).await.err().unwrap().code(), Code::Unavailable);
        house.fake.script(|script| script.digest = [8; 32]);
        house.fake.welcome();
        house.wait_for_phases(["ready", "ready"]).await;
        assert_eq!(try_collect_stream(&house, request).await.err().unwrap().code(), Code::FailedPrecondition);
        house.close().await;
    });
}
