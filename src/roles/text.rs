//! The text handling of a router's models by its settings: the chat template, and the formats of tool calls and
//! thoughts. Has no knowledge of requests.

use crate::settings::RouterSettings;
use anyhow::{Context as _, bail};
use checkpoint::catalogue::{self, CardSampling};
use checkpoint::{ChatTemplate, Checkpoint, SamplingDefaults};
use router::ModelText;
use std::path::Path;

/// Returns the text of the router's first model, to which the settings refer. `model` is its name there.
pub fn first_model_text(checkpoint: &Checkpoint, model: &str, settings: &RouterSettings) -> anyhow::Result<ModelText> {
    let mut text = ModelText::of(checkpoint)?;
    text.card = catalogue::card_sampling(model).map_or_else(SamplingDefaults::default, recommended);
    if let Some(given_template) = &settings.chat_template {
        let source = read_template(given_template)?;
        let like = |own: &ChatTemplate| own.with_source(&source);
        let template = text.template.as_ref().map_or_else(|| ChatTemplate::new(&source, None, None), like);
        text = text.with_template(template.context("--chat-template")?);
    }
    text.trusts_templates = settings.trust_request_chat_template;
    text.variables = settings.default_chat_template_kwargs.as_deref().map_or(Ok(Default::default()), variables)?;
    let calls = settings.tool_call_parser.as_deref();
    let text = text.with_dialect(calls, None).context("--tool-call-parser")?;
    text.with_dialect(None, settings.reasoning_parser.as_deref()).context("--reasoning-parser")
}

fn recommended(card: CardSampling) -> SamplingDefaults {
    let CardSampling { temperature, top_p, top_k } = card;
    SamplingDefaults { temperature: Some(temperature), top_p: Some(top_p), top_k, ..SamplingDefaults::default() }
}

/// Checks that the given template can be read, before anything starts.
pub fn check_template(settings: &RouterSettings) -> anyhow::Result<()> {
    let Some(given_template) = &settings.chat_template else { return Ok(()) };
    ChatTemplate::new(&read_template(given_template)?, None, None).map(drop).context("--chat-template")
}

/// Returns the text of another model.
pub fn other_model_text(checkpoint: &Checkpoint) -> anyhow::Result<ModelText> {
    Ok(ModelText::of(checkpoint)?)
}

fn variables(json: &str) -> anyhow::Result<serde_json::Map<String, serde_json::Value>> {
    serde_json::from_str(json).context("--default-chat-template-kwargs must be a JSON object")
}

/// Returns the text of a template file, or the template itself: like vLLM's flag, ours accepts both.
fn read_template(path_or_template: &str) -> anyhow::Result<String> {
    match std::fs::read_to_string(Path::new(path_or_template)) {
        Ok(source) => Ok(source),
        Err(_) if path_or_template.contains("{{") || path_or_template.contains("{%") => Ok(path_or_template.to_owned()),
        Err(error) => bail!("--chat-template {path_or_template} is neither a readable file nor a template: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::ServeSettings;
    use crate::settings::tests::parse_settings;

    fn read(words: &str) -> anyhow::Result<ModelText> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/llama-f32-tied");
        first_model_text(&Checkpoint::open(&folder)?, "smollm2", &parse_settings::<ServeSettings>(words).router)
    }

    #[test]
    fn a_template_and_the_names_of_forms_are_taken_or_refused_with_the_list() {
        let text = read("--chat-template {{messages[0].content}} --tool-call-parser hermes --reasoning-parser qwen3");
        let text = text.unwrap();
        assert_eq!(text.card.temperature, Some(0.2), "as its card in the catalogue");
        assert_eq!(text.template.unwrap().source(), "{{messages[0].content}}");
        assert!(text.dialect.has_calls() && text.dialect.has_thoughts());
        let variables = read(r#"--default-chat-template-kwargs {"enable_thinking":false}"#).unwrap().variables;
        assert_eq!(variables.get("enable_thinking"), Some(&false.into()));
        let refused = |words: &str| format!("{:#}", read(words).err().unwrap());
        for (words, part) in [
            ("--tool-call-parser hermess", "hermes"),
            ("--reasoning-parser deepthink", "deepseek_r1"),
            ("--chat-template no/such/file", "no/such/file is neither a readable file"),
            ("--chat-template {%for", "--chat-template"),
            ("--default-chat-template-kwargs [1]", "--default-chat-template-kwargs"),
        ] {
            assert!(refused(words).contains(part), "{}", refused(words));
        }
    }
}
