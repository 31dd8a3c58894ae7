//! The page of the metrics: starts counting, and renders the metrics for Prometheus and for a collector. Has no
//! knowledge of single metrics.

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
    sorted_lines(&page).into_iter().filter(|line| !metrics::is_past(line)).flat_map(|line| [line, "\n"]).collect()
}

/// Returns the lines of a page with families sorted by name, and counters and gauges by labels, so that two pages
/// differ only where something was counted.
fn sorted_lines(page: &str) -> Vec<&str> {
    let mut families: Vec<Vec<&str>> = page.split("\n\n").map(|family| family.lines().collect()).collect();
    for family in &mut families {
        let is_comment = |line: &&str| line.starts_with('#');
        let n_comments = family.iter().take_while(|line| is_comment(line)).count();
        // The buckets of a histogram keep their own order.
        if !family.iter().take(n_comments).any(|line| line.ends_with(" histogram")) {
            family[n_comments..].sort_unstable();
        }
    }
    families.retain(|family| !family.is_empty());
    families.sort_by_key(|family| family.iter().find_map(|line| line.strip_prefix("# TYPE ")));
    families.into_iter().flat_map(|family| family.into_iter().chain([""])).collect()
}

/// Starts counting this process's metrics. Before that, and in processes that never call it, they cost nearly nothing.
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
    otlp::export_metrics(move || rendered(&page));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_stand_by_name_and_their_series_by_labels() {
        let histogram = "# TYPE c histogram\nc_bucket{le=\"2\"} 1\nc_bucket{le=\"10\"} 1\nc_sum 1\nc_count 1\n\n";
        let page = format!(
            "# HELP b of b\n# TYPE b gauge\nb{{r=\"2\"}} 1\nb{{r=\"1\"}} 9\n\n{histogram}# TYPE a counter\na 1\n\n"
        );
        let sorted = "# HELP b of b\n# TYPE b gauge\nb{r=\"1\"} 9\nb{r=\"2\"} 1\n\n";
        let expected = format!("# TYPE a counter\na 1\n\n{sorted}{histogram}");
        let lines: String = sorted_lines(&page).into_iter().flat_map(|line| [line, "\n"]).collect();
        assert_eq!(lines, expected);
    }
}
