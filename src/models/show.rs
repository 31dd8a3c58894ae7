//! `show`: prints a model's properties from its header. Reads no weights.

use super::hub_name::to_hub_name;
use crate::settings::hub::{HubSettings, sources};
use anyhow::Context;
use checkpoint::Checkpoint;
use checkpoint::catalogue::{self, card_sampling};
use clap::Args;
use indicatif::HumanBytes;
use tools::out;

#[derive(Args)]
pub struct ShowCommand {
    /// Name from `lockstep list`, hub id, or path
    pub model: String,
    /// Print the chat template alone
    #[arg(long)]
    pub template: bool,
    #[command(flatten)]
    pub hub: HubSettings,
}

pub fn show(command: &ShowCommand) -> anyhow::Result<()> {
    let located = catalogue::locate(&to_hub_name(&command.model), &sources(&command.hub)?)?;
    let checkpoint = Checkpoint::open(&located.path)?;
    let template = checkpoint.chat_template()?;
    if command.template {
        let template = template.with_context(|| format!("{} has no chat template", command.model))?;
        return out::print_line(template.source());
    }
    let mut rows = rows(&checkpoint);
    let n_bytes = catalogue::bytes_of(&located.path);
    rows.push(("size", HumanBytes(n_bytes).to_string()));
    rows.push((
        "chat template",
        if template.is_some() { "yes (--template prints it)" } else { "none: use completions" }.into(),
    ));
    rows.push(("sampling", sampling(&command.model, &checkpoint)));
    rows.push(("path", located.path.display().to_string()));
    let line = |(name, value): &(&str, String)| format!("{name:<16} {value}\n");
    out::print(&rows.iter().map(line).collect::<String>())
}

fn rows(checkpoint: &Checkpoint) -> Vec<(&'static str, String)> {
    let spec = checkpoint.spec();
    let kinds: Vec<&str> = checkpoint.quantization().iter().map(|dtype| dtype.name()).collect();
    let heads = match spec.n_kv_heads == spec.n_heads {
        true => format!("{} of {}", spec.n_heads, spec.head_dim),
        false => format!("{} of {}, {} for keys and values", spec.n_heads, spec.head_dim, spec.n_kv_heads),
    };
    vec![
        ("model", spec.name.clone()),
        ("family", spec.family.name().to_owned()),
        ("quantization", kinds.join("+")),
        ("context", format!("{} tokens", spec.context)),
        ("layers", spec.n_layers.to_string()),
        ("width", format!("{}, {} in the MLP", spec.hidden, spec.inner)),
        ("heads", heads),
        ("vocabulary", format!("{} tokens", spec.vocab)),
    ]
}

/// Returns the sampling of `run` without flags.
fn sampling(model: &str, checkpoint: &Checkpoint) -> String {
    if let Some(card) = card_sampling(model) {
        let top_k = card.top_k.map_or_else(String::new, |top_k| format!(", top_k {top_k}"));
        return format!("temperature {}, top_p {}{top_k} (the model card's)", card.temperature, card.top_p);
    }
    let own = checkpoint.defaults();
    let value = |name: &str, value: Option<String>| value.map(|value| format!("{name} {value}"));
    let parts = [
        value("temperature", own.temperature.map(|n| n.to_string())),
        value("top_p", own.top_p.map(|n| n.to_string())),
        value("top_k", own.top_k.map(|n| n.to_string())),
    ];
    let given_parts: Vec<String> = parts.into_iter().flatten().collect();
    if given_parts.is_empty() {
        "temperature 1".to_owned()
    } else {
        format!("{} (the model's)", given_parts.join(", "))
    }
}
