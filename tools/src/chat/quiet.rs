//! The terminal while no line is read: typed text is not echoed, because the editor shows it when it reads it. Has no
//! knowledge of the chat.

use super::signals::SignalWatch;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Disables the terminal's echo until it is dropped.
pub struct EchoGuard {
    before: Termios,
}

impl EchoGuard {
    /// Returns None where standard input is no terminal.
    pub fn begin() -> Option<EchoGuard> {
        let before = tcgetattr(std::io::stdin()).ok()?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        // Ctrl-C stops an answer and must not discard the line that is typed meanwhile.
        quiet.local_modes.insert(LocalModes::NOFLSH);
        tcsetattr(std::io::stdin(), OptionalActions::Now, &quiet).ok()?;
        Some(EchoGuard { before })
    }

    /// Catches signals while no other code does: a signal would end the process with the echo still off.
    pub fn watch(&self) -> anyhow::Result<SignalWatch> {
        let before = self.before.clone();
        SignalWatch::begin(move || restore(&before))
    }
}

fn restore(before: &Termios) {
    // A closed terminal needs no echo.
    let _restored = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
}

impl Drop for EchoGuard {
    fn drop(&mut self) {
        restore(&self.before);
    }
}

/// Returns the columns of the terminal on standard output, or None if it is no terminal.
pub fn columns() -> Option<usize> {
    let size = tcgetwinsize(std::io::stdout()).ok()?;
    // A terminal without a known size reports zero.
    Some(if size.ws_col == 0 { 80 } else { size.ws_col.into() })
}
