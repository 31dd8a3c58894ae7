//! Settings parsed from a command line and a file.

use super::file::merge_text;
use super::{CoordinatorRole, RouterRole, ServeSettings, WorkerRole};
use clap::{ArgMatches, Args, Command};
use serde::Serialize;
use serde::de::DeserializeOwned;

fn parsed<T: Args>(words: &str) -> (T, ArgMatches) {
    let command = T::augment_args(Command::new("settings").no_binary_name(true));
    let matches = command.get_matches_from(words.split_whitespace());
    (T::from_arg_matches(&matches).unwrap(), matches)
}

/// Parses the settings of this command line.
pub fn parse_settings<T: Args>(words: &str) -> T {
    parsed(words).0
}

/// Parses the settings of this command line over a file.
pub fn from_file<T: Args + Serialize + DeserializeOwned>(words: &str, file: &str) -> anyhow::Result<T> {
    let (flags, matches) = parsed::<T>(words);
    merge_text::<T, T>(flags, &matches, file)
}

#[test]
fn roles_share_a_file_and_unknown_keys_are_refused() {
    let file = "threads = 5\nhttp = \"127.0.0.1:1\"\nlisten = \"127.0.0.1:2\"\ntp = 3";
    let (flags, matches) = parsed::<CoordinatorRole>("--tp 2");
    let role = merge_text::<CoordinatorRole, ServeSettings>(flags.clone(), &matches, file).unwrap();
    assert_eq!((role.coordinator.tp, role.listen.listen.port()), (2, 2));
    let worse = merge_text::<CoordinatorRole, ServeSettings>(flags.clone(), &matches, "worse = 1").unwrap_err();
    assert!(worse.to_string().contains("worse is not a setting"));
    let slip = merge_text::<CoordinatorRole, ServeSettings>(flags, &matches, "max-batch-token = 1").unwrap_err();
    assert!(slip.to_string().ends_with("a setting with a similar name is max-batch-tokens"), "{slip}");
    let alone = from_file::<WorkerRole>("", "http = \"127.0.0.1:1\"").unwrap_err();
    assert!(alone.to_string().contains("http is not a setting"));
}

#[test]
fn each_role_can_be_printed_and_read_back() {
    fn check<T: Args + Serialize + DeserializeOwned + Clone>(words: &str, resolved: fn(T) -> anyhow::Result<T>) {
        let settings = resolved(parse_settings(words)).unwrap();
        let text = super::config_text(&settings).unwrap();
        let again = resolved(from_file("", &text).unwrap()).unwrap();
        assert_eq!(super::config_text(&again).unwrap(), text);
    }
    check::<ServeSettings>("tiny --tp 2 --inproc", ServeSettings::resolved);
    check::<RouterRole>("tiny --coordinator a:1,b:2 --host 127.0.0.2", RouterRole::resolved);
    check::<CoordinatorRole>("tiny --kv-dtype f32 --health 127.0.0.1:1", CoordinatorRole::resolved);
    check::<WorkerRole>("--join a:1 --device cuda:1 --memory 1GiB --fetch", WorkerRole::resolved);
}

#[test]
fn secrets_are_handed_on_but_never_printed() {
    let settings = parse_settings::<ServeSettings>("--api-key hidden --otlp-headers x=hidden");
    assert!(!super::config_text(&settings).unwrap().contains("hidden"));
    assert_eq!(toml::to_string(&super::to_table(&settings).unwrap()).unwrap().matches("hidden").count(), 2);
}
