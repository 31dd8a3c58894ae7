//! Logs on stderr, because stdout is for answers; and logs and spans to a collector, if one is configured. Code that
//! logs waits for neither: lines go into a bounded queue, and a separate thread writes them.

mod queue;
mod stderr;

pub use stderr::{flush, write_line};

use crate::{Collector, Error, otlp, spans};
use queue::LogQueue;
use std::io::IsTerminal;
use std::sync::Arc;
use tracing::Level;
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

/// The outputs of a process besides its metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogOptions<'a> {
    pub format: Format,
    /// The form is `info` or `router=debug,info`.
    pub filter: &'a str,
    /// None sends nothing.
    pub collector: Option<&'a Collector>,
}

/// Sets up the process's log, and its spans if there is a collector for them. Call it once per process; it also logs
/// later panics.
pub fn init(options: LogOptions<'_>) -> Result<(), Error> {
    let queue = Arc::new(LogQueue::default());
    let mut layers = vec![log(options, queue.clone())?];
    if let Some(collector) = options.collector {
        let level = if collector.steps { spans::STEPS } else { spans::REQUESTS };
        let targets = Targets::new().with_target(spans::TARGET, LevelFilter::from_level(level));
        let (spans, logs) = otlp::layers(collector)?;
        layers.push(spans.with_filter(targets).boxed());
        layers.push(logs.with_filter(export_filter(options.filter, level)?).boxed());
    }
    tracing_subscriber::registry().with(layers).try_init().map_err(|_| Error::LogsTwice)?;
    Ok(stderr::start(queue, options.format)?)
}

fn log<S>(options: LogOptions<'_>, queue: Arc<LogQueue>) -> Result<Box<dyn Layer<S> + Send + Sync>, Error>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
{
    let log = tracing_subscriber::fmt::layer().with_writer(queue).with_ansi(std::io::stderr().is_terminal());
    // The layer would write them to stderr itself, and wait for its reader.
    let log = log.log_internal_errors(false);
    // Without a layer that records spans, none are made.
    let filter = filter(options.filter, &[NO_SPANS])?;
    Ok(match options.format {
        Format::Text => log.with_filter(filter).boxed(),
        Format::Json => log.json().flatten_event(true).with_filter(filter).boxed(),
    })
}

/// Returns the filter for the collector: the log without the messages of sending itself, which would never end, and the
/// configured spans.
fn export_filter(directives: &str, spans: Level) -> Result<EnvFilter, Error> {
    let within = format!("{}={spans}", spans::TARGET);
    filter(
        directives,
        &[
            &within,
            "telemetry=off",
            "opentelemetry=off",
            "opentelemetry_sdk=off",
            "hyper=off",
            "hyper_util=off",
            "h2=off",
            "tonic=off",
            "tower=off",
            "rustls=off",
        ],
    )
}

fn filter(directives: &str, more: &[&str]) -> Result<EnvFilter, Error> {
    let wrong = |filter: &str, source| Error::Filter { filter: filter.into(), source };
    let mut parsed = EnvFilter::try_new(directives).map_err(|source| wrong(directives, source))?;
    for directive in [&EXPECTED_FAILURES].into_iter().chain(more) {
        parsed = parsed.add_directive(directive.parse().map_err(|source| wrong(directive, source))?);
    }
    Ok(parsed)
}

const NO_SPANS: &str = "span=off";
/// The crate under the tokenizer looks for a seed of its hash tables, and warns of each that does not work.
const EXPECTED_FAILURES: &str = "ptr_hash=error";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Protocol;

    #[test]
    fn a_wrong_filter_is_named() {
        let error = init(LogOptions { filter: "router=loud", ..LogOptions::default() }).unwrap_err().to_string();
        assert!(error.contains("router=loud"), "{error}");
    }

    #[test]
    fn expected_failures_of_a_dependency_are_not_logged() {
        let log = tracing_subscriber::registry().with(filter("info", &[NO_SPANS]).unwrap());
        tracing::subscriber::with_default(log, || {
            assert!(tracing::enabled!(target: "router", Level::WARN));
            assert!(!tracing::enabled!(target: "ptr_hash::build", Level::WARN));
            assert!(tracing::enabled!(target: "ptr_hash::build", Level::ERROR));
        });
    }

    #[test]
    fn a_collector_that_cannot_be_meant_is_named() {
        for protocol in [Protocol::Grpc, Protocol::Http] {
            for endpoint in ["http://[", "ftp://collector:4317", "http:///v1"] {
                let collector = Collector { endpoint: endpoint.into(), protocol, ..Collector::default() };
                let options = LogOptions { collector: Some(&collector), ..LogOptions::default() };
                let error = init(options).unwrap_err().to_string();
                assert!(error.contains(endpoint), "{error}");
            }
        }
    }
}
