//! The thread that writes a serving process's output to stderr: its log, its greeting, its panics. Only this thread
//! waits for a slow reader. Has no knowledge of events and filters.

use super::Format;
use super::queue::{LogEntry, LogQueue};
use crate::metrics;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tracing_subscriber::fmt::format;
use tracing_subscriber::fmt::time::{FormatTime, time};

/// The longest wait for the last lines at the end of a process.
const LAST_MAX: Duration = Duration::from_secs(1);
/// The longest wait of a panicking thread for its message to be written, because the process may end with it.
const PANIC_MAX: Duration = Duration::from_millis(200);
/// The pause before the next write to a full stderr that another program has made non-blocking.
const RETRY_AFTER: Duration = Duration::from_millis(20);

static QUEUE: OnceLock<Arc<LogQueue>> = OnceLock::new();

/// Starts the thread that writes the queue. Later panics go into the queue too.
pub fn start(queue: Arc<LogQueue>, format: Format) -> io::Result<()> {
    // Not `io::stderr()`: its lock would be held until a reader makes room, and other threads would wait for it.
    let out = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let mut writer = LogWriter { queue: queue.clone(), out, format, n_lost: 0 };
    // The thread ends with the process.
    std::thread::Builder::new().name("log".into()).spawn(move || {
        loop {
            writer.write_next();
        }
    })?;
    let panics = queue.clone();
    std::panic::set_hook(Box::new(move |panic| write_panic(&panics, panic)));
    // A second call to set up logs has failed before this point.
    let _first = QUEUE.set(queue);
    Ok(())
}

/// Writes a line for the user that started the process, not in the log's format. Does not wait once logs are set up.
pub fn write_line(text: &str) {
    match QUEUE.get() {
        Some(queue) => put(queue, &format!("{text}\n")),
        None => eprintln!("{text}"),
    }
}

/// Waits until all output is written, within a limit. For the end of the process.
pub fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.wait_until_written(LAST_MAX);
    }
}

fn put(mut queue: &LogQueue, text: &str) {
    // A line without room is counted, which is no failure.
    let _never = queue.write_all(text.as_bytes());
}

/// Writes a panic as the standard library does, but through the queue.
fn write_panic(queue: &LogQueue, panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let mut text = format!("\nthread '{}' {panic}\n", thread.name().unwrap_or("<unnamed>"));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        text.push_str(&format!("stack backtrace:\n{backtrace}"));
    }
    put(queue, &text);
    if !queue.is_dropping() {
        queue.wait_until_written(PANIC_MAX);
    }
}

struct LogWriter<W> {
    queue: Arc<LogQueue>,
    out: W,
    format: Format,
    /// Lines that could not be written and are not reported yet.
    n_lost: u64,
}

impl<W: Write> LogWriter<W> {
    /// Waits for lines, and then for stderr's reader.
    fn write_next(&mut self) {
        let batch = self.queue.next_batch();
        let lost = (self.n_lost > 0).then(|| dropped_line(self.format, self.n_lost));
        let mut bytes = lost.unwrap_or_default().into_bytes();
        let (mut n_lines, mut n_dropped) = (0, 0);
        for entry in &batch {
            match entry {
                LogEntry::Line(line) => {
                    bytes.extend(line);
                    n_lines += 1;
                }
                LogEntry::Dropped(n) => {
                    bytes.extend(dropped_line(self.format, *n).into_bytes());
                    n_dropped += n;
                }
            }
        }
        match write_all(&mut self.out, &bytes) {
            Ok(()) => self.n_lost = 0,
            // The disk may be full, or the reader gone: later lines may have room.
            Err(_) => {
                metrics::log_dropped(n_lines);
                self.n_lost += n_lines + n_dropped;
            }
        }
        self.queue.free_batch(&batch);
    }
}

fn write_all(out: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY_AFTER),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the line that reports dropped lines. It looks like an event but is none: no filter may hide it, and it needs
/// room.
fn dropped_line(format: Format, n: u64) -> String {
    let mut now = String::new();
    // A line without a time is still a line.
    let _formatted = time().format_time(&mut format::Writer::new(&mut now));
    let message = format!("{n} log lines were dropped: stderr was not read in time");
    match format {
        Format::Text => format!("{now}  WARN telemetry: {message}\n"),
        // No character in it needs an escape.
        Format::Json => format!(
            "{{\"timestamp\":\"{now}\",\"level\":\"WARN\",\"message\":\"{message}\",\"dropped\":{n},\
             \"target\":\"telemetry\"}}\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// A stderr that answers each call with the next scripted result, and then accepts everything.
    #[derive(Default)]
    struct Moody {
        moods: VecDeque<Result<usize, ErrorKind>>,
        read: Vec<u8>,
    }

    impl Write for Moody {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = self.moods.pop_front().unwrap_or(Ok(usize::MAX))?.min(bytes.len());
            self.read.extend(&bytes[..n]);
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn writer(format: Format, moods: &[Result<usize, ErrorKind>]) -> LogWriter<Moody> {
        let out = Moody { moods: moods.iter().copied().collect(), ..Moody::default() };
        LogWriter { queue: Arc::default(), out, format, n_lost: 0 }
    }

    fn read(writer: &LogWriter<Moody>) -> &str {
        std::str::from_utf8(&writer.out.read).unwrap()
    }

    #[test]
    fn a_line_is_written_whole_however_much_is_taken_at_once() {
        let moods = [Ok(2), Err(ErrorKind::Interrupted), Err(ErrorKind::WouldBlock), Ok(1)];
        let mut writer = writer(Format::Text, &moods);
        put(&writer.queue, "one\ntwo\n");
        writer.write_next();
        assert_eq!(read(&writer), "one\ntwo\n");
        assert!(writer.queue.wait_until_written(Duration::ZERO));
    }

    #[test]
    fn unwritten_lines_are_reported_before_later_ones() {
        let mut writer = writer(Format::Text, &[Err(ErrorKind::BrokenPipe), Err(ErrorKind::StorageFull)]);
        for n in 0..3 {
            put(&writer.queue, &format!("{n}\n"));
            writer.write_next();
        }
        let (report, line) = read(&writer).split_once('\n').unwrap();
        assert!(report.contains(" WARN telemetry: 2 log lines were dropped"), "{report}");
        assert_eq!(line, "2\n");
    }

    #[test]
    fn drop_report_has_the_log_format() {
        let mut writer = writer(Format::Json, &[]);
        let long = "x".repeat(super::super::queue::BYTES_MAX + 1);
        put(&writer.queue, &long);
        put(&writer.queue, &long);
        writer.write_next();
        let report = read(&writer);
        let (start, rest) = report.split_once("Z\",").unwrap();
        assert!(start.starts_with("{\"timestamp\":\"20"), "{report}");
        let message = "2 log lines were dropped: stderr was not read in time";
        let expected =
            format!("\"level\":\"WARN\",\"message\":\"{message}\",\"dropped\":2,\"target\":\"telemetry\"}}\n");
        assert_eq!(rest, expected);
    }
}
