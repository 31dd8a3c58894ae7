//! The signals that a chat hears, which would otherwise leave the terminal without its echo.

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

    /// The number of the one that has come.
    pub async fn any(&mut self) -> i32 {
        let kind = tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.hangup.recv() => SignalKind::hangup(),
        };
        kind.as_raw_value()
    }

    pub async fn ended(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

/// While this is held, a signal ends the process, whatever blocks it, and before that `restore` is called.
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
                number = signals.any() => {
                    restore();
                    // As a shell tells who was ended by a signal.
                    std::process::exit(128 + number);
                }
                _ = is_over => {}
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(watch))?;
        Ok(SignalWatch { _until: until })
    }
}
