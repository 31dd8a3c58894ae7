//! A terminal for tests: a program runs on it as on a user's terminal, and its screen is read as text. Has no knowledge
//! of the commands.
#![allow(dead_code, reason = "each test binary uses a part")]

use crate::common::node::{BINARY, PATIENCE};
use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);

pub struct Terminal {
    ours: File,
    /// The program's side, kept open so that its modes can be read after the program's end.
    theirs: File,
    screen: Arc<Mutex<vt100::Parser>>,
    child: Child,
}

fn size((columns, rows): (u16, u16)) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// Both sides of a new terminal: ours, and the program's.
fn sides(of: (u16, u16)) -> (File, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    let flags = OFlags::NOCTTY.bits() as i32;
    let theirs = File::options().read(true).write(true).custom_flags(flags).open(name).unwrap();
    tcsetwinsize(&ours, size(of)).unwrap();
    (ours.into(), theirs)
}

/// In a session of its own with this terminal, so that Ctrl-C and a new size reach the program as signals.
fn start_on(theirs: &File, arguments: &[&str], variables: &[(&str, &Path)]) -> Child {
    let mut command = Command::new("setsid");
    command.arg("--ctty").arg(BINARY).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR"));
    command.env("TERM", "xterm-256color").env_remove("NO_COLOR").envs(variables.iter().copied());
    let [stdin, stdout, stderr] = [(); 3].map(|()| theirs.try_clone().unwrap());
    command.stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap()
}

impl Terminal {
    /// Starts the built binary on a terminal of so many columns and rows.
    pub fn start(arguments: &[&str], of: (u16, u16), variables: &[(&str, &Path)]) -> Terminal {
        let (ours, theirs) = sides(of);
        let child = start_on(&theirs, arguments, variables);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(of.1, of.0, 1000)));
        let (mut from, seen) = (ours.try_clone().unwrap(), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                seen.lock().unwrap().process(&bytes[..n]);
            }
        });
        Terminal { ours, theirs, screen, child }
    }

    /// Starts it on a terminal that is closed once something was shown.
    pub fn start_and_close(arguments: &[&str]) -> Child {
        let (mut ours, theirs) = sides((80, 24));
        let child = start_on(&theirs, arguments, &[]);
        ours.read_exact(&mut [0]).unwrap();
        child
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn type_in(&mut self, text: &str) {
        self.ours.write_all(text.as_bytes()).unwrap();
    }

    pub fn resize(&mut self, of: (u16, u16)) {
        self.screen.lock().unwrap().screen_mut().set_size(of.1, of.0);
        tcsetwinsize(&self.ours, size(of)).unwrap();
    }

    /// Returns the visible text.
    pub fn text(&self) -> String {
        let screen = self.screen.lock().unwrap();
        let lines: Vec<String> = screen.screen().rows(0, u16::MAX).map(|row| row.trim_end().to_owned()).collect();
        lines.join("\n").trim_end().to_owned()
    }

    /// Waits until the screen satisfies the condition; panics with its text if that does not happen.
    pub fn until(&mut self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.text();
            if is_so(&text) {
                return text;
            }
            let ended = self.child.try_wait().unwrap();
            assert!(Instant::now() < deadline && ended.is_none(), "{what} is never seen (ended: {ended:?}):\n{text}");
            std::thread::sleep(POLL);
        }
    }

    pub fn until_seen(&mut self, part: &str) -> String {
        self.until(part, |text| text.contains(part))
    }

    pub fn is_alternate(&self) -> bool {
        self.screen.lock().unwrap().screen().alternate_screen()
    }

    pub fn hides_cursor(&self) -> bool {
        self.screen.lock().unwrap().screen().hide_cursor()
    }

    /// Whether input is echoed and the terminal edits lines, which is a shell's default.
    pub fn is_as_found(&self) -> bool {
        tcgetattr(&self.theirs).unwrap().local_modes.contains(LocalModes::ECHO | LocalModes::ICANON)
    }

    /// Waits for the program's end, and until all of its output is on the screen.
    pub fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        let wait = |seen: &str| {
            assert!(Instant::now() < deadline, "it does not end:\n{seen}");
            std::thread::sleep(POLL);
        };
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => wait(&self.text()),
            }
        };
        // A mode that no other code sets after the program's end; it arrives after the program's last output.
        self.theirs.write_all(b"\x1b[?2004h").unwrap();
        while !self.screen.lock().unwrap().screen().bracketed_paste() {
            wait(&self.text());
        }
        status
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It may have ended already.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}
