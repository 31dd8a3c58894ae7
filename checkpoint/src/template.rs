//! Renders a chat to a prompt with the model's own template. Supports Jinja as transformers runs it, and knows nothing
//! of tokens.

use crate::conversation::Conversation;
use crate::error::{Error, ParseError, Result};
use crate::gguf::Gguf;
use crate::small_files::{read_json_if_there, read_text};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

const TEMPLATE_BYTES_MAX: usize = 1 << 20;
/// The instruction limit of one rendering: a chat of thousands of messages needs a small part of it.
const FUEL: u64 = 50_000_000;

#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: Arc<str>,
    bos: Option<String>,
    eos: Option<String>,
    /// Whether there is another template for chats with tools.
    has_tool_use: bool,
    /// The variables that it reads.
    variables: Arc<HashSet<String>>,
    /// Whether it gets the dates that llama.cpp gives to a template.
    has_dates: bool,
}

/// The dates of llama.cpp's templates, with their formats. A client's variable of the same name replaces one.
const DATES: [(&str, &str); 2] = [("date_string", "%d %b %Y"), ("datetime", "%b %d %Y")];
const NAME: &str = "chat";
/// The name of a second template, for chats with tools.
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are its variables `bos_token` and `eos_token`.
    pub fn new(source: &str, bos: Option<String>, eos: Option<String>) -> Result<ChatTemplate> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python_method);
        environment.add_filter("tojson", to_json);
        environment.add_filter("indent", bounded::indent);
        environment.add_filter("slice", bounded::slice);
        environment.add_filter("batch", bounded::batch);
        environment.add_filter("format", bounded::format);
        environment.add_function("raise_exception", raise_exception);
        add(&mut environment, NAME, source)?;
        let variables = Arc::new(variables(&environment, NAME)?);
        let source = Arc::from(source);
        Ok(ChatTemplate { environment, source, bos, eos, has_tool_use: false, variables, has_dates: false })
    }

    /// The same, with another template for chats with tools.
    pub fn with_tool_use(mut self, source: &str) -> Result<ChatTemplate> {
        add(&mut self.environment, TOOL_USE, source)?;
        // The template for tools is the one that shows calls.
        self.source = Arc::from(source);
        Ok(ChatTemplate { has_tool_use: true, ..self })
    }

    /// The same, with the variables `date_string` and `datetime`, as llama.cpp gives them to the template of a GGUF.
    /// transformers has no such variables.
    pub(crate) fn with_dates(self) -> ChatTemplate {
        ChatTemplate { has_dates: true, ..self }
    }

    /// Returns another template with the same special tokens and dates.
    pub fn with_source(&self, source: &str) -> Result<ChatTemplate> {
        let has_dates = self.has_dates;
        Ok(ChatTemplate { has_dates, ..ChatTemplate::new(source, self.bos.clone(), self.eos.clone())? })
    }

    /// Returns the template's text; if there are two, that of the one for chats with tools.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it shows the tools of a chat to the model.
    pub fn uses_tools(&self) -> bool {
        self.has_tool_use || self.reads("tools")
    }

    /// Whether it reads a variable of this name.
    pub fn reads(&self, variable: &str) -> bool {
        self.variables.contains(variable)
    }

    /// Renders the prompt. `now` is the time that a template can read, in Unix seconds: the same chat at the same time
    /// gives the same prompt everywhere.
    pub fn render(&self, chat: &Conversation, now: u64) -> Result<String> {
        // The clone shares all but the list of functions, which is short.
        let mut environment = self.environment.clone();
        environment.add_function("strftime_now", move |format: &str| strftime(format, now));
        let name = if self.has_tool_use && chat.tools.is_some() { TOOL_USE } else { NAME };
        let template = environment.get_template(name).map_err(failed)?;
        let mut variables: BTreeMap<&str, Value> =
            BTreeMap::from([("bos_token", text_or_undefined(&self.bos)), ("eos_token", text_or_undefined(&self.eos))]);
        if self.has_dates {
            for (name, format) in DATES {
                variables.insert(name, strftime(format, now).map_err(failed)?.into());
            }
        }
        variables.extend(chat.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        variables.extend([
            ("messages", Value::from(Serde(chat.template_messages()?))),
            ("add_generation_prompt", chat.add_generation_prompt.into()),
            ("tools", Value::from(Serde(&chat.tools))),
            ("documents", Value::from(Serde(&chat.documents))),
        ]);
        chat.cut_at_continuation(catch_panics(|| template.render(variables))?)
    }
}

fn add(environment: &mut Environment<'static>, name: &'static str, source: &str) -> Result<()> {
    if source.len() > TEMPLATE_BYTES_MAX {
        let n = source.len();
        return Err(Error::Template(format!("{n} bytes are more than the limit of {TEMPLATE_BYTES_MAX}")));
    }
    catch_panics(|| environment.add_template_owned(name, without_generation_marks(source)))
}

fn variables(environment: &Environment<'static>, name: &str) -> Result<HashSet<String>> {
    catch_panics(|| Ok(environment.get_template(name)?.undeclared_variables(false)))
}

/// Runs the engine and turns its panics into errors: it has some, for example when it reverses an empty string. Each
/// call passes all input anew, so that a panic leaves no broken state.
fn catch_panics<T>(work: impl FnOnce() -> std::result::Result<T, minijinja::Error>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(failed),
        Err(_panic) => Err(Error::Template("the template engine panicked".to_owned())),
    }
}

impl ChatTemplate {
    pub(crate) fn from_gguf(gguf: &Gguf, bytes: &[u8], path: &Path) -> Result<Option<ChatTemplate>> {
        let Some(source) = gguf.text(bytes, "tokenizer.chat_template").map_err(Error::with_path(path))? else {
            return Ok(None);
        };
        let text_of = |which: &str| -> std::result::Result<Option<String>, ParseError> {
            let tokens = gguf.texts(bytes, "tokenizer.ggml.tokens")?.unwrap_or_default();
            let id = gguf.unsigned(&format!("tokenizer.ggml.{which}_token_id"))?;
            Ok(id.and_then(|id| tokens.get(usize::try_from(id).ok()?).map(|text| (*text).to_owned())))
        };
        let bos = text_of("bos").map_err(Error::with_path(path))?;
        let eos = text_of("eos").map_err(Error::with_path(path))?;
        let template = ChatTemplate::new(source, bos, eos)?.with_dates();
        match gguf.text(bytes, "tokenizer.chat_template.tool_use").map_err(Error::with_path(path))? {
            Some(tool_use) => template.with_tool_use(tool_use).map(Some),
            None => Ok(Some(template)),
        }
    }

    /// Reads `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`.
    pub(crate) fn from_folder(folder: &Path) -> Result<Option<ChatTemplate>> {
        let config = read_json_if_there(&folder.join("tokenizer_config.json"))?;
        let file = folder.join("chat_template.jinja");
        let templates = &config["chat_template"];
        let source = if file.exists() { Some(read_text(&file)?) } else { default_template(templates) };
        let Some(source) = source else { return Ok(None) };
        let template = ChatTemplate::new(&source, token_text(&config["bos_token"]), token_text(&config["eos_token"]))?;
        match named_template(templates, TOOL_USE).filter(|_| !file.exists()) {
            Some(tool_use) => template.with_tool_use(tool_use).map(Some),
            None => Ok(Some(template)),
        }
    }
}

fn text_or_undefined(text: &Option<String>) -> Value {
    text.as_deref().map_or(Value::UNDEFINED, Value::from)
}

/// A single template, or among several the one named `default`.
fn default_template(value: &serde_json::Value) -> Option<String> {
    let first = || value.as_array()?.first()?["template"].as_str();
    value.as_str().or_else(|| named_template(value, "default")).or_else(first).map(str::to_owned)
}

fn named_template<'a>(value: &'a serde_json::Value, name: &str) -> Option<&'a str> {
    let entry = value.as_array()?.iter().find(|entry| entry["name"] == name)?;
    entry["template"].as_str()
}

/// A token is written as its text, or as an object with the text.
pub(crate) fn token_text(value: &serde_json::Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// `{% generation %}` marks what a training loss covers. Replaced by a condition that is always true, which keeps the
/// whitespace control.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start + 2..start + len]);
        out.push_str(before);
        out.push_str("{%");
        match tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[start + len + 2..];
    }
    out + rest
}

fn failed(error: minijinja::Error) -> Error {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    Error::Template(match (error.kind(), error.line()) {
        (ErrorKind::OutOfFuel, _) => format!("it did not end within {FUEL} instructions"),
        (_, Some(line)) => format!("{detail} (line {line})"),
        (_, None) => detail,
    })
}

/// Python's methods of strings, lists and objects.
fn python_method(
    state: &mut minijinja::State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    match (method, value.as_str(), args) {
        ("title", Some(text), []) => Ok(title(text).into()),
        ("format", Some(text), _) if bounded::is_wide(text) => Err(bounded::too_many()),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Like Python's `title`: a word begins after any character that is not a letter.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for character in text.chars() {
        if in_word {
            titled.extend(character.to_lowercase());
        } else {
            titled.extend(character.to_uppercase());
        }
        in_word = character.is_alphabetic();
    }
    titled
}

fn raise_exception(message: String) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime(format: &str, now: u64) -> std::result::Result<String, minijinja::Error> {
    date::format(format, now).map_err(|what| minijinja::Error::new(ErrorKind::InvalidOperation, what))
}

/// Like Python's `json.dumps(value, ensure_ascii=False)`, which templates expect.
fn to_json(value: &Value, options: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    let _: Option<Value> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let tree = serde_json::to_value(value)
        .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let mut out = String::new();
    json::write(&tree, indent.map(|n| n.min(16)), sort.unwrap_or(false), 0, &mut out);
    Ok(Value::from_safe_string(out))
}

/// Filters whose output is as large as a number in the template: the number has a limit. Fuel does not stop them,
/// because each is one instruction.
mod bounded {
    use minijinja::value::{Kwargs, Rest, StringInput, Value, ValueOrKwargs};
    use minijinja::{Error, ErrorKind, State, filters};

    /// The limit for spaces, pieces, and fields of a pattern.
    const COUNT_MAX: usize = 10_000;
    /// The limit for the digits of a width or precision in a pattern.
    const WIDTH_DIGITS_MAX: usize = 4;

    pub fn too_many() -> Error {
        Error::new(ErrorKind::InvalidOperation, format!("a template may create at most {COUNT_MAX} at once"))
    }

    fn check(count: Option<usize>) -> Result<(), Error> {
        if count.is_some_and(|count| count > COUNT_MAX) { Err(too_many()) } else { Ok(()) }
    }

    pub fn indent(
        text: StringInput<'_>,
        width: Option<usize>,
        first: Option<bool>,
        blank: Option<bool>,
        named: Kwargs,
    ) -> Result<Value, Error> {
        check(width)?;
        check(named.peek::<Option<usize>>("width")?)?;
        filters::indent(text, width, first, blank, named)
    }

    pub fn slice(state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
        check(Some(count))?;
        filters::slice(state, value, count, fill)
    }

    pub fn batch(state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
        check(Some(count))?;
        filters::batch(state, value, count, fill)
    }

    pub fn format(state: &mut State<'_, '_>, pattern: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
        if pattern.as_str().is_some_and(is_wide) {
            return Err(too_many());
        }
        filters::format(state, pattern, args)
    }

    /// Whether a pattern has a number with more digits than any width needs.
    pub fn is_wide(pattern: &str) -> bool {
        let numbers = pattern.split(|c: char| !c.is_ascii_digit());
        numbers.map(str::len).max().is_some_and(|digits| digits > WIDTH_DIGITS_MAX)
    }
}

/// JSON as Python writes it.
mod json {
    use serde_json::Value;

    pub fn write(value: &Value, indent: Option<usize>, sort: bool, depth: usize, out: &mut String) {
        match value {
            Value::Array(list) => {
                let items = list.iter().map(|item| (None, item)).collect();
                items_between(['[', ']'], items, indent, sort, depth, out);
            }
            Value::Object(object) => {
                let mut items: Vec<_> = object.iter().map(|(key, item)| (Some(key), item)).collect();
                if sort {
                    items.sort_by_key(|(key, _)| *key);
                }
                items_between(['{', '}'], items, indent, sort, depth, out);
            }
            leaf => out.push_str(&leaf.to_string()),
        }
    }

    fn items_between(
        [open, close]: [char; 2],
        items: Vec<(Option<&String>, &Value)>,
        indent: Option<usize>,
        sort: bool,
        depth: usize,
        out: &mut String,
    ) {
        let empty = items.is_empty();
        out.push(open);
        for (i, (key, item)) in items.into_iter().enumerate() {
            match indent {
                Some(indent) => {
                    out.push_str(if i == 0 { "\n" } else { ",\n" });
                    out.extend(std::iter::repeat_n(' ', indent * (depth + 1)));
                }
                None if i > 0 => out.push_str(", "),
                None => {}
            }
            if let Some(key) = key {
                out.push_str(&Value::String(key.clone()).to_string());
                out.push_str(": ");
            }
            write(item, indent, sort, depth + 1, out);
        }
        if let (Some(indent), false) = (indent, empty) {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
        out.push(close);
    }
}

/// The date functions of templates, in UTC.
mod date {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

    pub fn format(format: &str, seconds: u64) -> Result<String, String> {
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let (year, month, day) = civil(days);
        let mut out = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            match characters.next() {
                Some('Y') => out.push_str(&year.to_string()),
                Some('y') => out.push_str(&format!("{:02}", year % 100)),
                Some('m') => out.push_str(&format!("{month:02}")),
                Some('d') => out.push_str(&format!("{day:02}")),
                Some('B') => out.push_str(MONTHS[month - 1]),
                Some('b') => out.push_str(&MONTHS[month - 1][..3]),
                Some('A') => out.push_str(DAYS[(days as usize + 3) % 7]),
                Some('a') => out.push_str(&DAYS[(days as usize + 3) % 7][..3]),
                Some('H') => out.push_str(&format!("{:02}", second / 3600)),
                Some('M') => out.push_str(&format!("{:02}", second / 60 % 60)),
                Some('S') => out.push_str(&format!("{:02}", second % 60)),
                Some('%') => out.push('%'),
                other => return Err(format!("strftime_now does not support %{}", other.map_or(' ', |other| other))),
            }
        }
        Ok(out)
    }

    /// Year, month from 1 and day of a day counted from 1970-01-01, by the proleptic Gregorian calendar in eras of 400
    /// years that begin on March 1.
    fn civil(days: u64) -> (u64, usize, u64) {
        let days = days + 719_468;
        let day_of_era = days % 146_097;
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + days / 146_097 * 400 + u64::from(month <= 2);
        (year, month as usize, day)
    }

    #[cfg(test)]
    mod tests {
        use super::format;

        #[test]
        fn known_dates() {
            let check = |seconds, expect: &str| assert_eq!(format("%A %d %b %Y %H:%M:%S", seconds).unwrap(), expect);
            check(0, "Thursday 01 Jan 1970 00:00:00");
            check(951_782_400, "Tuesday 29 Feb 2000 00:00:00");
            check(1_785_024_000, "Sunday 26 Jul 2026 00:00:00");
            assert!(format("%Q", 0).unwrap_err().contains("%Q"));
            // A client may put any time into what it sends as a handle.
            assert!(format("%A %d %b %Y", u64::MAX).is_ok());
        }
    }
}
