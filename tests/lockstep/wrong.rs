//! The error messages of the command line, whole, in one table. Each names the mistake, its place and the correction,
//! in units for people. Read it as a user with that mistake.

use crate::common::node::{BINARY, Folder};
use std::process::{Command, Stdio};

/// A command line and its output; `{}` stands for text that differs between machines. `$HOME` is a folder with a few
/// invalid files in it, `$MODEL` a small model.
const TABLE: &[(&str, &str)] = &[
    ("run ./nofile.gguf hi", "lockstep: there is no model ./nofile.gguf: no such file or folder"),
    (
        "run no-such-model hi",
        "lockstep: there is no model no-such-model: not a path, not in the catalogue (`lockstep models` lists it), \
         and not a hub id like org/name or org/name:Q4_1",
    ),
    (
        "run lama3.3 hi",
        "lockstep: there is no model lama3.3: not a path, not in the catalogue (similar names are llama3.3:70b, {}; \
         `lockstep models` lists all), and not a hub id like org/name or org/name:Q4_1",
    ),
    ("run $HOME/bad.gguf hi", "lockstep: $HOME/bad.gguf: this is not a GGUF file: it does not begin with GGUF"),
    (
        "run hf.co/org/name hi",
        "lockstep: org/name could not be fetched: http://127.0.0.1:9/api/models/org/name/{}Connection refused",
    ),
    ("show org/name", "lockstep: there is no model org/name: it has not been fetched: `lockstep pull org/name`"),
    ("rm no-such-model", "lockstep: there is no model no-such-model here: `lockstep list` shows all"),
    (
        "serve $MODEL --kv-memory 100TiB",
        "lockstep: --kv-memory 100 TiB does not fit: {} has {} GiB left beside 369 KiB of weights of rank 0; no \
         other grid fits either",
    ),
    (
        "serve $MODEL --tp 64",
        "lockstep: the model cannot be split into tp 64: its attention has 2 runs of heads; the nearest \
         grid that fits is tp 2 x pp 1",
    ),
    ("serve $MODEL --pp 9", "lockstep: pp 9 exceeds the model's 2 layers; the nearest grid that fits is tp 1 x pp 2"),
    ("serve $MODEL --tp 0", "lockstep: --tp is 0; it must be at least 1"),
    (
        "serve $MODEL --context 999999",
        "lockstep: the requested context of 999999 exceeds the model's 512: set at most 512",
    ),
    (
        "serve $MODEL --api-keys $HOME/none",
        "lockstep: API keys in $HOME/none: cannot read $HOME/none: No such file or directory",
    ),
    ("serve $MODEL --config $HOME/none", "lockstep: cannot read $HOME/none: No such file or directory"),
    (
        "serve $MODEL --config $HOME/config.toml",
        "lockstep: in $HOME/config.toml: treads is not a setting of this command: a setting with a similar name \
         is threads",
    ),
    (
        "serve $MODEL --control 192.0.2.1:1",
        "lockstep: --control 192.0.2.1:1 is not loopback: for other machines, run `lockstep coordinator`",
    ),
    ("serve $MODEL --numerics fast", "lockstep: --numerics fast is for GPUs: other devices have one mode"),
    (
        "serve $MODEL --http 192.0.2.1:8000 --grpc 127.0.0.1:0",
        "lockstep: cannot listen for HTTP on 192.0.2.1:8000: Cannot assign requested address; set --port",
    ),
    ("run $MODEL hi --temperature 9", "lockstep: temperature: must be 0 to 2, got 9"),
    ("run $MODEL hi --max-tokens 0", "lockstep: max_tokens: must be at least 1, got 0"),
    (
        "run $MODEL hi --raw --context 2",
        "lockstep: the prompt has 2 tokens, which is too many for a context of 2. Please reduce the \
         length of the input prompt",
    ),
    (
        "status --url http://127.0.0.1:9",
        "lockstep: no server answers at http://127.0.0.1:9: Connection refused. `lockstep serve` starts one, \
         --url names another",
    ),
    (
        "ps --url http://127.0.0.1:9",
        "lockstep: no server answers at http://127.0.0.1:9: Connection refused. `lockstep serve` starts one, \
         --url names another",
    ),
    (
        "logs 7 --url http://127.0.0.1:9",
        "lockstep: request 7: no server answers at http://127.0.0.1:9: Connection refused. `lockstep serve` \
         starts one, --url names another",
    ),
    ("logs a/b", "lockstep: \"a/b\" is neither a request's number nor an answer's id, such as 7 or chatcmpl-1f2e3d4c"),
    (
        "status --url nonsense",
        "lockstep: --url nonsense is not a server's address: give one such as http://127.0.0.1:8000",
    ),
    (
        "status --tls-ca $HOME/none",
        "lockstep: no certificates can be read from $HOME/none: I/O error: No such file or directory",
    ),
    (
        "scale --tp 2 --pp 1 --coordinator 127.0.0.1:9",
        "lockstep: no coordinator answers at 127.0.0.1:9: no connection: Connection refused. Set --coordinator; \
         `lockstep serve` logs its address",
    ),
    (
        "reload --coordinator 127.0.0.1:9",
        "lockstep: no coordinator answers at 127.0.0.1:9: no connection: Connection refused. Set --coordinator; \
         `lockstep serve` logs its address",
    ),
    (
        "worker",
        "lockstep: give either --join HOST:PORT, the coordinator's address, or --etcd-endpoints HOST:PORT with \
         --replica NAME",
    ),
    (
        "router $MODEL",
        "lockstep: give either --coordinator HOST:PORT, a replica's address, or --etcd-endpoints HOST:PORT, to find \
         replicas",
    ),
    (
        "verify $HOME/none",
        "lockstep: cannot be compared: $HOME/none is not a file: $HOME/none is not an id of an answer either",
    ),
    ("replay $HOME/none", "lockstep: cannot be replayed: $HOME/none: No such file or directory"),
    (
        "bench --url http://127.0.0.1:9",
        "lockstep: http://127.0.0.1:9/v1/models does not answer: io: Connection refused",
    ),
    ("man /proc/none", "lockstep: /proc/none cannot be created: No such file or directory"),
    (
        "serve $MODEL --kv-memory 4Gb",
        "error: invalid value '4Gb' for '--kv-memory <BYTES>': \"Gb\" is not a unit of bytes: use KiB, MiB, GiB \
         or TiB\n\nFor more information, try '--help'.",
    ),
    (
        "serve $MODEL --device gpu",
        "error: invalid value 'gpu' for '--device <DEVICE>': \"gpu\" is not a device: give auto, cpu, cuda, \
         cuda:N or sim\n\nFor more information, try '--help'.",
    ),
    ("router $MODEL --tp 2", "error: `lockstep router` has no --tp: it is for `lockstep coordinator`{}"),
    ("simulate --gpu abacus", "error: invalid value 'abacus' for '--gpu <GPU>': \"abacus\" is not a known GPU: l4, {}"),
    (
        "completions tcsh",
        "error: invalid value 'tcsh' for '<SHELL>'\n  [possible values: bash, elvish, fish, powershell, zsh]{}",
    ),
    ("models --jsn", "error: unexpected argument '--jsn' found\n\n  tip: a similar argument exists: '--json'{}"),
    (
        "serve $HOME/empty",
        "lockstep: $HOME/empty is a folder without a config.json: give a model's folder, or a .gguf file",
    ),
    ("run $HOME/notes.txt hi", "lockstep: $HOME/notes.txt: this is not a GGUF file: it does not begin with GGUF"),
    (
        "pull https://example.com/model.gguf",
        "lockstep: https://example.com/model.gguf is not a hub id: give one such as org/name or org/name:Q4_K_M, or \
         download the file and give its path",
    ),
    (
        "serve $MODEL --chat-template $HOME/bad.jinja",
        "lockstep: --chat-template: the chat template failed: unexpected end of input{}(line 1)",
    ),
    (
        "serve $MODEL --chat-template $HOME/none",
        "lockstep: --chat-template $HOME/none is neither a readable file nor a template: No such file or directory",
    ),
    (
        "serve $MODEL --api-tls-cert $HOME/notes.txt --api-tls-key $HOME/notes.txt",
        "lockstep: there is no certificate in $HOME/notes.txt",
    ),
    (
        "serve $MODEL --otlp-endpoint collector",
        "lockstep: --otlp-endpoint collector is not a collector's URL: give one such as http://127.0.0.1:4317",
    ),
    (
        "serve $MODEL --kv-memory 1",
        "lockstep: a context of 512 needs 128 KiB of KV on rank 0 {}: set a shorter \
                                    context (--context) or more KV memory (--kv-memory); no other grid fits either",
    ),
    ("serve $MODEL --context 1", "lockstep: --context is below 2: a prompt and its answer need a token each"),
    ("serve $MODEL --threads 0", "lockstep: --threads is 0; it must be at least 1"),
    (
        "serve $MODEL --config $HOME/twice.toml",
        "lockstep: in $HOME/twice.toml: TOML parse error at line 2{}duplicate key",
    ),
    ("run $MODEL hi --top-p 2", "lockstep: top_p: must be 0 to 1, got 2"),
    ("scale --tp 0 --pp 1", "lockstep: --tp is 0; it must be at least 1"),
    ("scale --tp 1 --pp 1 --coordinator one", "lockstep: --coordinator: \"one\" is not an address: use host:port"),
    ("worker --join 127.0.0.1", "lockstep: --join: \"127.0.0.1\" is not an address: use host:port"),
    ("router $MODEL --coordinator one", "lockstep: --coordinator: \"one\" is not an address: use host:port"),
    (
        "worker --join 192.0.2.1:50100",
        "lockstep: 192.0.2.1:50100 is not loopback: give the cluster's join token with --token-file FILE (`lockstep \
         token` makes one), or certificates with --tls-cert, --tls-key and --tls-ca",
    ),
    ("serve $MODEL --port many", "error: --port <PORT>: \"many\" is not a whole number{}"),
    ("serve $MODEL --port 99999", "error: invalid value '99999' for '--port <PORT>': 99999 is not in 0..=65535{}"),
    ("run $MODEL hi --temperature hot", "error: --temperature <TEMPERATURE>: \"hot\" is not a number{}"),
    (
        "serve $MODEL --host localhost",
        "error: --host <IP>: \"localhost\" is not an IP address: give 127.0.0.1, or 0.0.0.0 for all of this \
         machine{}",
    ),
    (
        "serve $MODEL --http localhost",
        "error: --http <ADDR>: \"localhost\" is not an address: give one such as 127.0.0.1:8000{}",
    ),
    (
        "serve $MODEL --enforce-eager",
        "error: --enforce-eager is not supported: tokens are the same with CUDA graphs; --cuda-graphs off turns them \
         off{}",
    ),
    (
        "serve $MODEL --kv-host 8GiB",
        "lockstep: --kv-host on the CPU: its KV cache is in host memory; --kv-disk DIR:BYTES keeps more of it on disk",
    ),
    (
        "serve $MODEL --kv-disk $HOME/kv",
        "error: invalid value '$HOME/kv' for '--kv-disk <DIR:BYTES>': give a folder and its size, such as \
         /var/cache/kv:100GiB\n\nFor more information, try '--help'.",
    ),
    (
        "serve $MODEL --zero-kv --kv-disk $HOME/kv:1GiB",
        "lockstep: --kv-disk or --kv-host without the prefix cache: their pages are found as cached prefixes are; set \
         only one of them",
    ),
    ("serve $MODEL --kv-disk /dev/null:1GiB", "{}lockstep: --kv-disk /dev/null: File exists"),
    (
        "serve $MODEL --draft-min 2",
        "error: --draft-min is not supported: --speculation auto drafts as many tokens as make an answer faster; \
         --draft-max limits them{}",
    ),
    (
        "serve $MODEL --speculation 4 --draft-max 2",
        "lockstep: --draft-max 2 limits `--speculation auto`, and --speculation is 4",
    ),
    (
        "serve $MODEL --gpu-memory-utilization 90",
        "error: {}90 is out of range: give a part of the memory from 0.001 to 1{}",
    ),
    (
        "serve $MODEL --quantization awq",
        "error: --quantization is not supported: weights keep the dtype of their file: give a quantized model, such \
         as org/name:Q4_K_M{}",
    ),
    ("server", "error: unrecognized subcommand 'server'\n\n  tip: a similar subcommand exists: 'serve'{}"),
    ("pull", "error: the following required arguments were not provided:\n  <MODEL>{}"),
];

/// Whether a text is the pattern, with anything for each `{}`.
fn is_like(text: &str, pattern: &str) -> bool {
    let mut parts = pattern.split("{}");
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let parts: Vec<&str> = parts.collect();
    for (at, part) in parts.iter().enumerate() {
        let found = if at + 1 == parts.len() { rest.strip_suffix(part).map(|_| rest.len()) } else { rest.find(part) };
        let Some(found) = found else { return false };
        rest = rest.get(found + part.len()..).unwrap_or_default();
    }
    !parts.is_empty() || rest.is_empty()
}

#[test]
fn every_message_names_cause_place_and_remedy() {
    let home = Folder::new("wrong");
    home.write("bad.gguf", "no weights");
    home.write("config.toml", "treads = 1");
    home.write("twice.toml", "threads = 1\nthreads = 2");
    home.write("notes.txt", "words");
    home.write("bad.jinja", "{{ messages");
    std::fs::create_dir(home.0.join("empty")).unwrap();
    let place = home.0.to_str().unwrap();
    let mut wrong = Vec::new();
    for (line, expect) in TABLE {
        let filled = |text: &str| text.replace("$HOME", place).replace("$MODEL", "tests/reference/llama-f32-tied");
        let words: Vec<String> = line.split(' ').map(filled).collect();
        let mut command = Command::new(BINARY);
        command.args(&words).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
        command.env_clear().env("HOME", place).env("PATH", "/usr/bin:/bin").env("HF_ENDPOINT", "http://127.0.0.1:9");
        let output = command.output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        if output.status.success() || !is_like(&message, &filled(expect)) {
            wrong.push(format!("$ lockstep {line}\n{message}\n  and not\n{expect}\n"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), TABLE.len(), wrong.join("\n"));
}
