//! Checks that several settings share.

use anyhow::ensure;

pub fn at_least_one(name: &str, value: impl Into<u64>) -> anyhow::Result<()> {
    ensure!(value.into() > 0, "--{name} is 0; it must be at least 1");
    Ok(())
}
