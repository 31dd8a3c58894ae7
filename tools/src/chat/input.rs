//! Parses what is typed in a chat: a message of one or several lines, or a command to the chat itself. Commands have
//! Ollama's names. Has no knowledge of terminal or model.

use proto::v1::Sampling;

/// The quotes around a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Its lines fit into a terminal of sixty columns.
pub const HELP: &str = "\
/help, /?           this page
/bye, /exit, Ctrl-D leave
/clear              forget the conversation
/model NAME         switch to another model
/save NAME          save the conversation
/load NAME          load a saved conversation
/system TEXT        system message; without TEXT none
/set NAME VALUE     a parameter, or `none`: temperature,
                    top_k, top_p, min_p, seed, stop,
                    max_tokens (num_predict),
                    repeat_penalty, presence_penalty,
                    frequency_penalty
/set verbose, quiet show an answer's speed, or not
/show               show the settings
\"\"\"                 begins and ends several lines
\\ at a line's end   continues on the next line
Ctrl-C              stops an answer
";

/// A message as it is typed, line by line.
#[derive(Debug, Default)]
pub struct TypedMessage {
    text: String,
    is_quoted: bool,
    is_begun: bool,
}

impl TypedMessage {
    /// Whether the message needs more lines.
    pub fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// Adds a line; returns the message if this was its last line.
    pub fn add_line(&mut self, line: &str) -> Option<String> {
        let line = line.trim_end_matches(['\r', '\n']);
        let line = match line.trim_start().strip_prefix(QUOTES).filter(|_| !self.is_begun) {
            Some(first) => {
                self.is_quoted = true;
                first
            }
            None => line,
        };
        let (line, goes_on) = match self.is_quoted {
            true => line.trim_end().strip_suffix(QUOTES).map_or((line, true), |last| (last, false)),
            false => line.strip_suffix('\\').map_or((line, false), |more| (more, true)),
        };
        self.text.push_str(line);
        // A line that only opens the quotes is not part of the message.
        if goes_on && !(self.is_quoted && !self.is_begun && line.is_empty()) {
            self.text.push('\n');
        }
        self.is_begun = goes_on;
        if goes_on { None } else { self.take_incomplete() }
    }

    /// The incomplete message, at the end of the input.
    pub fn take_incomplete(&mut self) -> Option<String> {
        let TypedMessage { text, .. } = std::mem::take(self);
        Some(text.trim_end_matches('\n').to_owned()).filter(|text| !text.trim().is_empty())
    }
}

#[derive(Clone, Debug)]
pub enum TypedInput {
    Question(String),
    Help,
    Leave,
    Clear,
    System(String),
    Set(Setting),
    Verbose(bool),
    Show,
    Save(String),
    Load(String),
    Model(String),
    /// A command that does not exist or cannot be parsed, with the reply.
    Wrong(String),
}

/// A sampling parameter. `None` resets it to the default.
#[derive(Clone, Debug)]
pub enum Setting {
    Number(fn(&mut Sampling, Option<f32>), Option<f32>),
    Whole(fn(&mut Sampling, Option<u64>), Option<u64>),
    Stop(Option<String>),
}

pub fn read(text: &str) -> TypedInput {
    let text = text.trim();
    if !text.starts_with('/') {
        return TypedInput::Question(text.to_owned());
    }
    let (command, rest) = split(text);
    match (command, rest) {
        ("/help" | "/?", _) => TypedInput::Help,
        ("/bye" | "/exit" | "/quit", _) => TypedInput::Leave,
        ("/clear", _) => TypedInput::Clear,
        ("/show", _) => TypedInput::Show,
        ("/save" | "/load" | "/model", "") => TypedInput::Wrong(format!("{command} NAME; /help lists the commands")),
        ("/save", name) => TypedInput::Save(unquoted(name).to_owned()),
        ("/load", name) => TypedInput::Load(unquoted(name).to_owned()),
        ("/model", name) => TypedInput::Model(unquoted(name).to_owned()),
        ("/system", rest) => TypedInput::System(unquoted(rest).to_owned()),
        ("/set", rest) => parse_setting(rest),
        (other, _) => TypedInput::Wrong(format!("there is no command {other}; /help lists them")),
    }
}

fn parse_setting(rest: &str) -> TypedInput {
    // Ollama's syntax has an additional word here.
    let rest = rest.strip_prefix("parameter").map_or(rest, str::trim_start);
    let (name, value) = split(rest);
    match (name, value) {
        ("verbose", _) => return TypedInput::Verbose(true),
        ("quiet", _) => return TypedInput::Verbose(false),
        ("system", text) => return TypedInput::System(unquoted(text).to_owned()),
        (_, "") => return TypedInput::Wrong("/set NAME VALUE, as /set temperature 0.7; /help lists the names".into()),
        _ => {}
    }
    let setting = match name {
        "temperature" => parse_number(|sampling, to| sampling.temperature = to, value, (0.0, 2.0)),
        "top_p" => parse_number(|sampling, to| sampling.top_p = to, value, (f32::MIN_POSITIVE, 1.0)),
        "min_p" => parse_number(|sampling, to| sampling.min_p = to, value, (0.0, 1.0)),
        "repeat_penalty" | "repetition_penalty" => {
            parse_number(|sampling, to| sampling.repetition_penalty = to, value, (0.01, 100.0))
        }
        "presence_penalty" => {
            parse_number(|sampling, to| sampling.presence_penalty = to.unwrap_or(0.0), value, (-2.0, 2.0))
        }
        "frequency_penalty" => {
            parse_number(|sampling, to| sampling.frequency_penalty = to.unwrap_or(0.0), value, (-2.0, 2.0))
        }
        "top_k" => parse_whole_number(|sampling, to| sampling.top_k = to.map(saturate_u32), value, 0),
        "seed" => parse_whole_number(|sampling, to| sampling.seed = to, value, 0),
        "max_tokens" | "num_predict" => {
            parse_whole_number(|sampling, to| sampling.max_tokens = to.map(saturate_u32), value, 1)
        }
        "stop" => Ok(Setting::Stop(Some(unquoted(value)).filter(|value| *value != "none").map(str::to_owned))),
        other => return TypedInput::Wrong(format!("there is no parameter {other}; /help lists them")),
    };
    setting.map_or_else(|why| TypedInput::Wrong(format!("{name}: {why}")), TypedInput::Set)
}

fn saturate_u32(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn parse_number(to: fn(&mut Sampling, Option<f32>), value: &str, (least, most): (f32, f32)) -> Result<Setting, String> {
    let Some(number) = parsed::<f32>(value) else { return Err(format!("{value} is not a number")) };
    // The bound of a value that must be above zero is not a number that a user would write.
    let from = if least == f32::MIN_POSITIVE { "above 0".to_owned() } else { least.to_string() };
    match number.is_none_or(|number| (least..=most).contains(&number)) {
        true => Ok(Setting::Number(to, number)),
        false => Err(format!("{value} is not within {from} to {most}")),
    }
}

fn parse_whole_number(to: fn(&mut Sampling, Option<u64>), value: &str, least: u64) -> Result<Setting, String> {
    let Some(number) = parsed::<u64>(value) else { return Err(format!("{value} is not a whole number")) };
    match number.is_none_or(|number| number >= least) {
        true => Ok(Setting::Whole(to, number)),
        false => Err(format!("{value} is less than {least}")),
    }
}

/// Parses `none` or a value; None for anything else.
fn parsed<T: std::str::FromStr>(value: &str) -> Option<Option<T>> {
    if value == "none" { Some(None) } else { value.parse().ok().map(Some) }
}

impl Setting {
    pub fn apply(self, sampling: &mut Sampling) {
        match self {
            Setting::Number(to, value) => to(sampling, value),
            Setting::Whole(to, value) => to(sampling, value),
            Setting::Stop(None) => sampling.stop.clear(),
            Setting::Stop(Some(stop)) => sampling.stop.push(stop),
        }
    }
}

/// The first word, and what follows it.
fn split(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (word, rest.trim())
}

fn unquoted(text: &str) -> &str {
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    inner.unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(input: &str) -> Vec<String> {
        let mut message = TypedMessage::default();
        let mut texts: Vec<String> = input.lines().filter_map(|line| message.add_line(line)).collect();
        texts.extend(message.take_incomplete());
        texts
    }

    #[test]
    fn a_message_may_have_several_lines() {
        let check = |input: &str, expect: &[&str]| assert_eq!(messages(input), expect, "{input:?}");
        check("one\ntwo", &["one", "two"]);
        check("\n  \none", &["one"]);
        check("\"\"\"a\n\nb\"\"\"\nc", &["a\n\nb", "c"]);
        check("\"\"\"\na\nb\n\"\"\"", &["a\nb"]);
        check("\"\"\"a\"\"\"\nb", &["a", "b"]);
        check("\"\"\"never ended\nb", &["never ended\nb"]);
        check("a\\\nb\\\nc\nd", &["a\nb\nc", "d"]);
        check("a\\", &["a"]);
        check("\"\"\"\"\"\"\nb", &["b"]);
    }

    #[test]
    fn commands_are_read() {
        // A setting holds a function, and functions have no equality.
        let check = |text: &str, expect: &TypedInput| assert_eq!(format!("{:?}", read(text)), format!("{expect:?}"));
        check("why?", &TypedInput::Question("why?".into()));
        check(" /bye ", &TypedInput::Leave);
        check("/?", &TypedInput::Help);
        check("/system Be \"brief\".", &TypedInput::System("Be \"brief\".".into()));
        check("/set system \"Be brief.\"", &TypedInput::System("Be brief.".into()));
        check("/system", &TypedInput::System(String::new()));
        check("/set verbose", &TypedInput::Verbose(true));
        check("/save \"a b\"", &TypedInput::Save("a b".into()));
        check("/load a", &TypedInput::Load("a".into()));
        check("/model org/name:Q4_0", &TypedInput::Model("org/name:Q4_0".into()));
        for (wrong, part) in [
            ("/set temperature hot", "temperature: hot is not a number"),
            ("/set temperature 2.1", "temperature: 2.1 is not within 0 to 2"),
            ("/set top_p 0", "top_p: 0 is not within above 0 to 1"),
            ("/set top_p NaN", "top_p: NaN is not within"),
            ("/set presence_penalty -3", "presence_penalty: -3 is not within -2 to 2"),
            ("/set max_tokens 0", "max_tokens: 0 is less than 1"),
            ("/set top_k 0.5", "top_k: 0.5 is not a whole number"),
            ("/set", "/set NAME VALUE"),
            ("/set seed", "/set NAME VALUE"),
            ("/set beam 3", "there is no parameter beam"),
            ("/no", "there is no command /no"),
            ("/save", "/save NAME"),
            ("/model ", "/model NAME"),
        ] {
            match read(wrong) {
                TypedInput::Wrong(message) => assert!(message.contains(part), "{wrong}: {message}"),
                other => panic!("{wrong}: {other:?}"),
            }
        }
    }

    #[test]
    fn parameters_are_set_and_taken_back() {
        let mut sampling = Sampling::default();
        let mut set = |text: &str| match read(text) {
            TypedInput::Set(setting) => {
                setting.apply(&mut sampling);
                sampling.clone()
            }
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(set("/set temperature 0.7").temperature, Some(0.7));
        assert_eq!(set("/set parameter top_k 40").top_k, Some(40));
        assert_eq!(set("/set num_predict 5").max_tokens, Some(5));
        assert_eq!(set("/set seed 18446744073709551615").seed, Some(u64::MAX));
        assert_eq!(set("/set stop \"###\"").stop, ["###"]);
        assert_eq!(set("/set temperature none").temperature, None);
        assert_eq!(set("/set stop none").stop, [""; 0]);
    }
}
