//! Merges flags and a file into one struct, and prints it or hands it on. Has no knowledge of single settings.

use super::hub::HubSettings;
use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// The sources of settings besides the flags.
#[derive(Args)]
pub struct ConfigSource {
    /// TOML file of settings, with the flags' names; flags and LOCKSTEP_* variables override it
    #[arg(long, env = "LOCKSTEP_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the settings from flags, environment and file as TOML, and exit
    #[arg(long)]
    pub print_config: bool,
    #[command(flatten)]
    pub hub: HubSettings,
}

impl ConfigSource {
    /// Returns these flags, with missing values taken from the file. `matches` distinguishes flags from defaults.
    pub fn merge_file<T>(&self, flags: T, matches: &ArgMatches) -> anyhow::Result<T>
    where
        T: Args + Serialize + DeserializeOwned,
    {
        self.merge_shared_file::<T, T>(flags, matches)
    }

    /// Does the same as `under`, for a file that several roles share: keys that only `Other` has are skipped.
    pub fn merge_shared_file<T, Other>(&self, flags: T, matches: &ArgMatches) -> anyhow::Result<T>
    where
        T: Args + Serialize + DeserializeOwned,
        Other: Args,
    {
        let Some(path) = &self.config else { return Ok(flags) };
        merge_text::<T, Other>(flags, matches, &read(path)?).with_context(|| format!("in {}", path.display()))
    }
}

pub fn merge_text<T, Other>(flags: T, matches: &ArgMatches, file: &str) -> anyhow::Result<T>
where
    T: Args + Serialize + DeserializeOwned,
    Other: Args,
{
    let (ours, others) = (arguments::<T>(), arguments::<Other>());
    let mut merged = to_table(&flags)?;
    for (name, value) in toml::from_str::<toml::Table>(file)? {
        let is_named = |argument: &&Arg| name_of(argument) == name;
        let Some(argument) = ours.get_arguments().find(is_named) else {
            if others.get_arguments().any(|argument| is_named(&argument)) {
                continue;
            }
            let known: Vec<String> = ours.get_arguments().chain(others.get_arguments()).map(name_of).collect();
            let like = router::nearest(&name, known.iter().map(String::as_str));
            let like = like.map_or_else(String::new, |like| format!(": a setting with a similar name is {like}"));
            bail!("{name} is not a setting of this command{like}");
        };
        let mut with = merged.clone();
        with.insert(name.clone(), value);
        // A value is parsed even if a flag overrides it, so that an invalid one is reported.
        with.clone().try_into::<T>().with_context(|| name.clone())?;
        let source = matches.value_source(argument.get_id().as_str());
        if !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
            merged = with;
        }
    }
    Ok(merged.try_into()?)
}

/// Returns the arguments that declare these settings.
fn arguments<T: Args>() -> Command {
    T::augment_args(Command::new("settings"))
}

/// Returns an argument's name in a file.
fn name_of(argument: &Arg) -> String {
    argument.get_id().as_str().replace('_', "-")
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns all settings as a table, including secrets.
pub fn to_table(settings: &impl Serialize) -> anyhow::Result<toml::Table> {
    Ok(toml::Table::try_from(settings)?)
}

/// Returns the output of `--print-config`: a file with these settings, without the values that the help hides too.
pub fn config_text<T: Args + Serialize>(settings: &T) -> anyhow::Result<String> {
    let mut table = to_table(settings)?;
    for secret in arguments::<T>().get_arguments().filter(|argument| argument.is_hide_env_values_set()) {
        table.remove(&name_of(secret));
    }
    Ok(toml::to_string(&table)?)
}
