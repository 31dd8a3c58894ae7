//! A group as a process: what it finds comes line by line, and whoever does not come to an end is ended.

use super::{Finding, Outcome};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Before what is meant for who started the process; libraries print what they like.
const MARK: &str = "gpu-check tells ";
const ENDED: &str = "ended";
const LINES_MAX: usize = 256;

/// To who started this process.
pub fn tell(found: &Finding) {
    let Finding { name, outcome, told } = found;
    println!("{MARK}{}", json!({ "name": name, "outcome": outcome.name(), "told": told }));
}

pub fn tell_end() {
    println!("{MARK}{}", json!(ENDED));
}

fn finding(told: &Value) -> Option<Finding> {
    let outcome = Outcome::ALL.iter().find(|(_, name)| told["outcome"] == *name)?.0;
    Some(Finding { name: told["name"].as_str()?.to_owned(), outcome, told: told["told"].clone() })
}

/// All that the process finds within the limit, and what became of it if it did not end well.
/// `is_cut`: it could have had longer, and is no worse for not having ended.
pub fn run(mut command: Command, name: &str, limit: Duration, is_cut: bool) -> Vec<Finding> {
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(why) => return vec![Finding::wrong(name, &format!("it did not start: {why}"))],
    };
    let (lines, until) = (lines(&mut child), Instant::now() + limit);
    let (mut found, mut has_ended) = (Vec::new(), false);
    let why = loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => match line.split_once(MARK).and_then(|(_, told)| serde_json::from_str(told).ok()) {
                Some(Value::String(word)) => has_ended = word == ENDED,
                Some(told) => found.extend(finding(&told)),
                None => eprintln!("{line}"),
            },
            Err(RecvTimeoutError::Timeout) => break Some(format!("it had not ended after {} s", limit.as_secs())),
            Err(RecvTimeoutError::Disconnected) => break None,
        }
    };
    let ended = ended(&mut child, why.is_some());
    match why {
        Some(why) if is_cut => found.push(Finding::not_run(name, &why)),
        Some(why) => found.push(Finding::wrong(name, &why)),
        None if !has_ended => found.push(Finding::wrong(name, &ended)),
        None => {}
    }
    found
}

/// It is gone when this returns.
fn ended(child: &mut Child, is_late: bool) -> String {
    if is_late {
        // It may have ended by itself meanwhile.
        let _ended = child.kill();
    }
    child.wait().map_or_else(|why| why.to_string(), |status| format!("it ended early: {status}"))
}

fn lines(child: &mut Child) -> Receiver<String> {
    let (say, lines) = sync_channel(LINES_MAX);
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let all = BufReader::new(stdout).split(b'\n').map_while(Result::ok);
            for line in all {
                if say.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
    }
    lines
}

/// What a program says that ends soon.
pub fn answer(mut command: Command, limit: Duration) -> Result<String, String> {
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = spawned.map_err(|error| error.to_string())?;
    let (say, told) = sync_channel(1);
    if let Some(mut stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut text = String::new();
            let read = stdout.read_to_string(&mut text).map(|_| text);
            // Who is late is not waited for.
            let _late = say.send(read);
        });
    }
    let told = told.recv_timeout(limit);
    let ended = ended(&mut child, told.is_err());
    told.map_err(|_| ended)?.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(300);

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn what_was_told_is_kept_however_a_process_ends() {
        let told = |name: &str| format!("echo 'a word {MARK}{{\"name\":\"{name}\",\"outcome\":\"good\",\"told\":1}}'");
        let said = |script: String, limit| run(sh(&script), "it", limit, false);
        let well = said(format!("{}; echo noise; echo '{MARK}\"{ENDED}\"'", told("a")), PATIENCE);
        assert_eq!(well, [Finding { name: "a".into(), outcome: Outcome::Good, told: json!(1) }]);
        let early = said(format!("{}; kill -9 $$", told("b")), PATIENCE);
        assert_eq!((early.len(), &*early[0].name, early[1].outcome), (2, "b", Outcome::Wrong));
        assert!(early[1].told.to_string().contains("ended early"), "{:?}", early[1]);
        let late = said("exec sleep 600".into(), Duration::from_millis(50));
        assert!(late[0].outcome == Outcome::Wrong && late[0].told.to_string().contains("had not ended"), "{late:?}");
        let cut = run(sh("exec sleep 600"), "it", Duration::from_millis(50), true);
        assert!(cut[0].outcome == Outcome::NotRun && cut[0].told.to_string().contains("had not ended"), "{cut:?}");
        let none = run(Command::new("no-such-program-anywhere"), "it", PATIENCE, false);
        assert!(none[0].told.to_string().contains("did not start"), "{none:?}");
        assert_eq!(answer(sh("echo here"), PATIENCE), Ok("here\n".into()));
    }
}
