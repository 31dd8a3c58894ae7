//! Two sides over loopback: a peer that belongs is let in, and any other receives the reason.

use crate::dial::dial;
use crate::greeting::{GreetingVerdict, MAGIC, PROOF_BYTES, REPLY_BYTES};
use crate::token::NONCE_BYTES;
use crate::{ConnectError, HandshakeRefusal, JoinToken, Trust, incoming};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt;

fn token(letter: char) -> JoinToken {
    JoinToken::new(&letter.to_string().repeat(40)).unwrap()
}

/// Checks the dialler's result, with tokens on either side.
async fn check(listener: Option<JoinToken>, dialler: Option<JoinToken>, expect: Result<(), HandshakeRefusal>) {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let mut incoming = Box::pin(incoming(socket, Trust { token: listener, tls: None }));
    let dialled = dial(&address, &Trust { token: dialler, tls: None }).await;
    match (dialled, expect) {
        (Ok(mut ours), Ok(())) => {
            let mut theirs = incoming.next().await.unwrap().unwrap();
            ours.write_all(b"frames").await.unwrap();
            let mut received = [0; 6];
            theirs.read_exact(&mut received).await.unwrap();
            assert_eq!(&received, b"frames");
        }
        (Err(ConnectError::Refused(refused)), Err(expect)) => assert_eq!(refused, expect),
        (dialled, expect) => panic!("{:?}, expected {expect:?}", dialled.map(drop)),
    }
}

#[tokio::test]
async fn both_sides_have_the_token_or_get_the_reason() {
    check(None, None, Ok(())).await;
    check(Some(token('a')), Some(token('a')), Ok(())).await;
    check(Some(token('a')), Some(token('b')), Err(HandshakeRefusal::TokenWrong)).await;
    check(Some(token('a')), None, Err(HandshakeRefusal::TokenMissing)).await;
    check(None, Some(token('b')), Err(HandshakeRefusal::TokenUnwanted)).await;
}

/// Peers that send nothing, or begin and do not go on, delay no other peer.
#[tokio::test]
async fn unauthenticated_peers_block_no_others() {
    const N_IDLE: usize = 300;
    const JOINED_MAX: Duration = Duration::from_secs(3);
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let trust = Trust { token: Some(token('a')), tls: None };
    let mut incoming = Box::pin(incoming(socket, trust.clone()));
    let mut idle = Vec::new();
    for n in 0..N_IDLE {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        if n % 2 == 0 {
            stream.write_all(&MAGIC).await.unwrap();
        }
        idle.push(stream);
    }
    for _ in 0..2 {
        let joined = async { (dial(&address, &trust).await, incoming.next().await) };
        let (dialled, taken) =
            tokio::time::timeout(JOINED_MAX, joined).await.expect("a peer is not blocked by idle connections");
        assert!(dialled.is_ok() && taken.unwrap().is_ok());
    }
}

/// Whatever a peer sends, and wherever it stops, the next one is served.
#[tokio::test]
async fn garbage_ends_its_own_connection() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let trust = Trust { token: Some(token('a')), tls: None };
    let mut incoming = Box::pin(incoming(socket, trust.clone()));
    let mut half = TcpStream::connect(&address).await.unwrap();
    half.write_all(&MAGIC).await.unwrap();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 200], &[0xff; 8], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        let mut received = Vec::new();
        // A reset counts as an end.
        let _reset = stream.read_to_end(&mut received).await;
        assert!(received.is_empty());
    }
    let mut tls = TcpStream::connect(&address).await.unwrap();
    tls.write_all(&[22, 3, 1, 2, 0]).await.unwrap();
    dial(&address, &trust).await.unwrap();
    assert!(incoming.next().await.unwrap().is_ok());
    // An overheard proof cannot be used again: the listener's nonce is new.
    let mut replay = TcpStream::connect(&address).await.unwrap();
    let mut hello = MAGIC.to_vec();
    hello.extend([1; 1 + NONCE_BYTES]);
    replay.write_all(&hello).await.unwrap();
    let mut reply = [0; REPLY_BYTES];
    replay.read_exact(&mut reply).await.unwrap();
    let proof = reply[REPLY_BYTES - PROOF_BYTES..].to_vec();
    replay.write_all(&proof).await.unwrap();
    assert_eq!(
        replay.read_u8().await.unwrap(),
        GreetingVerdict::TokenWrong as u8,
        "a listener's proof is not accepted from a dialler"
    );
}
