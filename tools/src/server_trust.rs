//! The certificates that a command accepts from a server over HTTPS.

use anyhow::{Context, ensure};
use clap::Args;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::path::{Path, PathBuf};
use ureq::Agent;
use ureq::config::ConfigBuilder;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::typestate::AgentScope;

#[derive(Args, Clone, Debug, Default)]
pub struct ServerTrust {
    /// PEM file with the CA of the server's certificate [default: the public authorities]
    #[arg(long = "tls-ca", value_name = "FILE")]
    pub server_ca: Option<PathBuf>,
}

impl ServerTrust {
    pub fn agent(&self, config: ConfigBuilder<AgentScope>) -> anyhow::Result<Agent> {
        let Some(path) = &self.server_ca else { return Ok(config.build().into()) };
        let roots = certificates(path)?.iter().map(|der| Certificate::from_der(der).to_owned()).collect::<Vec<_>>();
        let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots)).build();
        Ok(config.tls_config(tls).build().into())
    }
}

/// Returns the certificates of a PEM file.
pub fn certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let unreadable = || format!("no certificates can be read from {}", path.display());
    let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).with_context(unreadable)?.collect();
    let read = read.with_context(unreadable)?;
    ensure!(!read.is_empty(), "there is no certificate in {}", path.display());
    Ok(read)
}
