//! `simulate`: the simulator, with the models of this machine.

use crate::settings::hub::{HubSettings, sources};
use clap::Args;
use tools::simulate::{SimulateOptions, run};

#[derive(Args)]
pub struct SimulateCommand {
    #[command(flatten)]
    pub options: SimulateOptions,
    #[command(flatten)]
    pub hub: HubSettings,
}

impl SimulateCommand {
    pub fn run(self) -> anyhow::Result<()> {
        run(&self.options, || sources(&self.hub))
    }
}
