//! The table of the sampling parameters that are numbers. A row has a parameter's names, range and defaults, and its
//! places in a request. Every face reads and writes these parameters by the rows, and `sampling` checks them. Has no
//! knowledge of faces and replicas.

use checkpoint::SamplingDefaults;
use proto::v1;
use proto::v1::sampling::Defaults as Vendor;
use serde_json::Value;
use std::fmt::{self, Display, Formatter};
use types::{Dry, NumberRange, Penalties, Sampling, Xtc};

use Number::{Real, Whole};

/// A row: the name, the APIs that have it, an example in JSON, and the places in `v1::Sampling` and in `Sampling`.
macro_rules! number {
    ($name:literal, $of:literal, $example:literal, $([$message:ident])? $field:ident, $($place:ident).+) => {
        NumberParameter {
            name: $name,
            of: $of,
            llama_name: None,
            example: $example,
            range: None,
            has_minus_one: false,
            is_searchable: true,
            requested: |sampling| number!(@requested sampling, $($message,)? $field),
            request: |sampling, number| sampling$(.$message.get_or_insert_default())?.$field.put(number),
            get: |sampling| sampling.$($place).+.into(),
            set: |sampling, number| sampling.$($place).+ = number.into(),
            defaults: None,
        }
    };
    (@requested $sampling:ident, $message:ident, $field:ident) => {
        $sampling.$message.as_ref().and_then(|message| message.$field.number())
    };
    (@requested $sampling:ident, $field:ident) => {
        $sampling.$field.number()
    };
}

/// The table, in the order of `docs/fields.md`. A row's defaults are those of OpenAI and vLLM, of llama.cpp
/// (`common_params_sampling`) and of Ollama (`DefaultOptions`). A model's files may recommend others.
pub const NUMBERS: &[NumberParameter] = &[
    number!("temperature", "O A V L S", "0.5", temperature, temperature)
        .within(Sampling::TEMPERATURE)
        .with_defaults([Real(1.0), Real(0.8), Real(0.8)], |model| model.temperature.map(Real)),
    number!("top_p", "O A V L S", "0.5", top_p, top_p)
        .within(Sampling::TOP_P.with_least())
        .with_defaults([Real(1.0), Real(0.95), Real(0.9)], |model| model.top_p.map(Real)),
    number!("top_k", "A V L S", "5", top_k, top_k)
        .with_minus_one()
        .with_defaults([Whole(0), Whole(40), Whole(40)], |model| model.top_k.map(Whole)),
    number!("min_p", "V L S", "0.5", min_p, min_p)
        .within(Sampling::MIN_P)
        .with_defaults([Real(0.0), Real(0.05), Real(0.0)], |model| model.min_p.map(Real)),
    number!("typical_p", "L", "0.5", typical_p, typical_p).within(Sampling::TYPICAL_P),
    number!("top_n_sigma", "L", "2", top_n_sigma, top_n_sigma).within(Sampling::TOP_N_SIGMA).with_minus_one(),
    number!("xtc_probability", "L", "0.5", [xtc] probability, xtc.probability).within(Xtc::PROBABILITY).unsearchable(),
    number!("xtc_threshold", "L", "0.2", [xtc] threshold, xtc.threshold).within(Xtc::THRESHOLD),
    number!("dry_multiplier", "L", "0.5", [dry] multiplier, dry.multiplier).within(Dry::MULTIPLIER).unsearchable(),
    number!("dry_base", "L", "2", [dry] base, dry.base).within(Dry::BASE),
    number!("dry_allowed_length", "L", "3", [dry] allowed_length, dry.length_allowed),
    number!("presence_penalty", "O V L S", "0.5", presence_penalty, penalties.presence)
        .within(Penalties::PRESENCE)
        .unsearchable(),
    number!("frequency_penalty", "O V L S", "0.5", frequency_penalty, penalties.frequency)
        .within(Penalties::FREQUENCY)
        .unsearchable(),
    number!("repetition_penalty", "V S", "1.5", repetition_penalty, penalties.repetition)
        .named_in_llama_cpp("repeat_penalty")
        .within(Penalties::REPETITION)
        .unsearchable()
        .with_defaults([Real(1.0), Real(1.0), Real(1.1)], |model| model.repetition_penalty.map(Real)),
];

/// The order of the token filters in this server, by llama.cpp's names. llama.cpp's own order has the temperature last.
pub const SAMPLERS: [&str; 9] =
    ["penalties", "dry", "temperature", "top_n_sigma", "min_p", "top_k", "typ_p", "top_p", "xtc"];

/// A sampling parameter that is a number.
pub struct NumberParameter {
    pub name: &'static str,
    /// The APIs that have the name, as in `docs/fields.md`.
    pub of: &'static str,
    /// The name in llama.cpp and Ollama, if it is another one.
    llama_name: Option<&'static str>,
    /// A value that has an effect, in JSON.
    pub example: &'static str,
    /// The numbers that a client may send. None: all that the type has.
    range: Option<NumberRange>,
    /// Whether -1 stands for the number that changes nothing, as in other servers.
    pub has_minus_one: bool,
    /// Whether a beam search supports it.
    is_searchable: bool,
    /// Returns the client's number. A field that cannot be absent always has one.
    pub requested: fn(&v1::Sampling) -> Option<Number>,
    pub request: fn(&mut v1::Sampling, Number),
    pub get: fn(&Sampling) -> Number,
    pub set: fn(&mut Sampling, Number),
    /// Where vendors or models have defaults. Otherwise `Sampling` has the default, which changes nothing.
    pub defaults: Option<NumberDefaults>,
}

/// The number of a parameter that a request leaves out.
pub struct NumberDefaults {
    openai: Number,
    llama_cpp: Number,
    ollama: Number,
    /// Returns the number that a model's files recommend.
    pub recommended: fn(&SamplingDefaults) -> Option<Number>,
}

impl NumberParameter {
    /// The parameters for which vendors or models have defaults.
    pub fn with_recommendations() -> impl Iterator<Item = (&'static NumberParameter, &'static NumberDefaults)> {
        NUMBERS.iter().filter_map(|parameter| Some((parameter, parameter.defaults.as_ref()?)))
    }

    /// Returns the name in llama.cpp's and Ollama's formats.
    pub fn name_in_llama_cpp(&self) -> &'static str {
        self.llama_name.unwrap_or(self.name)
    }

    /// Returns its names, each with the APIs that have it.
    pub fn names(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        [(self.name, self.of)].into_iter().chain(self.llama_name.map(|name| (name, "L")))
    }

    /// Returns the number that changes nothing.
    pub fn neutral(&self) -> Number {
        (self.get)(&Sampling::default())
    }

    /// Returns the range, unless the number is in it.
    pub fn missed_range(&self, number: Number) -> Option<NumberRange> {
        self.range.filter(|range| !range.contains(number.into()))
    }

    /// Whether a request has a number that a beam search does not support.
    pub fn prevents_search(&self, requested: &v1::Sampling) -> bool {
        !self.is_searchable && (self.requested)(requested).is_some_and(|number| number != self.neutral())
    }

    const fn within(self, range: NumberRange) -> Self {
        NumberParameter { range: Some(range), ..self }
    }

    const fn with_minus_one(self) -> Self {
        NumberParameter { has_minus_one: true, ..self }
    }

    const fn unsearchable(self) -> Self {
        NumberParameter { is_searchable: false, ..self }
    }

    const fn named_in_llama_cpp(self, name: &'static str) -> Self {
        NumberParameter { llama_name: Some(name), ..self }
    }

    const fn with_defaults(
        self,
        [openai, llama_cpp, ollama]: [Number; 3],
        recommended: fn(&SamplingDefaults) -> Option<Number>,
    ) -> Self {
        NumberParameter { defaults: Some(NumberDefaults { openai, llama_cpp, ollama, recommended }), ..self }
    }
}

impl NumberDefaults {
    pub fn of(&self, vendor: Vendor) -> Number {
        match vendor {
            Vendor::Unspecified => self.openai,
            Vendor::LlamaCpp => self.llama_cpp,
            Vendor::Ollama => self.ollama,
        }
    }
}

/// A parameter's number. A parameter has numbers of one type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Real(f32),
    Whole(u32),
}

impl From<f32> for Number {
    fn from(number: f32) -> Number {
        Real(number)
    }
}

impl From<u32> for Number {
    fn from(number: u32) -> Number {
        Whole(number)
    }
}

impl From<Number> for f32 {
    fn from(number: Number) -> f32 {
        match number {
            Real(number) => number,
            Whole(number) => number as f32,
        }
    }
}

impl From<Number> for u32 {
    fn from(number: Number) -> u32 {
        match number {
            Real(number) => number as u32,
            Whole(number) => number,
        }
    }
}

impl From<Number> for Value {
    fn from(number: Number) -> Value {
        match number {
            Real(number) => number.into(),
            Whole(number) => number.into(),
        }
    }
}

impl Display for Number {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Real(number) => number.fmt(out),
            Whole(number) => number.fmt(out),
        }
    }
}

/// A field of a request. Some fields cannot be absent.
trait NumberField {
    fn number(&self) -> Option<Number>;
    fn put(&mut self, number: Number);
}

impl<T: Copy + Into<Number> + From<Number>> NumberField for T {
    fn number(&self) -> Option<Number> {
        Some((*self).into())
    }

    fn put(&mut self, number: Number) {
        *self = number.into();
    }
}

impl<T: Copy + Into<Number> + From<Number>> NumberField for Option<T> {
    fn number(&self) -> Option<Number> {
        self.map(T::into)
    }

    fn put(&mut self, number: Number) {
        *self = Some(number.into());
    }
}
