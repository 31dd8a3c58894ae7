//! The page of the metrics: what makes a process's metrics count, and renders them for Prometheus and for a collector.
//! Knows no metric.

use crate::{Error, metrics, otlp};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::time::Duration;

/// Observations stay in memory until they are summed up, when a page is rendered or after this interval.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// Renders the page that Prometheus reads.
#[derive(Clone)]
pub struct Exporter {
    handle: PrometheusHandle,
}

impl Exporter {
    pub fn render(&self) -> String {
        rendered(&self.handle)
    }
}

fn rendered(handle: &PrometheusHandle) -> String {
    let page = handle.render();
    page.lines().filter(|line| !metrics::is_past(line)).flat_map(|line| [line, "\n"]).collect()
}

/// Starts counting this process's metrics. Before it, and in processes that never call it, they cost nearly nothing.
pub fn install(labels: &[(&str, &str)]) -> Result<Exporter, Error> {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in metrics::buckets() {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.into()), buckets)?;
    }
    let builder = labels.iter().fold(builder, |builder, (key, value)| builder.add_global_label(*key, *value));
    let handle = builder.install_recorder()?;
    metrics::describe();
    count_panics();
    metrics::log_dropped(0);
    let upkeep = handle.clone();
    // The thread ends with the process, as the recorder does.
    std::thread::Builder::new().name("metrics".into()).spawn(move || {
        loop {
            std::thread::sleep(UPKEEP_EVERY);
            upkeep.run_upkeep();
        }
    })?;
    let page = handle.clone();
    otlp::measure(move || rendered(&page));
    Ok(Exporter { handle })
}

/// Counts panics, and calls the hook that was installed before.
fn count_panics() {
    metrics::panicked(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        metrics::panicked(1);
        before(panic);
    }));
}
