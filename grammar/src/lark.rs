//! Pieces of Lark as the engine reads it. Knows nothing of what they mean.

/// A string as a Lark literal: the engine reads JSON's escapes, and no raw control characters.
pub(crate) fn literal(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted += "\\\"",
            '\\' => quoted += "\\\\",
            '\n' => quoted += "\\n",
            '\r' => quoted += "\\r",
            '\t' => quoted += "\\t",
            c if c.is_control() && (c as u32) < 0x80 => quoted += &format!("\\u{:04x}", c as u32),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}
