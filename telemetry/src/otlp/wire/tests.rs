//! Collectors behind TLS with a certificate of the test's own authority, which require a key.

use super::*;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Response, Status};

const KEY: &str = "a key, a = and a %";

struct Certified {
    authority: String,
    certificate: rcgen::Certificate,
    key: KeyPair,
}

fn certified() -> Certified {
    let mut of_authority = CertificateParams::new(Vec::new()).unwrap();
    of_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(of_authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["localhost".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
    Certified { authority: authority.pem(), certificate, key }
}

struct Guarded;

#[tonic::async_trait]
impl TraceService for Guarded {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let key = request.metadata().get("x-key").and_then(|key| key.to_str().ok());
        if key == Some(KEY) {
            Ok(Response::new(ExportTraceServiceResponse::default()))
        } else {
            Err(Status::unauthenticated("unknown key"))
        }
    }
}

/// Starts both collectors at `localhost` and returns their ports.
async fn collectors(of: &Certified) -> [u16; 2] {
    let identity = Identity::from_pem(of.certificate.pem(), of.key.serialize_pem());
    let by_grpc = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let by_http = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ports = [&by_grpc, &by_http].map(|listener| listener.local_addr().unwrap().port());
    let mut server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity)).unwrap();
    let served = server.add_service(TraceServiceServer::new(Guarded));
    tokio::spawn(served.serve_with_incoming(TcpListenerStream::new(by_grpc)));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let key = PrivateKeyDer::try_from(of.key.serialize_der()).unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![of.certificate.der().clone()], key).unwrap();
    tokio::spawn(answer(by_http, TlsAcceptor::from(Arc::new(config))));
    ports
}

/// Answers over HTTP/1.1, one request per connection.
async fn answer(listener: TcpListener, tls: TlsAcceptor) {
    while let Ok((stream, _)) = listener.accept().await {
        let Ok(mut stream) = tls.accept(stream).await else { continue };
        let (mut received, mut part) = (Vec::new(), [0; 1024]);
        // An empty batch has no body.
        while !received.ends_with(b"\r\n\r\n") {
            let n = stream.read(&mut part).await.unwrap();
            received.extend_from_slice(&part[..n]);
        }
        let has_key = String::from_utf8(received).unwrap().contains(&format!("\r\nx-key: {KEY}\r\n"));
        let status = if has_key { "200 OK" } else { "401 Unauthorized" };
        let reply = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        stream.write_all(reply.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn over_tls_only_trusted_collectors_get_the_key() {
    let certified = self::certified();
    let [by_grpc, by_http] = collectors(&certified).await;
    for (protocol, port) in [(Protocol::Grpc, by_grpc), (Protocol::Http, by_http)] {
        let endpoint = format!("https://localhost:{port}");
        let headers = ExportHeaders::parse("x-key=a%20key%2C%20a%20%3D%20and%20a%20%25").unwrap();
        let authority = Some(certified.authority.clone().into_bytes());
        let right = Collector { endpoint, protocol, headers, authority, ..Collector::default() };
        let send = async |collector: &Collector| {
            CollectorClient::to(collector)
                .unwrap()
                .send(&ExportBatch::Spans(ExportTraceServiceRequest::default()))
                .await
        };
        assert_eq!(send(&right).await.unwrap(), PartialSuccess::default(), "{protocol:?}");
        let keyless = send(&Collector { headers: ExportHeaders::default(), ..right.clone() }).await.unwrap_err();
        assert!(!keyless.is_passing && (keyless.why.contains("401") || keyless.why.contains("Unauth")), "{keyless:?}");
        let by_the_web = send(&Collector { authority: None, ..right.clone() }).await.unwrap_err();
        assert!(by_the_web.why.contains("certificate"), "{by_the_web:?}");
        let elsewhere = send(&Collector { endpoint: format!("https://127.0.0.1:{port}"), ..right.clone() }).await;
        assert!(elsewhere.unwrap_err().why.contains("certificate"), "{protocol:?}: the name is checked");
        let by_another = Some(self::certified().authority.into_bytes());
        let by_another = send(&Collector { authority: by_another, ..right }).await.unwrap_err();
        assert!(by_another.why.contains("certificate"), "{by_another:?}");
    }
}
