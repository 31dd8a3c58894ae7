//! SmolLM3: some layers have no positions.

use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition, GgufRules, WindowUse};
use super::llama::LLAMA;
use crate::config::json::keys::JsonKeys;
use crate::config::{LayerSpec, PositionEncoding};
use crate::error::ParseError;

pub const SMOLLM3: FamilyDefinition = FamilyDefinition {
    name: "SmolLM3",
    architecture: "smollm3",
    config: ConfigRules {
        class: "SmolLM3ForCausalLM",
        model_type: "smollm3",
        window: WindowUse::Switched,
        ..LLAMA.config
    },
    readers: ConfigReaders {
        is_local: |keys, layer, _| Ok(!has_rope(keys, layer)?),
        positions: |keys, layer, rope| Ok(if has_rope(keys, layer)? { rope } else { PositionEncoding::None }),
        ..LLAMA.readers
    },
    gguf: GgufRules {
        layer: |_, i, usual| match has_rope_in_turn(i, INTERVAL) {
            true => Ok(usual),
            false => Ok(LayerSpec { positions: PositionEncoding::None, ..usual }),
        },
        ..LLAMA.gguf
    },
    ..LLAMA
};

const INTERVAL: u32 = 4;

fn has_rope(keys: &JsonKeys<'_>, layer: u32) -> Result<bool, ParseError> {
    match keys.lengths("no_rope_layers")? {
        // In this list, one means that a layer has a rope, despite the list's name.
        Some(list) => Ok(list.get(layer as usize).is_none_or(|flag| *flag != 0)),
        None => {
            let interval = keys.optional("no_rope_layer_interval")?.unwrap_or(INTERVAL).max(1);
            Ok(has_rope_in_turn(layer, interval))
        }
    }
}

fn has_rope_in_turn(layer: u32, interval: u32) -> bool {
    !(layer + 1).is_multiple_of(interval)
}
