//! `plan`: how a model would be placed on this machine, or the devices of this machine. A model is named as for
//! `serve`, or as for `simulate`, by figures alone.

use crate::serve::plan::{table, table_of};
use crate::serve::{resolve_or_print, with_model};
use crate::settings::device::list;
use crate::settings::{ConfigSource, ServeSettings};
use checkpoint::Checkpoint;
use clap::{ArgMatches, Args};
use tools::known_models::SimulatedModel;
use tools::out;
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
    pub fn run(self, matches: &ArgMatches) -> anyhow::Result<()> {
        if self.devices {
            return out::print(&list());
        }
        let Some(settings) = resolve_or_print(self.settings, &self.source, matches)? else { return Ok(()) };
        // A model known by figures is not fetched; its weights count as bf16.
        if let Some(model) = SimulatedModel::of_figures(&settings.model.model, None)? {
            return out::print(&table_of(&settings, &model.name, &model.shape)?);
        }
        let (settings, located) = with_model(settings, &self.source)?;
        out::print(&table(&settings, &Checkpoint::open(&located.path)?)?)?;
        if settings.device.device.class() == DeviceClass::Cuda {
            out::print(&format!("\n{}", list()))?;
        }
        Ok(())
    }
}
