//! Who may ask, how much, and when to come again: API keys, what a tenant may use, places to wait.
//!
//! Knows counts and moments: no text, no tokens' values and no replica. Read `keys` (who), `tenants` (how much),
//! `admission` (whether now), `again` (when else).

pub mod admission;
pub mod again;
pub mod keys;
pub mod tenants;
