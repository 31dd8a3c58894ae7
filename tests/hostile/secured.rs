//! The TLS of a router's ports towards clients: its files, handshakes, and one request behind a handshake. Has no
//! knowledge of attacks.

use crate::kinds::Port;
use crate::node::Folder;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The clients' side of a certificate.
pub struct ClientTls(ClientConfig);

/// Shakes hands with a port.
#[derive(Clone)]
pub struct TlsHandshake {
    tls: TlsConnector,
    is_http2: bool,
}

/// Returns the clients' side of a new certificate, and the router's flags for its files.
pub fn files(folder: &Folder) -> (ClientTls, [String; 4]) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = KeyPair::generate().unwrap();
    let root = params.self_signed(&authority).unwrap();
    let mut offered = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    offered.distinguished_name.push(DnType::CommonName, "offered");
    let key = KeyPair::generate().unwrap();
    let leaf = offered.signed_by(&key, &Issuer::from_params(&params, &authority)).unwrap();
    let certificate = folder.write("cert.pem", &crate::pem::pem("CERTIFICATE", leaf.der()));
    let key = folder.write("key.pem", &crate::pem::pem("PRIVATE KEY", &key.serialize_der()));
    let mut roots = RootCertStore::empty();
    roots.add(root.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let client = ClientTls(config.with_root_certificates(roots).with_no_client_auth());
    (client, ["--api-tls-cert".into(), certificate, "--api-tls-key".into(), key])
}

impl ClientTls {
    /// Shakes hands for this protocol.
    pub fn handshake(&self, protocol: &str) -> TlsHandshake {
        let mut config = self.0.clone();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        TlsHandshake { tls: Arc::new(config).into(), is_http2: protocol == "h2" }
    }
}

impl TlsHandshake {
    pub async fn connect(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        self.tls.connect(ServerName::try_from("127.0.0.1").unwrap(), stream).await
    }
}

/// Returns the first bytes of a port's answer to a valid client.
pub async fn request(port: &Port) -> Vec<u8> {
    let handshake = port.tls.as_ref().unwrap();
    let mut stream = handshake.connect(TcpStream::connect(port.address).await.unwrap()).await.unwrap();
    let http2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let http1: &[u8] = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
    stream.write_all(if handshake.is_http2 { http2 } else { http1 }).await.unwrap();
    stream.flush().await.unwrap();
    let mut answer = vec![0; 64];
    let n = stream.read(&mut answer).await.unwrap();
    answer.truncate(n);
    answer
}
