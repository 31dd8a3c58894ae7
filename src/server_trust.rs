//! The certificates that a command accepts from a server over HTTPS.

use crate::settings::certificates;
use clap::Args;
use std::path::PathBuf;
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
