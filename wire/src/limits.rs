//! The limits and timers of HTTP/2 on every connection, the same for every role on both sides.

use std::time::Duration;
use tonic::transport::{Endpoint, Server};

const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Calls under way on one connection; more wait at the client.
pub const STREAMS_MAX: u32 = 256;
/// Streams of one connection that were opened and reset before they were looked at. A client that resets more is
/// disconnected: it costs a client nothing, and a server the work.
pub const RESETS_PENDING_MAX: usize = 20;
/// Streams that this side had to reset because of errors in them.
pub const RESETS_OWN_MAX: usize = 1024;
/// The bytes of one request's headers together.
pub const HEADERS_BYTES_MAX: u32 = 16 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A peer that does not answer a ping for this long has lost its connection.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// A server's limits and timers, the same for every role.
pub fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_pending_accept_reset_streams(Some(RESETS_PENDING_MAX))
        .http2_max_local_error_reset_streams(Some(RESETS_OWN_MAX))
        .http2_max_header_list_size(HEADERS_BYTES_MAX)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}

pub(crate) fn with_limits(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
}
