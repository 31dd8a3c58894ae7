//! Runs groups in processes: findings come line by line, and a process that does not end is killed. After a failed or
//! endless group the rest runs in a new process, because the failure could cause others.

use super::{Finding, Outcome};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Prefix of lines for the parent process; libraries print other lines.
const MARK: &str = "gpu-check line: ";
const LINES_MAX: usize = 256;
/// Time for a finished or killed process to release its resources.
const FAREWELL: Duration = Duration::from_secs(10);

/// What a process reports of its groups, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    Begun,
    Ended,
    /// The process leaves the groups that it has not begun to another process.
    Leaves,
}

impl Word {
    const ALL: [(Word, &'static str); 3] = [(Word::Begun, "begun"), (Word::Ended, "ended"), (Word::Leaves, "leaves")];

    fn name(self) -> &'static str {
        Word::ALL.iter().find(|(word, _)| *word == self).map_or("", |(_, name)| name)
    }
}

/// Reports a finding to the parent process.
pub fn send_finding(found: &Finding) {
    let Finding { name, outcome, details } = found;
    println!("{MARK}{}", json!({ "name": name, "outcome": outcome.name(), "details": details }));
}

pub fn send_word(word: Word) {
    println!("{MARK}{}", json!(word.name()));
}

fn parse_finding(value: &Value) -> Option<Finding> {
    let outcome = Outcome::ALL.iter().find(|(_, name)| value["outcome"] == *name)?.0;
    Some(Finding { name: value["name"].as_str()?.to_owned(), outcome, details: value["details"].clone() })
}

/// A line from a group's process.
enum ProcessLine {
    Found(Finding),
    Word(Word),
}

fn parse_line(line: &str) -> Option<ProcessLine> {
    let value: Value = serde_json::from_str(line.split_once(MARK)?.1).ok()?;
    match &value {
        Value::String(text) => {
            Word::ALL.iter().find(|(_, name)| name == text).map(|(word, _)| ProcessLine::Word(*word))
        }
        _ => parse_finding(&value).map(ProcessLine::Found),
    }
}

/// A group that a process must run.
pub struct GroupRequest<'a> {
    pub name: &'a str,
    pub limit: Duration,
}

/// Takes the findings of a group, by its number.
pub type Take<'a> = &'a mut dyn FnMut(usize, Vec<Finding>) -> Result<(), String>;

/// Runs groups one after another, in as few processes as their outcomes allow; `start` makes the command for those from
/// a number on. Groups that have not ended by `until` are not run. Returns how many processes were started.
pub fn run(
    requests: &[GroupRequest<'_>],
    until: Instant,
    start: impl Fn(usize) -> Result<Command, String>,
    take: Take<'_>,
) -> Result<usize, String> {
    let (mut next, mut n_started) = (0, 0);
    while next < requests.len() && Instant::now() < until {
        n_started += 1;
        let process = start(next).and_then(|command| Process::start(command, next));
        next = match process {
            Ok(process) => process.follow(requests, until, take)?,
            Err(why) => {
                take(next, vec![Finding::wrong(requests[next].name, &why)])?;
                next + 1
            }
        };
    }
    for (i, group) in requests.iter().enumerate().skip(next) {
        take(i, vec![Finding::not_run(group.name, &"the time for its part was over")])?;
    }
    Ok(n_started)
}

/// A running process.
struct Process {
    child: Child,
    lines: Receiver<String>,
    first: usize,
    /// The number of the present group, or of the next one.
    group: usize,
    since: Instant,
    found: Vec<Finding>,
    has_begun: bool,
    leaves: bool,
}

impl Process {
    fn start(mut command: Command, first: usize) -> Result<Process, String> {
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|why| format!("it did not start: {why}"))?;
        let (lines, since) = (lines(&mut child), Instant::now());
        Ok(Process { child, lines, first, group: first, since, found: vec![], has_begun: false, leaves: false })
    }

    /// Follows the process until it ends or must be killed. Returns the number of the next group.
    fn follow(mut self, requests: &[GroupRequest<'_>], until: Instant, take: Take<'_>) -> Result<usize, String> {
        loop {
            let limit = requests.get(self.group).map_or(FAREWELL, |group| group.limit);
            let latest = (self.since + limit).min(until);
            match self.lines.recv_timeout(latest.saturating_duration_since(Instant::now())) {
                Ok(line) => self.receive_line(&line, take)?,
                Err(RecvTimeoutError::Timeout) => return self.cut(requests, latest == until, take),
                Err(RecvTimeoutError::Disconnected) => return self.gone(requests, take),
            }
        }
    }

    fn receive_line(&mut self, line: &str, take: Take<'_>) -> Result<(), String> {
        match parse_line(line) {
            None => eprintln!("{line}"),
            Some(ProcessLine::Found(finding)) => self.found.push(finding),
            Some(ProcessLine::Word(Word::Leaves)) => self.leaves = true,
            Some(ProcessLine::Word(Word::Begun)) => (self.has_begun, self.since) = (true, Instant::now()),
            Some(ProcessLine::Word(Word::Ended)) => {
                take(self.group, std::mem::take(&mut self.found))?;
                (self.group, self.has_begun, self.since) = (self.group + 1, false, Instant::now());
            }
        }
        Ok(())
    }

    /// Kills the process and records why: its part's time is over, or the group's.
    fn cut(mut self, requests: &[GroupRequest<'_>], is_part_over: bool, take: Take<'_>) -> Result<usize, String> {
        ended(&mut self.child, true);
        let Some(GroupRequest { name, limit }) = requests.get(self.group) else { return Ok(self.group) };
        self.found.push(match is_part_over {
            true => Finding::not_run(*name, &"it had not ended when the time for its part was over"),
            false => Finding::wrong(*name, &format!("it had not ended after {} s", limit.as_secs())),
        });
        take(self.group, self.found)?;
        Ok(self.group + 1)
    }

    fn gone(mut self, requests: &[GroupRequest<'_>], take: Take<'_>) -> Result<usize, String> {
        let why = ended(&mut self.child, false);
        let Some(GroupRequest { name, .. }) = requests.get(self.group).filter(|_| !self.leaves) else {
            return Ok(self.group);
        };
        if !self.has_begun && self.group > self.first {
            // The group before this one may be the cause.
            let last = self.group - 1;
            take(last, vec![Finding::wrong(requests[last].name, &format!("when it was done: {why}"))])?;
            return Ok(self.group);
        }
        self.found.push(Finding::wrong(*name, &why));
        take(self.group, self.found)?;
        Ok(self.group + 1)
    }
}

/// Ends the process. It is gone when this returns, unless a driver keeps a killed one.
fn ended(child: &mut Child, is_late: bool) -> String {
    if is_late {
        // It may have ended meanwhile.
        let _ended = child.kill();
        let until = Instant::now() + FAREWELL;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() >= until {
                return "it was killed, and has not ended".into();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    child.wait().map_or_else(|why| why.to_string(), |status| format!("it ended early: {status}"))
}

fn lines(child: &mut Child) -> Receiver<String> {
    let (sender, lines) = sync_channel(LINES_MAX);
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let all = BufReader::new(stdout).split(b'\n').map_while(Result::ok);
            for line in all {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
    }
    lines
}

/// Returns the output of a program that ends soon.
pub fn output_of(mut command: Command, limit: Duration) -> Result<String, String> {
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = spawned.map_err(|error| error.to_string())?;
    let (sender, receiver) = sync_channel(1);
    if let Some(mut stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut text = String::new();
            let read = stdout.read_to_string(&mut text).map(|_| text);
            // The receiver may have given up on a late answer.
            let _late = sender.send(read);
        });
    }
    let received = receiver.recv_timeout(limit);
    let ended = ended(&mut child, received.is_err());
    received.map_err(|_| ended)?.map_err(|error| error.to_string())
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

    fn finding_script(name: &str) -> String {
        format!("echo 'a word {MARK}{{\"name\":\"{name}\",\"outcome\":\"good\",\"details\":1}}'")
    }

    fn word_script(word: Word) -> String {
        format!("echo '{MARK}\"{}\"'", word.name())
    }

    fn whole(name: &str) -> String {
        [word_script(Word::Begun), finding_script(name), "echo noise".into(), word_script(Word::Ended)].join("; ")
    }

    /// Returns the findings of groups whose processes behave like these scripts, and the number of processes.
    fn outcomes(scripts: &[String], limit: Duration, until: Duration) -> (usize, Vec<Vec<Finding>>) {
        let requests: Vec<GroupRequest<'_>> = scripts.iter().map(|_| GroupRequest { name: "it", limit }).collect();
        let mut all = vec![Vec::new(); scripts.len()];
        let mut take = |i: usize, found: Vec<Finding>| {
            all[i].extend(found);
            Ok(())
        };
        let n_started = run(&requests, Instant::now() + until, |next| Ok(sh(&scripts[next])), &mut take).unwrap();
        (n_started, all)
    }

    fn is(found: &[Finding], outcome: Outcome, why: &str) -> bool {
        found.last().is_some_and(|last| last.outcome == outcome && last.details.to_string().contains(why))
    }

    #[test]
    fn findings_are_kept_however_a_process_ends() {
        let one = |script: String, limit| outcomes(&[script], limit, PATIENCE).1.remove(0);
        let well = one(whole("a"), PATIENCE);
        assert_eq!(well, [Finding { name: "a".into(), outcome: Outcome::Good, details: json!(1) }]);
        let early = one(format!("{}; kill -9 $$", finding_script("b")), PATIENCE);
        assert_eq!((early.len(), &*early[0].name), (2, "b"));
        assert!(is(&early, Outcome::Wrong, "ended early"), "{early:?}");
        let late = one("exec sleep 600".into(), Duration::from_millis(50));
        assert!(is(&late, Outcome::Wrong, "had not ended after"), "{late:?}");
        let mut none = Vec::new();
        let requests = [GroupRequest { name: "it", limit: PATIENCE }];
        let start = |_| Ok(Command::new("no-such-program-anywhere"));
        run(&requests, Instant::now() + PATIENCE, start, &mut |_, found| {
            none.extend(found);
            Ok(())
        })
        .unwrap();
        assert!(is(&none, Outcome::Wrong, "did not start"), "{none:?}");
        assert_eq!(output_of(sh("echo here"), PATIENCE), Ok("here\n".into()));
    }

    #[test]
    fn a_group_that_hangs_or_dies_is_named_and_the_rest_goes_on() {
        let all_well = [whole("a"), whole("b"), whole("c")].join("; ");
        let (n_started, found) = outcomes(&[all_well, String::new(), String::new()], PATIENCE, PATIENCE);
        assert!(n_started == 1 && found.iter().all(|found| found.len() == 1 && found[0].outcome == Outcome::Good));
        // The second group hangs, and the third dies. The fourth leaves the rest, whose first group's process dies
        // before it begins the group.
        let hangs = format!("{}; {}; exec sleep 600", whole("a"), word_script(Word::Begun));
        let dies = format!("{}; {}; kill -9 $$", word_script(Word::Begun), finding_script("c"));
        let leaves = format!("{}; {}", whole("d"), word_script(Word::Leaves));
        let scripts = [hangs, String::new(), dies, leaves, format!("{}; exit 3", whole("e")), whole("f")];
        let (n_started, found) = outcomes(&scripts, Duration::from_secs(2), PATIENCE);
        assert_eq!((n_started, found.iter().map(Vec::len).collect::<Vec<_>>()), (5, vec![1, 1, 2, 1, 2, 1]));
        assert!(is(&found[1], Outcome::Wrong, "had not ended after 2 s"), "{:?}", found[1]);
        assert!(is(&found[2], Outcome::Wrong, "ended early"), "{:?}", found[2]);
        assert!(is(&found[4], Outcome::Wrong, "when it was done"), "{:?}", found[4]);
        assert!([0, 3, 5].iter().all(|i| found[*i][0].outcome == Outcome::Good), "{found:?}");
    }

    #[test]
    fn what_does_not_fit_is_not_run() {
        let slow = format!("{}; {}; exec sleep 600", whole("a"), word_script(Word::Begun));
        let scripts = [slow, String::new(), whole("c")];
        let (n_started, found) = outcomes(&scripts, PATIENCE, Duration::from_secs(2));
        assert!(n_started == 1 && found[0][0].outcome == Outcome::Good, "{found:?}");
        assert!(is(&found[1], Outcome::NotRun, "it had not ended when the time"), "{found:?}");
        assert!(is(&found[2], Outcome::NotRun, "the time for its part was over"), "{found:?}");
    }
}
