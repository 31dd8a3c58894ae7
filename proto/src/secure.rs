//! Connections between roles on sockets, and how both sides prove that they belong to the cluster: TLS with
//! certificates on both sides, a join token, or both. Knows nothing of what is sent afterwards, nor where keys come
//! from.
//!
//! Every connection begins with a greeting, inside TLS where there is TLS:
//!
//! ```text
//! dialler  magic · has a token · nonce d                →
//!          ← magic · verdict · nonce l · keyed(token, "listener" d l)
//! dialler  keyed(token, "dialler" d l)                  →
//!          ← verdict
//! ```
//! A dialler that finds the listener's proof wrong answers with zeros.
//! So a token is never sent, what was overheard cannot be sent again, and whoever is refused is told why before a
//! single frame of HTTP.

use crate::transport::with_limits;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, ServerConfig};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::Service;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Uri};

/// The name in every role's certificate: machines come and go, the cluster is what is proved.
pub const SERVER_NAME: &str = "lockstep.cluster";
/// Below it a token could be guessed by whoever has seen one greeting.
pub const TOKEN_CHARS_MIN: usize = 32;
pub const TOKEN_CHARS_MAX: usize = 4096;

const MAGIC: [u8; 8] = *b"LOCKSTP1";
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + 1 + NONCE_BYTES;
const REPLY_BYTES: usize = MAGIC.len() + 1 + NONCE_BYTES + PROOF_BYTES;
/// How a record of TLS begins: one with an alert, and one with the first message of a handshake.
const TLS_ALERT: [u8; 2] = [21, 3];
const TLS_HANDSHAKE: [u8; 2] = [22, 3];
const TOKEN_PURPOSE: &str = "lockstep 2026 join token greeting";

const CONNECT_MAX: Duration = Duration::from_secs(3);
/// TLS and the greeting together.
const PROOF_MAX: Duration = Duration::from_secs(5);
/// Peers that prove themselves at once; more wait in the listener's queue.
const PROVING_MAX: usize = 64;
/// Connections that have proved themselves and were not yet taken.
const PROVED_MAX: usize = 64;
/// After the listener failed, as when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the machines of a cluster know and nobody else does.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    pub fn new(text: &str) -> Result<Token, BadToken> {
        let text = text.trim();
        if !(TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(BadToken);
        }
        Ok(Token(text.into()))
    }

    pub fn random() -> Result<Token, NoRandomness> {
        let secret: [u8; 32] = random()?;
        Ok(Token(secret.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// For the file or pipe that hands it on.
    pub fn expose(&self) -> &str {
        &self.0
    }

    fn proof(&self, side: &str, dialler: &[u8; NONCE_BYTES], listener: &[u8; NONCE_BYTES]) -> blake3::Hash {
        let key = blake3::derive_key(TOKEN_PURPOSE, self.0.as_bytes());
        let mut hasher = blake3::Hasher::new_keyed(&key);
        hasher.update(side.as_bytes()).update(dialler).update(listener).finalize()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[derive(Debug, thiserror::Error)]
#[error("a join token is {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} printable characters: `lockstep token` makes one")]
pub struct BadToken;

#[derive(Debug, thiserror::Error)]
#[error("this system gives no random bytes")]
pub struct NoRandomness;

/// Bytes that nobody can guess.
pub fn random<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    let filled = rustls::crypto::ring::default_provider().secure_random.fill(&mut bytes);
    filled.map(|()| bytes).map_err(|_| NoRandomness)
}

/// What a role shows of itself, and asks of its peers.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    pub token: Option<Token>,
    pub tls: Option<Tls>,
}

/// Both ask the peer for a certificate of the cluster.
#[derive(Clone, Debug)]
pub struct Tls {
    pub server: Arc<ServerConfig>,
    pub client: Arc<ClientConfig>,
}

/// Why a connection did not come about though the peer was reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the certificate has expired, or this machine's clock is wrong")]
    Expired,
    #[error("the certificate is not of this cluster: is it the same join token, or the same authority?")]
    Stranger,
    #[error("the certificate is refused: {0}")]
    Certificate(String),
    #[error("the dialler speaks TLS, and the listener does not")]
    TlsUnwanted,
    #[error("the listener speaks TLS, and the dialler does not")]
    TlsMissing,
    #[error("the join tokens are not the same")]
    TokenWrong,
    #[error("the listener asks for a join token, and the dialler has none")]
    TokenMissing,
    #[error("the dialler has a join token, and the listener asks for none")]
    TokenUnwanted,
    #[error("what speaks there is no role of a cluster of this version")]
    Garbage,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Unconnected {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("no connection: {0}")]
    Io(#[from] io::Error),
    #[error("nothing was heard for too long")]
    Late,
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    /// Nobody could be dialled.
    #[error("{0}")]
    Nowhere(String),
}

impl Refused {
    /// What refused a connection, if something on the way to this error did.
    pub fn cause_of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Refused> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(refused) = error.downcast_ref() {
                return Some(refused);
            }
            if let Some(Unconnected::Refused(refused)) = error.downcast_ref() {
                return Some(refused);
            }
            next = error.source();
        }
        None
    }

    /// Another attempt would only repeat it; what is garbage may be a stranger who holds the port for a while.
    pub fn is_final(&self) -> bool {
        *self != Refused::Garbage
    }

    fn of_tls(error: &rustls::Error) -> Refused {
        use rustls::AlertDescription as Alert;
        use rustls::Error as E;
        match error {
            E::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            )
            | E::AlertReceived(Alert::CertificateExpired) => Refused::Expired,
            E::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)
            | E::AlertReceived(Alert::UnknownCA | Alert::DecryptError) => Refused::Stranger,
            other => Refused::Certificate(other.to_string()),
        }
    }
}

impl From<u8> for Verdict {
    fn from(byte: u8) -> Verdict {
        match byte {
            0 => Verdict::Welcome,
            1 => Verdict::TokenMissing,
            2 => Verdict::TokenUnwanted,
            3 => Verdict::TokenWrong,
            _ => Verdict::Garbage,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Welcome = 0,
    TokenMissing = 1,
    TokenUnwanted = 2,
    TokenWrong = 3,
    Garbage = 4,
}

impl Verdict {
    fn accept(self) -> Result<(), Refused> {
        match self {
            Verdict::Welcome => Ok(()),
            Verdict::TokenMissing => Err(Refused::TokenMissing),
            Verdict::TokenUnwanted => Err(Refused::TokenUnwanted),
            Verdict::TokenWrong => Err(Refused::TokenWrong),
            Verdict::Garbage => Err(Refused::Garbage),
        }
    }
}

/// A connection that has proved itself.
#[derive(Debug)]
pub enum Connection {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    /// Within the process: there is nobody to prove anything to.
    Pipe(DuplexStream),
}

macro_rules! either {
    ($self:ident, $io:ident => $call:expr) => {
        match $self.get_mut() {
            Connection::Plain(io) => {
                let $io = Pin::new(io);
                $call
            }
            Connection::Tls(io) => {
                let $io = Pin::new(&mut **io);
                $call
            }
            Connection::Pipe(io) => {
                let $io = Pin::new(io);
                $call
            }
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_read(cx, buf))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, io => io.poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_shutdown(cx))
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

/// The connections of a listener that have proved themselves. Who does not is told why, and is named in the log.
pub fn incoming(listener: TcpListener, trust: Trust) -> impl Stream<Item = io::Result<Connection>> + Send {
    let (proved, connections) = mpsc::channel(PROVED_MAX);
    tokio::spawn(listen(listener, trust, proved));
    ReceiverStream::new(connections)
}

async fn listen(listener: TcpListener, trust: Trust, proved: mpsc::Sender<io::Result<Connection>>) {
    let proving = Arc::new(Semaphore::new(PROVING_MAX));
    loop {
        let Ok(permit) = proving.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            () = proved.closed() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (trust, proved) = (trust.clone(), proved.clone());
        tokio::spawn(async move {
            let _permit = permit;
            if let Some(connection) = admit(stream, peer, &trust).await {
                // Nobody takes connections any more when the server has ended.
                let _ended = proved.send(Ok(connection)).await;
            }
        });
    }
}

async fn admit(stream: TcpStream, peer: SocketAddr, trust: &Trust) -> Option<Connection> {
    let admitted = timeout(PROOF_MAX, accept(stream, trust)).await.unwrap_or(Err(Unconnected::Late));
    admitted.inspect_err(|why| tracing::warn!(%peer, %why, "a peer is refused")).ok()
}

async fn accept(stream: TcpStream, trust: &Trust) -> Result<Connection, Unconnected> {
    stream.set_nodelay(true)?;
    let mut connection = match &trust.tls {
        None => Connection::Plain(stream),
        Some(tls) => {
            let accepted = TlsAcceptor::from(tls.server.clone()).accept(stream).await.map_err(of_tls)?;
            Connection::Tls(Box::new(accepted.into()))
        }
    };
    greet_dialler(&mut connection, trust.token.as_ref()).await?;
    Ok(connection)
}

/// What rustls says is wrapped as an error of the stream.
fn of_tls(error: io::Error) -> Unconnected {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).map(Refused::of_tls);
    tls.map_or(Unconnected::Io(error), Unconnected::Refused)
}

async fn greet_dialler(peer: &mut Connection, token: Option<&Token>) -> Result<(), Unconnected> {
    let mut hello = [0; HELLO_BYTES];
    read_magic(peer, &mut hello, TLS_HANDSHAKE, Refused::TlsUnwanted).await?;
    let has_token = hello[MAGIC.len()] != 0;
    let dialler: [u8; NONCE_BYTES] = nonce_at(&hello, MAGIC.len() + 1);
    let listener: [u8; NONCE_BYTES] = random()?;
    let verdict = match (token, has_token) {
        (Some(_), false) => Verdict::TokenMissing,
        (None, true) => Verdict::TokenUnwanted,
        (Some(_), true) | (None, false) => Verdict::Welcome,
    };
    let mut reply = [0; REPLY_BYTES];
    reply[..MAGIC.len()].copy_from_slice(&MAGIC);
    reply[MAGIC.len()] = verdict as u8;
    reply[MAGIC.len() + 1..][..NONCE_BYTES].copy_from_slice(&listener);
    if let (Some(token), Verdict::Welcome) = (token, verdict) {
        let proof = token.proof("listener", &dialler, &listener);
        reply[REPLY_BYTES - PROOF_BYTES..].copy_from_slice(proof.as_bytes());
    }
    say(peer, &reply).await?;
    verdict.accept()?;
    let mut answer = [0; PROOF_BYTES];
    peer.read_exact(&mut answer).await.map_err(of_tls)?;
    let verdict = match token {
        // Hashes are compared in constant time.
        Some(token) if token.proof("dialler", &dialler, &listener) != blake3::Hash::from_bytes(answer) => {
            Verdict::TokenWrong
        }
        _ => Verdict::Welcome,
    };
    let told = say(peer, &[verdict as u8]).await;
    // Who was refused need not have stayed to hear it.
    verdict.accept()?;
    Ok(told?)
}

async fn greet_listener(peer: &mut Connection, token: Option<&Token>) -> Result<(), Unconnected> {
    let dialler: [u8; NONCE_BYTES] = random()?;
    let mut hello = [0; HELLO_BYTES];
    hello[..MAGIC.len()].copy_from_slice(&MAGIC);
    hello[MAGIC.len()] = token.is_some().into();
    hello[MAGIC.len() + 1..].copy_from_slice(&dialler);
    say(peer, &hello).await.map_err(of_tls)?;
    let mut reply = [0; REPLY_BYTES];
    read_magic(peer, &mut reply, TLS_ALERT, Refused::TlsMissing).await?;
    Verdict::from(reply[MAGIC.len()]).accept()?;
    let listener = nonce_at(&reply, MAGIC.len() + 1);
    let theirs = blake3::Hash::from_bytes(nonce_at(&reply, REPLY_BYTES - PROOF_BYTES));
    let is_ours = token.is_none_or(|token| token.proof("listener", &dialler, &listener) == theirs);
    // To a listener of another token nothing is proved; that this is no proof tells it why.
    let answer = match token {
        Some(token) if is_ours => *token.proof("dialler", &dialler, &listener).as_bytes(),
        _ => [0; PROOF_BYTES],
    };
    say(peer, &answer).await.map_err(of_tls)?;
    if !is_ours {
        return Err(Refused::TokenWrong.into());
    }
    let mut verdict = [0];
    peer.read_exact(&mut verdict).await.map_err(of_tls)?;
    Ok(Verdict::from(verdict[0]).accept()?)
}

async fn say(peer: &mut Connection, message: &[u8]) -> io::Result<()> {
    peer.write_all(message).await?;
    peer.flush().await
}

/// Fills a message that begins with the magic. The first bytes are looked at first: what begins otherwise may be
/// shorter.
async fn read_magic(
    peer: &mut Connection,
    message: &mut [u8],
    tls: [u8; 2],
    is_tls: Refused,
) -> Result<(), Unconnected> {
    let (first, rest) = message.split_at_mut(tls.len());
    peer.read_exact(first).await.map_err(hung_up)?;
    if *first == tls {
        return Err(is_tls.into());
    }
    let magic = &mut rest[..MAGIC.len() - first.len()];
    if *first == MAGIC[..first.len()] {
        peer.read_exact(magic).await.map_err(hung_up)?;
    }
    if message[..MAGIC.len()] != MAGIC {
        return Err(Refused::Garbage.into());
    }
    let rest = &mut message[MAGIC.len()..];
    peer.read_exact(rest).await.map(drop).map_err(hung_up)
}

/// Who hangs up on a greeting is none of ours; who was lost is not there.
fn hung_up(error: io::Error) -> Unconnected {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Refused::Garbage.into(),
        _ => of_tls(error),
    }
}

fn nonce_at(bytes: &[u8], at: usize) -> [u8; NONCE_BYTES] {
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[at..at + NONCE_BYTES]);
    nonce
}

/// A channel to a role at `host:port` that connects when it is used and again when the connection is lost.
pub fn channel(address: &str, trust: Trust) -> Channel {
    let address = address.to_owned();
    channel_to_where(move || Ok((address.clone(), trust.clone())))
}

/// The same to a role that may move: asked again for each connection where it is, and whom to trust there.
pub fn channel_to_where(peer: impl Fn() -> Result<(String, Trust), String> + Send + Sync + 'static) -> Channel {
    let connector = Connector { peer: Arc::new(peer), reason: Arc::new(Mutex::new(String::new())) };
    with_limits(Endpoint::from_static("http://lockstep.cluster")).connect_with_connector_lazy(connector)
}

/// Where to dial, and whom to trust there.
type Peer = dyn Fn() -> Result<(String, Trust), String> + Send + Sync;

#[derive(Clone)]
struct Connector {
    peer: Arc<Peer>,
    /// Why there was no connection the last time: the same is not logged again and again.
    reason: Arc<Mutex<String>>,
}

impl Connector {
    async fn connect(self) -> Result<TokioIo<Connection>, Unconnected> {
        let (address, trust) = (self.peer)().map_err(Unconnected::Nowhere)?;
        let connected = dial(&address, &trust).await;
        let now = connected.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if !now.is_empty() && *reason != now {
            tracing::warn!(address, why = now, "no connection to this address");
        }
        *reason = now;
        connected.map(TokioIo::new)
    }
}

async fn dial(address: &str, trust: &Trust) -> Result<Connection, Unconnected> {
    let stream = timeout(CONNECT_MAX, TcpStream::connect(address)).await.map_err(|_| Unconnected::Late)??;
    stream.set_nodelay(true)?;
    timeout(PROOF_MAX, prove(stream, trust)).await.unwrap_or(Err(Unconnected::Late))
}

async fn prove(stream: TcpStream, trust: &Trust) -> Result<Connection, Unconnected> {
    let mut connection = match &trust.tls {
        None => Connection::Plain(stream),
        Some(tls) => {
            let name = ServerName::try_from(SERVER_NAME).expect("a constant name that is valid");
            let connected = TlsConnector::from(tls.client.clone()).connect(name, stream).await.map_err(of_tls)?;
            Connection::Tls(Box::new(connected.into()))
        }
    };
    greet_listener(&mut connection, trust.token.as_ref()).await?;
    Ok(connection)
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Connection>;
    type Error = Unconnected;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Unconnected>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Unconnected>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        Box::pin(self.clone().connect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_stream::StreamExt;

    fn token(letter: char) -> Token {
        Token::new(&letter.to_string().repeat(40)).unwrap()
    }

    /// What the dialler makes of a listener, with tokens on either side.
    async fn check(listener: Option<Token>, dialler: Option<Token>, expect: Result<(), Refused>) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap().to_string();
        let mut incoming = Box::pin(incoming(socket, Trust { token: listener, tls: None }));
        let dialled = dial(&address, &Trust { token: dialler, tls: None }).await;
        match (dialled, expect) {
            (Ok(mut ours), Ok(())) => {
                let mut theirs = incoming.next().await.unwrap().unwrap();
                ours.write_all(b"frames").await.unwrap();
                let mut heard = [0; 6];
                theirs.read_exact(&mut heard).await.unwrap();
                assert_eq!(&heard, b"frames");
            }
            (Err(Unconnected::Refused(refused)), Err(expect)) => assert_eq!(refused, expect),
            (dialled, expect) => panic!("{:?}, expected {expect:?}", dialled.map(drop)),
        }
    }

    #[tokio::test]
    async fn both_sides_have_the_token_or_are_told_why_not() {
        check(None, None, Ok(())).await;
        check(Some(token('a')), Some(token('a')), Ok(())).await;
        check(Some(token('a')), Some(token('b')), Err(Refused::TokenWrong)).await;
        check(Some(token('a')), None, Err(Refused::TokenMissing)).await;
        check(None, Some(token('b')), Err(Refused::TokenUnwanted)).await;
    }

    /// Whatever is said, and wherever it stops, the next peer is served.
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
            let mut heard = Vec::new();
            // A reset says as much as an end.
            let _reset = stream.read_to_end(&mut heard).await;
            assert!(heard.is_empty());
        }
        let mut tls = TcpStream::connect(&address).await.unwrap();
        tls.write_all(&[22, 3, 1, 2, 0]).await.unwrap();
        dial(&address, &trust).await.unwrap();
        assert!(incoming.next().await.unwrap().is_ok());
        // What overhears a proof cannot use it: the listener's nonce is new.
        let mut replay = TcpStream::connect(&address).await.unwrap();
        let mut hello = MAGIC.to_vec();
        hello.extend([1; 1 + NONCE_BYTES]);
        replay.write_all(&hello).await.unwrap();
        let mut reply = [0; REPLY_BYTES];
        replay.read_exact(&mut reply).await.unwrap();
        let proof = reply[REPLY_BYTES - PROOF_BYTES..].to_vec();
        replay.write_all(&proof).await.unwrap();
        assert_eq!(replay.read_u8().await.unwrap(), Verdict::TokenWrong as u8, "a listener's proof is no dialler's");
    }

    #[test]
    fn a_token_is_long_and_printable() {
        for text in ["", "short", &"x".repeat(31), &"x".repeat(5000), &format!("{} {}", "x".repeat(20), "y".repeat(20))]
        {
            assert!(Token::new(text).is_err(), "{text}");
        }
        let made = Token::random().unwrap();
        assert_eq!(Token::new(&format!(" {}\n", made.expose())).unwrap(), made);
        assert_ne!(Token::random().unwrap(), made);
    }
}
