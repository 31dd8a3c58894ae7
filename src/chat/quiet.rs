//! The terminal while nobody reads it: what is typed meanwhile is not echoed, since the editor shows it when it reads
//! it. Knows no chat.

use super::signals::SignalWatch;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Without an echo until it is dropped.
pub struct Quiet {
    before: Termios,
}

impl Quiet {
    /// None where standard input is no terminal.
    pub fn begin() -> Option<Quiet> {
        let before = tcgetattr(std::io::stdin()).ok()?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        // Ctrl-C stops an answer, and is no reason to forget the line that was begun meanwhile.
        quiet.local_modes.insert(LocalModes::NOFLSH);
        tcsetattr(std::io::stdin(), OptionalActions::Now, &quiet).ok()?;
        Some(Quiet { before })
    }

    /// Where nobody else hears signals, which would end the process without an echo.
    pub fn watch(&self) -> anyhow::Result<SignalWatch> {
        let before = self.before.clone();
        SignalWatch::begin(move || restore(&before))
    }
}

fn restore(before: &Termios) {
    // A terminal that has gone needs no echo.
    let _restored = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
}

impl Drop for Quiet {
    fn drop(&mut self) {
        restore(&self.before);
    }
}

/// The columns of the terminal that standard output is; None if it is none.
pub fn columns() -> Option<usize> {
    let size = tcgetwinsize(std::io::stdout()).ok()?;
    // A terminal that does not know its size says zero.
    Some(if size.ws_col == 0 { 80 } else { size.ws_col.into() })
}
