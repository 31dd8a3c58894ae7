//! A coordinator is lost: streams wait for it, and continue without a gap or a repetition.

use crate::grpc::{client, generate, text_request};
use crate::{House, config, eventually, run};
use proto::v1;
use proto::v1::generate_reply::Event;
use tonic::{Code, Status, Streaming};

/// Reads `n_tokens` of a stream.
async fn read(replies: &mut Streaming<v1::GenerateReply>, n_tokens: usize) -> String {
    let (mut text, mut n_read) = (String::new(), 0);
    while n_read < n_tokens {
        if let Some(Event::Delta(delta)) = replies.message().await.unwrap().unwrap().event {
            assert_eq!(delta.position as usize, n_read);
            n_read += delta.token_ids.len();
            text.push_str(&delta.text);
        }
    }
    text
}

async fn finish(replies: &mut Streaming<v1::GenerateReply>) -> Result<(String, v1::Usage), Status> {
    let (mut text, mut usage) = (String::new(), None);
    while let Some(reply) = replies.message().await? {
        match reply.event.unwrap() {
            Event::Delta(delta) => text.push_str(&delta.text),
            Event::Finished(finished) => usage = finished.usage,
            Event::Started(_) | Event::PromptLogprobs(_) | Event::PromptProgress(_) => {
                panic!("a second Started, or an unexpected event")
            }
        }
    }
    Ok((text, usage.expect("no Finished")))
}

#[test]
fn a_stream_goes_on_where_it_was() {
    run(async {
        for overlap in [0, 3] {
            let house = House::open(config()).await;
            house.fake.script(|script| script.hold_at = 5);
            let mut replies = client(&house).generate(text_request("x")).await.unwrap().into_inner();
            let mut text = read(&mut replies, 5).await;
            house.fake.script(|script| (script.hold_at, script.overlap) = (usize::MAX, overlap));
            house.fake.die();
            house.fake.welcome();
            let (rest, usage) = finish(&mut replies).await.unwrap();
            text.push_str(&rest);
            assert_eq!((text.as_str(), usage.completion_tokens), ("Hello, world", 13));
            let submits = house.fake.submits();
            let [first, second] = &submits[..] else { panic!("{submits:?}") };
            assert_eq!((&first.prompt, &first.sampling), (&second.prompt, &second.sampling));
            assert_eq!(second.output, b"Hello".map(u32::from));
            assert_ne!(first.id, second.id);
            house.close().await;
        }
    });
}

#[test]
fn a_stream_fails_once_where_every_replica_has_another_policy() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 5);
        let mut replies = client(&house).generate(text_request("x")).await.unwrap().into_inner();
        read(&mut replies, 5).await;
        house.fake.script(|script| (script.hold_at, script.digest) = (usize::MAX, [8; 32]));
        house.fake.die();
        house.fake.welcome();
        assert_eq!(finish(&mut replies).await.unwrap_err().code(), Code::Unavailable);
        assert_eq!(house.fake.submits().len(), 1);
        // New requests are served under the new policy.
        let reply = generate(&house, text_request("x")).await.unwrap();
        assert_eq!(reply.started.resume.unwrap().policy_digest, [8; 32]);
        house.close().await;
    });
}

#[test]
fn replica_that_returns_busy_is_retried() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 5);
        let mut replies = client(&house).generate(text_request("x")).await.unwrap().into_inner();
        let mut text = read(&mut replies, 5).await;
        house.fake.script(|script| {
            (script.hold_at, script.refuse) = (usize::MAX, Some((proto::cluster::refused::Reason::Full, 5)));
        });
        house.fake.die();
        house.fake.welcome();
        eventually(|| async { house.fake.submits().len() >= 2 }).await;
        house.fake.script(|script| script.refuse = None);
        text.push_str(&finish(&mut replies).await.unwrap().0);
        assert_eq!(text, "Hello, world");
        house.close().await;
    });
}

#[test]
fn a_request_that_was_cancelled_meanwhile_is_not_sent_again() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 5);
        let mut gone = client(&house).generate(text_request("gone")).await.unwrap().into_inner();
        read(&mut gone, 5).await;
        let mut stays = client(&house).generate(text_request("stays")).await.unwrap().into_inner();
        read(&mut stays, 5).await;
        house.fake.die();
        house.fake.script(|script| script.hold_at = usize::MAX);
        eventually(|| async { crate::client::get(house.http, "/ready").await.status == 503 }).await;
        drop(gone);
        let one_left = serde_json::json!({ "server_load": 1 });
        eventually(|| async { crate::client::get(house.http, "/load").await.json() == one_left }).await;
        house.fake.welcome();
        finish(&mut stays).await.unwrap();
        let prompts: Vec<_> = house.fake.submits().into_iter().map(|request| request.prompt.len()).collect();
        assert_eq!(prompts, [4, 5, 5]);
        assert!(house.fake.cancels().is_empty());
        house.close().await;
    });
}

#[test]
fn many_streams_survive_many_losses() {
    run(async {
        let house = House::open(config()).await;
        let answer: String = (0..150).map(|i| char::from(b'a' + (i * 7 % 26) as u8)).collect();
        house.fake.answer(&answer);
        house.fake.script(|script| script.hold_at = 10);
        let streams = async {
            let mut streams = tokio::task::JoinSet::new();
            for i in 0..20 {
                let mut client = client(&house);
                streams.spawn(async move {
                    let mut replies = client.generate(text_request(&format!("{i}"))).await.unwrap().into_inner();
                    finish_after_started(&mut replies).await
                });
            }
            streams.join_all().await
        };
        let losses = async {
            eventually(|| async { house.fake.submits().len() == 20 }).await;
            for life in 2..=8 {
                house.fake.script(|script| script.hold_at = life * 20);
                house.fake.die();
                house.fake.welcome();
                eventually(|| async { house.fake.submits().len() >= 20 * life }).await;
            }
        };
        let (texts, ()) = tokio::join!(streams, losses);
        assert_eq!(texts, vec![answer; 20]);
        house.close().await;
    });
}

async fn finish_after_started(replies: &mut Streaming<v1::GenerateReply>) -> String {
    let (mut text, mut n_tokens) = (String::new(), 0);
    while let Some(reply) = replies.message().await.unwrap() {
        if let Some(Event::Delta(delta)) = reply.event {
            assert_eq!(delta.position as usize, n_tokens);
            n_tokens += delta.token_ids.len();
            text.push_str(&delta.text);
        }
    }
    text
}
