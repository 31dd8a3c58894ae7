//! The certificate for clients of the APIs, from files that may change while it is in use. `wire` presents it.

use super::RouterSettings;
use super::identity::{self, private_key};
use anyhow::{Context, bail};
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tools::server_trust::certificates;
use wire::TlsOffer;

/// The files of TLS towards clients.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiTlsFiles {
    certificate: PathBuf,
    key: PathBuf,
    client_authority: Option<PathBuf>,
}

impl ApiTlsFiles {
    /// Returns None if clients are served without TLS.
    pub fn of(settings: &RouterSettings) -> anyhow::Result<Option<ApiTlsFiles>> {
        match (&settings.api_tls_cert, &settings.api_tls_key, &settings.api_client_ca) {
            (Some(certificate), Some(key), authority) => Ok(Some(ApiTlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                client_authority: authority.clone(),
            })),
            (None, None, None) => Ok(None),
            _ => bail!("give both --api-tls-cert and --api-tls-key; --api-client-ca needs both"),
        }
    }

    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let all = [Some(&self.certificate), Some(&self.key), self.client_authority.as_ref()];
        all.into_iter().flatten().map(PathBuf::as_path)
    }

    /// Returns the time at which the certificate expires, in seconds since 1970.
    pub fn ends_at(&self) -> Option<i64> {
        identity::ends_at(&self.certificate)
    }

    /// Reads the current contents of the files.
    pub fn read(&self) -> anyhow::Result<TlsOffer> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
        let verifier = self.client_authority.as_deref().map(|path| verifier(path, provider)).transpose()?;
        let builder = match verifier.clone() {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(verifier),
        };
        let (certificate, key) = (&self.certificate, &self.key);
        let unusable = || format!("{} and {} do not match", certificate.display(), key.display());
        let config = builder.with_single_cert(certificates(certificate)?, private_key(key)?).with_context(unusable)?;
        Ok(TlsOffer { config, verifier })
    }
}

/// Returns the check of clients' certificates against these authorities.
fn verifier(path: &Path, provider: Arc<CryptoProvider>) -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(path)? {
        roots.add(authority).with_context(|| format!("a certificate in {} cannot be used", path.display()))?;
    }
    Ok(WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?)
}
