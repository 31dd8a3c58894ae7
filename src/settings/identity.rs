//! A process's identity in its cluster: a certificate signed by the authority of the join token, or files that an
//! operator made. Has no knowledge of addresses and opens no connection.
//!
//! Every machine that has the token derives the same authority from it and signs its own certificate with it, so
//! operators distribute only one file. A certificate is valid for a month, and the process renews it long before it
//! expires.

use super::expiry::not_after;
use super::secret;
use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ED25519,
};
use rustls::client::ResolvesClientCert;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SignatureScheme};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use tools::server_trust::certificates;
use wire::{JoinToken, SERVER_NAME, Tls};

const VALID: Duration = Duration::from_secs(30 * 24 * 3600);
/// A third of a certificate's validity: a machine that sleeps for a while does not wake up with an expired certificate.
const RENEWED_AFTER: Duration = Duration::from_secs(10 * 24 * 3600);
/// The most by which the clocks of a cluster may differ.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(300);
const AUTHORITY_PURPOSE: &str = "lockstep 2026 cluster authority ed25519";
const AUTHORITY_NAME: &str = "lockstep cluster";
/// The bytes before the 32 secret bytes of an Ed25519 key in PKCS #8.
const PKCS8_ED25519: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Returns certificates for both sides, signed by the authority derived from the token.
pub fn tls_of_token(token: &JoinToken, role: &str) -> anyhow::Result<Tls> {
    let leaves = Arc::new(RenewedCertificate {
        authority: Authority::of(token)?,
        role: role.into(),
        provider: Arc::new(ring::default_provider()),
        current: Mutex::new(None),
    });
    // Made once now, so that an error is reported at the start.
    leaves.current().context("cannot create a certificate")?;
    let roots = [leaves.authority.certificate()?];
    let (server, client) = builders(roots)?;
    let server = server.with_cert_resolver(leaves.clone());
    let client = client.with_client_cert_resolver(leaves);
    Ok(Tls { server: Arc::new(server), client: Arc::new(client) })
}

/// Returns the time at which the first certificate of a file expires, in seconds since 1970, or None if it cannot be
/// read.
pub fn ends_at(certificate: &Path) -> Option<i64> {
    let chain = certificates(certificate).ok()?;
    chain.iter().filter_map(|certificate| not_after(certificate)).map(OffsetDateTime::unix_timestamp).min()
}

/// Returns certificates for both sides, from PEM files. They must be issued to `lockstep.cluster`.
pub fn tls_of_files(certificate: &Path, key: &Path, authority: &Path) -> anyhow::Result<Tls> {
    let chain = certificates(certificate)?;
    let secret = private_key(key)?;
    let (server, client) = builders(certificates(authority)?)?;
    let unusable = || format!("{} and {} do not match", certificate.display(), key.display());
    let server = server.with_single_cert(chain.clone(), secret.clone_key()).with_context(unusable)?;
    let client = client.with_client_auth_cert(chain, secret).with_context(unusable)?;
    Ok(Tls { server: Arc::new(server), client: Arc::new(client) })
}

pub(super) fn private_key(path: &Path) -> anyhow::Result<PrivateKeyDer<'static>> {
    let text = secret::read_text(path)?;
    PrivateKeyDer::from_pem_slice(text.as_bytes()).with_context(|| format!("no private key in {}", path.display()))
}

type ServerBuilder = rustls::ConfigBuilder<ServerConfig, rustls::server::WantsServerCert>;
type ClientBuilder = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

/// Accepts TLS 1.3 only: a cluster has one version, and no older peers.
fn builders(
    authorities: impl IntoIterator<Item = CertificateDer<'static>>,
) -> anyhow::Result<(ServerBuilder, ClientBuilder)> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).context("the authority's certificate cannot be used")?;
    }
    let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
    let versions = &[&rustls::version::TLS13];
    let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(versions)?;
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions)?;
    Ok((server.with_client_cert_verifier(verifier), client.with_root_certificates(roots)))
}

/// The authority that every holder of the token can derive.
struct Authority {
    key: KeyPair,
}

impl Authority {
    fn of(token: &JoinToken) -> anyhow::Result<Authority> {
        let secret = blake3::derive_key(AUTHORITY_PURPOSE, token.expose().as_bytes());
        let key = PrivatePkcs8KeyDer::from([&PKCS8_ED25519[..], &secret].concat());
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ED25519)
            .context("cannot derive a key from this token")?;
        Ok(Authority { key })
    }

    fn params() -> anyhow::Result<CertificateParams> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name = common_name(AUTHORITY_NAME);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Ok(params)
    }

    fn certificate(&self) -> anyhow::Result<CertificateDer<'static>> {
        Ok(Authority::params()?.self_signed(&self.key)?.der().clone())
    }

    fn sign(&self, role: &str, now: OffsetDateTime, provider: &CryptoProvider) -> anyhow::Result<CertifiedKey> {
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
        params.distinguished_name = common_name(role);
        params.not_before = now - CLOCKS_APART_MAX;
        params.not_after = now + VALID;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate_for(&PKCS_ED25519)?;
        let issuer = Issuer::new(Authority::params()?, &self.key);
        let certificate = params.signed_by(&key, &issuer)?;
        let secret = PrivatePkcs8KeyDer::from(key.serialize_der());
        let secret = provider.key_provider.load_private_key(secret.into())?;
        Ok(CertifiedKey::new(vec![certificate.der().clone()], secret))
    }
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

/// This role's certificate, renewed in time.
struct RenewedCertificate {
    authority: Authority,
    role: String,
    provider: Arc<CryptoProvider>,
    current: Mutex<Option<(Instant, Arc<CertifiedKey>)>>,
}

impl RenewedCertificate {
    fn current(&self) -> anyhow::Result<Arc<CertifiedKey>> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, key)) = current.as_ref().filter(|(made, _)| made.elapsed() < RENEWED_AFTER) {
            debug_assert!(made.elapsed() < VALID);
            return Ok(key.clone());
        }
        let made = Arc::new(self.authority.sign(&self.role, OffsetDateTime::now_utc(), &self.provider)?);
        *current = Some((Instant::now(), made.clone()));
        Ok(made)
    }

    fn current_or_log(&self) -> Option<Arc<CertifiedKey>> {
        self.current().inspect_err(|error| tracing::error!(%error, "cannot create a certificate")).ok()
    }
}

impl std::fmt::Debug for RenewedCertificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Leaves({})", self.role)
    }
}

impl ResolvesServerCert for RenewedCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current_or_log()
    }
}

impl ResolvesClientCert for RenewedCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.current_or_log()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::cluster::coordinator_client::CoordinatorClient;
    use tokio::net::TcpListener;
    use tokio_stream::StreamExt;
    use wire::HandshakeRefusal;
    use wire::{Trust, channel, incoming};

    fn tls(letter: &str, age: Duration) -> Tls {
        let authority = Authority::of(&JoinToken::new(&letter.repeat(40)).unwrap()).unwrap();
        let provider = ring::default_provider();
        let leaf = Arc::new(authority.sign("a test", OffsetDateTime::now_utc() - age, &provider).unwrap());
        let (server, client) = builders([authority.certificate().unwrap()]).unwrap();
        let single = Arc::new(rustls::sign::SingleCertAndKey::from((*leaf).clone()));
        let server = server.with_cert_resolver(single.clone());
        let client = client.with_client_cert_resolver(single);
        Tls { server: Arc::new(server), client: Arc::new(client) }
    }

    /// Checks the error that a dialler gets from a listener that only accepts.
    async fn check(listener: Tls, dialler: Tls, expect: Option<HandshakeRefusal>) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap().to_string();
        let mut incoming = Box::pin(incoming(socket, Trust { token: None, tls: Some(listener) }));
        let channel = channel(&address, Trust { token: None, tls: Some(dialler) });
        let mut client = CoordinatorClient::new(channel);
        let call = client.attach(tokio_stream::empty());
        match expect {
            Some(expect) => {
                let status = call.await.unwrap_err();
                assert_eq!(HandshakeRefusal::cause_of(&status), Some(&expect), "{status:?}");
            }
            None => tokio::select! {
                answered = call => panic!("no server answers: {answered:?}"),
                connection = incoming.next() => assert!(connection.unwrap().is_ok()),
            },
        }
    }

    #[tokio::test]
    async fn certificates_of_one_token_trust_each_other() {
        let young = Duration::ZERO;
        check(tls("a", young), tls("a", young), None).await;
        check(tls("a", young), tls("b", young), Some(HandshakeRefusal::Stranger)).await;
        let old = VALID + CLOCKS_APART_MAX;
        check(tls("a", old), tls("a", young), Some(HandshakeRefusal::Expired)).await;
        check(tls("a", young), tls("a", old), Some(HandshakeRefusal::Expired)).await;
        let token = JoinToken::random().unwrap();
        check(tls_of_token(&token, "one").unwrap(), tls_of_token(&token, "other").unwrap(), None).await;
    }
}
