//! A connection to etcd that a test can cut: everything through it ends, and nothing new comes through. It can also
//! hold back a client's bytes from given words on, while answers still come.

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const PIECE_BYTES: usize = 64 << 10;

pub struct Proxy {
    pub endpoint: String,
    state: watch::Sender<State>,
}

#[derive(Clone, Default)]
struct State {
    is_cut: bool,
    n_connections: u32,
    hold: Option<Hold>,
}

#[derive(Clone)]
struct Hold {
    words: &'static str,
    n_passing: u32,
    is_reached: bool,
}

impl Proxy {
    pub async fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let state = watch::Sender::default();
        tokio::spawn(accept(listener, port, state.clone()));
        Proxy { endpoint, state }
    }

    pub fn cut(&self) {
        self.state.send_modify(|state| state.is_cut = true);
    }

    pub fn mend(&self) {
        self.state.send_modify(|state| state.is_cut = false);
    }

    /// Lets the words pass `n_passing` times, and holds the next piece that has them.
    pub fn hold_behind(&self, words: &'static str, n_passing: u32) {
        self.state.send_modify(|state| state.hold = Some(Hold { words, n_passing, is_reached: false }));
    }

    pub async fn until_held(&self) {
        let mut state = self.state.subscribe();
        state.wait_for(|state| state.hold.as_ref().is_some_and(|hold| hold.is_reached)).await.unwrap();
    }

    pub fn let_on(&self) {
        self.state.send_modify(|state| state.hold = None);
    }

    /// How many connections came through so far.
    pub fn n_connections(&self) -> u32 {
        self.state.borrow().n_connections
    }
}

/// Ends with the proxy's runtime.
async fn accept(listener: TcpListener, port: u16, state: watch::Sender<State>) {
    while let Ok((ours, _)) = listener.accept().await {
        if !state.borrow().is_cut {
            state.send_modify(|state| state.n_connections += 1);
            tokio::spawn(carry(ours, port, state.clone()));
        }
    }
}

async fn carry(ours: TcpStream, port: u16, state: watch::Sender<State>) {
    let Ok(theirs) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let mut cut = state.subscribe();
    let ((from_us, mut to_us), (mut from_them, to_them)) = (ours.into_split(), theirs.into_split());
    tokio::select! {
        () = forward_from_client(from_us, to_them, &state) => {}
        _ = copy(&mut from_them, &mut to_us) => {}
        _ = cut.wait_for(|state| state.is_cut) => {}
    }
}

async fn forward_from_client(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, state: &watch::Sender<State>) {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(n @ 1..) = from.read(&mut piece).await {
        if state.send_if_modified(|state| state.hold.as_mut().is_some_and(|hold| hold.check_piece(&piece[..n]))) {
            let mut held = state.subscribe();
            let on = held.wait_for(|state| state.hold.as_ref().is_none_or(|hold| !hold.is_reached)).await;
            on.expect("the sender is held here");
        }
        if to.write_all(&piece[..n]).await.is_err() {
            return;
        }
    }
}

impl Hold {
    /// Whether this piece is held.
    fn check_piece(&mut self, piece: &[u8]) -> bool {
        let has_words = piece.windows(self.words.len()).any(|bytes| bytes == self.words.as_bytes());
        match self.n_passing {
            0 => self.is_reached |= has_words,
            _ => self.n_passing -= u32::from(has_words),
        }
        self.is_reached
    }
}
