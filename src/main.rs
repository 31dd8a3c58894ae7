//! The binary: arguments, then a configuration, then roles.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod args;
mod bench;
mod chat;
mod children;
mod config;
mod control;
mod device;
mod identity;
mod keys;
mod models;
mod page;
mod plan;
mod presence;
mod relay;
mod roles;
mod routes;
mod run;
mod scale;
mod simulate;
mod single;
mod status;
mod store;
mod terminal;
mod top;
mod trust;
mod whereabouts;

use anyhow::{Context, anyhow};
use args::{Command, Source};
use checkpoint::Checkpoint;
use checkpoint::catalogue::Located;
use config::{Config, Settings};
use roles::Doors;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::process::ExitCode;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

fn main() -> ExitCode {
    let done = match args::parse().command {
        Command::Serve(serve) => prepared(serve.settings, &serve.source, self::serve),
        Command::Run(mut run) => {
            let settings = std::mem::take(&mut run.settings);
            prepared(settings, &run.source, |config, located| ask(config, located, &run))
        }
        Command::Plan(plan) if plan.devices => {
            print!("{}", device::list());
            Ok(())
        }
        Command::Plan(plan) => prepared(plan.settings, &plan.source, |config, located| {
            let checkpoint = Checkpoint::open(&located.path)?;
            print!("{}", self::plan::table(&config, &checkpoint)?);
            Ok(())
        }),
        Command::Status(look) => status::Cluster::new(look).show().map(|page| print!("{page}")),
        Command::Top(top) => top::run(&top),
        Command::Scale(scale) => scale.run(),
        Command::Reload(reload) => reload.run(),
        Command::Bench(options) => bench::run(&options),
        Command::Simulate(options) => self::simulate::run(&options),
        Command::Coordinator(coordinator) => single::coordinator(coordinator),
        Command::Worker(worker) => single::worker(worker),
        Command::Router(router) => single::router(router),
        Command::Token => token(),
        Command::Pull(pull) => self::pull(&pull),
        Command::Models(models) => models::list(&models),
    };
    telemetry::flush();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstep: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Resolves the settings and finds the model; or prints the settings, if that is what was asked.
fn prepared(
    settings: Settings,
    source: &Source,
    command: impl FnOnce(Config, Located) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut config = settings.over_file(source.config.as_deref())?.resolve()?;
    config.kernel_cache = config.kernel_cache.or_else(|| models::kernels(&source.hub));
    if source.print_config {
        print!("{}", toml::to_string(&config)?);
        return Ok(());
    }
    let located = models::ready(&config.model, &source.hub)?;
    command(config, located)
}

fn token() -> anyhow::Result<()> {
    println!("{}", proto::secure::Token::random()?.expose());
    Ok(())
}

fn pull(pull: &args::Pull) -> anyhow::Result<()> {
    let located = models::ready(&pull.model, &pull.hub)?;
    if let Some(sha256) = &pull.sha256 {
        checkpoint::catalogue::verify(&located.path, sha256)?;
    }
    println!("{}", located.path.display());
    Ok(())
}

fn serve(mut config: Config, located: Located) -> anyhow::Result<()> {
    config.served_model_name.get_or_insert(located.name);
    let metrics = roles::watch(&config.watched()?)?;
    let checkpoint = Checkpoint::open(&located.path)?;
    plan::blueprint(&config, &checkpoint)?;
    Runtime::new()?.block_on(async {
        let doors = Doors::open(&config).await?;
        let doors = Doors { control: control::open(config.control, config.replicas).await?, ..doors };
        greet(&config, &doors)?;
        let shutdown = CancellationToken::new();
        tokio::spawn(stop_on_signals(shutdown.clone()));
        roles::serve(&config, &checkpoint, metrics, doors, shutdown).await
    })
}

fn greet(config: &Config, doors: &Doors) -> anyhow::Result<()> {
    let (http, grpc) = (doors.http.local_addr()?, doors.grpc.local_addr()?);
    let model = config.served_model_name.as_deref().unwrap_or(&config.model);
    eprintln!("lockstep {} serves {model} on http://{http}/v1 and grpc://{grpc}", env!("CARGO_PKG_VERSION"));
    eprintln!(
        "try: curl -s http://{http}/v1/chat/completions -H 'content-type: application/json' \
         -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}]}}'"
    );
    Ok(())
}

/// The first signal drains; a second ends the process at once, for whoever cannot wait.
async fn stop_on_signals(shutdown: CancellationToken) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("signals cannot be watched: only SIGKILL ends this process");
        return;
    };
    for is_first in [true, false] {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if !is_first {
            std::process::exit(130);
        }
        tracing::info!("draining: what runs may finish, nothing new is taken");
        shutdown.cancel();
    }
}

/// Starts the roles on ports of their own, asks, and stops them.
fn ask(mut config: Config, located: Located, run: &args::Run) -> anyhow::Result<()> {
    let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    (config.http, config.grpc) = (any_port, any_port);
    // Nobody else knows these doors, and this client has no key.
    (config.api_keys, config.api_key) = (None, None);
    config.served_model_name.get_or_insert(located.name);
    if config.log == config::LOG {
        config.log = "warn".into();
    }
    let metrics = roles::watch(&config.watched()?)?;
    let history = models::cache(&run.source.hub)?.join("history");
    let checkpoint = Checkpoint::open(&located.path)?;
    plan::blueprint(&config, &checkpoint)?;
    let runtime = Runtime::new()?;
    let done = runtime.block_on(async {
        let doors = Doors::open(&config).await?;
        let channel = proto::transport::tcp(&doors.grpc.local_addr()?.to_string())?;
        let shutdown = CancellationToken::new();
        let mut served = pin!(roles::serve(&config, &checkpoint, metrics, doors, shutdown.clone()));
        let asked = tokio::select! {
            asked = run::answer_all(channel, run, history) => asked,
            served = &mut served => return served.and(Err(anyhow!("the roles ended before the answer"))),
        };
        shutdown.cancel();
        asked.and(served.await.context("the roles did not end well"))
    });
    // A read of the terminal cannot be aborted, and nobody waits for its line any more.
    runtime.shutdown_background();
    done
}
