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

/// A regular expression between slashes. A slash ends it, and a newline is the end of the line.
pub(crate) fn regex(text: &str) -> String {
    let mut written = String::from("/");
    let mut is_escaped = false;
    for c in text.chars() {
        match c {
            '/' if is_escaped => written += "x2F",
            '/' => written += "\\x2F",
            '\n' if is_escaped => written += "n",
            '\n' => written += "\\n",
            c => written.push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    // An empty expression would be a comment.
    if text.is_empty() { "\"\"".to_owned() } else { written + "/" }
}
