//! Logs on stderr: stdout belongs to answers. Spans go to a collector if one is named, and to no log.

use crate::{Error, otlp, spans};
use std::io::IsTerminal;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    #[default]
    Text,
    Json,
}

/// What a process tells of itself besides its metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Telling<'a> {
    pub format: Format,
    /// Reads as `info` or `router=debug,info`.
    pub filter: &'a str,
    /// Where a collector listens for OTLP over gRPC: `http://host:4317`.
    pub collector: Option<&'a str>,
    /// Spans of every step, not only of every request.
    pub steps: bool,
}

/// Sets up the process's log, and its spans if there is a collector for them. Once in a process.
pub fn init(telling: Telling<'_>) -> Result<(), Error> {
    let log = log(telling)?;
    let spans = telling.collector.map(otlp::layer).transpose()?;
    let level = if telling.steps { spans::STEPS } else { spans::REQUESTS };
    let wanted = Targets::new().with_target(spans::TARGET, LevelFilter::from_level(level));
    let spans = spans.map(|layer| layer.with_filter(wanted));
    tracing_subscriber::registry().with(spans).with(log).try_init().map_err(|_| Error::LogsTwice)
}

fn log<S>(telling: Telling<'_>) -> Result<Box<dyn Layer<S> + Send + Sync>, Error>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
{
    let filter = telling.filter;
    let parsed = EnvFilter::try_new(filter).map_err(|source| Error::Filter { filter: filter.into(), source })?;
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    // Where nothing wants spans, none is made.
    let parsed =
        parsed.add_directive(NO_SPANS.parse().map_err(|source| Error::Filter { filter: NO_SPANS.into(), source })?);
    Ok(match telling.format {
        Format::Text => log.with_filter(parsed).boxed(),
        Format::Json => log.json().flatten_event(true).with_filter(parsed).boxed(),
    })
}

const NO_SPANS: &str = "span=off";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_filter_is_named() {
        let error = init(Telling { filter: "router=loud", ..Telling::default() }).unwrap_err().to_string();
        assert!(error.contains("router=loud"), "{error}");
    }

    #[test]
    fn a_collector_that_cannot_be_meant_is_named() {
        for endpoint in ["http://[", "https://collector:4317"] {
            let error = init(Telling { collector: Some(endpoint), ..Telling::default() }).unwrap_err().to_string();
            assert!(error.contains(endpoint), "{error}");
        }
    }
}
