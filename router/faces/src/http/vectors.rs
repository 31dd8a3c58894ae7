//! How replies write vectors: as numbers, in base64, or as bytes; in one of several types and byte orders. Has no
//! knowledge of models.

use crate::http::fields::Fields;
use axum::Json;
use axum::response::{IntoResponse, Response};
use checkpoint::base64;
use half::{bf16, f16};
use http::header::CONTENT_TYPE;
use proto::v1;
use router::refusal::Refusal;
use serde_json::{Value, json};

/// The header with the description of a reply in bytes.
const METADATA: &str = "metadata";
const BYTES: &str = "application/octet-stream";

/// How a reply writes its vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorForm {
    encoding: VectorEncoding,
    number: NumberForm,
    is_big_endian: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VectorEncoding {
    Numbers,
    /// The `openai` client requests this by default.
    Base64,
    /// The reply's body is the bytes of all vectors. A header describes them, if `is_described`.
    Bytes {
        is_described: bool,
    },
}

/// The type of each number in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberForm {
    F32,
    F16,
    Bf16,
    /// Eight bits: how many of them are the mantissa, and the codes that stand for an overflow and no number.
    F8 {
        n_mantissa: u32,
        overflow: u8,
    },
}

const E4M3: NumberForm = NumberForm::F8 { n_mantissa: 3, overflow: 0x7f };
const E5M2: NumberForm = NumberForm::F8 { n_mantissa: 2, overflow: 0x7c };
/// The code of eight bits for no number.
const NAN_8: u8 = 0x7f;

const NUMBER_FORMS: [(&str, NumberForm); 5] = [
    ("float32", NumberForm::F32),
    ("float16", NumberForm::F16),
    ("bfloat16", NumberForm::Bf16),
    ("fp8_e4m3", E4M3),
    ("fp8_e5m2", E5M2),
];
const ENCODINGS: [(&str, VectorEncoding); 4] = [
    ("float", VectorEncoding::Numbers),
    ("base64", VectorEncoding::Base64),
    ("bytes", VectorEncoding::Bytes { is_described: true }),
    ("bytes_only", VectorEncoding::Bytes { is_described: false }),
];
const BYTE_ORDERS: [(&str, bool); 3] = [("native", false), ("little", false), ("big", true)];

impl VectorForm {
    /// 32 bits in base64, the lowest byte first.
    pub const BASE64: VectorForm =
        VectorForm { encoding: VectorEncoding::Base64, number: NumberForm::F32, is_big_endian: false };

    /// Reads `encoding_format`, `embed_dtype` and `endianness`.
    pub fn parse(fields: &mut Fields) -> Result<VectorForm, Refusal> {
        Ok(VectorForm {
            encoding: one_of(fields, "encoding_format", &ENCODINGS)?,
            number: one_of(fields, "embed_dtype", &NUMBER_FORMS)?,
            is_big_endian: one_of(fields, "endianness", &BYTE_ORDERS)?,
        })
    }

    /// Returns a vector as a member of a JSON reply.
    pub fn value(self, values: &[f32]) -> Value {
        match self.encoding {
            VectorEncoding::Numbers => values.into(),
            VectorEncoding::Base64 | VectorEncoding::Bytes { .. } => base64::encode(&self.bytes(values)).into(),
        }
    }

    /// Returns the reply: `head` with the vectors as `data`, each in the member `name` of its item; or their bytes.
    pub fn reply(self, mut head: Value, name: &str, object: &str, reply: &v1::EmbedReply) -> Response {
        let vectors = reply.embeddings.iter().map(|of| of.values.as_slice()).enumerate();
        let VectorEncoding::Bytes { is_described } = self.encoding else {
            let item = |(i, values)| json!({ "object": object, "index": i, name: self.value(values) });
            head["data"] = vectors.map(item).collect();
            return Json(head).into_response();
        };
        let (mut body, mut data) = (Vec::new(), Vec::new());
        for (i, values) in vectors {
            let start = body.len();
            body.extend(self.bytes(values));
            data.push(json!({
                "index": i,
                "embed_dtype": name_of(&NUMBER_FORMS, self.number),
                "endianness": if self.is_big_endian { "big" } else { "little" },
                "start": start,
                "end": body.len(),
                "shape": [values.len()],
            }));
        }
        head["data"] = data.into();
        let mut response = ([(CONTENT_TYPE, BYTES)], body).into_response();
        // A description that is no header value has characters that no model's name has here.
        if let Some(described) = is_described.then(|| head.to_string().parse().ok()).flatten() {
            response.headers_mut().insert(METADATA, described);
        }
        response
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size_of_val(values));
        for value in values {
            let start = bytes.len();
            match self.number {
                NumberForm::F32 => bytes.extend(value.to_le_bytes()),
                NumberForm::F16 => bytes.extend(f16::from_f32(*value).to_le_bytes()),
                NumberForm::Bf16 => bytes.extend(bf16::from_f32(*value).to_le_bytes()),
                NumberForm::F8 { n_mantissa, overflow } => bytes.push(f8(*value, n_mantissa, overflow)),
            }
            if self.is_big_endian {
                bytes[start..].reverse();
            }
        }
        bytes
    }
}

/// Reads a field that has one of these values; the first is its default.
fn one_of<T: Copy>(fields: &mut Fields, field: &'static str, all: &[(&str, T)]) -> Result<T, Refusal> {
    let Some(name) = fields.string(field)? else { return Ok(all[0].1) };
    let found = all.iter().find(|(of, _)| *of == name).map(|(_, value)| *value);
    found.ok_or_else(|| {
        let names: Vec<String> = all.iter().map(|(of, _)| format!("`{of}`")).collect();
        Refusal::invalid(field, format!("must be one of {}, got `{name}`", names.join(", ")))
    })
}

fn name_of<T: PartialEq>(all: &[(&'static str, T)], value: T) -> &'static str {
    all.iter().find(|(_, of)| *of == value).map_or("", |(name, _)| name)
}

/// Rounds to eight bits with this many of the mantissa: to the nearest, of two that are equally near to the even one.
fn f8(value: f32, n_mantissa: u32, overflow: u8) -> u8 {
    if value.is_nan() {
        return NAN_8;
    }
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let bias = (1 << (6 - n_mantissa)) - 1;
    let exponent = ((value.to_bits() >> 23) & 0xff) as i32 - 127;
    let exponent = exponent.max(1 - bias);
    let steps = (f64::from(value.abs()) * 2f64.powi(n_mantissa as i32 - exponent)).round_ties_even();
    let code = f64::from((exponent + bias - 1) << n_mantissa) + steps;
    sign | if code < f64::from(overflow) { code as u8 } else { overflow }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(text: &Value) -> Result<VectorForm, Refusal> {
        VectorForm::parse(&mut Fields::of(text.as_object().unwrap().clone()))
    }

    #[test]
    fn vectors_become_bytes_of_each_type_and_order() {
        for (fields, bytes) in [
            (json!({}), vec![0, 0, 128, 63, 0, 0, 32, 192]),
            (json!({ "endianness": "big" }), vec![63, 128, 0, 0, 192, 32, 0, 0]),
            (json!({ "embed_dtype": "float16" }), vec![0, 60, 0, 193]),
            (json!({ "embed_dtype": "bfloat16", "endianness": "big" }), vec![63, 128, 192, 32]),
            (json!({ "embed_dtype": "fp8_e4m3" }), vec![0x38, 0xc2]),
            (json!({ "embed_dtype": "fp8_e5m2" }), vec![0x3c, 0xc1]),
        ] {
            assert_eq!(form(&fields).unwrap().bytes(&[1.0, -2.5]), bytes, "{fields}");
        }
        for wrong in [json!({ "encoding_format": "x" }), json!({ "embed_dtype": "x" }), json!({ "endianness": "x" })] {
            assert!(form(&wrong).unwrap_err().to_string().contains("got `x`"));
        }
    }

    /// Every code of eight bits, and the middle between it and the next.
    #[test]
    fn eight_bits_round_to_the_nearest() {
        for (n_mantissa, overflow, bias) in [(3, 0x7f, 7), (2, 0x7c, 15)] {
            let value = |code: u8| {
                let (exponent, mantissa) = (i32::from(code >> n_mantissa), f64::from(code & ((1 << n_mantissa) - 1)));
                let least = 2f64.powi(1 - bias - n_mantissa);
                match exponent {
                    0 => mantissa * least,
                    _ => (mantissa + f64::from(1 << n_mantissa)) * least * 2f64.powi(exponent - 1),
                }
            };
            for code in 0..overflow - 1 {
                let (own, next) = (value(code), value(code + 1));
                let round = |x: f64| f8(x as f32, n_mantissa as u32, overflow);
                assert_eq!((round(own), round(-own) & 0x7f), (code, code));
                assert_eq!(round((own + next) / 2.0), code + (code & 1), "{code}");
            }
            assert_eq!([f8(1e9, n_mantissa as u32, overflow), f8(f32::NAN, 3, overflow)], [overflow, NAN_8]);
        }
    }
}
