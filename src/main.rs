//! The binary: arguments, then a configuration, then roles.

mod args;
mod config;

use args::Cli;
use clap::Parser;

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    match cli.command {
        args::Command::Serve(serve) => {
            let config = serve.settings.over_file(serve.source.config.as_deref())?.resolve()?;
            print!("{}", toml::to_string(&config)?);
        }
        _ => {}
    }
    Ok(())
}
