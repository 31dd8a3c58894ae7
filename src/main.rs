//! The binary: arguments, then settings, then roles.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod args;
mod bench;
mod chat;
mod figures;
mod known_models;
mod mistakes;
mod models;
mod operate;
mod out;
mod roles;
mod serve;
mod server_trust;
mod settings;
mod shell;
mod simulate;
mod verify;

use args::Command;
use clap::ArgMatches;
use std::process::ExitCode;
use telemetry::logs;

fn main() -> ExitCode {
    let (command, said) = args::parse();
    let done = run(command, &said);
    telemetry::flush();
    let code = match done {
        Ok(code) => code,
        Err(error) if error.is::<out::ReaderGone>() => ExitCode::SUCCESS,
        Err(error) => {
            logs::say(&format!("lockstep: {}", out::for_people(&error)));
            ExitCode::FAILURE
        }
    };
    logs::flush();
    code
}

fn run(command: Command, said: &ArgMatches) -> anyhow::Result<ExitCode> {
    let done = match command {
        Command::Serve(serve) => serve.run(said),
        Command::Run(run) => run.run(said),
        Command::Coordinator(coordinator) => coordinator.run(said),
        Command::Worker(worker) => worker.run(said),
        Command::Router(router) => router.run(said),
        Command::Token => token(),
        Command::Pull(pull) => models::pull(&pull),
        Command::Models(models) => models::list(&models, &operate::fit),
        Command::Show(show) => models::show(&show),
        Command::Rm(remove) => models::remove(&remove),
        Command::Ps(ps) => ps.run(),
        Command::Logs(logs) => logs.run(),
        Command::Completions(asked) => shell::completions(&asked, args::program()),
        Command::Man(asked) => shell::man(&asked, args::program()),
        Command::Plan(plan) => plan.run(said),
        Command::Status(status) => status.run(),
        Command::Top(top) => top.run(),
        Command::Scale(scale) => scale.run(),
        Command::Reload(reload) => reload.run(),
        Command::Bench(options) => bench::run(&options),
        Command::Simulate(options) => simulate::run(&options),
        Command::Verify(verify) => return Ok(verify.run(said)),
        Command::Replay(replay) => return Ok(replay.run(said)),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn token() -> anyhow::Result<()> {
    out::line(wire::JoinToken::random()?.expose())
}
