//! Whether a model thinks before it answers, in Anthropic's format. Has no knowledge of any one template: it sets the
//! variables that templates read.

use crate::http::fields::Fields;
use proto::v1;
use router::refusal::Refusal;
use router::replicas::models::text::SWITCHES;
use serde_json::{Map, Value};

const BUDGET: &str = "thinking.budget_tokens";

pub struct ThinkingOptions {
    /// Whether the client receives thoughts, or only an empty block for each.
    pub is_shown: bool,
    /// The most tokens of a thought.
    pub budget: Option<u32>,
}

/// Reads `thinking` into a chat, or into the variables of its template. Without it the template's default applies.
pub fn read(
    fields: &mut Fields,
    chat: v1::Chat,
    variables: &mut Map<String, Value>,
) -> Result<(ThinkingOptions, v1::Chat), Refusal> {
    let Some(mut thinking) = fields.object("thinking")? else {
        return Ok((ThinkingOptions { is_shown: true, budget: None }, chat));
    };
    let kind = thinking.take("type");
    let is_shown = match thinking.take("display").as_ref().map(Value::as_str) {
        None | Some(Some("summarized")) => true,
        Some(Some("omitted")) => false,
        _ => return Err(Refusal::invalid("thinking.display", "must be summarized or omitted")),
    };
    let on = || SWITCHES.map(|name| (name.to_owned(), true.into()));
    let budget = match kind.as_ref().and_then(Value::as_str) {
        Some("enabled") => {
            variables.extend(on());
            Some(budget(&mut thinking)?)
        }
        Some("adaptive") => {
            variables.extend(on());
            None
        }
        Some("disabled") => {
            let chat = v1::Chat { reasoning_effort: "none".into(), ..chat };
            return Ok((ThinkingOptions { is_shown, budget: None }, chat));
        }
        _ => return Err(Refusal::invalid("thinking.type", "must be enabled, adaptive or disabled")),
    };
    Ok((ThinkingOptions { is_shown, budget }, chat))
}

fn budget(thinking: &mut Fields) -> Result<u32, Refusal> {
    let budget = thinking.unsigned("budget_tokens").map_err(|refusal| refusal.renamed(&[("budget_tokens", BUDGET)]))?;
    match budget {
        None => Err(Refusal::invalid(BUDGET, "is missing")),
        Some(0) => Err(Refusal::invalid(BUDGET, "must be at least 1")),
        Some(budget) => Ok(budget),
    }
}
