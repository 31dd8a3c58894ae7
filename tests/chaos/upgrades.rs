//! A cluster of processes is upgraded role by role and rolled back, while clients stream without a pause. The build
//! before is the same program with a flag that limits it to the protocol before, or an earlier program with the same
//! numerics that `LOCKSTEP_TEST_BEFORE` names, as `make upgrade` does. The test compares answers, and controls which
//! build each role has.

use crate::city::{Build, City, Model};
use crate::client::{self, StreamOutcome, StreamRequest};
use crate::node::PATIENCE;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const N_CLIENTS: usize = 6;
const OLDEST: u64 = proto::OLDEST as u64;
const NEWEST: u64 = proto::NEWEST as u64;
const REGEX: &str = "[ab]{24}";

/// Two ranks a replica, so that one replica has ranks of two builds for a while. Guesses came with the newer protocol:
/// with them a rank ends if it ignores the negotiated protocol.
fn model() -> Model {
    Model { grid: [2, 1], numerics: vec!["--activations", "f32", "--speculation", "ngram"], ..Model::tiny() }
}

/// The same program, limited to the protocol before, which serves no grammars; or an earlier program, which may speak
/// this protocol.
fn build_before() -> Build {
    match earlier_program() {
        Some(program) => Build { program, flags: vec![] },
        None => Build { flags: vec!["--protocol-max", "1"], ..Build::this() },
    }
}

fn earlier_program() -> Option<String> {
    std::env::var("LOCKSTEP_TEST_BEFORE").ok()
}

/// Checks that the whole cluster is of the build before.
fn check_before(city: &City) {
    if earlier_program().is_none() {
        assert_eq!(protocols(city), [OLDEST, OLDEST]);
        let (status, refused) = request_grammar(&city.doors()[0]);
        assert_eq!(status, 503, "{refused}");
    }
}

/// Clients that send the next request as soon as they have an answer, until the test ends them.
struct Traffic {
    clients: Vec<JoinHandle<Seen>>,
    /// Tokens of the answer that each client reads at this moment, and of the whole answer.
    reading: Vec<(Arc<AtomicUsize>, usize)>,
    end: Arc<AtomicBool>,
}

/// The counts of all clients.
#[derive(Default)]
struct Seen {
    n_answers: usize,
    n_resumed: usize,
    n_refused: usize,
    /// Which of the possible answers occurred, by their index in the list.
    answers: BTreeSet<usize>,
}

impl Traffic {
    /// `expected` has the possible answers to each request: one for each digest.
    fn begin(doors: &[String], requests: &[StreamRequest], expected: &[Vec<StreamOutcome>]) -> Traffic {
        let end = Arc::new(AtomicBool::new(false));
        let reading: Vec<_> =
            (0..requests.len()).map(|i| (Arc::new(AtomicUsize::new(0)), expected[0][i].n_tokens())).collect();
        let client = |i: usize| {
            let (doors, request, end, n_received) =
                (doors.to_vec(), requests[i].clone(), end.clone(), reading[i].0.clone());
            let expected: Vec<StreamOutcome> = expected.iter().map(|of| of[i].clone()).collect();
            std::thread::spawn(move || {
                let mut seen = Seen::default();
                while !end.load(Relaxed) {
                    let outcome = client::run_client(&doors, i, &request, &n_received);
                    let which = expected.iter().position(|expected| expected.choices == outcome.choices);
                    let which = which.unwrap_or_else(|| {
                        let StreamOutcome { n_resumed, n_refused, .. } = outcome;
                        let first = differences(&expected[0], &outcome);
                        panic!("client {i}, {} answers before, {n_resumed}, {n_refused}: {first}", seen.n_answers)
                    });
                    seen.answers.insert(which);
                    seen.n_answers += 1;
                    seen.n_resumed += outcome.n_resumed;
                    seen.n_refused += outcome.n_refused;
                }
                seen
            })
        };
        Traffic { clients: (0..requests.len()).map(client).collect(), reading, end }
    }

    /// Waits until most clients are reading an answer, so that the replacement happens under load.
    fn until_under_way(&self, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let n_received: Vec<usize> = self.reading.iter().map(|(count, _)| count.load(Relaxed)).collect();
            let expected: Vec<usize> = self.reading.iter().map(|(_, whole)| *whole).collect();
            if client::n_under_way(&n_received, &expected) > N_CLIENTS / 2 {
                return;
            }
            let have_ended = self.clients.iter().any(JoinHandle::is_finished);
            assert!(!have_ended && Instant::now() < deadline, "{what}: no request is running: {n_received:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(self) -> Seen {
        self.end.store(true, Relaxed);
        self.clients.into_iter().map(|client| client.join().unwrap()).fold(Seen::default(), |mut all, seen| {
            all.n_answers += seen.n_answers;
            all.n_resumed += seen.n_resumed;
            all.n_refused += seen.n_refused;
            all.answers.extend(seen.answers);
            all
        })
    }
}

/// Describes where an answer differs from the expected one.
fn differences(expected: &StreamOutcome, outcome: &StreamOutcome) -> String {
    let choice_difference = |(index, expected): (&u64, &client::Choice)| {
        let Some(choice) = outcome.choices.get(index) else { return format!("choice {index} is missing") };
        let first = |a: &[String], b: &[String]| (0..a.len().max(b.len())).find(|i| a.get(*i) != b.get(*i));
        let ids = |of: &client::Choice| of.ids.iter().map(u64::to_string).collect::<Vec<_>>();
        let (at, is_same_text) = (first(&ids(expected), &ids(choice)), expected.text == choice.text);
        let logprobs = [0, 1].map(|i| first(&expected.logprobs[i], &choice.logprobs[i]));
        let ends = (&expected.finish, &choice.finish);
        format!("choice {index}: token {at:?}, logprobs {logprobs:?}, ends {ends:?}, the same text: {is_same_text}")
    };
    expected.choices.iter().map(choice_difference).collect::<Vec<_>>().join("; ")
}

/// Returns the answers of a cluster without faults.
fn undisturbed(model: &Model, requests: &[StreamRequest]) -> Vec<StreamOutcome> {
    crate::Load::new(model, requests.to_vec()).expected
}

/// The protocol with each replica. A router from before protocol 2 does not report it.
fn protocols(city: &City) -> Vec<u64> {
    city.replicas().iter().map(|replica| replica["protocol"].as_u64().unwrap_or(1)).collect()
}

/// The status and body of a request with a grammar. Replicas that share only the protocol before cannot serve it.
fn request_grammar(door: &str) -> (u16, Value) {
    let body = json!({
        "prompt": "letters", "max_tokens": 64, "temperature": 0.9, "seed": 5,
        "structured_outputs": {"regex": REGEX},
    });
    let mut answer = crate::node::post(door, &body);
    let status = answer.status().as_u16();
    (status, serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap())
}

fn check_grammar(door: &str, expected: &Value) {
    let (status, answer) = request_grammar(door);
    assert_eq!((status, &answer["choices"]), (200, expected), "{answer}");
}

#[test]
fn a_cluster_is_upgraded_and_rolled_back_under_load() {
    let model = model();
    let requests = client::old_requests(N_CLIENTS, model.tokens_max);
    let expected = undisturbed(&model, &requests);
    let mut city = City::of(build_before(), model, None, 0);
    let doors = city.doors();
    check_before(&city);
    let traffic = Traffic::begin(&doors, &requests, &[expected]);

    city.build = Build::this();
    let mut n_replaced = 0;
    let mut under_way = |what: &str| {
        traffic.until_under_way(what);
        n_replaced += 1;
    };
    city.roll_with(&mut under_way);
    assert_eq!(protocols(&city), [NEWEST, NEWEST]);
    let (status, grammar) = request_grammar(&doors[0]);
    assert_eq!(status, 200, "{grammar}");
    let text = grammar["choices"][0]["text"].as_str().unwrap();
    assert!(text.len() == 24 && text.bytes().all(|byte| b"ab".contains(&byte)), "{text:?}");

    // One replica after another goes back: while one is left, it serves grammars.
    city.build = build_before();
    let mut n_workers = 0;
    let doors_of_all = doors.clone();
    let mut under_way = |what: &str| {
        traffic.until_under_way(what);
        n_workers += usize::from(what == "worker");
        if what == "worker" && n_workers <= 3 {
            check_grammar(&doors_of_all[0], &grammar["choices"]);
        }
        n_replaced += 1;
    };
    city.roll_with(&mut under_way);
    check_before(&city);
    let seen = traffic.end();
    let Seen { n_answers, n_resumed, n_refused, .. } = seen;
    println!("{n_replaced} processes replaced; {n_answers} answers, {n_resumed} resumed, {n_refused} retried");
    assert!(n_replaced == 16 && n_answers > N_CLIENTS, "{n_replaced} processes, {n_answers} answers");
}

/// A build with other numerics has another digest: running requests are drained, and later ones get the other answers.
/// No answer is a mixture.
#[test]
fn replicas_of_another_digest_take_over_once_the_former_ones_are_drained() {
    let (before, now) = (model(), Model { numerics: vec!["--activations", "f32", "--kv-dtype", "f32"], ..model() });
    let mut requests = client::old_requests(N_CLIENTS, 60);
    requests.iter_mut().for_each(|request| request.body["logprobs"] = 2.into());
    let expected = [undisturbed(&before, &requests), undisturbed(&now, &requests)];
    let differ = |i: &usize| expected[0][*i].choices != expected[1][*i].choices;
    assert!((0..N_CLIENTS).all(|i| differ(&i)), "the digests give different answers");
    let mut city = City::of(Build::this(), before, None, 0);
    let traffic = Traffic::begin(&city.doors(), &requests, &expected);
    city.model = now;
    for side in [0, 1] {
        traffic.until_under_way("coordinator");
        city.end_coordinator(side);
        city.heal();
    }
    traffic.until_under_way("the end");
    let seen = traffic.end();
    let Seen { n_answers, n_resumed, n_refused, answers } = seen;
    println!("{n_answers} answers, {n_resumed} resumed, {n_refused} retried");
    assert_eq!(answers, BTreeSet::from([0, 1]), "both digests have answered");
    assert_eq!(n_resumed, 0, "no router was replaced");
}
