//! The signals that a chat catches. Without that, a signal would leave the terminal without its echo.

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    pub fn open() -> anyhow::Result<Signals> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Signals { interrupt: interrupt?, terminate: terminate?, hangup: hangup? })
    }

    /// Returns the number of the signal that arrived.
    pub async fn next_signal(&mut self) -> i32 {
        let kind = tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.hangup.recv() => SignalKind::hangup(),
        };
        kind.as_raw_value()
    }

    pub async fn wait_for_termination(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

/// While this is held, a signal calls `restore` and then ends the process, even if other code blocks.
pub struct SignalWatch {
    _until: oneshot::Sender<()>,
}

impl SignalWatch {
    pub fn begin(restore: impl FnOnce() + Send + 'static) -> anyhow::Result<SignalWatch> {
        let runtime = Builder::new_current_thread().enable_io().build()?;
        let mut signals = {
            let _entered = runtime.enter();
            Signals::open()?
        };
        let (until, is_over) = oneshot::channel();
        let watch = async move {
            tokio::select! {
                number = signals.next_signal() => {
                    restore();
                    // As shells report a process that a signal ended.
                    std::process::exit(128 + number);
                }
                _ = is_over => {}
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(watch))?;
        Ok(SignalWatch { _until: until })
    }
}
