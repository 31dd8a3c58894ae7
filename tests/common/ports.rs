//! Ports for processes that need a port before they listen, or the same port after a restart.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::net::TcpListener;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a port without a listener, from which no connection can come either: the system takes the ports of
/// connections from 32,768 on. Otherwise one of another test's thousands of clients would sooner or later hold it.
pub fn free_port(host: &str, among: Range<u32>) -> u16 {
    static N_LOOKED_AT: AtomicU32 = AtomicU32::new(0);
    assert!(among.end <= 32_000, "connections come from there");
    // Processes of tests that run at the same time begin at distant ports.
    let first = std::process::id().wrapping_mul(61);
    let next = || first.wrapping_add(N_LOOKED_AT.fetch_add(1, Ordering::Relaxed)) % (among.end - among.start);
    let ports = std::iter::repeat_with(|| (among.start + next()) as u16);
    ports.take(among.len()).find(|port| TcpListener::bind((host, *port)).is_ok()).expect("no port is free")
}
