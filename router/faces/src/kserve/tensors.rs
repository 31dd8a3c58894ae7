//! Converts tensors of the Open Inference Protocol from and to text. Trusts no length in them. Has no knowledge of
//! requests.

use proto::kserve as wire;
use proto::kserve::infer_parameter::ParameterChoice;
use proto::kserve::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use proto::kserve::model_infer_response::InferOutputTensor;
use proto::kserve::model_metadata_response::TensorMetadata;
use router::refusal::Refusal;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The version of every model: each has only one.
pub const VERSION: &str = "1";
const INPUTS: [(&str, &str); 4] = [
    ("text_input", "BYTES"),
    ("stream", "BOOL"),
    ("sampling_parameters", "BYTES"),
    ("exclude_input_in_output", "BOOL"),
];
const OUTPUTS: [(&str, &str); 2] = [("text_output", "BYTES"), ("finish_reason", "BYTES")];

/// A request's inputs; each has one element.
#[derive(Debug, Default)]
pub struct InputTensors {
    pub text: Option<String>,
    pub is_stream: bool,
    /// A JSON object.
    pub sampling: Option<String>,
    pub exclude_input: Option<bool>,
}

enum TensorElement {
    Text(String),
    Truth(bool),
}

impl InputTensors {
    pub fn read(inputs: Vec<InferInputTensor>, raw: Vec<Vec<u8>>) -> Result<InputTensors, Refusal> {
        if !raw.is_empty() && raw.len() != inputs.len() {
            let message = format!("has {} entries for {} inputs", raw.len(), inputs.len());
            return Err(Refusal::invalid("raw_input_contents", message));
        }
        let mut tensors = InputTensors::default();
        let mut raw = raw.into_iter();
        for input in inputs {
            let name = input.name.clone();
            match (name.as_str(), element(input, raw.next())?) {
                ("text_input", TensorElement::Text(text)) => tensors.text = Some(text),
                ("sampling_parameters", TensorElement::Text(text)) => tensors.sampling = Some(text),
                ("stream", TensorElement::Truth(truth)) => tensors.is_stream = truth,
                ("exclude_input_in_output", TensorElement::Truth(truth)) => tensors.exclude_input = Some(truth),
                _ => return Err(Refusal::invalid("inputs", "an input has the wrong type")),
            }
        }
        Ok(tensors)
    }
}

fn element(input: InferInputTensor, raw: Option<Vec<u8>>) -> Result<TensorElement, Refusal> {
    let Some((name, datatype)) = INPUTS.into_iter().find(|(name, _)| *name == input.name) else {
        let name: String = input.name.chars().take(100).collect();
        return Err(Refusal::invalid("inputs", format!("`{name}` is not supported")));
    };
    if input.datatype != datatype {
        return Err(Refusal::invalid(name, format!("must be of the type {datatype}")));
    }
    if input.shape.iter().any(|n| *n != 1) {
        return Err(Refusal::invalid(name, "must have one element"));
    }
    let contents = input.contents.unwrap_or_default();
    let one = || Refusal::invalid(name, "must have one element, as in its shape");
    match (datatype, raw) {
        ("BOOL", Some(raw)) => {
            <[u8; 1]>::try_from(raw).map(|[byte]| TensorElement::Truth(byte != 0)).map_err(|_| one())
        }
        ("BOOL", None) => {
            <[bool; 1]>::try_from(contents.bool_contents).map(|[it]| TensorElement::Truth(it)).map_err(|_| one())
        }
        (_, Some(raw)) => text(name, strip_length_prefix(raw).ok_or_else(one)?),
        (_, None) => {
            let [bytes] = <[Vec<u8>; 1]>::try_from(contents.bytes_contents).map_err(|_| one())?;
            text(name, bytes)
        }
    }
}

fn text(name: &'static str, bytes: Vec<u8>) -> Result<TensorElement, Refusal> {
    String::from_utf8(bytes).map(TensorElement::Text).map_err(|_| Refusal::invalid(name, "is not UTF-8"))
}

/// Reads one element and checks that nothing follows it.
///
/// `[0, 4) length, the lowest byte first · [4, 4 + length) bytes`
fn strip_length_prefix(mut raw: Vec<u8>) -> Option<Vec<u8>> {
    let length = u32::from_le_bytes(*raw.first_chunk()?) as usize;
    (raw.len() - 4 == length).then(|| raw.split_off(4))
}

fn with_length_prefix(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    [&length.to_le_bytes()[..], bytes].concat()
}

/// Whether the client requests the finish reason too. Without a list of outputs it gets only the text.
pub fn has_reason(outputs: &[InferRequestedOutputTensor]) -> Result<bool, Refusal> {
    let is_known = |output: &&InferRequestedOutputTensor| OUTPUTS.iter().any(|(name, _)| *name == output.name);
    match outputs.iter().find(|output| !is_known(output)) {
        Some(other) => {
            let name: String = other.name.chars().take(100).collect();
            Err(Refusal::invalid("outputs", format!("there is no output `{name}`")))
        }
        None => Ok(outputs.iter().any(|output| output.name == OUTPUTS[1].0)),
    }
}

/// Returns the parameters of the request. Those of the tensor override them.
pub fn parameters(
    parameters: HashMap<String, wire::InferParameter>,
    sampling: Option<String>,
) -> Result<Map<String, Value>, Refusal> {
    let value = |parameter: wire::InferParameter| match parameter.parameter_choice {
        Some(ParameterChoice::BoolParam(truth)) => truth.into(),
        Some(ParameterChoice::Int64Param(n)) => n.into(),
        Some(ParameterChoice::Uint64Param(n)) => n.into(),
        Some(ParameterChoice::DoubleParam(x)) => x.into(),
        Some(ParameterChoice::StringParam(text)) => text.into(),
        None => Value::Null,
    };
    let mut all: Map<String, Value> = parameters.into_iter().map(|(name, one)| (name, value(one))).collect();
    let no_object = |what: String| Refusal::invalid("sampling_parameters", what);
    match sampling.map(|text| serde_json::from_str(&text)) {
        None => {}
        Some(Ok(Value::Object(more))) => all.extend(more),
        Some(Ok(_)) => return Err(no_object("must be a JSON object".into())),
        Some(Err(error)) => return Err(no_object(format!("is not JSON: {error}"))),
    }
    all.iter_mut().for_each(|(name, value)| parse_string_value(name, value));
    Ok(all)
}

/// Reads numbers and booleans that Triton's clients write as strings.
fn parse_string_value(name: &str, value: &mut Value) {
    const TEXTS: [&str; 7] = ["stop", "bad_words", "guided_regex", "guided_grammar", "regex", "ebnf", "grammar"];
    let Value::String(text) = value else { return };
    let text = text.trim().to_lowercase();
    if let (false, Ok(scalar @ (Value::Number(_) | Value::Bool(_)))) =
        (TEXTS.contains(&name), serde_json::from_str(&text))
    {
        *value = scalar;
    }
}

pub fn metadata(name: String) -> wire::ModelMetadataResponse {
    let tensor = |(name, datatype): (&str, &str)| TensorMetadata {
        name: name.into(),
        datatype: datatype.into(),
        shape: vec![1],
    };
    wire::ModelMetadataResponse {
        name,
        versions: vec![VERSION.into()],
        platform: "lockstep".into(),
        inputs: INPUTS.into_iter().map(tensor).collect(),
        outputs: OUTPUTS.into_iter().map(tensor).collect(),
    }
}

pub fn response(id: &str, model: &str, text: String, reason: Option<&str>, is_raw: bool) -> wire::ModelInferResponse {
    let values = [Some(text.into_bytes()), reason.map(|reason| reason.as_bytes().to_vec())];
    let mut response = wire::ModelInferResponse {
        model_name: model.into(),
        model_version: VERSION.into(),
        id: id.into(),
        ..wire::ModelInferResponse::default()
    };
    for ((name, datatype), bytes) in OUTPUTS.into_iter().zip(values.into_iter().flatten()) {
        let mut output = InferOutputTensor {
            name: name.into(),
            datatype: datatype.into(),
            shape: vec![1],
            ..InferOutputTensor::default()
        };
        match is_raw {
            true => response.raw_output_contents.push(with_length_prefix(&bytes)),
            false => {
                let contents = wire::InferTensorContents { bytes_contents: vec![bytes], ..Default::default() };
                output.contents = Some(contents);
            }
        }
        response.outputs.push(output);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(name: &str, datatype: &str, shape: Vec<i64>) -> InferInputTensor {
        InferInputTensor { name: name.into(), datatype: datatype.into(), shape, ..InferInputTensor::default() }
    }

    fn refused(inputs: Vec<InferInputTensor>, raw: Vec<Vec<u8>>) -> String {
        InputTensors::read(inputs, raw).unwrap_err().to_string()
    }

    #[test]
    fn raw_contents_are_framed() {
        assert_eq!(strip_length_prefix(with_length_prefix(b"Hi")).as_deref(), Some(&b"Hi"[..]));
        assert_eq!(strip_length_prefix(with_length_prefix(b"")).as_deref(), Some(&b""[..]));
        for bad in [&b""[..], b"\x01\0\0", b"\x03\0\0\0Hi", b"\x01\0\0\0Hi", b"\xff\xff\xff\xffHi"] {
            assert_eq!(strip_length_prefix(bad.to_vec()), None, "{bad:?}");
        }
        let inputs = vec![input("text_input", "BYTES", vec![1]), input("stream", "BOOL", vec![1])];
        let read = InputTensors::read(inputs, vec![with_length_prefix("né".as_bytes()), vec![1]]).unwrap();
        assert_eq!((read.text.as_deref(), read.is_stream, read.exclude_input), (Some("né"), true, None));
    }

    #[test]
    fn inputs_that_are_not_one_text_are_refused() {
        let text = |shape| vec![input("text_input", "BYTES", shape)];
        assert!(refused(text(vec![2]), vec![with_length_prefix(b"Hi")]).starts_with("text_input"));
        assert!(refused(text(vec![-1]), vec![with_length_prefix(b"Hi")]).starts_with("text_input"));
        assert!(refused(text(vec![1]), vec![with_length_prefix(b"\xff")]).contains("UTF-8"));
        assert!(refused(text(vec![1]), Vec::new()).starts_with("text_input"));
        assert!(refused(text(vec![1]), vec![with_length_prefix(b"Hi"); 2]).starts_with("raw_input_contents"));
        assert!(refused(vec![input("stream", "BYTES", vec![1])], vec![vec![1]]).starts_with("stream"));
        assert!(refused(vec![input("stream", "BOOL", vec![1])], vec![vec![1, 1]]).starts_with("stream"));
        assert!(refused(vec![input("image", "BYTES", vec![1])], vec![with_length_prefix(b"Hi")]).contains("image"));
    }

    #[test]
    fn parameters_may_be_strings() {
        let one = |choice| wire::InferParameter { parameter_choice: Some(choice) };
        let first = HashMap::from([
            ("max_tokens".to_owned(), one(ParameterChoice::Int64Param(3))),
            ("top_p".to_owned(), one(ParameterChoice::DoubleParam(0.5))),
        ]);
        let more = r#"{"max_tokens": "7", "ignore_eos": "True", "stop": "12", "seed": 5}"#;
        let all = parameters(first, Some(more.into())).unwrap();
        let expected =
            serde_json::json!({ "max_tokens": 7, "top_p": 0.5, "ignore_eos": true, "stop": "12", "seed": 5 });
        assert_eq!(Value::Object(all), expected);
        assert!(parameters(HashMap::new(), Some("[1]".into())).is_err());
        assert!(parameters(HashMap::new(), Some("{".into())).is_err());
    }
}
