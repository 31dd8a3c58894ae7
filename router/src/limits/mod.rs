//! Admission: API keys, a tenant's limits, places to wait, and when to retry.
//!
//! Knows counts and moments: no text, no tokens' values and no replica. Read `keys` (which tenant), `tenants` (how
//! much), `shared` (how much of that here), `admission` (whether now), `retry_after` (when to retry).

pub mod admission;
pub mod keys;
pub mod retry_after;
pub mod shared;
pub mod tenants;
