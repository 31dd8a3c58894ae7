//! The binary: arguments, then settings, then roles.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod args;
mod clients;
mod mistakes;
mod models;
mod operate;
mod roles;
mod serve;
mod settings;
mod shell;

use args::Command;
use clap::ArgMatches;
use std::process::ExitCode;
use telemetry::logs;
use tools::{bench, out};

fn main() -> ExitCode {
    let (command, matches) = args::parse();
    let done = run(command, &matches);
    telemetry::flush();
    let code = match done {
        Ok(code) => code,
        Err(error) if error.is::<out::ReaderGone>() => ExitCode::SUCCESS,
        Err(error) => {
            logs::write_line(&format!("lockstep: {}", out::error_text(&error)));
            ExitCode::FAILURE
        }
    };
    logs::flush();
    code
}

fn run(command: Command, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let done = match command {
        Command::Serve(serve) => serve.run(matches),
        Command::Run(run) => run.run(matches),
        Command::Coordinator(coordinator) => coordinator.run(matches),
        Command::Worker(worker) => worker.run(matches),
        Command::Router(router) => router.run(matches),
        Command::Token => token(),
        Command::Pull(pull) => models::pull(&pull),
        Command::Models(models) => models::list(&models, &serve::fit::fit),
        Command::Show(show) => models::show(&show),
        Command::Rm(remove) => models::remove(&remove),
        Command::Quantize(quantize) => models::write_quantized(&quantize),
        Command::Ps(ps) => ps.run(),
        Command::Logs(logs) => logs.run(),
        Command::Completions(completions) => shell::completions(&completions, args::program()),
        Command::Man(man) => shell::man(&man, args::program()),
        Command::Plan(plan) => plan.run(matches),
        Command::Status(status) => status.run(settings::device::list),
        Command::Top(top) => top.run(),
        Command::Scale(scale) => scale.run(),
        Command::Reload(reload) => reload.run(),
        Command::Bench(options) => bench::run(&options),
        Command::Simulate(simulate) => simulate.run(),
        Command::Verify(verify) => return Ok(verify.run(matches)),
        Command::Replay(replay) => return Ok(replay.run(matches)),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn token() -> anyhow::Result<()> {
    out::print_line(wire::JoinToken::random()?.expose())
}
