//! A client's certificate while its connection is open: it ends when the certificate expires, or when the authorities
//! change and no longer accept it. Has no knowledge of what is sent on the connection.

use crate::offered::TlsConfigs;
use rustls::CertificateError;
use rustls::pki_types::{CertificateDer, UnixTime};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// A time after the end of any certificate, in seconds since 1970: the year 9999 ends before.
const FAR: u64 = 253_402_300_800;
/// The longest pause between two checks: a machine's clock may be set.
const CHECK_EVERY: Duration = Duration::from_secs(60);
/// The shortest one.
const CHECK_PAUSE: Duration = Duration::from_millis(50);

/// The certificate that a connection's client has shown.
#[derive(Clone, Debug)]
pub struct ClientCertificate {
    ended: CancellationToken,
    /// Ends with the connection and with the last copy of this.
    _watched: Arc<AbortOnDropHandle<()>>,
}

impl ClientCertificate {
    pub(crate) fn watch(chain: PresentedChain, offers: watch::Receiver<TlsConfigs>) -> ClientCertificate {
        let ended = CancellationToken::new();
        let watched = tokio::spawn(end_with(chain, offers, ended.clone()));
        ClientCertificate { ended, _watched: Arc::new(AbortOnDropHandle::new(watched)) }
    }

    /// Is cancelled when the certificate is no longer accepted.
    pub fn ended(&self) -> &CancellationToken {
        &self.ended
    }
}

async fn end_with(chain: PresentedChain, mut offers: watch::Receiver<TlsConfigs>, ended: CancellationToken) {
    loop {
        let offer = offers.borrow_and_update().clone();
        let now = UnixTime::now();
        if chain.verify(&offer, now).is_err() {
            ended.cancel();
            return;
        }
        let until = chain.ends_at(&offer).map_or(CHECK_EVERY, |at| {
            // It is valid in its last second.
            Duration::from_secs((at + 1).saturating_sub(now.as_secs())).clamp(CHECK_PAUSE, CHECK_EVERY)
        });
        tokio::select! {
            changed = offers.changed() => if changed.is_err() {
                // The listener has ended, so there is no later offer; the certificate still expires.
                sleep(until).await;
            },
            () = sleep(until) => {}
        }
    }
}

/// The certificates that a client has shown, its own first.
pub(crate) struct PresentedChain(Vec<CertificateDer<'static>>);

impl PresentedChain {
    pub(crate) fn of(chain: &[CertificateDer<'_>]) -> PresentedChain {
        PresentedChain(chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
    }

    /// Returns why it is not accepted at this time.
    pub(crate) fn verify(&self, offer: &TlsConfigs, now: UnixTime) -> Result<(), rustls::Error> {
        let (Some(verifier), [own, others @ ..]) = (&offer.verifier, self.0.as_slice()) else { return Ok(()) };
        verifier.verify_client_cert(own, others, now).map(drop)
    }

    /// Returns the last second in which it is accepted, as the verifier reports it; None if it has another reason.
    fn ends_at(&self, offer: &TlsConfigs) -> Option<u64> {
        let mut at = FAR;
        // Each step finds a certificate of the chain that expires earlier.
        for _ in 0..=self.0.len() {
            match self.verify(offer, UnixTime::since_unix_epoch(Duration::from_secs(at))) {
                Ok(()) => return Some(at),
                Err(rustls::Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) => {
                    at = not_after.as_secs();
                }
                Err(_) => return None,
            }
        }
        None
    }
}

impl fmt::Debug for PresentedChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PresentedChain({} certificates)", self.0.len())
    }
}
