//! Puts the loop and the gRPC server together. The caller owns the sockets and the end.

use super::grpc::CoordinatorService;
use crate::replica::Replica;
use crate::replica::announcement::Announcement;
use crate::{Config, Error};
use cluster::Claim;
use std::pin::pin;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use types::Epoch;
use wire::{ConnectionFuture, Incoming};

/// Serves a replica over incoming connections until `shutdown`; then accepts no requests, lets running ones finish, and
/// returns.
pub fn serve(incoming: Incoming, config: Config, claim: Claim, shutdown: CancellationToken) -> ConnectionFuture<Error> {
    Box::pin(run(incoming, config, claim, shutdown))
}

async fn run(incoming: Incoming, config: Config, mut claim: Claim, shutdown: CancellationToken) -> Result<(), Error> {
    let (events, queue) = mpsc::channel(config.limits.events_max);
    let closing = CancellationToken::new();
    let close_max = config.waits.close_max;
    let router = wire::server().add_service(CoordinatorService::server(events, &config));
    let mut server = pin!(router.serve_with_incoming_shutdown(incoming, closing.cancelled()));
    let epoch = Epoch { incarnation: claim.incarnation(), n: 0 };
    let (announce, mut announced) = watch::channel(Announcement::default());
    let mut replica = pin!(Replica::new(config, epoch, announce, claim.others()).run(queue, shutdown));
    let result = loop {
        tokio::select! {
            biased;
            ended = &mut server => break match ended {
                Ok(()) => Err(Error::Server("the listener has ended".into())),
                Err(error) => Err(Error::Server(error.into())),
            },
            // Ends at once: the holder of the later claim serves, and frames of this one's epochs are refused.
            lost = claim.wait_lost() => break Err(Error::ClaimLost(lost)),
            Ok(()) = announced.changed() => {
                let announcement = announced.borrow_and_update().clone();
                claim.update_registration(|registration| announcement.write(registration));
            }
            result = &mut replica => {
                closing.cancel();
                // The streams have ended; a peer that does not close its connection is not waited for.
                let _late = timeout(close_max, server).await;
                break result;
            }
        }
    };
    claim.release().await;
    result
}
