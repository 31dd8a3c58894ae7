//! Whether a model of the catalogue fits on this machine, as `serve` would place it with its default settings.

use super::plan::place_shape;
use crate::settings::ServeSettings;
use checkpoint::catalogue::CatalogueEntry;
use clap::Parser;
use coordinator::{Blueprint, Unplaceable};
use tools::figures;

/// The settings of `serve` without flags: defaults, and the environment.
#[derive(Parser)]
struct DefaultServeSettings {
    #[command(flatten)]
    settings: ServeSettings,
}

pub fn fit(entry: &CatalogueEntry, context: u32) -> anyhow::Result<Result<Blueprint, Unplaceable>> {
    let words = ["serve".to_owned(), entry.name.to_owned(), "--context".to_owned(), context.to_string()];
    let settings = DefaultServeSettings::try_parse_from(words)?.settings.resolved()?;
    place_shape(&settings, &figures::shape(entry)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::catalogue::entry;
    use coordinator::UnplaceableReason;

    fn on(words: &str, name: &str) -> Result<Blueprint, Unplaceable> {
        let settings =
            DefaultServeSettings::parse_from(format!("serve {words}").split(' ')).settings.resolved().unwrap();
        place_shape(&settings, &figures::shape(entry(name).unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn a_model_takes_its_file_and_the_keys_and_values_of_its_layers() {
        let blueprint = on("--context 1024 --max-running 1", "smollm2").unwrap();
        // Thirty layers of three heads with 64 keys and values each, in two bytes.
        assert_eq!(blueprint.shards[0].kv_bytes, 1024 * 30 * 3 * 2 * 64 * 2);
        assert!(blueprint.shards[0].weight_bytes.abs_diff(98_362_432) < 4096);
        assert_eq!(fit(entry("smollm2").unwrap(), 1024).unwrap().unwrap().context, 1024);
    }

    #[test]
    fn oversized_model_error_names_what_is_lacking() {
        let refused = on("--context 40960 --kv-memory 1GiB", "qwen3:0.6b").unwrap_err();
        // 28 layers of eight heads of 128: 112 KiB a token, so 4.4 GiB.
        let needed = 40_960 * 28 * 8 * 2 * 128 * 2;
        let is_it = matches!(refused.why, UnplaceableReason::Kv { needed: n_bytes, .. } if n_bytes == needed);
        assert!(is_it, "{refused}");
        let refused = on("--context 8192 --kv-memory 100TiB", "llama3.3").unwrap_err();
        assert!(
            matches!(refused.why, UnplaceableReason::Weights { .. } | UnplaceableReason::KvMemory { .. }),
            "{refused}"
        );
    }
}
