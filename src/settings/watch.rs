//! A process's log, and the data that it sends to a collector. The same for every role.

use super::choices::{LogFormat, OtlpProtocol};
use anyhow::{Context, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use telemetry::{Collector, ExportHeaders};

/// The default log filter. The tokenizer's crate logs its tables as it builds them, which does not help an operator.
pub const LOG: &str = "info,tk_encode=warn";

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct WatchSettings {
    /// Format of logs, which go to stderr
    #[arg(long, env = "LOCKSTEP_LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// Log filter, such as info or router=debug,info
    #[arg(long, env = "LOCKSTEP_LOG", default_value = LOG)]
    pub log: String,
    /// OTLP address of an OpenTelemetry collector, such as http://host:4317 [default: nothing is sent]
    #[arg(long, alias = "otlp", env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// OTLP protocol of the collector
    #[arg(long, env = "OTEL_EXPORTER_OTLP_PROTOCOL", value_enum, default_value = "grpc")]
    pub otlp_protocol: OtlpProtocol,
    /// Headers to send to the collector, as name=value,name=value
    #[arg(long, env = "OTEL_EXPORTER_OTLP_HEADERS", value_name = "HEADERS", hide_env_values = true)]
    pub otlp_headers: Option<String>,
    /// CA certificate of an https collector, as PEM [default: public authorities]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_CERTIFICATE", value_name = "FILE")]
    pub otlp_certificate: Option<String>,
    /// Fraction of traces to record, 0 to 1; a trace that the caller began is recorded if the caller records it
    #[arg(long, env = "LOCKSTEP_OTLP_SAMPLE", value_name = "RATIO", default_value_t = 1.0)]
    pub otlp_sample: f64,
    /// Seconds between exports of metrics; 0 exports none
    #[arg(long, env = "LOCKSTEP_OTLP_METRICS_SECONDS", value_name = "SECONDS", default_value_t = 15)]
    pub otlp_metrics_seconds: u64,
}

impl WatchSettings {
    /// Treats empty values as unset, as the standard of these variables requires: Compose sets variables that have no
    /// value.
    pub fn resolved(mut self) -> anyhow::Result<WatchSettings> {
        let is_set = |text: &String| !text.is_empty();
        self.otlp_endpoint = self.otlp_endpoint.filter(is_set);
        self.otlp_certificate = self.otlp_certificate.filter(is_set);
        let is_url = |url: &String| url.contains(':') && !url.contains(char::is_whitespace);
        if let Some(endpoint) = self.otlp_endpoint.as_ref().filter(|url| !is_url(url)) {
            bail!("--otlp-endpoint {endpoint} is not a collector's URL: give one such as http://127.0.0.1:4317");
        }
        let ratio = self.otlp_sample;
        ensure!((0.0..=1.0).contains(&ratio), "--otlp-sample is {ratio}; it must be from 0 to 1");
        Ok(self)
    }

    /// The collector, if one is configured.
    pub fn collector(&self) -> anyhow::Result<Option<Collector>> {
        let Some(endpoint) = self.otlp_endpoint.clone() else { return Ok(None) };
        let protocol = match self.otlp_protocol {
            OtlpProtocol::Grpc => telemetry::Protocol::Grpc,
            OtlpProtocol::Http => telemetry::Protocol::Http,
        };
        let headers =
            ExportHeaders::parse(self.otlp_headers.as_deref().unwrap_or_default()).context("--otlp-headers")?;
        let read = |path: &String| std::fs::read(path).with_context(|| format!("cannot read {path}"));
        let authority = self.otlp_certificate.as_ref().map(read).transpose().context("--otlp-certificate")?;
        let metrics_every = (self.otlp_metrics_seconds > 0).then(|| Duration::from_secs(self.otlp_metrics_seconds));
        let sample = self.otlp_sample;
        Ok(Some(Collector { endpoint, protocol, headers, authority, sample, metrics_every, ..Collector::default() }))
    }
}
