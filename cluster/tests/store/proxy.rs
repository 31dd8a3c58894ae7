//! A connection to etcd that a test can cut: all that goes through it ends, and nothing new comes through.

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub struct Proxy {
    pub endpoint: String,
    is_open: watch::Sender<bool>,
}

impl Proxy {
    pub async fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let (is_open, open) = watch::channel(true);
        tokio::spawn(accept(listener, port, open));
        Proxy { endpoint, is_open }
    }

    pub fn cut(&self) {
        self.is_open.send_replace(false);
    }

    pub fn mend(&self) {
        self.is_open.send_replace(true);
    }
}

/// Ends with the proxy.
async fn accept(listener: TcpListener, port: u16, mut open: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (ours, _) = accepted.unwrap();
                if *open.borrow() {
                    tokio::spawn(carry(ours, port, open.clone()));
                }
            }
            changed = open.changed() => if changed.is_err() { return },
        }
    }
}

async fn carry(mut ours: TcpStream, port: u16, mut open: watch::Receiver<bool>) {
    let Ok(mut theirs) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    tokio::select! {
        _ = copy_bidirectional(&mut ours, &mut theirs) => {}
        _ = open.wait_for(|is_open| !is_open) => {}
    }
}
