//! `quantize`: writes a model again with fewer bits for each weight, and shows how far it is.

use super::locate_or_fetch;
use crate::settings::hub::HubSettings;
use clap::Args;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use quantize::{QuantizeProgress, QuantizeReport, Recipe};
use std::path::PathBuf;
use tools::out;

#[derive(Args)]
pub struct QuantizeCommand {
    /// A .gguf file, or a name as for `lockstep pull`; best with F32, F16, BF16 or Q8_0 weights
    pub model: String,
    /// The .gguf file to write; replaced if it exists
    pub output: PathBuf,
    /// Types of the weights, under the names of llama.cpp: q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k_s, q3_k_m, q3_k_l,
    /// q4_k_s, q4_k_m, q5_k_s, q5_k_m, q6_k, f16, bf16
    #[arg(long = "type", value_name = "TYPE", default_value = "q4_k_m")]
    pub recipe: Recipe,
    #[command(flatten)]
    pub hub: HubSettings,
}

pub fn write_quantized(command: &QuantizeCommand) -> anyhow::Result<()> {
    let model = locate_or_fetch(&command.model, &command.hub)?.path;
    let bar = ProgressBar::no_length();
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let report = quantize::file(&model, &command.output, command.recipe, &mut |progress: QuantizeProgress<'_>| {
        bar.set_length(progress.total);
        bar.set_message(progress.tensor.to_owned());
        bar.set_position(progress.done);
    });
    bar.finish_and_clear();
    out::print_line(&format!("{}: {}", command.output.display(), summary(&report?)))
}

fn summary(report: &QuantizeReport) -> String {
    let types: Vec<String> = report.types.iter().map(|(dtype, n)| format!("{n} {}", dtype.name())).collect();
    let (before, after) = (HumanBytes(report.bytes_before), HumanBytes(report.bytes_after));
    format!("{after}, was {before}; tensors: {}", types.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::Dtype;

    #[test]
    fn a_summary_has_sizes_and_types() {
        let types = vec![(Dtype::Q4K, 193), (Dtype::F32, 65)];
        let report = QuantizeReport { bytes_before: 16 << 30, bytes_after: 5 << 30, types };
        assert_eq!(summary(&report), "5.00 GiB, was 16.00 GiB; tensors: 193 Q4_K, 65 F32");
    }

    #[test]
    fn help_lists_every_type() {
        let program = crate::args::program();
        let command = program.find_subcommand("quantize").unwrap();
        let argument = command.get_arguments().find(|argument| argument.get_long() == Some("type")).unwrap();
        let help = argument.get_help().unwrap().to_string();
        let listed = help.rsplit(": ").next().unwrap();
        assert_eq!(listed.split_whitespace().collect::<Vec<_>>().join(" "), Recipe::names());
    }
}
