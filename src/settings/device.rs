//! `--device`: its syntax, its meaning on this machine, and the choices. Reads the drivers' replies; has no knowledge
//! of kernels.

use super::machine;
use anyhow::{Context, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fmt::Write;
use std::path::PathBuf;
use std::str::FromStr;
use types::{DeviceClass, DeviceKind};
use worker::{Card, Compiler, ComputeDevice, Driver};

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeviceSettings {
    /// Device to compute on: cpu, cuda, cuda:N, auto or sim
    ///
    /// With cuda each worker of `lockstep serve` takes the next GPU; cuda:N is one GPU. auto is cuda if there is a GPU,
    /// otherwise cpu. sim loads no model and draws tokens from a hash, to test everything else.
    #[arg(long, env = "LOCKSTEP_DEVICE", value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
}

/// The device that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// A usable GPU if there is one, otherwise the CPU.
    Auto,
    /// This machine's CPU.
    Cpu,
    /// A GPU: the given one, or a different one for each worker in turn.
    Cuda(Option<u32>),
    /// No model: tokens drawn from each request's hash, to test everything else.
    Sim,
}

/// The percentage of a device's free memory that weights, KV cache and scratch memory may take. The driver needs some
/// for loaded kernels, and other programs may use the device too.
const USABLE_PERCENT: u64 = 88;

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceChoice::Auto),
            None if text == "cpu" => Ok(DeviceChoice::Cpu),
            None if text == "cuda" => Ok(DeviceChoice::Cuda(None)),
            None if text == "sim" => Ok(DeviceChoice::Sim),
            Some(("cuda", number)) if number.parse::<u32>().is_ok() => Ok(DeviceChoice::Cuda(number.parse().ok())),
            _ => Err(format!("{text:?} is not a device: give auto, cpu, cuda, cuda:N or sim")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(None) => f.write_str("cuda"),
            DeviceChoice::Cuda(Some(number)) => write!(f, "cuda:{number}"),
            DeviceChoice::Sim => f.write_str("sim"),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<DeviceChoice, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(device: DeviceChoice) -> String {
        device.to_string()
    }
}

impl DeviceChoice {
    /// Replaces `auto` by the device that this machine has.
    pub fn resolved(self) -> DeviceChoice {
        match self {
            DeviceChoice::Auto if usable_gpus().is_ok() => DeviceChoice::Cuda(None),
            DeviceChoice::Auto => DeviceChoice::Cpu,
            choice => choice,
        }
    }

    pub fn class(self) -> DeviceClass {
        match self {
            DeviceChoice::Auto | DeviceChoice::Cpu => DeviceClass::Cpu,
            DeviceChoice::Cuda(_) => DeviceClass::Cuda,
            DeviceChoice::Sim => DeviceClass::Sim,
        }
    }

    /// Returns the device of the worker with this number, among all devices of this machine.
    pub fn of_worker(self, number: u16) -> anyhow::Result<DeviceChoice> {
        Ok(match self.resolved() {
            DeviceChoice::Cuda(None) => {
                let ordinals = usable_gpus()?;
                DeviceChoice::Cuda(Some(ordinals[usize::from(number) % ordinals.len()]))
            }
            one => one,
        })
    }

    /// Returns the kind of device that a worker reports: all ranks of one replica must report the same.
    pub fn device_kind(self) -> anyhow::Result<DeviceKind> {
        Ok(match self.of_worker(0)? {
            DeviceChoice::Cuda(ordinal) => Driver::find()?.card(ordinal.unwrap_or(0))?.device_kind(),
            other => other.class().into(),
        })
    }

    /// Returns the memory that a worker on this device may use, if `n_workers` of this machine share its devices.
    pub fn memory_bytes(self, n_workers: u16, of_machine: u64) -> anyhow::Result<u64> {
        let DeviceChoice::Cuda(ordinal) = self.resolved() else { return Ok(of_machine / u64::from(n_workers.max(1))) };
        let (n_sharing, ordinal) = match ordinal {
            Some(ordinal) => (n_workers.into(), ordinal),
            None => {
                let ordinals = usable_gpus()?;
                (usize::from(n_workers).div_ceil(ordinals.len()), ordinals[0])
            }
        };
        let driver = Driver::find()?;
        let free = driver.free_bytes(&driver.card(ordinal)?)?;
        Ok(free / 100 * USABLE_PERCENT / (n_sharing.max(1) as u64))
    }

    /// Returns the memory that a separate worker process may use, if `n_workers` of this machine share its devices:
    /// either all workers have the same device, or they take devices in turn. The other workers may already run, or
    /// start later.
    pub fn memory_bytes_of_one(self, n_workers: u16, of_machine: u64) -> anyhow::Result<u64> {
        let ordinal = match self.resolved() {
            DeviceChoice::Cuda(ordinal) => ordinal,
            one => return one.memory_bytes(n_workers, of_machine),
        };
        let ordinals = usable_gpus()?;
        let n_sharing = ordinal.map_or(n_workers, |_| n_workers.div_ceil(ordinals.len() as u16));
        let driver = Driver::find()?;
        let card = driver.card(ordinal.unwrap_or(ordinals[0]))?;
        let share = card.memory_bytes / u64::from(n_sharing.max(1));
        Ok(share.min(driver.free_bytes(&card)?) / 100 * USABLE_PERCENT)
    }

    /// Returns the device for a model's loader; `cache` is the folder for compiled kernels.
    pub fn compute_device(self, cache: Option<PathBuf>) -> anyhow::Result<Option<ComputeDevice>> {
        Ok(match self.of_worker(0)? {
            DeviceChoice::Cuda(ordinal) => {
                let ordinal = ordinal.unwrap_or(0);
                Driver::find()?.card(ordinal)?.check()?;
                Some(ComputeDevice::Cuda { ordinal, cache })
            }
            DeviceChoice::Auto | DeviceChoice::Cpu => Some(ComputeDevice::Cpu),
            DeviceChoice::Sim => None,
        })
    }
}

/// Returns the GPUs that can run kernels; at least one.
fn usable_gpus() -> anyhow::Result<Vec<u32>> {
    let cards = Driver::find()?.cards()?;
    let ordinals: Vec<u32> = cards.iter().filter(|card| card.check().is_ok()).map(|card| card.ordinal).collect();
    match cards.first() {
        _ if !ordinals.is_empty() => Ok(ordinals),
        None => bail!("no CUDA: the driver has no device"),
        Some(card) => Err(card.check().err().context("no device")?.into()),
    }
}

/// Lists this machine's devices, as lines.
pub fn list() -> String {
    let mut out = format!("cpu     {} cores, {}\n", machine::cores(), worker::Isa::detect().name());
    let driver = Driver::find();
    let cards = driver.as_ref().map_err(ToString::to_string).and_then(|driver| {
        let cards = driver.cards().map_err(|error| error.to_string())?;
        Ok((*driver, cards))
    });
    // Writing to a string does not fail.
    match cards {
        Err(why) => {
            let _written = writeln!(out, "cuda    none: {why}");
        }
        Ok((driver, cards)) => {
            let _written =
                writeln!(out, "cuda    driver for CUDA {driver}{}, {} devices", driver_release(), cards.len());
            cards.iter().for_each(|card| out += &line(driver, card));
        }
    }
    let nvrtc = driver.map_or_else(|_| Compiler::find(), Compiler::find_for);
    let nvrtc = nvrtc.map_or_else(|error| error.to_string(), |compiler| compiler.to_string());
    let nccl = worker::nccl_version().map_or_else(|error| error.to_string(), |version| version.to_string());
    let cublaslt = worker::lt_version().map_or_else(|error| error.to_string(), |version| version.to_string());
    let _written = writeln!(out, "nvrtc   {nvrtc}\nnccl    {nccl}\ncublaslt {cublaslt}");
    out
}

fn line(driver: Driver, card: &Card) -> String {
    let (major, minor) = card.capability;
    let free = driver.free_bytes(card).map_or_else(|error| error.to_string(), gibibytes);
    format!(
        "cuda:{}  {}, sm_{major}{minor}, {} multiprocessors, {free} of {} free{}\n",
        card.ordinal,
        card.name,
        card.multiprocessors,
        gibibytes(card.memory_bytes),
        card.check().err().map_or_else(String::new, |error| format!(": {error}")),
    )
}

/// Returns the driver's release number, if its kernel module reports one.
fn driver_release() -> String {
    let version_text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    parse_release(&version_text).map_or_else(String::new, |release| format!(" ({release})"))
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 ..` -> `580.95.05`
fn parse_release(version_text: &str) -> Option<&str> {
    let is_release = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    version_text.lines().next()?.split_whitespace().find(is_release)
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["auto", "cpu", "cuda", "cuda:3", "sim"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|device| device.to_string()), Ok(text.to_owned()));
        }
        for wrong in ["gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1", ""] {
            assert!(wrong.parse::<DeviceChoice>().is_err_and(|error| error.contains("cuda:N")), "{wrong}");
        }
    }

    #[test]
    fn driver_release_is_found_in_version_text() {
        let version_text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.3.0";
        assert_eq!(parse_release(version_text), Some("580.95.05"));
        assert_eq!(parse_release(""), None);
    }
}
