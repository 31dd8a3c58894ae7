//! A user at a terminal: a session of some forty steps in a chat and in `top`, at two widths, with sizes that change,
//! Ctrl-C, Ctrl-D, letters of all scripts, and pipes. The tests check the screen, and not the bytes.

use crate::common::node::{BINARY, Folder, Node, PATIENCE, complete};
use crate::common::terminal::Terminal;
use crate::messages::talking_model;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ROWS: u16 = 40;

/// A chat. The test waits for its prompt after each step.
struct Chat {
    terminal: Terminal,
    n_steps: usize,
    _folder: Folder,
}

impl Chat {
    fn begin(columns: u16) -> Chat {
        Chat::begin_with(columns, "320")
    }

    fn begin_with(columns: u16, context: &str) -> Chat {
        let (folder, template) = talking_model("terminal");
        let model = folder.0.to_str().unwrap().to_owned();
        let more = ["--chat-template", &template, "--context", context, "--threads", "1", "--max-tokens", "8"];
        let cache = folder.0.join("cache");
        let arguments = [&["run", &model][..], &more].concat();
        let mut terminal = Terminal::start(&arguments, (columns, ROWS), &[("LOCKSTEP_CACHE", &cache)]);
        // Typed before there is a prompt.
        while terminal.is_as_found() {
            std::thread::sleep(Duration::from_millis(1));
        }
        terminal.type_in("/set temperature 0\r");
        let mut chat = Chat { terminal, n_steps: 1, _folder: folder };
        let seen = chat.settled("the text typed ahead", |seen| seen.contains("/set temperature 0"));
        assert_eq!(seen.matches("/set temperature 0").count(), 1, "echoed once:\n{seen}");
        assert!(seen.contains("/help lists the commands"), "{seen}");
        chat
    }

    /// Waits until the screen satisfies the condition and has an empty prompt below.
    fn settled(&mut self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let is_prompting = |seen: &str| seen.lines().last().is_some_and(|last| last == ">>>");
        self.terminal.until(what, |seen| is_prompting(seen) && is_so(seen))
    }

    /// Types the first line of a message that has several.
    fn begins(&mut self, line: &str) {
        self.n_steps += 1;
        self.terminal.type_in(&format!("{line}\r"));
        self.terminal.until("another line", |seen| seen.ends_with("..."));
    }

    /// Types a line on an empty screen and returns the screen when the next prompt appears.
    fn enter_line(&mut self, line: &str, part: &str) -> String {
        self.n_steps += 1;
        self.terminal.type_in("\x0c");
        self.terminal.until("an empty screen", |seen| seen == ">>>" || seen == "...");
        self.terminal.type_in(&format!("{line}\r"));
        let seen = self.settled(part, |seen| flat(seen).contains(part) && seen.len() > ">>>".len());
        let widest = seen.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        assert!(widest <= 120, "{seen}");
        seen
    }
}

/// Joins the lines, because their ends depend on the width.
fn flat(seen: &str) -> String {
    seen.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Settings, commands and their errors.
fn commands(chat: &mut Chat) {
    let help = chat.enter_line("/help", "Ctrl-C");
    assert!(help.contains("/save NAME") && help.contains("/model NAME"), "{help}");
    assert_eq!(help.lines().filter(|line| line.starts_with('/')).count(), 10, "no line of it is broken:\n{help}");
    assert!(!help.contains('…'), "{help}");
    for (line, expected) in [
        ("/set temperature 9", "temperature: 9 is not within 0 to 2"),
        ("/set top_p 0", "top_p: 0 is not within above 0 to 1"),
        ("/set max_tokens none", ">>>"),
        ("/set max_tokens 6", ">>>"),
        ("/set beams 2", "there is no parameter beams"),
        ("/nothing", "there is no command /nothing; /help lists them"),
        ("/system Be brief, 再帰.", ">>>"),
        ("/show", "Be brief, 再帰."),
        ("/load no-such", "cannot be loaded"),
        ("/model no-such-model", "there is no model no-such-model"),
    ] {
        chat.enter_line(line, expected);
    }
    assert!(flat(&chat.enter_line("/show", "messages")).contains("max_tokens 6 stop"));
}

/// Answers, long and short, saved and loaded again, stopped and too long.
fn answers(chat: &mut Chat) {
    chat.enter_line("hello", "tokens, first after");
    chat.enter_line("Grüße, 再帰 🦀", "tokens, first after");
    for (first, rest) in [("one\\", "two"), ("\"\"\"three", "four\"\"\"")] {
        chat.begins(first);
        chat.enter_line(rest, "tokens, first after");
    }
    chat.enter_line("/show", "messages 9");
    chat.enter_line("/save kept", "kept.json");
    chat.enter_line("/clear", ">>>");
    chat.enter_line("/show", "messages 1");
    chat.enter_line("/load kept", "9 messages, model");
    let long = "words ".repeat(400);
    chat.enter_line("/set max_tokens none", ">>>");
    let seen = chat.enter_line(&long, "/clear forgets the conversation");
    assert!(flat(&seen).contains("too many for a context"), "{seen}");
    chat.enter_line("/clear", ">>>");
    chat.enter_line("/set quiet", ">>>");
    chat.enter_line("/set max_tokens 3", ">>>");
    assert!(!chat.enter_line("hello", ">>> hello").contains("tokens, first after"));
}

/// Keys that are no text.
fn keys(chat: &mut Chat) {
    chat.terminal.type_in("half a thou");
    chat.terminal.until_seen("half a thou");
    chat.terminal.type_in("\x03");
    chat.settled("a dropped line", |seen| seen.contains("Ctrl-D or /bye leaves."));
    chat.terminal.type_in("\x1b[A");
    chat.terminal.until("the last line again", |seen| seen.ends_with(">>> hello"));
    chat.terminal.type_in("\x15");
    chat.settled("nothing", |_| true);
    chat.terminal.resize((100, 30));
    chat.enter_line("/help", "/show show the settings");
    // An answer without an end, until it is stopped; its text stays in the conversation.
    for line in ["/clear", "/set stop none", "/set max_tokens none", "/set verbose"] {
        chat.enter_line(line, ">>>");
    }
    chat.terminal.type_in("go on for ever");
    chat.terminal.until_seen("go on for ever");
    chat.terminal.type_in("\r");
    chat.terminal.until("an answer", |seen| seen != ">>>" && !seen.ends_with(">>> go on for ever"));
    chat.terminal.type_in("\x03");
    chat.settled("a prompt after an answer", |_| true);
    chat.n_steps += 6;
}

fn session(columns: u16) -> usize {
    let mut chat = Chat::begin(columns);
    commands(&mut chat);
    answers(&mut chat);
    chat.enter_line("/model tests/reference/smollm3", ">>>");
    chat.enter_line("/show", "model smollm3");
    // A context that no answer fills before it is stopped.
    let mut long = Chat::begin_with(columns, "8192");
    long.enter_line("hello", "tokens, first after");
    keys(&mut long);
    for chat in [&mut chat, &mut long] {
        chat.terminal.type_in("\x04");
        assert!(chat.terminal.ended().success() && chat.terminal.is_as_found(), "{}", chat.terminal.text());
    }
    chat.n_steps + long.n_steps
}

#[test]
fn a_session_of_forty_steps_in_sixty_columns() {
    let n_steps = session(60);
    assert!(n_steps >= 40, "{n_steps}");
}

#[test]
fn a_session_of_forty_steps_in_a_hundred_and_twenty_columns() {
    let n_steps = session(120);
    assert!(n_steps >= 40, "{n_steps}");
}

/// After a signal the terminal is as before.
#[test]
fn a_terminal_is_left_as_it_was_found() {
    for signal in [Signal::TERM, Signal::HUP] {
        let mut chat = Chat::begin(80);
        assert!(!chat.terminal.is_as_found(), "an editor reads each key");
        kill_process(Pid::from_raw(chat.terminal.pid() as i32).unwrap(), signal).unwrap();
        assert!(!chat.terminal.ended().success() && chat.terminal.is_as_found(), "{}", chat.terminal.text());
    }
}

/// Text typed while the chat does not read: the answer is not mixed with it, and it appears at the next prompt.
#[test]
fn what_is_typed_ahead_is_the_next_lines_beginning() {
    let mut chat = Chat::begin_with(80, "8192");
    // Lines that arrive together: each is a message, in order.
    chat.terminal.type_in("\x0c");
    chat.terminal.until("an empty screen", |seen| seen == ">>>");
    chat.terminal.type_in("first\rsecond\rthird");
    let seen = chat.terminal.until("the last of three lines", |seen| seen.ends_with("\n>>> third"));
    assert!(seen.starts_with(">>> first\n") && seen.contains("\n>>> second\n"), "{seen}");
    assert_eq!(seen.matches("tokens, first after").count(), 2, "{seen}");
    chat.terminal.type_in("\x15");
    // Typed during an answer that Ctrl-C stops: the line is not lost.
    for line in ["/set stop none", "/set max_tokens none"] {
        chat.enter_line(line, ">>>");
    }
    for line in ["typed ahead", "再帰 wirdx\x7f"] {
        chat.terminal.type_in("\x0cgo on\r");
        chat.terminal.until("an answer", |seen| seen.contains(">>> go on\n"));
        chat.terminal.type_in(line);
        std::thread::sleep(Duration::from_millis(50));
        let expect = line.replace("x\x7f", "");
        let seen = chat.terminal.text();
        assert!(!seen.contains(&expect) && !seen.contains("tokens, first"), "an answer without an end:\n{seen}");
        chat.terminal.type_in("\x03");
        let last = format!("\n>>> {expect}");
        let seen = chat.terminal.until("the text typed ahead", |seen| seen.ends_with(&last));
        assert_eq!(seen.matches(&expect).count(), 1, "{seen}");
        chat.terminal.type_in("\x15");
        chat.settled("an empty line", |_| true);
    }
}

/// A slow hub: typed text is not echoed beside its progress, and Ctrl-C leaves the terminal as before.
#[test]
fn nothing_is_echoed_while_a_model_is_fetched() {
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    let folder = Folder::new("fetching");
    let variables = [("HF_ENDPOINT", Path::new(&endpoint)), ("LOCKSTEP_CACHE", &folder.0), ("HF_HOME", &folder.0)];
    for key in ["\x03", ""] {
        let mut terminal = Terminal::start(&["run", "org/name"], (80, 24), &variables);
        let _silent = hub.accept().unwrap();
        terminal.type_in("typed meanwhile");
        std::thread::sleep(Duration::from_millis(100));
        let seen = terminal.text();
        assert!(!seen.contains("typed") && !terminal.is_as_found(), "{seen}");
        match key {
            "" => kill_process(Pid::from_raw(terminal.pid() as i32).unwrap(), Signal::TERM).unwrap(),
            key => terminal.type_in(key),
        }
        assert!(!terminal.ended().success() && terminal.is_as_found(), "{}", terminal.text());
    }
}

/// The line is visible while the prompt is computed, and gone when the answer begins.
#[test]
fn a_long_prompt_shows_how_far_it_is() {
    let (folder, template) = talking_model("prompt");
    let (model, prompt) = (folder.0.to_str().unwrap(), "one two three four ".repeat(300));
    let small = ["--context", "8192", "--max-batch-tokens", "16", "--max-running", "1", "--max-tokens", "4"];
    let arguments = [&["run", model, &prompt, "--threads", "1", "--chat-template", &template][..], &small].concat();
    let mut terminal = Terminal::start(&arguments, (80, 24), &[]);
    let seen = terminal.until_seen("%");
    assert!(seen.contains("reading the prompt: ") && seen.contains(" tokens, "), "{seen}");
    assert!(terminal.ended().success(), "{}", terminal.text());
    assert!(!terminal.text().contains("reading the prompt"), "{}", terminal.text());
}

fn serving() -> (Node, String) {
    let model = "tests/reference/llama-f32-tied";
    let mut node = Node::start(&["serve", model, "--tp", "2", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]);
    let http = node.http();
    node.until_ready(&http);
    complete(&http, &json!({ "prompt": "hello", "max_tokens": 5, "seed": 7 }));
    (node, http)
}

fn stdout_of(arguments: &[&str]) -> String {
    let output = Command::new(BINARY).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn top_shows_its_views_at_every_width_and_leaves_no_trace() {
    let (_node, http) = serving();
    let mut terminal = Terminal::start(&["top", "--url", &http], (60, 24), &[]);
    let seen = terminal.until_seen("llama-f32-tied");
    assert!(terminal.is_alternate() && terminal.hides_cursor());
    assert!(seen.contains(" 1 Cluster  2 Requests  3 Load") && !seen.contains("pid"), "{seen}");
    assert_eq!(seen.lines().filter(|line| line.contains(" ready ")).count(), 3, "a replica of two ranks:\n{seen}");
    terminal.resize((120, 30));
    terminal.until("more columns", |seen| seen.contains("pid") && seen.contains("q quit"));
    terminal.type_in("2");
    terminal.until("a request", |seen| seen.contains("0 run, 0 wait") && seen.contains(" 1 ok"));
    terminal.type_in("\r");
    let seen = terminal.until_seen("ended: ok");
    assert!(seen.contains("started: no tokens are cached") && seen.contains("sent to local"), "{seen}");
    terminal.type_in("\t");
    terminal.until_seen("first token, p50");
    terminal.resize((60, 10));
    // Its last line is drawn again: a key that arrives together with a new size may wait for the next key.
    terminal.until("fewer columns", |seen| seen.lines().count() == 10 && seen.contains("q quit"));
    terminal.type_in("?");
    terminal.until_seen("q, Ctrl-C");
    terminal.type_in("1");
    terminal.type_in("1");
    terminal.until_seen("KV");
    terminal.type_in("q");
    assert!(terminal.ended().success() && terminal.is_as_found());
    assert!(!terminal.is_alternate() && !terminal.hides_cursor() && terminal.text().is_empty(), "{}", terminal.text());
    // Ctrl-C and SIGTERM also end it, and it reports a server that is gone.
    let mut terminal = Terminal::start(&["top", "--url", "http://127.0.0.1:9"], (60, 10), &[]);
    terminal.until_seen("no server answers at http://127.0.0.1:9");
    terminal.type_in("\x03");
    assert!(terminal.ended().success() && terminal.is_as_found());
}

/// Returns the answer to a prompt, without a home folder, and with this text on standard input.
fn answered(words: &[&str], piped: &str) -> String {
    let mut command = Command::new(BINARY);
    command.args(["run", "tests/reference/llama-f32-tied"]).args(words);
    command.args(["--raw", "--seed", "7", "--max-tokens", "8", "--threads", "1"]).env_remove("HOME");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(piped.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_prompt_is_its_words_and_what_is_piped_in() {
    let whole = answered(&["ab cd"], "");
    assert_eq!(answered(&["ab", "cd"], ""), whole);
    assert_eq!(answered(&["-"], "ab cd"), whole);
    assert_eq!(answered(&["ab"], "cd"), answered(&["ab\n\ncd"], ""));
    assert_ne!(answered(&["ab"], "cd"), answered(&["ab"], ""));
}

#[test]
fn top_in_a_pipe_ends_where_no_server_answers() {
    let output = Command::new(BINARY).args(["top", "--url", "http://127.0.0.1:9"]).output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.matches("no server answers at http://127.0.0.1:9").count(), 1, "{stderr}");
}

#[test]
fn a_running_server_is_looked_at_in_pipes_too() {
    let (_node, http) = serving();
    let ps = stdout_of(&["ps", "--url", &http]);
    assert!(ps.lines().count() == 2 && ps.contains("tp 2 x pp 1") && ps.contains("ready"), "{ps}");
    let log = stdout_of(&["logs", "1", "--url", &http]);
    assert!(log.contains("request 1 · ok") && log.contains("arrived") && log.contains("ended: ok"), "{log}");
    let top = stdout_of(&["top", "--looks", "2", "--url", &http]);
    assert!(top.matches("tp 2 x pp 1").count() == 2 && !top.contains('\x1b'), "{top}");
    assert!(stdout_of(&["status", "--url", &http]).contains("ready"));
    // A second server finds a port for gRPC by itself.
    let mut node = Node::start(&["serve", "tests/reference/llama-f32-tied", "--port", "0", "--threads", "1"]);
    let mut other = Node::start(&["serve", "tests/reference/llama-f32-tied", "--port", "0", "--threads", "1"]);
    [&mut node, &mut other].into_iter().for_each(|node| drop(node.http()));
}

#[test]
fn closed_stdout_is_no_error() {
    for arguments in [&["simulate", "--help"][..], &["models"], &["completions", "bash"], &["plan", "--devices"]] {
        let mut child =
            Command::new(BINARY).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(child.wait().unwrap().success() && stderr.is_empty(), "{arguments:?}: {stderr}");
    }
}

#[test]
fn shells_and_readers_of_manuals_know_every_command() {
    for (shell, part) in [("bash", "complete -F"), ("zsh", "#compdef lockstep"), ("fish", "complete -c lockstep")] {
        let script = stdout_of(&["completions", shell]);
        assert!(script.contains(part) && script.contains("kv-memory") && script.contains("logs"), "{shell}");
    }
    let folder = Folder::new("man");
    stdout_of(&["man", folder.0.to_str().unwrap()]);
    for command in ["serve", "run", "top", "ps", "rm", "quantize", "show", "logs", "verify", "completions"] {
        let page = std::fs::read_to_string(folder.0.join(format!("lockstep-{command}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains("SYNOPSIS"), "{command}");
        let is_ordered = command != "run" || page.contains("[\\fIMODEL\\fR] [\\fIPROMPT\\fR]");
        assert!(is_ordered, "{page}");
    }
    assert!(std::fs::read_to_string(folder.0.join("lockstep.1")).unwrap().contains("simulate"));
}

/// A wait for keys would read the end of a closed terminal forever, with a whole core.
#[test]
fn top_ends_when_its_terminal_is_closed() {
    let mut top = Terminal::start_and_close(&["top", "--url", "http://127.0.0.1:9"]);
    let deadline = Instant::now() + PATIENCE;
    while top.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            top.kill().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
