//! The rules of this repository, each a test that gives its reason. Reads the sources and `cargo metadata`; builds
//! nothing.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod language;
mod methods;
mod modules;
mod source;

use cargo_metadata::{CargoOpt, DependencyKind, Metadata, MetadataCommand, Package};
use modules::Modules;
use source::{Source, files, functions, root, sources, strip, structs, types, words};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(sources);
static METADATA: LazyLock<Metadata> = LazyLock::new(|| {
    let mut command = MetadataCommand::new();
    command.manifest_path(root().join("Cargo.toml")).features(CargoOpt::AllFeatures);
    // Other platforms are left out, so that nothing has to be fetched for them.
    let options = ["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"];
    command.other_options(options.map(String::from).to_vec()).exec().unwrap()
});

/// Which crate may depend on which; every crate may use `types`. A new dependency is a decision, for ARCHITECTURE.md
/// too.
const ARROWS: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("scheduler", &[]),
    ("proto", &[]),
    ("wire", &[]),
    ("checkpoint", &[]),
    ("quantize", &["checkpoint"]),
    ("grammar", &[]),
    ("cluster", &[]),
    ("telemetry", &[]),
    ("backend", &[]),
    ("collective", &["backend"]),
    ("model", &["checkpoint", "backend", "collective"]),
    ("worker", &["proto", "wire", "checkpoint", "grammar", "model", "backend", "collective", "telemetry"]),
    ("coordinator", &["proto", "wire", "checkpoint", "scheduler", "cluster", "telemetry"]),
    ("dialect", &[]),
    ("router", &["proto", "wire", "checkpoint", "dialect", "grammar", "cluster", "telemetry"]),
    ("faces", &["proto", "wire", "checkpoint", "dialect", "grammar", "telemetry", "router"]),
    // The tools are clients, and know the roles only for `simulate`, which plans steps in virtual time.
    ("tools", &["proto", "checkpoint", "telemetry", "router", "coordinator", "scheduler"]),
    // The binary joins the roles. It starts no kernel, and plans no step.
    (
        "lockstep",
        &[
            "proto",
            "wire",
            "checkpoint",
            "quantize",
            "cluster",
            "telemetry",
            "router",
            "faces",
            "coordinator",
            "worker",
            "tools",
        ],
    ),
    // Programs outside this workspace use it, so it has only what is published with it.
    ("lockstep-client", &[]),
    ("tidy", &[]),
];

/// The crate for programs outside this workspace.
const CLIENT: &str = "lockstep-client";

/// The folders of a crate, and which others each may use.
type Rooms = [(&'static str, &'static [&'static str])];

/// Which folder may use which. All may use the files beside the folders, for example a crate's `config.rs`.
const ROOMS: &[(&str, &Rooms)] = &[
    (
        "router/src/",
        &[
            ("audit", &["front", "replicas", "link", "board"]),
            ("front", &["history", "limits", "replicas", "link", "board"]),
            ("history", &[]),
            ("record", &[]),
            ("limits", &[]),
            ("replicas", &["link", "board"]),
            ("link", &["board"]),
            ("board", &[]),
        ],
    ),
    (
        "router/faces/src/",
        &[("kserve", &["http", "doors"]), ("vllm", &["doors"]), ("http", &["doors"]), ("doors", &[])],
    ),
    (
        "coordinator/src/",
        &[
            ("service", &["replica"]),
            ("replica", &["deployment", "requests", "members", "placement"]),
            ("deployment", &["members", "placement"]),
            ("requests", &["placement"]),
            ("members", &["placement"]),
            ("placement", &[]),
        ],
    ),
    ("worker/src/", &[("session", &["runner", "load"]), ("runner", &["load"]), ("load", &[])]),
    ("worker/backend/src/", &[("cuda", &["cpu", "ops"]), ("cpu", &["ops"]), ("ops", &[])]),
    ("worker/collective/src/", &[("carriers", &[]), ("join", &["link"]), ("link", &[])]),
    (
        "checkpoint/src/",
        &[("catalogue", &[]), ("config", &["tokenizer", "gguf"]), ("tokenizer", &["gguf"]), ("gguf", &[])],
    ),
    ("telemetry/src/", &[("logs", &["otlp"]), ("otlp", &[])]),
    (
        "src/",
        &[
            ("clients", &["serve", "settings"]),
            ("operate", &["serve", "settings"]),
            ("serve", &["roles", "models", "settings"]),
            ("roles", &["models", "settings"]),
            ("models", &["settings"]),
            ("settings", &[]),
        ],
    ),
    ("tools/src/", &[("chat", &[]), ("top", &[]), ("verify", &[]), ("simulate", &["bench"]), ("bench", &[])]),
];

/// Fails with every place that breaks the rule, and with its reason.
fn hold(law: &str, broken: Vec<String>) {
    assert!(broken.is_empty(), "\n{law}\n  {}\n", broken.join("\n  "));
}

/// Returns the places where `shipped` code in these folders has one of `names` as a whole word.
fn named(names: &[&str], inside: impl Fn(&str) -> bool) -> Vec<String> {
    let in_source = |source: &'static Source| {
        let found = words(&source.shipped).filter(|(_, word)| names.contains(word));
        found.map(|(at, word)| format!("{} names {word}", source.at(at)))
    };
    SOURCES.iter().filter(|source| inside(source.folder())).flat_map(in_source).collect()
}

fn members() -> Vec<&'static Package> {
    METADATA.packages.iter().filter(|package| METADATA.workspace_members.contains(&package.id)).collect()
}

#[test]
fn crates_depend_as_in_the_table() {
    let members = members();
    let names: BTreeSet<&str> = members.iter().map(|package| package.name.as_str()).collect();
    let mut broken = Vec::new();
    for package in &members {
        let allowed = ARROWS.iter().find(|(name, _)| *name == package.name.as_str()).map(|(_, allowed)| *allowed);
        let Some(allowed) = allowed else {
            broken.push(format!("{} is not in the table", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let name = dependency.name.as_str();
            // A test may use a crate from outside, as the binary's tests do; that is no dependency of shipped code.
            let is_arrow = names.contains(name) && name != "types" && dependency.kind != DependencyKind::Development;
            if is_arrow && !allowed.contains(&name) {
                broken.push(format!("{} -> {name}", package.manifest_path));
            }
        }
    }
    hold(
        "A crate depends only on the crates that ARROWS (tests/tidy/tidy.rs) lists: each part can be read alone.",
        broken,
    );
}

#[test]
fn rooms_use_each_other_one_way() {
    let mut broken = Vec::new();
    for (root, rooms) in ROOMS {
        let modules = Modules::of(&SOURCES, root);
        let room = |module: &[String]| rooms.iter().find(|(name, _)| module.first().is_some_and(|first| first == name));
        for (from, to) in modules.edges() {
            let (Some((of, allowed)), Some((used, _))) = (room(&from), room(&to)) else { continue };
            if of != used && !allowed.contains(used) {
                broken.push(format!("{} uses {}", modules.file(&from), modules.file(&to)));
            }
        }
    }
    hold("A crate's modules use each other in one direction (ROOMS): each can be read alone.", broken);
}

#[test]
fn files_use_each_other_in_no_large_circle() {
    const FILES_MAX: usize = 3;
    let mut broken = Vec::new();
    for package in members() {
        let folder = package.manifest_path.parent().and_then(|folder| folder.strip_prefix(root()).ok()).unwrap();
        let modules = Modules::of(&SOURCES, folder.join("src/").as_str());
        let circles = modules.circles().into_iter().filter(|circle| circle.len() > FILES_MAX);
        let circles = circles.map(|circle| circle.iter().map(|of| modules.file(of)).collect::<Vec<_>>());
        broken.extend(circles.map(|files| files.join(", ")));
    }
    hold("At most three files use each other in a circle, because none of them can be read first.", broken);
}

#[test]
fn every_dependency_is_named() {
    // The code that `build.rs` generates names it, and no source does.
    const GENERATED: &[(&str, &str)] = &[("proto", "tonic-prost"), (CLIENT, "tonic-prost"), (CLIENT, "prost")];
    let mut broken = Vec::new();
    for package in members() {
        let folder = package.manifest_path.parent().and_then(|folder| folder.strip_prefix(root()).ok()).unwrap();
        let folder = folder.join("src/");
        let sources: Vec<_> = SOURCES.iter().filter(|source| source.path.starts_with(folder.as_str())).collect();
        let is_named = |name: &str| sources.iter().any(|source| is_crate_named(&source.shipped, name));
        let shipped = package.dependencies.iter().filter(|dependency| dependency.kind == DependencyKind::Normal);
        for name in shipped.map(|dependency| dependency.rename.as_ref().unwrap_or(&dependency.name).as_str()) {
            let is_generated = GENERATED.contains(&(package.name.as_str(), name));
            let is_idle = !is_generated && !is_named(&name.replace('-', "_"));
            broken.extend(is_idle.then(|| format!("{} depends on {name}", package.manifest_path)));
        }
    }
    hold("A crate's shipped sources use each of its dependencies: what only tests use is a dev-dependency.", broken);
}

/// Whether the name is the first of a path, or imported whole.
fn is_crate_named(code: &str, name: &str) -> bool {
    let mut found = words(code).filter(|(_, word)| *word == name);
    found.any(|(at, word)| {
        let (before, after) = (&code[..at], &code[at + word.len()..]);
        (after.starts_with("::") && !before.ends_with("::")) || before.trim_end().ends_with("use")
    })
}

#[test]
fn every_crate_obeys_the_workspace_lints() {
    let lacks = |package: &&&Package| {
        let manifest: toml::Table = std::fs::read_to_string(&package.manifest_path).unwrap().parse().unwrap();
        let lints = manifest.get("lints").and_then(|lints| lints.get("workspace"));
        let is_public = package.publish.as_ref().is_none_or(|to| !to.is_empty());
        lints.and_then(toml::Value::as_bool) != Some(true) || is_public != (package.name.as_str() == CLIENT)
    };
    let broken = members().iter().filter(lacks).map(|package| package.manifest_path.to_string()).collect();
    hold("Every crate has `lints.workspace = true`, and only the client's may be published.", broken);
}

#[test]
fn unsafe_only_where_memory_is_the_work() {
    let mut broken = Vec::new();
    for source in SOURCES.iter() {
        let is_test = source.shipped.is_empty();
        // A test that counts allocations needs `unsafe impl GlobalAlloc`, so that name identifies it.
        let counts_allocations = is_test && source.code.contains("GlobalAlloc");
        let allowed = matches!(source.folder(), "worker/backend" | "worker/collective");
        if !allowed && !counts_allocations {
            let places = words(&source.code).filter(|(_, word)| matches!(*word, "unsafe" | "unsafe_code"));
            broken.extend(places.map(|(at, word)| format!("{} has {word}", source.at(at))));
        }
    }
    hold("`unsafe` only in backend and collective: elsewhere a bug cannot corrupt memory.", broken);
}

#[test]
fn devices_only_in_backend_and_collective() {
    let is_device = |folder: &str| matches!(folder, "worker/backend" | "worker/collective");
    let mut broken = named(&["cudarc"], |folder| !is_device(folder));
    for source in SOURCES.iter().filter(|source| !is_device(source.folder())) {
        let flags = words(&source.code).filter(|(_, word)| *word == "feature");
        let flags = flags.filter(|(at, word)| source.code[at + word.len()..].trim_start().starts_with('='));
        broken.extend(flags.map(|(at, _)| format!("{} has a cfg feature", source.at(at))));
    }
    for package in members().iter().filter(|package| !matches!(package.name.as_str(), "backend" | "collective")) {
        let has_cudarc = package.dependencies.iter().any(|dependency| dependency.name == "cudarc");
        broken.extend(has_cudarc.then(|| format!("{} depends on cudarc", package.manifest_path)));
    }
    hold(
        "`cudarc` and cfg features only in backend and collective: everything else is one program on every device.",
        broken,
    );
}

#[test]
fn clocks_are_for_people() {
    const CLOCKS: &[&str] =
        &["SystemTime", "UNIX_EPOCH", "OffsetDateTime", "UtcDateTime", "now_utc", "now_local", "chrono", "Utc"];
    // Times for people, unique names, and the first epoch of a single process.
    const CLOCK_READERS: &[&str] = &[
        "cluster/src/etcd/follow.rs",
        "cluster/src/etcd/keep.rs",
        "cluster/src/etcd/line.rs",
        "cluster/src/state.rs",
        "router/faces/src/vllm/mod.rs",
        "router/src/front/frontend.rs",
        "router/src/record/folder.rs",
        "router/src/replicas/topology.rs",
        "src/roles/process.rs",
        // The dates of a certificate, which TLS requires.
        "src/settings/expiry.rs",
        "src/settings/identity.rs",
        "src/settings/store.rs",
        "telemetry/src/otlp/queue.rs",
        "tools/src/status.rs",
        // The last use of a file with packed weights.
        "worker/src/load/packed_cache/mod.rs",
        // And of a page of the KV cache.
        "worker/src/tier/folder.rs",
    ];
    let broken = named(CLOCKS, |_| true);
    let is_allowed = |place: &String| CLOCK_READERS.iter().any(|file| place.starts_with(file));
    hold(
        "No decision reads a wall clock, so machines may disagree about the time: messages carry durations, and \
         revisions of the store order events.",
        broken.into_iter().filter(|place| !is_allowed(place)).collect(),
    );
}

#[test]
fn scheduler_is_pure() {
    const IMPURE: &[&str] = &[
        "std",
        "tokio",
        "Instant",
        "SystemTime",
        "HashMap",
        "HashSet",
        "RandomState",
        "rand",
        "f32",
        "f64",
        "thread",
        "Mutex",
        "AtomicU64",
        "println",
        "async",
    ];
    let mut broken = named(IMPURE, |folder| folder == "coordinator/scheduler");
    for path in ["coordinator/scheduler/src/lib.rs", "types/src/lib.rs"] {
        let lib = SOURCES.iter().find(|source| source.path == path).unwrap();
        let is_no_std = lib.code.contains("#![no_std]") || lib.code.contains("#![cfg_attr(not(test), no_std)]");
        broken.extend((!is_no_std).then(|| format!("{path} is not no_std")));
    }
    let scheduler = members().into_iter().find(|package| package.name == "scheduler").unwrap();
    let shipped = scheduler.dependencies.iter().filter(|dependency| dependency.kind == DependencyKind::Normal);
    let foreign = shipped.filter(|dependency| !matches!(dependency.name.as_str(), "types" | "thiserror"));
    broken.extend(foreign.map(|dependency| format!("scheduler depends on {}", dependency.name)));
    hold(
        "The scheduler sees no clock, socket, device, random source or hash order: the same calls give the same steps.",
        broken,
    );
}

#[test]
fn coordinator_sees_no_tensor() {
    let broken = named(&["Tensor", "tensor", "backend", "collective", "bytemuck", "half"], |f| f == "coordinator");
    hold("The coordinator plans and never computes: no tensor passes through it.", broken);
}

#[test]
fn worker_sees_no_cluster_store() {
    let mut broken = Vec::new();
    for source in SOURCES.iter().filter(|source| source.folder().starts_with("worker")) {
        for (at, _) in words(&source.shipped).filter(|(_, word)| *word == "cluster") {
            let is_path = source.shipped[at + "cluster".len()..].starts_with("::");
            // `proto::cluster` is the frames' package, not the store.
            let is_root = !source.shipped[..at].ends_with("::");
            broken.extend((is_path && is_root).then(|| source.at(at)));
        }
    }
    hold("A worker knows its coordinator and nothing of the store behind membership.", broken);
}

#[test]
fn only_the_router_has_text_and_outside_http() {
    let is_outside = |folder: &str| matches!(folder, "router" | "router/faces" | "src");
    let mut broken = named(&["axum", "hyper", "tower_http"], |folder| !is_outside(folder));
    let text = ["Tokenizer", "Detokenizer", "ChatTemplate"];
    broken.extend(named(&text, |folder| !is_outside(folder) && folder != "checkpoint"));
    hold(
        "Text and outside HTTP end in the router (and the binary's own pages): inside there are only token ids.",
        broken,
    );
}

#[test]
fn only_proto_encodes() {
    let uses = |package: &&&Package| {
        let shipped = package.dependencies.iter().filter(|dependency| dependency.kind == DependencyKind::Normal);
        !["proto", "telemetry", CLIENT].contains(&package.name.as_str())
            && shipped.into_iter().any(|dependency| dependency.name == "prost")
    };
    let broken = members().iter().filter(uses).map(|package| package.manifest_path.to_string()).collect();
    let why = "Only proto encodes frames, and only telemetry encodes messages to a collector; clients have their own.";
    hold(why, broken);
}

#[test]
fn only_the_binary_reads_the_environment() {
    let mut broken = Vec::new();
    for source in SOURCES.iter().filter(|source| source.folder() != "src" && !source.path.ends_with("build.rs")) {
        for (at, word) in
            words(&source.shipped).filter(|(_, word)| matches!(*word, "var" | "var_os" | "vars" | "vars_os"))
        {
            let reads = source.shipped[..at].ends_with("env::");
            broken.extend(reads.then(|| format!("{} reads env::{word}", source.at(at))));
        }
    }
    hold(
        "Configuration is resolved once, in the binary; a part that reads the environment has a hidden setting.",
        broken,
    );
}

#[test]
fn every_file_begins_with_its_purpose() {
    let silent = |source: &&Source| source.path.contains("/src/") || source.path.starts_with("src/");
    let silent = SOURCES.iter().filter(silent).filter(|source| !source.text.starts_with("//! "));
    hold(
        "A file begins with its purpose, and then with what it does not know (`//! ..`).",
        silent.map(|s| s.path.clone()).collect(),
    );
}

#[test]
fn no_function_is_longer_than_a_page() {
    const LINES_MAX: usize = 70;
    let long = |source: &'static Source| {
        let long = functions(&source.code).into_iter().filter(|f| f.n_lines > LINES_MAX);
        long.map(|f| format!("{}:{} fn {} has {} lines", source.path, f.first_line, f.name, f.n_lines))
    };
    hold(
        "No function over 70 lines: one that does not fit on a page does several things.",
        SOURCES.iter().flat_map(long).collect(),
    );
}

#[test]
fn what_gets_its_name_was_synced_and_so_is_the_name() {
    // Without compiled kernels, packed weights and pages of the KV cache: a damaged kernel is compiled again, a damaged
    // matrix is packed again, and a damaged page is computed.
    const FOLDERS: [&str; 5] = ["checkpoint/src/", "router/src/", "src/", "tools/src/", "worker/src/"];
    const HASHED: [&str; 2] = ["worker/src/load/packed_cache/mod.rs", "worker/src/tier/folder.rs"];
    let keeps_files = |path: &str| {
        FOLDERS.iter().any(|folder| path.starts_with(folder)) && !path.contains("/tests") && !HASHED.contains(&path)
    };
    let hasty = |source: &'static Source| {
        let lines: Vec<&str> = source.code.lines().collect();
        let hasty = functions(&source.code).into_iter().filter_map(move |f| {
            let body = lines.get(f.first_line - 1..f.first_line - 1 + f.n_lines)?.join("\n");
            let (before, after) = body.split_at(body.find("fs::rename(")?);
            let is_synced = before.contains("sync_") && after.contains("sync_");
            (!is_synced).then(|| format!("{}:{} fn {}", source.path, f.first_line, f.name))
        });
        hasty.collect::<Vec<_>>()
    };
    hold(
        "A file is synced before it is renamed, and its folder after that: a power cut leaves no incomplete file \
         under the name.",
        SOURCES.iter().filter(|source| keeps_files(&source.path)).flat_map(hasty).collect(),
    );
}

#[test]
fn no_file_is_longer_than_five_hundred_lines() {
    const LINES_MAX: usize = 500;
    // Flat lists for lookups: each metric with its function, each of the driver's symbols.
    const LISTS: &[&str] = &["telemetry/src/metrics.rs", "worker/backend/src/cuda/driver/mod.rs"];
    let long = SOURCES.iter().filter(|source| !LISTS.contains(&source.path.as_str()));
    let long = long.map(|source| (source, source.n_shipped_lines())).filter(|(_, n_lines)| *n_lines > LINES_MAX);
    hold(
        "No file over 500 lines, its tests not counted: split a longer one.",
        long.map(|(source, n_lines)| format!("{} has {n_lines}", source.path)).collect(),
    );
}

#[test]
fn a_type_name_means_one_thing() {
    // Names that each crate may define for itself.
    const OWN: &[&str] = &["Error", "Config", "Settings", "Options", "Result"];
    // One for each platform.
    const PLATFORMS: &[&str] = &["RegionExport"];
    // Each device defines its own context of an operation: one concept, with a type for each folder.
    const HOMES: [&str; 2] = ["worker/backend/src/cpu/", "worker/backend/src/cuda/"];
    let mut defined: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for source in SOURCES.iter() {
        for (_, name) in
            types(&source.shipped).into_iter().filter(|(_, name)| !OWN.contains(name) && !PLATFORMS.contains(name))
        {
            defined.entry(name).or_default().push(source);
        }
    }
    let home = |source: &&Source| HOMES.iter().position(|home| source.path.starts_with(home));
    let are_homes =
        |all: &[&Source]| matches!(all, [a, b] if home(a).is_some() && home(b).is_some_and(|b| Some(b) != home(a)));
    let many = defined.iter().filter(|(_, all)| all.len() > 1 && !are_homes(all));
    hold(
        "A type name is defined once in the workspace, so it has one meaning everywhere.",
        many.map(|(name, all)| {
            let files: Vec<&str> = all.iter().map(|source| source.path.as_str()).collect();
            format!("{name}: {}", files.join(", "))
        })
        .collect(),
    );
}

#[test]
fn a_request_has_the_forms_that_are_listed() {
    // With an endpoint's own message and that of `step.proto` they are the eight of router/DESIGN.md.
    const FORMS: &[&str] = &[
        "router/src/front/parsed_request.rs: ParsedRequest",
        "router/src/front/prepared.rs: PreparedRequest",
        "types/src/request.rs: Request",
        "router/src/link/request.rs: LinkRequest",
        "coordinator/scheduler/src/sequence.rs: Sequence",
        "worker/src/runner/sequences/sequence.rs: RankSequence",
        // Takes the place of a rank's sequence in simulations.
        "worker/src/runner/sim.rs: SimSequence",
        // An additional form: a draft model's part of it, with guesses that the log does not hold.
        "worker/src/runner/draft_model/drafted.rs: DraftSequence",
        // The same of the model's own layer, whose cache may begin behind the log's beginning.
        "worker/src/runner/mtp/sequence.rs: MtpSequence",
    ];
    // A step has many requests, each unchanged; so does a request that is kept until its answer has ended.
    const CARRIES: &[&str] = &[
        "types/src/step.rs: Step",
        "router/src/front/finished_answer.rs: AnswerSubscription",
        "router/src/front/finished_answer.rs: FinishedAnswer",
        // A row of the table of parameters: functions that read and write a request.
        "router/src/front/parameters.rs: NumberParameter",
    ];
    const CONTENT: &[&str] = &["Request", "Sampling", "Input"];
    let on_the_way = |source: &&Source| {
        ["types", "router", "router/faces", "coordinator", "coordinator/scheduler", "worker"].contains(&source.folder())
    };
    let mut found = BTreeSet::new();
    for source in SOURCES.iter().filter(on_the_way) {
        let holds = |fields: &str| words(fields).any(|(_, word)| CONTENT.contains(&word));
        let forms = structs(&source.shipped).into_iter().filter(|(_, fields)| holds(fields));
        found.extend(forms.map(|(name, _)| format!("{}: {name}", source.path)));
    }
    let listed: BTreeSet<String> = FORMS.iter().chain(CARRIES).map(|form| form.to_string()).collect();
    hold(
        "A request has as few types as possible: use one of these, or give a reason for a new one.",
        found.symmetric_difference(&listed).cloned().collect(),
    );
}

#[test]
fn nothing_is_left_for_later() {
    let mut broken = Vec::new();
    for source in SOURCES.iter() {
        let macros = words(&source.code).filter(|(_, word)| matches!(*word, "todo" | "unimplemented" | "dbg"));
        let macros = macros.filter(|(at, word)| source.code[at + word.len()..].starts_with('!'));
        broken.extend(macros.map(|(at, word)| format!("{} has {word}!", source.at(at))));
        broken.extend(source.code.match_indices("#[ignore").map(|(at, _)| format!("{} skips a test", source.at(at))));
    }
    hold("No placeholder such as `todo!`, and no skipped test.", broken);
}

#[test]
fn every_queue_has_a_limit() {
    let mut broken = named(&["unbounded_channel", "UnboundedSender", "UnboundedReceiver", "unbounded"], |_| true);
    for source in SOURCES.iter() {
        // tokio's channel takes its limit; only the standard library's takes nothing, and has none.
        for (at, word) in words(&source.shipped).filter(|(_, word)| *word == "channel") {
            let call = &source.shipped[at + word.len()..];
            let is_mpsc = source.shipped[..at].ends_with("mpsc::");
            let call = if call.starts_with("::<") { call.find(">(").map_or(call, |n| &call[n + 1..]) } else { call };
            broken.extend((is_mpsc && call.starts_with("()")).then(|| source.at(at)));
        }
    }
    hold("Every queue has a named limit: without one, only the machine's memory limits it.", broken);
}

#[test]
fn lines_fit() {
    const COLUMNS_MAX: usize = 120;
    let mut broken = Vec::new();
    for (path, text) in files(&["rs", "proto", "py", "sh", "Makefile", "run"]) {
        let long = text.lines().enumerate().filter(|(_, line)| line.chars().count() > COLUMNS_MAX);
        broken.extend(long.map(|(i, line)| format!("{path}:{} has {} columns", i + 1, line.chars().count())));
    }
    hold("Lines are at most 120 columns; rustfmt does not wrap comments and strings.", broken);
}

#[test]
fn a_file_that_is_named_is_there() {
    let all = files(&["rs"]);
    let is_there = |name: &str| all.iter().any(|(path, _)| path == name || path.ends_with(&format!("/{name}")));
    let is_name = |text: &str| {
        text.len() > 3 && text.ends_with(".rs") && text.chars().all(|c| c.is_alphanumeric() || "_./-".contains(c))
    };
    let mut broken = Vec::new();
    for (path, text) in files(&["md", "rs"]) {
        // A result names the day of its measurement.
        let is_code = |line: &str| path.ends_with(".rs") && !line.trim_start().starts_with("//");
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !path.contains("results/") && !is_code(line)) {
            let named = line.split('`').skip(1).step_by(2).filter(|quoted| is_name(quoted));
            let missing = named.filter(|name| !is_there(name));
            broken.extend(missing.map(|name| format!("{path}:{} names {name}", i + 1)));
        }
    }
    hold("A document or a comment names only files that exist.", broken);
}

#[test]
fn no_machine_is_named() {
    // Joined here, so that this file does not contain them.
    let places = ["tmp", "work", "root"].map(|name| format!("/{name}/"));
    let mut broken = Vec::new();
    for (path, text) in files(&["rs", "proto", "py", "sh", "toml", "md", "yaml", "yml", "json", "Makefile", "run"]) {
        for (i, line) in text.lines().enumerate() {
            // In the middle of a path or an address the name is that of another folder.
            let is_absolute = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-*}~".contains(c));
            let names = places.iter().any(|place| line.match_indices(place.as_str()).any(|(at, _)| is_absolute(at)));
            broken.extend(names.then(|| format!("{path}:{}", i + 1)));
        }
    }
    hold("No folder of one machine in the sources: a test calls `temp_dir()`, a script `mktemp`.", broken);
}

#[test]
fn one_version_of_what_must_agree() {
    // Two versions of these in one program are two types of one name, and two copies of the network code.
    const SINGLE: &[&str] =
        &["tonic", "prost", "hyper", "h2", "http", "tower", "rustls", "tokenizers", "tokio", "axum"];
    let versions = |name: &str| -> Vec<String> {
        let of_name = METADATA.packages.iter().filter(|package| package.name.as_str() == name);
        of_name.map(|package| package.version.to_string()).collect()
    };
    let several = SINGLE.iter().map(|name| (name, versions(name))).filter(|(_, versions)| versions.len() > 1);
    hold(
        "One version of each: two versions have different types of the same name.",
        several.map(|v| format!("{v:?}")).collect(),
    );
}

/// Tests the lexer on difficult inputs: `(source, expected rest)`.
#[test]
fn comments_and_strings_are_not_code() {
    let cases = [
        ("a // unsafe\nb", "a          \nb"),
        ("a /* x /* y */ z */ b", "a                   b"),
        (r#"f("un\"safe", 1)"#, "f(          , 1)"),
        ("f(r#\"a \" b\"#, 1)", "f(r         , 1)"),
        ("let c = '\"'; x", "let c =    ; x"),
        (r"let c = '\''; x", "let c =     ; x"),
        ("fn f<'a>(x: &'a str)", "fn f<'a>(x: &'a str)"),
        ("b'{' + 'a'", "b    +    "),
    ];
    for (text, left) in cases {
        let stripped = strip(text);
        assert_eq!(stripped.len(), text.len(), "{text}");
        assert_eq!(stripped.replace("r ", "  "), left.replace("r ", "  "), "{text}");
    }
}

#[test]
fn crates_are_found_by_the_paths_that_begin_with_them() {
    let cases = [
        ("use half::f16;", true),
        ("fn f() { half::f16::ONE }", true),
        ("use half;", true),
        ("let half = 1; half + 1", false),
        ("use other::half::X;", false),
    ];
    for (code, expect) in cases {
        assert_eq!(is_crate_named(code, "half"), expect, "{code}");
    }
}

#[test]
fn functions_are_measured() {
    let code =
        "fn a() {}\nimpl X {\n  fn b<T>(x: [u8; 2]) -> T\n  where\n    T: Y,\n  {\n    c(|| {});\n  }\n}\nfn d();\n";
    let found: Vec<_> = functions(code).into_iter().map(|f| (f.name, f.first_line, f.n_lines)).collect();
    assert_eq!(found, [("a".to_string(), 1, 1), ("b".to_string(), 3, 6)]);
}

#[test]
fn parameters_are_counted() {
    let cases = [
        ("fn f() {}", 0),
        ("fn f(&self) {}", 0),
        ("fn f(&mut self, a: u8,) {}", 1),
        ("fn f<'a, T: Into<(u8, u8)>>(self, a: &'a T, b: [u8; 2], c: (u8, u8)) -> (u8, u8) {}", 4),
        ("fn f(a: impl Fn(u8, u8) -> u8, b: Map<u8, u8>, [c, d]: [u8; 2]) where T: Fn(u8, u8) {}", 3),
        ("fn f<F: Fn(u8) -> u8>(f: F, g: u8) {}", 2),
        ("fn f((a, (b, c)): (u8, (u8, u8)), d: &'a mut (u8, Map<u8, u8>)) {}", 5),
        ("fn f(self: Arc<Self>, A { b: (c, d) }: A, e: &[(u8, u8)], g: Option<(u8, u8)>, (): ()) {}", 4),
    ];
    for (code, n) in cases {
        assert_eq!(functions(code)[0].n_parameters, n, "{code}");
    }
    assert_eq!(types("pub struct A; struct B; pub enum C {} pub fn d() {} pub(crate) type E = u8;").len(), 3);
}

#[test]
fn structs_have_their_fields() {
    let code = "pub struct A<'a> { b: &'a [C; 2] }\nimpl A<'_> { fn f(d: D) {} }\nstruct E(F, [G; 2]);\nstruct H;\n\
        enum I { J(K) }";
    let found: Vec<_> = structs(code).into_iter().map(|(name, fields)| (name, fields.trim())).collect();
    assert_eq!(found, [("A", "<'a> { b: &'a [C; 2] }"), ("E", "(F, [G; 2]);"), ("H", ";")]);
}
