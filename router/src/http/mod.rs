//! HTTP to the outside.

use crate::Error;
use crate::generate::Front;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub async fn serve(front: Arc<Front>, listener: TcpListener, shutdown: CancellationToken) -> Result<(), Error> {
    let router: axum::Router = axum::Router::new();
    let _ = front;
    axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await.map_err(Error::Http)
}
