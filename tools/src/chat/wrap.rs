//! Text for a terminal as it streams in: words that do not fit go to the next line whole, and control characters are
//! replaced by visible ones. Has no knowledge of the model.

use std::borrow::Cow;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

const FENCE: &str = "```";

/// Breaks a stream of text into lines of a terminal. Text within a code fence is not broken, so that it can be copied
/// unchanged.
#[derive(Default)]
pub struct LineWrapper {
    column: usize,
    /// The part of the current word that is on the screen.
    word: String,
    /// The beginning of the current line, as long as a fence.
    begin: String,
    is_fenced: bool,
}

impl LineWrapper {
    /// Returns what to write for this text on a terminal with so many columns.
    pub fn push(&mut self, text: &str, columns: usize) -> String {
        // Terminals disagree on the position of the cursor behind the last column, so that column is not used.
        let width = columns.saturating_sub(1).max(1);
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '\n' => self.end_line(&mut out),
                '\r' => {}
                '\t' => self.push_blank("    ", width, &mut out),
                ' ' => self.push_blank(" ", width, &mut out),
                c => self.push_letter(make_visible(c), width, &mut out),
            }
        }
        out
    }

    fn end_line(&mut self, out: &mut String) {
        out.push('\n');
        if self.begin.starts_with(FENCE) {
            self.is_fenced = !self.is_fenced;
        }
        (self.column, self.word, self.begin) = (0, String::new(), String::new());
    }

    fn push_blank(&mut self, blank: &str, width: usize, out: &mut String) {
        self.word.clear();
        if self.column + blank.len() > width && !self.is_fenced {
            out.push('\n');
            self.column = 0;
        } else {
            out.push_str(blank);
            self.column += blank.len();
        }
    }

    fn push_letter(&mut self, c: char, width: usize, out: &mut String) {
        if self.begin.len() < FENCE.len() {
            self.begin.push(c);
        }
        let (n, of_word) = (c.width().unwrap_or(0), self.word.width());
        if self.column + n > width && !self.is_fenced {
            // A word that is longer than a line is broken at the end of the line.
            if of_word < self.column && of_word + n <= width {
                out.push_str(&erase_columns(of_word));
                out.push('\n');
                out.push_str(&self.word);
                self.column = of_word;
            } else {
                out.push('\n');
                self.word.clear();
                self.column = 0;
            }
        }
        out.push(c);
        self.column += n;
        // Wide characters belong to scripts without spaces, so a line may end before each.
        if n > 1 {
            self.word.clear();
        } else {
            self.word.push(c);
        }
    }
}

/// Erases the part of a word that is on the screen.
fn erase_columns(n_columns: usize) -> String {
    if n_columns == 0 { String::new() } else { format!("\x1b[{n_columns}D\x1b[K") }
}

/// Replaces a control character, or one that changes the direction of text, by a visible one.
fn make_visible(c: char) -> char {
    let turns = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if c.is_control() || turns { '\u{fffd}' } else { c }
}

/// Cuts lines off at the terminal's width.
pub fn clipped(text: &str, columns: usize) -> String {
    text.lines().map(|line| clipped_line(line, columns.max(2)) + "\n").collect()
}

fn clipped_line(line: &str, columns: usize) -> Cow<'_, str> {
    if line.width() < columns {
        return line.into();
    }
    let mut width = 0;
    let fits = |c: &char| {
        width += c.width().unwrap_or(0);
        width + 1 < columns
    };
    line.chars().take_while(fits).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the visible text, and checks that it has no control characters that a terminal would obey.
    fn shown(parts: &[&str], columns: u16) -> String {
        let mut wrapped = LineWrapper::default();
        let mut screen = vt100::Parser::new(40, columns, 0);
        for part in parts {
            screen.process(wrapped.push(part, columns.into()).replace('\n', "\r\n").as_bytes());
        }
        let text = screen.screen().contents();
        text.trim_end().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn words_are_whole_wherever_the_stream_is_cut() {
        let text = "The quick brown fox jumps over the lazy dog, and a donaudampfschifffahrtsgesellschaft\ntoo.";
        let expect = "The quick brown fox\njumps over the lazy\ndog, and a\ndonaudampfschifffah\nrtsgesellschaft\ntoo.";
        for size in [1, 2, 3, 7, 100] {
            let letters: Vec<char> = text.chars().collect();
            let parts: Vec<String> = letters.chunks(size).map(|part| part.iter().collect()).collect();
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            assert_eq!(shown(&parts, 20), expect, "{size}");
        }
    }

    #[test]
    fn code_is_left_as_it_is_and_wide_signs_count_twice() {
        let code = "```\nlet x = a_function_of_many(1, 2);\n```\nand on with words";
        let out = LineWrapper::default().push(code, 16);
        assert!(out.contains("let x = a_function_of_many(1, 2);\n"), "{out:?}");
        assert!(shown(&[code], 16).ends_with("and on with\nwords"), "{}", shown(&[code], 16));
        assert_eq!(shown(&["再帰は自分自身を呼ぶ"], 9), "再帰は自\n分自身を\n呼ぶ");
    }

    #[test]
    fn nothing_that_a_model_writes_is_obeyed() {
        let wrapped = LineWrapper::default().push("a\x1b[2J\x07\u{202e}b\r\n\u{9b}c", 80);
        assert_eq!(wrapped, "a\u{fffd}[2J\u{fffd}\u{fffd}b\n\u{fffd}c");
    }

    #[test]
    fn pages_are_cut_off_at_the_width() {
        assert_eq!(clipped("short\na line that is long", 10), "short\na line t…\n");
        assert_eq!(clipped("再帰再帰再帰", 8), "再帰再…\n");
    }
}
