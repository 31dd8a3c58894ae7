//! Converts the page of the metrics to OTLP. The page is the only source, so that there is one way to count. Has no
//! knowledge of single metrics, except for names that OpenTelemetry writes differently.

use crate::metrics::convention;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, Sum,
};

const CUMULATIVE: i32 = AggregationTemporality::Cumulative as i32;

/// The interval that counters cover, as Unix time in nanoseconds.
#[derive(Clone, Copy)]
struct CounterInterval {
    since: u64,
    now: u64,
}

/// Returns every metric of a page.
pub fn read(page: &str, since: u64, now: u64) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = Vec::new();
    let (mut name, mut help) = ("", "");
    for line in page.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            (_, help) = described.split_once(' ').unwrap_or((described, ""));
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (of, kind) = typed.split_once(' ').unwrap_or((typed, ""));
            name = of;
            metrics.push(empty(name, std::mem::take(&mut help), kind));
        } else if let (Some(sample), Some(metric)) = (MetricLine::read(line), metrics.last_mut()) {
            add(metric, name, sample, CounterInterval { since, now });
        }
    }
    metrics
}

pub fn n_points(metrics: &[Metric]) -> u64 {
    let of = |metric: &Metric| match &metric.data {
        Some(Data::Gauge(gauge)) => gauge.data_points.len(),
        Some(Data::Sum(sum)) => sum.data_points.len(),
        Some(Data::Histogram(histogram)) => histogram.data_points.len(),
        _ => 0,
    };
    metrics.iter().map(of).sum::<usize>() as u64
}

fn empty(name: &str, help: &str, kind: &str) -> Metric {
    let (otel_name, unit) = convention(name);
    let data = match kind {
        "counter" => {
            Data::Sum(Sum { data_points: Vec::new(), aggregation_temporality: CUMULATIVE, is_monotonic: true })
        }
        "histogram" => Data::Histogram(Histogram { data_points: Vec::new(), aggregation_temporality: CUMULATIVE }),
        _ => Data::Gauge(Gauge::default()),
    };
    Metric {
        name: otel_name.into(),
        description: help.into(),
        unit: unit.into(),
        data: Some(data),
        ..Metric::default()
    }
}

/// A line that is not a comment.
struct MetricLine<'a> {
    name: &'a str,
    labels: Vec<(&'a str, String)>,
    value: f64,
}

impl MetricLine<'_> {
    fn read(line: &str) -> Option<MetricLine<'_>> {
        let end = line.find(['{', ' '])?;
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest)?,
            None => (Vec::new(), rest),
        };
        let value = rest.trim().parse().ok()?;
        Some(MetricLine { name, labels, value })
    }
}

/// Parses labels after the opening brace: `a="b",c="d"} 1`.
fn labels(mut rest: &str) -> Option<(Vec<(&str, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let (value, behind) = unquoted(quoted)?;
        labels.push((name, value));
        rest = behind;
    }
}

/// Splits at the closing quote: the text before it, and the rest.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((i, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[i + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

fn add(metric: &mut Metric, name: &str, sample: MetricLine<'_>, span: CounterInterval) {
    match &mut metric.data {
        Some(Data::Gauge(gauge)) => gauge.data_points.push(number(sample, CounterInterval { since: 0, ..span })),
        Some(Data::Sum(sum)) => sum.data_points.push(number(sample, span)),
        Some(Data::Histogram(histogram)) => observe(&mut histogram.data_points, name, sample, span),
        _ => {}
    }
}

fn number(sample: MetricLine<'_>, span: CounterInterval) -> NumberDataPoint {
    NumberDataPoint {
        attributes: attributes(sample.labels),
        start_time_unix_nano: span.since,
        time_unix_nano: span.now,
        value: Some(Number::AsDouble(sample.value)),
        ..NumberDataPoint::default()
    }
}

/// Adds a line of a histogram to its series: cumulative buckets, sum and count follow each other.
fn observe(points: &mut Vec<HistogramDataPoint>, name: &str, mut sample: MetricLine<'_>, span: CounterInterval) {
    let bound = sample.labels.iter().position(|(label, _)| *label == "le").map(|i| sample.labels.swap_remove(i).1);
    // A bucket's label may stand at any place among the others.
    sample.labels.sort_unstable();
    let (end, value) = (sample.name.strip_prefix(name).unwrap_or_default(), sample.value);
    let attributes = attributes(sample.labels);
    if points.last().is_none_or(|point| point.attributes != attributes) {
        points.push(HistogramDataPoint {
            attributes,
            start_time_unix_nano: span.since,
            time_unix_nano: span.now,
            ..HistogramDataPoint::default()
        });
    }
    let Some(point) = points.last_mut() else { return };
    match (end, bound.as_deref().map(str::parse::<f64>)) {
        ("_bucket", Some(Ok(bound))) => {
            let below: u64 = point.bucket_counts.iter().sum();
            point.bucket_counts.push((value as u64).saturating_sub(below));
            point.explicit_bounds.extend(bound.is_finite().then_some(bound));
        }
        ("_sum", _) => point.sum = Some(value),
        ("_count", _) => point.count = value as u64,
        _ => {}
    }
}

/// Returns labels as attributes, under OpenTelemetry's names.
fn attributes(labels: Vec<(&str, String)>) -> Vec<KeyValue> {
    let of = |(name, value): (&str, String)| KeyValue {
        key: convention(name).0.into(),
        value: Some(AnyValue { value: Some(Value::StringValue(value)) }),
        ..KeyValue::default()
    };
    labels.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# HELP lockstep:steps_total Steps that were planned.
# TYPE lockstep:steps_total counter
lockstep:steps_total{model_name="a \"b\", c\\",replica="one"} 7
lockstep:steps_total{replica="other"} 2

# TYPE gen_ai_server_request_duration_seconds histogram
gen_ai_server_request_duration_seconds_bucket{gen_ai_operation_name="chat",le="0.5"} 1
gen_ai_server_request_duration_seconds_bucket{gen_ai_operation_name="chat",le="2"} 3
gen_ai_server_request_duration_seconds_bucket{gen_ai_operation_name="chat",le="+Inf"} 4
gen_ai_server_request_duration_seconds_sum{gen_ai_operation_name="chat"} 9.5
gen_ai_server_request_duration_seconds_count{gen_ai_operation_name="chat"} 4

# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 3
"#;

    #[test]
    fn a_page_is_read_as_it_was_meant() {
        let metrics = read(PAGE, 5, 6);
        let names: Vec<&str> = metrics.iter().map(|metric| &*metric.name).collect();
        assert_eq!(names, ["lockstep:steps_total", "gen_ai.server.request.duration", "vllm:num_requests_running"]);
        assert_eq!((metrics[0].description.as_str(), metrics[1].unit.as_str()), ("Steps that were planned.", "s"));
        let Some(Data::Sum(sum)) = &metrics[0].data else { panic!("no counter") };
        let Some(Value::StringValue(model)) = sum.data_points[0].attributes[0].value.clone().unwrap().value else {
            panic!("no text")
        };
        assert_eq!((sum.data_points.len(), &*model, sum.is_monotonic), (2, r#"a "b", c\"#, true));
        assert_eq!((sum.data_points[0].start_time_unix_nano, sum.data_points[0].time_unix_nano), (5, 6));
        let Some(Data::Histogram(histogram)) = &metrics[1].data else { panic!("no histogram") };
        let [point] = &histogram.data_points[..] else { panic!("one series") };
        assert_eq!((&point.bucket_counts[..], &point.explicit_bounds[..]), (&[1, 2, 1][..], &[0.5, 2.0][..]));
        assert_eq!((point.sum, point.count), (Some(9.5), 4));
        assert_eq!(point.attributes[0].key, "gen_ai.operation.name");
        let Some(Data::Gauge(gauge)) = &metrics[2].data else { panic!("no gauge") };
        assert_eq!(gauge.data_points[0].value, Some(Number::AsDouble(3.0)));
        assert_eq!(n_points(&metrics), 4);
    }

    #[test]
    fn what_is_no_page_is_passed_over() {
        for odd in ["", "# TYPE", "a{b=\"c", "# TYPE a histogram\na_bucket{le=\"x\"} 1\na 2", "a b c\n{}\n# HELP"] {
            assert!(n_points(&read(odd, 0, 0)) <= 1, "{odd}");
        }
    }
}
