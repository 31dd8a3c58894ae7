//! Real hosts: a network namespace in the middle, and others around it, each with a link to it that can be cut. Uses
//! iproute2, and has no knowledge of the programs that run there.
#![allow(dead_code, reason = "each test binary uses a part")]

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

/// The namespaces, removed at the end. Hosts around the middle are counted from 0.
pub struct Star {
    middle: String,
    around: Vec<String>,
}

impl Star {
    /// Returns None if this system does not permit namespaces; the reason is printed.
    pub fn new(n_around: usize) -> Option<Star> {
        let pid = std::process::id();
        let middle = format!("lockstep-{pid}-m");
        if !run(&format!("ip netns add {middle}")) {
            return None;
        }
        let around = (0..n_around).map(|i| format!("lockstep-{pid}-{i}")).collect();
        let star = Star { middle, around };
        assert!(run(&format!("ip -n {} link set lo up", star.middle)));
        (0..n_around).for_each(|i| star.join(i));
        Some(star)
    }

    fn join(&self, i: usize) {
        let (here, there, near, far) = (&self.middle, &self.around[i], self.near(i), self.far(i));
        // Interface names are global until their ends are moved to the namespaces.
        let (a, b) = (format!("ls{}a{i}", std::process::id()), format!("ls{}b{i}", std::process::id()));
        let commands = [
            format!("ip netns add {there}"),
            format!("ip link add {a} netns {here} type veth peer name {b} netns {there}"),
            format!("ip -n {there} link set dev {b} name link"),
            format!("ip -n {here} address add {near}/30 dev {a}"),
            format!("ip -n {there} address add {far}/30 dev link"),
            format!("ip -n {there} link set lo up"),
            format!("ip -n {here} link set dev {a} up"),
            format!("ip -n {there} link set dev link up"),
        ];
        assert!(commands.iter().all(|command| run(command)));
    }

    /// The middle's address on the link to a host.
    pub fn near(&self, i: usize) -> String {
        format!("192.0.2.{}", 4 * i + 1)
    }

    /// The host's address.
    pub fn far(&self, i: usize) -> String {
        format!("192.0.2.{}", 4 * i + 2)
    }

    /// Moves this thread, and all processes that it starts, to the middle.
    pub fn enter(&self) {
        let place = File::open(Path::new("/run/netns").join(&self.middle)).unwrap();
        move_into_link_name_space(place.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }

    /// A command that runs `program` on a host, with the same process id; arguments are to be added.
    pub fn command_at(&self, i: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.around[i], program]);
        command
    }

    pub fn set_link(&self, i: usize, state: &str) {
        assert!(run(&format!("ip -n {} link set dev link {state}", self.around[i])));
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        for name in self.around.iter().chain([&self.middle]) {
            run(&format!("ip netns delete {name}"));
        }
    }
}

fn run(command: &str) -> bool {
    let mut words = command.split(' ');
    let done = Command::new(words.next().unwrap()).args(words).output();
    let done = done.map_err(|error| error.to_string());
    match done {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            eprintln!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim());
            false
        }
        Err(error) => {
            eprintln!("{command}: {error}");
            false
        }
    }
}
