//! From the value of a structural tag to rules, part by part.

use super::literal::{LiteralPiece, pieces};
use super::{free, parameters};
use crate::rules::{GrammarRules, RuleIdx, Symbol};
use crate::specials::SpecialTexts;
use crate::words::{RegexNode, TextSet, whole_match};
use crate::{GrammarLimits, GrammarRefused, ebnf, schema};
use serde_json::Value;

/// Makes the rules of one value.
struct TagWriter<'w> {
    rules: &'w mut GrammarRules,
    specials: &'w mut SpecialTexts,
    limits: &'w GrammarLimits,
    depth: usize,
}

/// The rule for texts that a structural tag describes.
pub(crate) fn write(
    value: &Value,
    rules: &mut GrammarRules,
    specials: &mut SpecialTexts,
    limits: &GrammarLimits,
) -> Result<RuleIdx, GrammarRefused> {
    let mut writer = TagWriter { rules, specials, limits, depth: 0 };
    let symbols = match (value.get("format"), value.get("structures")) {
        (Some(format), None) => writer.format(format, "/format", &[])?,
        (None, Some(structures)) => writer.legacy_tag(value, structures)?,
        _ => return Err(GrammarRefused::invalid("", "a structural tag has either a format or structures")),
    };
    Ok(writer.rules.add(vec![symbols]))
}

/// A part that begins and ends with fixed texts.
struct Tag<'v> {
    begin: &'v str,
    content: TagContent<'v>,
    ends: Vec<String>,
    at: String,
}

enum TagContent<'v> {
    Format(&'v Value),
    Schema(&'v Value),
}

impl TagWriter<'_> {
    fn legacy_tag(&mut self, value: &Value, structures: &Value) -> Result<Vec<Symbol>, GrammarRefused> {
        let mut tags = Vec::new();
        for (i, structure) in list(structures, "/structures")?.iter().enumerate() {
            let at = format!("/structures/{i}");
            let content = TagContent::Schema(structure.get("schema").ok_or_else(|| missing(&at, "schema"))?);
            tags.push(Tag { begin: text(structure, "begin", &at)?, content, ends: ends(structure, &at)?, at });
        }
        let triggers = texts(value, "triggers", "")?;
        self.write_triggered(
            &TriggeredText { tags, triggers, excludes: Vec::new(), at_least_one: false, only_one: false },
            &[],
        )
    }

    /// Texts of a format, and then one of `ends`: what is free text ends where one of them is first found.
    fn format(&mut self, format: &Value, at: &str, ends: &[String]) -> Result<Vec<Symbol>, GrammarRefused> {
        if self.depth == self.limits.depth_max {
            return Err(GrammarRefused::too_large("the depth of a structural tag", self.limits.depth_max));
        }
        self.rules.check_size(self.limits)?;
        self.depth += 1;
        let symbols = self.format_of_kind(format, at, ends);
        self.depth -= 1;
        symbols
    }

    fn format_of_kind(&mut self, format: &Value, at: &str, ends: &[String]) -> Result<Vec<Symbol>, GrammarRefused> {
        check_fields(format, at)?;
        match text(format, "type", at)? {
            "any_text" => self.any_text(format, at, ends),
            "triggered_tags" => {
                let triggered = read_triggered(format, at)?;
                self.write_triggered(&triggered, ends)
            }
            "sequence" => {
                let elements = list_of(format, "elements", at)?;
                let mut symbols = Vec::new();
                for (i, element) in elements.iter().enumerate() {
                    let is_last = i + 1 == elements.len();
                    let at = format!("{at}/elements/{i}");
                    if !is_last && is_free(element) {
                        return Err(GrammarRefused::unsupported(at, "free text that is not followed by an end"));
                    }
                    symbols.extend(self.format(element, &at, if is_last { ends } else { &[] })?);
                }
                if elements.is_empty() { Ok(self.append_end(symbols, ends)) } else { Ok(symbols) }
            }
            "or" => {
                let mut alternatives = Vec::new();
                for (i, element) in list_of(format, "elements", at)?.iter().enumerate() {
                    alternatives.push(self.format(element, &format!("{at}/elements/{i}"), ends)?);
                }
                Ok(vec![Symbol::Rule(self.rules.add(alternatives))])
            }
            "tag" => {
                let tag = tag(format, at)?;
                let symbols = self.tag(&tag, tag.begin)?;
                Ok(self.append_end(symbols, ends))
            }
            "regex" => self.regex(text(format, "pattern", at)?, at, ends),
            kind => {
                let symbols = self.bounded(kind, format, at)?;
                Ok(self.append_end(symbols, ends))
            }
        }
    }

    /// The kinds whose texts end by themselves.
    fn bounded(&mut self, kind: &str, format: &Value, at: &str) -> Result<Vec<Symbol>, GrammarRefused> {
        let schema = || format.get("json_schema").ok_or_else(|| missing(at, "json_schema"));
        match (kind, format.get("style").and_then(Value::as_str)) {
            ("const_string", _) => Ok(self.literal(text(format, "value", at)?)),
            ("json_schema", None | Some("json")) => self.schema(schema()?, &format!("{at}/json_schema")),
            ("json_schema", Some("qwen_xml")) | ("qwen_xml_parameter", _) => {
                parameters::write(schema()?, &format!("{at}/json_schema"), self.rules, self.limits)
            }
            ("json_schema", Some(style)) => Err(GrammarRefused::unsupported(at, format!("the style {style:?}"))),
            ("grammar", _) => {
                let start =
                    ebnf::write(text(format, "grammar", at)?, ebnf::EbnfNotation::Ebnf, self.rules, self.limits)?;
                Ok(vec![Symbol::Rule(start)])
            }
            ("tags_with_separator", _) => self.separated(format, at),
            ("optional" | "star" | "plus" | "repeat", _) => self.repeated(kind, format, at),
            (kind, _) => Err(GrammarRefused::unsupported(at, format!("the kind {kind:?} here"))),
        }
    }

    fn repeated(&mut self, kind: &str, format: &Value, at: &str) -> Result<Vec<Symbol>, GrammarRefused> {
        let content = format.get("content").ok_or_else(|| missing(at, "content"))?;
        if is_free(content) {
            return Err(GrammarRefused::unsupported(at, "repeated free text"));
        }
        let of = self.format(content, &format!("{at}/content"), &[])?;
        let count = |name: &str| {
            let n = format.get(name).and_then(Value::as_i64).ok_or_else(|| missing(at, name))?;
            usize::try_from(n).map(Some).or(Ok(None))
        };
        let (min, max) = match kind {
            "optional" => (0, Some(1)),
            "star" => (0, None),
            "plus" => (1, None),
            _ => (count("min")?.unwrap_or(0), count("max")?),
        };
        if min.max(max.unwrap_or(0)) > self.limits.repeat_max || max.is_some_and(|max| max < min) {
            return Err(GrammarRefused::invalid(at, "the repetition exceeds the limits"));
        }
        Ok(vec![Symbol::Many { of: vec![Symbol::Rule(self.rules.add(vec![of]))], min, max }])
    }

    fn schema(&mut self, value: &Value, at: &str) -> Result<Vec<Symbol>, GrammarRefused> {
        let rule = schema::write(value, self.rules, self.limits).map_err(|refused| refused.prefix_path(at))?;
        Ok(vec![Symbol::Rule(rule)])
    }

    /// A fixed text.
    fn literal(&mut self, text: &str) -> Vec<Symbol> {
        let pieces = pieces(text).into_iter();
        let symbol = |piece| match piece {
            LiteralPiece::Text(text) => self.rules.words(&TextSet::Text(text.to_owned())),
            LiteralPiece::Special(text) => Symbol::Named(self.specials.rule(text)),
        };
        pieces.map(symbol).collect()
    }

    fn append_end(&mut self, mut symbols: Vec<Symbol>, ends: &[String]) -> Vec<Symbol> {
        if !ends.is_empty() {
            let alternatives = ends.iter().map(|end| self.literal(end)).collect();
            symbols.push(Symbol::Rule(self.rules.add(alternatives)));
        }
        symbols
    }

    fn any_text(&mut self, format: &Value, at: &str, ends: &[String]) -> Result<Vec<Symbol>, GrammarRefused> {
        for word in ["max_tokens", "max_chars"] {
            if format.get(word).is_some_and(|value| !value.is_null()) {
                return Err(GrammarRefused::unsupported(format!("{at}/{word}"), word));
            }
        }
        let excludes = texts_or_none(format, "excludes", at)?;
        let alternatives = self.free(&excludes, &[], ends);
        Ok(vec![Symbol::Rule(self.rules.add(alternatives))])
    }

    /// Free text to its end: one of `ends`, or where there is none, the end of all.
    fn free(&mut self, excludes: &[String], triggers: &[String], ends: &[String]) -> Vec<Vec<Symbol>> {
        // An end may be excluded too, as text in between.
        let excludes: Vec<String> = excludes.iter().filter(|text| !ends.contains(text)).cloned().collect();
        let signs = [triggers, ends].concat();
        let without = self.rules.words(&free::text_without(&[signs.as_slice(), &excludes].concat()));
        if ends.is_empty() {
            return vec![Vec::new(), vec![without]];
        }
        let excluded = [triggers, &excludes].concat();
        let mut alternatives = Vec::new();
        for end in ends {
            alternatives.push(vec![self.rules.words(&free::text_up_to(end, &signs, &excluded))]);
            alternatives.extend(self.special(end).map(|end| vec![Symbol::Maybe(vec![without.clone()]), end]));
        }
        alternatives
    }

    /// A text that may be one special token.
    fn special(&mut self, text: &str) -> Option<Symbol> {
        let is_one = matches!(pieces(text).as_slice(), [LiteralPiece::Special(_)]);
        is_one.then(|| Symbol::Named(self.specials.rule(text)))
    }

    fn regex(&mut self, pattern: &str, at: &str, ends: &[String]) -> Result<Vec<Symbol>, GrammarRefused> {
        let read = RegexNode::read(pattern, self.limits.depth_max, self.limits.repeat_max);
        let words = read
            .and_then(|read| whole_match(&read))
            .map_err(|why| GrammarRefused::invalid(format!("{at}/pattern"), why))?;
        if ends.is_empty() {
            return Ok(vec![self.rules.words(&words)]);
        }
        let mut alternatives = Vec::new();
        for end in ends {
            alternatives.push(vec![self.rules.words(&free::text_before_sign(words.clone(), end))]);
            if let Some(end) = self.special(end) {
                alternatives.push(vec![self.rules.words(&words), end]);
            }
        }
        Ok(vec![Symbol::Rule(self.rules.add(alternatives))])
    }

    /// A tag from `rest` on, which is what is left of its beginning.
    fn tag(&mut self, tag: &Tag, rest: &str) -> Result<Vec<Symbol>, GrammarRefused> {
        let mut symbols = self.literal(rest);
        match tag.content {
            TagContent::Format(format) => {
                symbols.extend(self.format(format, &format!("{}/content", tag.at), &tag.ends)?);
            }
            TagContent::Schema(value) => {
                symbols.extend(self.schema(value, &format!("{}/schema", tag.at))?);
                symbols = self.append_end(symbols, &tag.ends);
            }
        }
        Ok(vec![Symbol::Rule(self.rules.add(vec![symbols]))])
    }

    fn separated(&mut self, format: &Value, at: &str) -> Result<Vec<Symbol>, GrammarRefused> {
        let mut alternatives = Vec::new();
        for tag in tags(format, at)? {
            alternatives.push(self.tag(&tag, tag.begin)?);
        }
        let one = Symbol::Rule(self.rules.add(alternatives));
        let mut symbols = vec![one.clone()];
        if !flag(format, "stop_after_first") {
            let mut of = self.literal(text(format, "separator", at)?);
            of.push(one);
            symbols.push(Symbol::Many { of, min: 0, max: None });
        }
        Ok(if flag(format, "at_least_one") { symbols } else { vec![Symbol::Maybe(symbols)] })
    }

    fn write_triggered(&mut self, format: &TriggeredText, ends: &[String]) -> Result<Vec<Symbol>, GrammarRefused> {
        let TriggeredText { tags, triggers, .. } = format;
        // What follows a trigger, by trigger; and whole tags, for the one that text begins with.
        let mut after: Vec<Vec<Vec<Symbol>>> = vec![Vec::new(); triggers.len()];
        let mut whole = Vec::new();
        for tag in tags {
            let fits = triggers.iter().enumerate().filter(|(_, trigger)| tag.begin.starts_with(trigger.as_str()));
            let [(index, trigger)] = fits.collect::<Vec<_>>()[..] else {
                return Err(GrammarRefused::invalid(
                    format!("{}/begin", tag.at),
                    "it must begin with exactly one trigger",
                ));
            };
            after[index].push(self.tag(tag, &tag.begin[trigger.len()..])?);
            if format.at_least_one {
                whole.push(self.tag(tag, tag.begin)?);
            }
        }
        let rest = self.rules.reserve();
        let then = if format.only_one { self.append_end(Vec::new(), ends) } else { vec![Symbol::Rule(rest)] };
        let mut alternatives = self.free(&format.excludes, triggers, ends);
        let signs = [triggers.as_slice(), ends].concat();
        let without = self.rules.words(&free::text_without(&[signs.as_slice(), &format.excludes].concat()));
        for (trigger, tags) in triggers.iter().zip(after) {
            let tag = Symbol::Rule(self.rules.add(tags));
            let found = self.rules.words(&free::text_up_to(trigger, &signs, &format.excludes));
            alternatives.push([vec![found, tag.clone()], then.clone()].concat());
            if let Some(special) = self.special(trigger) {
                let found = vec![Symbol::Maybe(vec![without.clone()]), special, tag];
                alternatives.push([found, then.clone()].concat());
            }
        }
        self.rules.define(rest, alternatives);
        if !format.at_least_one {
            return Ok(vec![Symbol::Rule(rest)]);
        }
        let first = Symbol::Rule(self.rules.add(whole));
        Ok([vec![first], then].concat())
    }
}

/// Free text in which triggers begin tags.
struct TriggeredText<'v> {
    tags: Vec<Tag<'v>>,
    triggers: Vec<String>,
    excludes: Vec<String>,
    at_least_one: bool,
    only_one: bool,
}

fn read_triggered<'v>(format: &'v Value, at: &str) -> Result<TriggeredText<'v>, GrammarRefused> {
    let triggers = texts(format, "triggers", at)?;
    let excludes = texts_or_none(format, "excludes", at)?;
    let (at_least_one, only_one) = (flag(format, "at_least_one"), flag(format, "stop_after_first"));
    Ok(TriggeredText { tags: tags(format, at)?, triggers, excludes, at_least_one, only_one })
}

fn tags<'v>(format: &'v Value, at: &str) -> Result<Vec<Tag<'v>>, GrammarRefused> {
    let tags = list_of(format, "tags", at)?;
    let tags = tags.iter().enumerate().map(|(i, value)| tag(value, &format!("{at}/tags/{i}")));
    tags.collect()
}

fn tag<'v>(value: &'v Value, at: &str) -> Result<Tag<'v>, GrammarRefused> {
    let content = TagContent::Format(value.get("content").ok_or_else(|| missing(at, "content"))?);
    Ok(Tag { begin: text(value, "begin", at)?, content, ends: ends(value, at)?, at: at.to_owned() })
}

/// The fields of each kind: one that is not among them would be ignored.
fn check_fields(format: &Value, at: &str) -> Result<(), GrammarRefused> {
    const FIELDS: &[(&str, &[&str])] = &[
        ("const_string", &["value"]),
        ("json_schema", &["json_schema", "style", "strict"]),
        ("qwen_xml_parameter", &["json_schema"]),
        ("regex", &["pattern"]),
        ("grammar", &["grammar"]),
        ("any_text", &["excludes", "max_tokens", "max_chars"]),
        ("sequence", &["elements"]),
        ("or", &["elements"]),
        ("optional", &["content"]),
        ("star", &["content"]),
        ("plus", &["content"]),
        ("repeat", &["content", "min", "max"]),
        ("tag", &["begin", "content", "end"]),
        ("triggered_tags", &["triggers", "tags", "at_least_one", "stop_after_first", "excludes"]),
        ("tags_with_separator", &["tags", "separator", "at_least_one", "stop_after_first"]),
    ];
    let kind = text(format, "type", at)?;
    let known = FIELDS.iter().find(|(name, _)| *name == kind).map(|(_, fields)| *fields);
    let Some(known) = known else {
        return Err(GrammarRefused::unsupported(format!("{at}/type"), format!("the kind {kind:?}")));
    };
    let mut fields = format.as_object().into_iter().flatten().map(|(field, _)| field.as_str());
    match fields.find(|field| *field != "type" && !known.contains(field)) {
        Some(field) => Err(GrammarRefused::unsupported(format!("{at}/{field}"), format!("{field:?} of {kind}"))),
        None => Ok(()),
    }
}

/// Whether its texts end only where something else begins.
fn is_free(format: &Value) -> bool {
    let last = || format.get("elements").and_then(Value::as_array).and_then(|elements| elements.last());
    match format.get("type").and_then(Value::as_str) {
        Some("any_text" | "triggered_tags") => true,
        Some("sequence") => last().is_some_and(is_free),
        Some("or") => format.get("elements").and_then(Value::as_array).is_some_and(|all| all.iter().any(is_free)),
        _ => false,
    }
}

fn missing(at: &str, name: &str) -> GrammarRefused {
    GrammarRefused::invalid(at, format!("{name} is missing or has the wrong type"))
}

fn text<'v>(value: &'v Value, name: &str, at: &str) -> Result<&'v str, GrammarRefused> {
    value.get(name).and_then(Value::as_str).ok_or_else(|| missing(at, name))
}

fn list<'v>(value: &'v Value, at: &str) -> Result<&'v [Value], GrammarRefused> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| GrammarRefused::invalid(at, "it is not a list"))
}

fn list_of<'v>(value: &'v Value, name: &str, at: &str) -> Result<&'v [Value], GrammarRefused> {
    list(value.get(name).ok_or_else(|| missing(at, name))?, &format!("{at}/{name}"))
}

/// Signs in free text: an empty one would be everywhere.
fn texts(value: &Value, name: &str, at: &str) -> Result<Vec<String>, GrammarRefused> {
    let texts = list_of(value, name, at)?.iter().map(|text| text.as_str().filter(|text| !text.is_empty()));
    texts.map(|text| text.map(str::to_owned).ok_or_else(|| missing(at, name))).collect()
}

fn texts_or_none(value: &Value, name: &str, at: &str) -> Result<Vec<String>, GrammarRefused> {
    if value.get(name).is_some() { texts(value, name, at) } else { Ok(Vec::new()) }
}

fn ends(value: &Value, at: &str) -> Result<Vec<String>, GrammarRefused> {
    match value.get("end") {
        Some(Value::String(end)) if end.is_empty() => Ok(Vec::new()),
        Some(Value::String(end)) => Ok(vec![end.clone()]),
        _ => texts(value, "end", at),
    }
}

fn flag(value: &Value, name: &str) -> bool {
    value.get(name).and_then(Value::as_bool).unwrap_or(false)
}
