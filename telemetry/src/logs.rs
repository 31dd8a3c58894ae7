//! Logs on stderr: stdout belongs to answers.

use crate::Error;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    #[default]
    Text,
    Json,
}

/// Sets up the process's log. `filter` reads as `info` or `router=debug,info`.
pub fn init(format: Format, filter: &str) -> Result<(), Error> {
    let parsed = EnvFilter::try_new(filter).map_err(|source| Error::Filter { filter: filter.into(), source })?;
    let log = tracing_subscriber::fmt().with_env_filter(parsed).with_writer(std::io::stderr);
    let log = log.with_ansi(std::io::stderr().is_terminal());
    let set = match format {
        Format::Text => log.try_init(),
        Format::Json => log.json().flatten_event(true).try_init(),
    };
    set.map_err(|_| Error::LogsTwice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_filter_is_named() {
        let error = init(Format::Text, "router=loud").unwrap_err().to_string();
        assert!(error.contains("router=loud"), "{error}");
    }
}
