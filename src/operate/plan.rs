//! `plan`: how a model would be placed on this machine, or what this machine has to compute on.

use crate::out;
use crate::serve::plan::table;
use crate::serve::prepared;
use crate::settings::device::list;
use crate::settings::{ConfigSource, ServeSettings};
use checkpoint::Checkpoint;
use clap::{ArgMatches, Args};
use types::DeviceClass;

#[derive(Args)]
pub struct PlanCommand {
    /// List this machine's devices, drivers, memory and libraries, and exit
    #[arg(long)]
    pub devices: bool,
    #[command(flatten)]
    pub settings: ServeSettings,
    #[command(flatten)]
    pub source: ConfigSource,
}

impl PlanCommand {
    pub fn run(self, said: &ArgMatches) -> anyhow::Result<()> {
        if self.devices {
            return out::print(&list());
        }
        let Some((settings, located)) = prepared(self.settings, &self.source, said)? else { return Ok(()) };
        out::print(&table(&settings, &Checkpoint::open(&located.path)?)?)?;
        if settings.device.device.class() == DeviceClass::Cuda {
            out::print(&format!("\n{}", list()))?;
        }
        Ok(())
    }
}
