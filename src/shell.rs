//! Completions for shells and manual pages, made from the declarations of the commands.

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use std::path::PathBuf;
use tools::out;

#[derive(Args)]
pub struct CompletionsCommand {
    /// Shell that completes the commands
    pub shell: Shell,
}

#[derive(Args)]
pub struct ManCommand {
    /// Folder for the pages, one for each command; created if missing
    pub dir: PathBuf,
}

pub fn completions(command: &CompletionsCommand, mut lockstep: Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(command.shell, &mut lockstep, "lockstep", &mut script);
    out::print(&String::from_utf8_lossy(&script))
}

pub fn man(command: &ManCommand, lockstep: Command) -> anyhow::Result<()> {
    let dir = command.dir.display();
    std::fs::create_dir_all(&command.dir).with_context(|| format!("{dir} cannot be created"))?;
    clap_mangen::generate_to(lockstep, &command.dir).with_context(|| format!("{dir} cannot be written to"))?;
    out::print_line(&format!("manual pages are in {dir}: man -l {dir}/lockstep.1"))
}
