//! The terminal while nobody reads it: what is typed meanwhile is not echoed, since the editor shows it when it reads
//! it. Knows no chat.

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
        tcsetattr(std::io::stdin(), OptionalActions::Now, &quiet).ok()?;
        Some(Quiet { before })
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // A terminal that has gone needs no echo.
        let _restored = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// The columns of the terminal that standard output is; None if it is none.
pub fn columns() -> Option<usize> {
    let size = tcgetwinsize(std::io::stdout()).ok()?;
    // A terminal that does not know its size says zero.
    Some(if size.ws_col == 0 { 80 } else { size.ws_col.into() })
}
