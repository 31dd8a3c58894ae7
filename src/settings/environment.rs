//! Rejects variables with our prefix that no command has. Without that a misspelt variable would have no effect, while
//! a misspelt flag is an error. Has no knowledge of single commands.

use clap::Command;
use std::collections::BTreeSet;

const OURS: &str = "LOCKSTEP_";
/// Variables of tests and scripts. The processes that these start may inherit them.
const OF_TESTS: [&str; 13] = [
    "BINARY",
    "CHAOS",
    "CHAOS_MODEL",
    "CHAOS_ROWS",
    "CHAOS_SECONDS",
    "CHAOS_SEED",
    "FAULTS",
    "GRIDS",
    "IMAGE",
    "ORACLE",
    "OVERLOAD",
    "SOAK_MINUTES",
    "TENANTS",
];
const TESTS_OWN: &str = "TEST_";

/// Returns an error for the first variable that has our prefix and is no setting of any command.
pub fn check(program: &Command, variables: impl IntoIterator<Item = (String, String)>) -> Result<(), String> {
    let of_commands = program.get_subcommands().flat_map(Command::get_arguments);
    let known: BTreeSet<&str> = of_commands.filter_map(|argument| argument.get_env()?.to_str()).collect();
    let is_strange = |(name, value): &(String, String)| {
        let rest = name.strip_prefix(OURS).filter(|_| !known.contains(name.as_str()));
        rest.is_some_and(|rest| !OF_TESTS.contains(&rest) && !rest.starts_with(TESTS_OWN) && !is_service(name, value))
    };
    let Some((name, _)) = variables.into_iter().find(is_strange) else { return Ok(()) };
    let like = router::nearest(&name, known).map_or_else(
        || "`lockstep serve --help` lists the settings".to_owned(),
        |like| format!("a setting with a similar name is {like}"),
    );
    Err(format!("unknown environment variable {name}: {like}"))
}

/// Whether Kubernetes has set it, for example `LOCKSTEP_ETCD_SERVICE_HOST` or `LOCKSTEP_ETCD_PORT_2379_TCP` for a
/// Service `lockstep-etcd`.
fn is_service(name: &str, value: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_of_port = |after: &str| after.split_once('_').is_some_and(|(port, _)| is_number(port));
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || (name.ends_with("_PORT") && value.contains("://"))
        || name.split_once("_PORT_").is_some_and(|(_, after)| is_of_port(after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;

    fn checked(names: &[&str]) -> Result<(), String> {
        let worker = Command::new("worker").arg(Arg::new("threads").env("LOCKSTEP_THREADS"));
        let router = Command::new("router").arg(Arg::new("http").env("LOCKSTEP_HTTP"));
        let program = Command::new("lockstep").subcommands([worker, router]);
        let value = |name: &str| if name.ends_with("R_PORT") { "tcp://a:1" } else { "1" }.to_owned();
        let variable = |name: &&str| ((*name).to_owned(), value(name));
        check(&program, names.iter().map(variable))
    }

    #[test]
    fn a_slip_is_refused_and_what_is_for_others_is_not() {
        for names in [
            &["LOCKSTEP_THREADS", "LOCKSTEP_HTTP", "HOME", "LOCK", "LOCKSTEPS_X"][..],
            &["LOCKSTEP_ORACLE", "LOCKSTEP_TEST_RANK", "LOCKSTEP_CHAOS_SEED"],
            &["LOCKSTEP_ETCD_SERVICE_HOST", "LOCKSTEP_SERVICE_PORT", "LOCKSTEP_ROUTER_SERVICE_PORT_HTTP"],
            &["LOCKSTEP_ROUTER_PORT", "LOCKSTEP_PORT_8000_TCP", "LOCKSTEP_ROUTER_PORT_8000_TCP_ADDR"],
        ] {
            assert_eq!(checked(names), Ok(()), "{names:?}");
        }
        for (name, expected) in [
            ("LOCKSTEP_THREAD", "a setting with a similar name is LOCKSTEP_THREADS"),
            ("LOCKSTEP_HTPP", "a setting with a similar name is LOCKSTEP_HTTP"),
            ("LOCKSTEP_TESTS", "unknown environment variable LOCKSTEP_TESTS"),
            ("LOCKSTEP_HTTP_PORT", "a setting with a similar name is LOCKSTEP_HTTP"),
            ("LOCKSTEP_SERVICE_HOSTS", "variable LOCKSTEP_SERVICE_HOSTS:"),
            ("LOCKSTEP_", "unknown environment variable LOCKSTEP_:"),
        ] {
            let refused = checked(&["LOCKSTEP_THREADS", name]).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
