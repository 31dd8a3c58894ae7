//! The models of the catalogue that fit on this machine. The caller's placement decides whether one fits.

use checkpoint::catalogue::{CATALOGUE, CatalogueEntry};
use coordinator::{Blueprint, Unplaceable, UnplaceableReason};
use indicatif::HumanBytes;
use serde_json::{Value, json};
use std::fmt;

/// Places a model of the catalogue on this machine, with this context.
pub type Fits<'a> = &'a dyn Fn(&CatalogueEntry, u32) -> anyhow::Result<Result<Blueprint, Unplaceable>>;

/// Whether one model fits, with this context.
pub struct CatalogueFit {
    context: u32,
    placed: Result<Blueprint, Unplaceable>,
}

/// Returns the result for each model of the catalogue, in its order.
pub fn fit_catalogue(context: u32, fits: Fits<'_>) -> anyhow::Result<Vec<CatalogueFit>> {
    let fitting = |entry: &CatalogueEntry| {
        let context = context.min(entry.figures.context);
        Ok(CatalogueFit { context, placed: fits(entry, context)? })
    };
    CATALOGUE.iter().map(fitting).collect()
}

impl CatalogueFit {
    pub fn json(&self) -> Value {
        let of = |bytes: fn(&coordinator::Shard) -> u64| match &self.placed {
            Ok(blueprint) => Some(blueprint.shards.iter().map(bytes).sum::<u64>()),
            Err(_) => None,
        };
        json!({
            "fits": self.placed.is_ok(),
            "context": self.context,
            "weight_bytes": of(|shard| shard.weight_bytes),
            "kv_bytes": of(|shard| shard.kv_bytes),
            "why_not": self.placed.as_ref().err().map(ToString::to_string),
        })
    }
}

impl fmt::Display for CatalogueFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.placed {
            Ok(_) => write!(f, "yes, {} tokens", self.context),
            Err(Unplaceable { why: UnplaceableReason::Weights { needed, available, .. }, .. }) => {
                write!(f, "no: weights of {}, memory of {}", HumanBytes(*needed), HumanBytes(*available))
            }
            Err(Unplaceable { why: UnplaceableReason::Kv { context, needed, available, .. }, .. }) => {
                let (needed, available) = (HumanBytes(*needed), HumanBytes(*available));
                write!(f, "no: {context} tokens need {needed} of KV, {available} are left")
            }
            Err(other) => write!(f, "no: {}", other.why),
        }
    }
}
