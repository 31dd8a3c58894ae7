//! `lockstep-client`, the client for programs in Rust: its answers continue where their stream broke off.

use crate::grpc::{generate, text_request};
use crate::{House, config, run};
use lockstep_client::v1::generate_reply::Event;
use lockstep_client::v1::generate_request::Input;
use lockstep_client::v1::{self, GenerateRequest};
use lockstep_client::{AnswerStream, ConnectOptions, LockstepClient};
use router::ApiKeys;
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tonic::Code;

/// A way to a router that can be cut off.
struct Relay {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Relay {
    async fn to(router: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            let mut near = listener.accept().await.unwrap().0;
            // Later connections are refused.
            drop(listener);
            let mut far = TcpStream::connect(router).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
        });
        Relay { address, task }
    }

    fn cut(&self) {
        self.task.abort();
    }
}

fn client_of(addresses: &[SocketAddr]) -> LockstepClient {
    let addresses = addresses.iter().map(|address| format!("http://{address}"));
    LockstepClient::connect(addresses, &ConnectOptions { retries_max: 4, ..ConnectOptions::default() }).unwrap()
}

fn request(text: &str) -> GenerateRequest {
    GenerateRequest { input: Some(Input::Text(text.into())), ..Default::default() }
}

/// What was read of an answer. There is no gap between its tokens.
#[derive(Debug, Default, PartialEq)]
struct Read {
    n_started: usize,
    n_scored: usize,
    text: String,
    token_ids: Vec<u32>,
    finished: Option<v1::Finished>,
}

impl Read {
    fn add(&mut self, event: Event) {
        match event {
            Event::Started(_) => self.n_started += 1,
            Event::PromptLogprobs(_) => self.n_scored += 1,
            Event::PromptProgress(_) => {}
            Event::Delta(delta) => {
                assert_eq!(delta.position as usize, self.token_ids.len());
                self.text.push_str(&delta.text);
                self.token_ids.extend(delta.token_ids);
            }
            Event::Finished(finished) => assert_eq!(self.finished.replace(finished), None),
        }
    }

    async fn until_tokens(&mut self, answer: &mut AnswerStream, n: usize) {
        while self.token_ids.len() < n {
            self.add(answer.next_event().await.unwrap().unwrap());
        }
    }

    async fn read_to_end(&mut self, answer: &mut AnswerStream) {
        while let Some(event) = answer.next_event().await.unwrap() {
            self.add(event);
        }
    }
}

#[test]
fn an_answer_continues_at_another_router_wherever_it_breaks_off() {
    run(async {
        for n_read in [1, 5, 12] {
            let first = House::open(config()).await;
            let second = House::of(config(), vec![first.fake.clone()]).await;
            second.wait_until_ready().await;
            let relay = Relay::to(first.grpc).await;
            let sampling = v1::Sampling { seed: Some(7), prompt_logprobs: Some(0), ..Default::default() };
            let request = GenerateRequest { sampling: Some(sampling), ..request("Hi") };
            let mut whole = Read::default();
            whole.read_to_end(&mut client_of(&[first.grpc]).generate(request.clone())).await;
            assert_eq!((whole.text.as_str(), whole.n_started, whole.n_scored), ("Hello, world", 1, 1));
            first.fake.script(|script| script.hold_at = n_read);
            let (mut answer, mut read) = (client_of(&[relay.address, second.grpc]).generate(request), Read::default());
            read.add(answer.next_event().await.unwrap().unwrap());
            read.until_tokens(&mut answer, n_read).await;
            first.fake.script(|script| script.hold_at = usize::MAX);
            relay.cut();
            read.read_to_end(&mut answer).await;
            assert_eq!(read, whole, "cut behind {n_read} tokens");
            first.close().await;
            second.close().await;
        }
    });
}

#[test]
fn a_router_that_is_away_is_passed_over() {
    run(async {
        let house = House::open(config()).await;
        let away = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let (mut answer, mut read) = (client_of(&[away, house.grpc]).generate(request("Hi")), Read::default());
        read.read_to_end(&mut answer).await;
        assert_eq!(read.text, "Hello, world");
        assert_eq!(answer.next_event().await.unwrap(), None);
        let mut nowhere = client_of(&[away]).generate(request("Hi"));
        assert_eq!(nowhere.next_event().await.unwrap_err().code(), Code::Unavailable);
        house.close().await;
    });
}

#[test]
fn a_refusal_is_not_repeated() {
    run(async {
        let house = House::open(config()).await;
        let status = client_of(&[house.grpc]).generate(request("")).next_event().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        house.fake.script(|script| script.refuse = Some((proto::cluster::refused::Reason::Full, 1000)));
        let status = client_of(&[house.grpc]).generate(request("x")).next_event().await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        house.close().await;
    });
}

#[test]
fn several_choices_end_with_the_last_and_a_deadline_holds_over_retries() {
    run(async {
        let house = House::open(config()).await;
        let mut answer = client_of(&[house.grpc]).generate(GenerateRequest { n: 2, ..request("Hi") });
        let mut n_finished = 0;
        while let Some(event) = answer.next_event().await.unwrap() {
            n_finished += usize::from(matches!(event, Event::Finished(_)));
        }
        assert_eq!(n_finished, 2);
        let away = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let mut late = client_of(&[away]).generate(GenerateRequest { deadline_ms: 60, ..request("Hi") });
        assert_eq!(late.next_event().await.unwrap_err().code(), Code::DeadlineExceeded);
        house.close().await;
    });
}

#[test]
fn the_key_reaches_the_router() {
    run(async {
        let keys = ApiKeys::parse("alice:secret-key").unwrap();
        let house = House::open(router::Config { keys, ..config() }).await;
        assert!(generate(&house, text_request("Hi")).await.is_err());
        let options = ConnectOptions { api_key: Some("secret-key".into()), ..ConnectOptions::default() };
        let client = LockstepClient::connect([format!("http://{}", house.grpc)], &options).unwrap();
        let mut read = Read::default();
        read.read_to_end(&mut client.generate(request("Hi"))).await;
        assert_eq!(read.text, "Hello, world");
        let models = client.inference().list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        assert_eq!(models[0].id, "toy");
        house.close().await;
    });
}
