//! Follows a JSON text that arrives in pieces: finds where a value ends, and decodes strings. Builds no value, and
//! keeps only a count of open brackets.

/// Finds the end of a value by its quotes and brackets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ValueScan {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    is_scalar: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ScanResult {
    /// The value ends after this many bytes.
    Whole(usize),
    /// All of the text belongs to the value, and more will follow.
    Open,
    /// This many bytes belong to it. The next byte is invalid there.
    Foreign(usize),
}

impl ValueScan {
    /// Whether the value is a number or a word.
    pub fn is_scalar(&self) -> bool {
        self.is_scalar
    }

    pub fn scan(&mut self, text: &str) -> ScanResult {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                self.scan_string(byte);
                if !self.in_string && self.depth == 0 {
                    return ScanResult::Whole(at + 1);
                }
                continue;
            }
            match byte {
                _ if self.is_scalar && !is_of_scalar(byte) => return ScanResult::Whole(at),
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth <= 1 => return ScanResult::Whole(at + self.depth),
                b'}' | b']' => self.depth -= 1,
                b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' if self.depth > 0 => {}
                _ if is_of_scalar(byte) => self.is_scalar = self.depth == 0,
                _ => return ScanResult::Foreign(at),
            }
        }
        ScanResult::Open
    }

    fn scan_string(&mut self, byte: u8) {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' => self.is_escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
    }
}

fn is_of_scalar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.' | b'_')
}

/// Decodes the text of a JSON string that arrives in pieces. An escape is decoded once it is complete; an invalid one
/// stays as it is written.
#[derive(Clone, Debug, Default)]
pub struct StringDecoder {
    escape: String,
}

impl StringDecoder {
    /// Reads up to the closing quote, if `text` has it. Returns how many bytes were read, and whether the quote was
    /// there.
    pub fn read(&mut self, text: &str, meant: &mut String) -> (usize, bool) {
        for (at, c) in text.char_indices() {
            self.drop_half(c, meant);
            match c {
                _ if self.is_pending(c) => {
                    self.escape.push(c);
                    self.settle(meant);
                }
                '"' => {
                    self.flush(meant);
                    return (at + 1, true);
                }
                '\\' => {
                    self.flush(meant);
                    self.escape.push('\\');
                }
                _ => {
                    self.flush(meant);
                    meant.push(c);
                }
            }
        }
        (text.len(), false)
    }

    /// Writes the first half of a pair if `c` shows that the escape behind it is no second half.
    fn drop_half(&mut self, c: char, meant: &mut String) {
        if self.escape.len() == 7 && c != 'u' {
            let next = self.escape.split_off(6);
            self.flush(meant);
            self.escape = next;
        }
    }

    /// Whether `c` belongs to the current escape: `\x`, `\uABCD`, or a pair of the latter.
    fn is_pending(&self, c: char) -> bool {
        match self.escape.len() {
            0 => false,
            1 => true,
            2..6 => c.is_ascii_hexdigit(),
            6 => c == '\\',
            7 => c == 'u',
            _ => c.is_ascii_hexdigit(),
        }
    }

    /// Writes the escape as soon as it is complete. The first half of a pair waits for the second.
    fn settle(&mut self, meant: &mut String) {
        let is_unicode = self.escape.as_bytes().get(1) == Some(&b'u');
        let is_first_half = self.escape.len() == 6 && is_high_surrogate(&self.escape[2..]);
        let is_whole = match self.escape.len() {
            2 => !is_unicode,
            6 => !is_first_half,
            12 => true,
            _ => false,
        };
        if is_whole {
            self.flush(meant);
        }
    }

    /// Keeps an invalid escape as it is written.
    fn flush(&mut self, meant: &mut String) {
        if self.escape.is_empty() {
            return;
        }
        match decoded(&self.escape) {
            Some(text) => meant.push_str(&text),
            None => meant.push_str(&self.escape),
        }
        self.escape.clear();
    }
}

fn is_high_surrogate(digits: &str) -> bool {
    u16::from_str_radix(digits, 16).is_ok_and(|unit| (0xD800..0xDC00).contains(&unit))
}

/// Decodes the text between the quotes of a JSON string.
pub(crate) fn decoded(written: &str) -> Option<String> {
    serde_json::from_str(&format!("\"{written}\"")).ok()
}

/// Appends `text` in the form that it has between the quotes of a JSON string.
pub(crate) fn escape(text: &str, json: &mut String) {
    for c in text.chars() {
        match c {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            '\r' => json.push_str("\\r"),
            '\t' => json.push_str("\\t"),
            c if c < ' ' => json.push_str(&format!("\\u{:04x}", c as u32)),
            c => json.push(c),
        }
    }
}

/// Returns `text` as a JSON string.
pub(crate) fn quoted(text: &str) -> String {
    let mut json = String::from("\"");
    escape(text, &mut json);
    json.push('"');
    json
}
