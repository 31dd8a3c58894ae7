//! The output of a command on standard output. Has no knowledge of the commands.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// The reader of standard output has closed it, as `head` does. The command ends without an error.
#[derive(Debug)]
pub struct ReaderGone;

impl Display for ReaderGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "standard output is closed")
    }
}

impl std::error::Error for ReaderGone {}

/// Prints text as it is.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        done => Ok(done?),
    }
}

/// Prints a line.
pub fn print_line(text: &str) -> anyhow::Result<()> {
    print(&format!("{text}\n"))
}

/// Prints a line of a command whose exit status has the same meaning, so a closed output is no error.
pub fn print_last_line(text: &str) {
    let _unread = print_line(text);
}

/// Formats an error with its causes, without the system's error numbers and without repetitions.
pub fn error_text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = if text.is_empty() { cause } else { format!("{text}: {cause}") };
        }
    }
    while let Some(at) = text.find(" (os error ") {
        let Some(end) = text[at..].find(')') else { break };
        text.replace_range(at..=at + end, "");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn errors_are_printed_once_and_without_numbers() {
        let error = anyhow!("No such file (os error 2)").context("x: No such file (os error 2)").context("--tls-ca");
        assert_eq!(error_text(&error), "--tls-ca: x: No such file");
        assert_eq!(error_text(&anyhow!("a (os error 1) b (os error 22)")), "a b");
        assert_eq!(error_text(&anyhow!("odd (os error ")), "odd (os error ");
    }
}
