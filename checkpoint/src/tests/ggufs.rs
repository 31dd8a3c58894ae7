//! GGUFs, whole, in parts, cut off and damaged.

use super::*;

#[test]
fn opens_a_gguf() {
    let folder = Temporary::folder("gguf");
    let checkpoint = Checkpoint::open(&folder.write("tiny.gguf", &tiny().bytes())).unwrap();
    let spec = checkpoint.spec();
    assert_eq!((spec.hidden, spec.n_layers, spec.head_dim, spec.vocab), (64, 2, 16, 263));
    assert_eq!((spec.bos, &spec.eos[..]), (Some(260), &[261][..]));
    assert!(spec.tied_embeddings && spec.rope.pairs && spec.name == "tiny");
    let k = checkpoint.tensor("model.layers.1.self_attn.k_proj.weight").unwrap();
    assert_eq!((k.dtype, k.shape, k.read().unwrap().len()), (Dtype::Q4_1, [32, 64], 32 * 40));
    assert_eq!(checkpoint.tensor("model.norm.weight").unwrap().to_f32().unwrap().len(), 64);
    assert!(!checkpoint.has("lm_head.weight"));
    let error = checkpoint.tensor("lm_head.weight").unwrap_err().to_string();
    assert!(error.contains("lm_head.weight") && error.contains("tiny.gguf"), "{error}");
    let sizes = checkpoint.sizes();
    assert_eq!((sizes.embedding, sizes.norm, sizes.head), (263 * 68, 256, 0));
    let layer = sizes.layers[0];
    assert_eq!(layer.total(), 12_288 / 32 * 20 + 3 * 96 * 64 * 2 + 512);
    assert_eq!((layer.mlp, layer.experts, layer.replicated), (3 * 96 * 64 * 2, 0, 512));
    assert_eq!(layer.heads, 2 * layer.kv_heads);
    assert_eq!(sizes.total(), sizes.embedding + 256 + 2 * layer.total());
}

/// The tiny model in `n` files, as a splitting tool writes them.
fn in_parts(n: u32) -> Vec<Writer> {
    let whole = tiny();
    let total = whole.tensors.len();
    let place = |writer: Writer, no: u32| {
        let writer = writer.meta("split.no", Meta::U32(no)).meta("split.count", Meta::U32(n));
        writer.meta("split.tensors.count", Meta::U32(total as u32))
    };
    let mut parts: Vec<Writer> = (0..n).map(|no| place(Writer::default(), no)).collect();
    parts[0] = place(Writer { values: whole.values, tensors: Vec::new() }, 0);
    for (i, tensor) in whole.tensors.into_iter().enumerate() {
        parts[i % n as usize].tensors.push(tensor);
    }
    parts
}

#[test]
fn opens_a_gguf_in_parts() {
    let folder = Temporary::folder("parts");
    let name = |no: usize| format!("tiny-{no:05}-of-00003.gguf");
    let write = |parts: &[Writer]| {
        for (i, part) in parts.iter().enumerate() {
            folder.write(&name(i + 1), &part.bytes());
        }
    };
    let open = |no: usize| Checkpoint::open(&folder.0.join(name(no)));
    let refused = |expect: &str| {
        let error = open(2).err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    };
    write(&in_parts(3));
    let whole = Checkpoint::open(&folder.write("whole.gguf", &tiny().bytes())).unwrap();
    for no in 1..=3 {
        let checkpoint = open(no).unwrap();
        assert_eq!(checkpoint.sizes(), whole.sizes());
        assert_eq!(checkpoint.spec(), whole.spec());
        let shape = |c: &Checkpoint| c.tensor("model.layers.1.mlp.up_proj.weight").unwrap().shape;
        assert_eq!(shape(&checkpoint), shape(&whole));
        assert_eq!(checkpoint.tokenizer().unwrap().n_vocab(), 263);
    }
    std::fs::remove_file(folder.0.join(name(3))).unwrap();
    refused("its part tiny-00003-of-00003.gguf is missing");
    let mut parts = in_parts(3);
    parts.swap(1, 2);
    write(&parts);
    refused("its name is part 2 of 3, but its header is 3 of 3");
    let mut parts = in_parts(3);
    parts[2].tensors.pop();
    write(&parts);
    refused("tensors in all, and should have 20");
    let mut parts = in_parts(3);
    let twice = parts[1].tensors[0].clone();
    parts[2].tensors[0] = twice;
    write(&parts);
    refused("is in another part too");
    let alone = Checkpoint::open(&folder.write("alone.gguf", &in_parts(3)[0].bytes())).err().unwrap().to_string();
    assert!(alone.contains("one of 3 parts, but its name has no part number"), "{alone}");
}

#[test]
#[cfg(unix)]
fn what_does_not_end_is_not_read() {
    let folder = Temporary::folder("endless");
    std::os::unix::fs::symlink("/dev/zero", folder.0.join("config.json")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.0.join("zero.gguf")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(folder.0.join("pipe.gguf")).status();
    let pipe = made.is_ok_and(|status| status.success()).then(|| folder.0.join("pipe.gguf"));
    for path in [Some(folder.0.clone()), Some(folder.0.join("zero.gguf")), pipe].into_iter().flatten() {
        let error = Checkpoint::open(&path).err().unwrap().to_string();
        assert!(error.contains("not a file"), "{error}");
    }
}

#[test]
fn a_digest_names_the_weights() {
    let folder = Temporary::folder("digest");
    let bytes = tiny().bytes();
    let digest =
        |name: &str, bytes: &[u8]| Checkpoint::open(&folder.write(name, bytes)).unwrap().fingerprint().unwrap();
    let first = digest("a.gguf", &bytes);
    assert_eq!(first, digest("b.gguf", &bytes));
    assert_eq!(first, digest("c.gguf", &tiny().meta("general.name", Meta::Text("other")).bytes()));
    assert_ne!(first, digest("d.gguf", &tiny().meta("llama.rope.freq_base", Meta::F32(5e5)).bytes()));
    let mut other = bytes.clone();
    *other.last_mut().unwrap() ^= 1;
    assert_ne!(first, digest("e.gguf", &other));
}

#[test]
fn what_no_rank_reads_has_no_hash_and_is_listed() {
    let folder = Temporary::folder("unread");
    let open = |name: &str, writer: Writer| Checkpoint::open(&folder.write(name, &writer.bytes())).unwrap();
    let (plain, more) = (open("plain.gguf", tiny()), open("more.gguf", tiny().tensor("mtp.weight", &[64], 0, 256)));
    assert_eq!((plain.unread_tensors(), more.unread_tensors()), (vec![], vec!["mtp.weight".to_owned()]));
    let hashes = more.hash_weights().unwrap();
    assert_eq!(plain.hash_weights().unwrap(), hashes);
    // It is the last tensor of the file.
    let mut bytes = tiny().tensor("mtp.weight", &[64], 0, 256).bytes();
    *bytes.last_mut().unwrap() ^= 1;
    let damaged = Checkpoint::open(&folder.write("damaged.gguf", &bytes)).unwrap();
    assert_eq!(
        (damaged.hash_weights().unwrap(), damaged.first_difference(&hashes, &|| false).unwrap()),
        (hashes, None)
    );
}

#[test]
fn refuses_what_contradicts_itself() {
    refused(tiny().meta("general.architecture", Meta::Text("mamba")), "the architecture mamba");
    refused(tiny().meta("llama.attention.head_count_kv", Meta::U32(3)), "4 heads cannot share 3 KV heads");
    refused(tiny().meta("llama.attention.head_count_kv", Meta::U32(0)), "KV heads is zero");
    refused(
        tiny().meta("llama.attention.head_count_kv", Meta::I32s(vec![2; 4097])),
        "4097 layers, which exceed the limit",
    );
    refused(tiny().meta("llama.feed_forward_length", Meta::I32s(vec![96, 64])), "differs between layers");
    refused(tiny().meta("llama.attention.head_count", Meta::U32(0)), "zero");
    refused(tiny().meta("llama.block_count", Meta::U32(u32::MAX)), "llama.block_count is 4294967295");
    refused(tiny().meta("llama.block_count", Meta::Text("two")), "llama.block_count is not a number");
    refused(tiny().meta("llama.rope.freq_base", Meta::F32(f32::NAN)), "base is NaN");
    refused(tiny().meta("llama.rope.scaling.type", Meta::Text("yarn")), "type yarn");
    refused(tiny().meta("llama.expert_count", Meta::U32(8)), "expert_used_count is missing");
    refused(tiny().meta("tokenizer.ggml.eos_token_id", Meta::U32(70_000)), "70000 is outside the vocabulary of 263");
    refused(tiny().meta("general.alignment", Meta::U32(33)), "general.alignment is 33");
    refused(tiny().tensor("output_norm.weight", &[64], 0, 256), "output_norm.weight occurs twice");
    refused(tiny().raw_meta("general.name", &[4, 0, 0, 0, 1, 0, 0, 0]), "general.name occurs twice");
    refused(tiny().tensor("x", &[0], 0, 0), "x has a dimension of zero");
    refused(tiny().tensor("x", &[64], 8, 68), "the tensor x, a vector of type Q8_0");
    refused(tiny().tensor("x", &[64, 4], 12, 0), "x cannot have the dimensions [4, 64] as Q4_K");
    refused(tiny().tensor("x", &[33], 8, 0), "x cannot have the dimensions [33] as Q8_0");
    refused(tiny().tensor("x", &[1 << 40, 1 << 40], 0, 0), "x cannot have the dimensions");
    refused(tiny().tensor("x", &[1 << 40], 0, 0), "past the end of the file");
    refused(tiny().tensor("x", &[], 0, 0), "x has 0 dimensions");
    refused(tiny().tensor("x", &[256], 15, 0), "the tensor x has type Q8_K");
    refused(tiny().tensor("x", &[256], 4, 0), "the unknown type 4");
    refused(tiny().raw_meta("k", &[&array_head(8, 1 << 60)[..], &[1; 64]].concat()), "k");
    refused(tiny().raw_meta("k", &array_head(6, 1 << 62)), "is the file cut off?");
    refused(tiny().raw_meta("k", &array_head(9, 1)), "a list of lists");
    refused(tiny().raw_meta("k", &[99, 0, 0, 0]), "k has the unknown type 99");
    let counts = |n_tensors: u64, n_values: u64| {
        let mut bytes = tiny().bytes();
        bytes[8..16].copy_from_slice(&n_tensors.to_le_bytes());
        bytes[16..24].copy_from_slice(&n_values.to_le_bytes());
        assert!(read(&bytes).is_err());
    };
    counts(1 << 60, 19);
    counts(20, 1 << 60);
}

#[test]
fn refuses_missing_and_misshapen_tensors() {
    let folder = Temporary::folder("shapes");
    let check = |edit: &dyn Fn(&mut Writer), expect: &str| {
        let mut writer = tiny();
        edit(&mut writer);
        let error = Checkpoint::open(&folder.write("t.gguf", &writer.bytes())).err().unwrap().to_string();
        assert!(error.contains(expect) && error.contains("t.gguf"), "{error}");
    };
    check(&|w| w.tensors.retain(|t| t.0 != "blk.1.ffn_up.weight"), "no tensor model.layers.1.mlp.up_proj.weight");
    check(&|w| w.tensors[2].1 = vec![32, 128], "q_proj.weight has the shape [128, 32], and the model needs [64, 64]");
    for (name, bytes) in [("empty.gguf", &b""[..]), ("text.gguf", b"hello, this is no model"), ("short.gguf", b"GG")] {
        let error = Checkpoint::open(&folder.write(name, bytes)).err().unwrap().to_string();
        assert!(error.contains(name), "{error}");
    }
    let error = Checkpoint::open(&folder.0.join("none.gguf")).err().unwrap();
    assert!(matches!(error, Error::Io { .. }));
}

#[test]
fn a_file_that_is_cut_off_is_an_error() {
    let bytes = tiny().bytes();
    assert!(read(&bytes).is_ok());
    for len in (0..bytes.len() - 32).step_by(37).chain(0..200) {
        assert!(read(&bytes[..len]).is_err(), "{len} of {}", bytes.len());
    }
}

/// A committed GGUF in which the bytes behind a key's name and type are others.
fn patched(name: &str, changes: &[(&str, usize, &[u8])]) -> Vec<u8> {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../tests/reference", name, "model.gguf"].iter().collect();
    let mut bytes = std::fs::read(path).unwrap();
    for (key, at, new) in changes {
        let start = bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + at;
        bytes[start..start + new.len()].copy_from_slice(new);
    }
    bytes
}

#[test]
fn layers_of_hybrids_are_read_from_lists_or_refused() {
    // Behind a key: its type, and for a list the type of its numbers and how many there are.
    const VALUE: usize = 4;
    const LIST: usize = 4 + 4 + 8;
    const KV: &str = "granitehybrid.attention.head_count_kv";
    const INNER: &str = "nemotron_h.feed_forward_length";
    let folder = Temporary::folder("hybrids");
    let open = |name: &str, changes: &[(&str, usize, &[u8])]| {
        Checkpoint::open(&folder.write("hybrid.gguf", &patched(name, changes)))
    };
    let mixers =
        |name: &str| open(name, &[]).unwrap().spec().layers.iter().map(|layer| layer.mixer).collect::<Vec<_>>();
    let is_state = |mixer: &MixerSpec| matches!(mixer, MixerSpec::Recurrence(_) | MixerSpec::Convolution(_));
    for name in ["gguf-granite4-dense", "gguf-lfm2"] {
        assert_eq!(mixers(name).iter().map(is_state).collect::<Vec<_>>(), [true, false, true], "{name}");
    }
    let nemotron = mixers("gguf-nemotron-h");
    assert_eq!(nemotron.iter().map(is_state).collect::<Vec<_>>(), [true, false, false, true, false]);
    assert_eq!((nemotron[1], nemotron[2]), (MixerSpec::None, MixerSpec::Attention));
    let refused = |name: &str, changes: &[(&str, usize, &[u8])], expect: &str| {
        let error = open(name, changes).err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    };
    refused("gguf-granite4-dense", &[(KV, LIST, &[1])], "head_count_kv that differs between layers");
    refused("gguf-granite4-dense", &[(KV, LIST, &[0xff; 4])], "head_count_kv has the number -1");
    refused("gguf-nemotron-h", &[(INNER, LIST + 8, &[64])], "layer 2, of attention and an MLP");
    refused("gguf-granite4-dense", &[("granitehybrid.ssm.time_step_rank", VALUE, &[3])], "cannot share 128 columns");
    let rope: [(&str, usize, &[u8]); 2] =
        [("granitehybrid.rope.scaling.finetuned", VALUE, &[1]), ("granitehybrid.rope.dimension_count", VALUE, &[8])];
    assert_eq!(open("gguf-granite4-dense", &rope[..1]).unwrap().spec().layers[1].positions, PositionEncoding::Rope);
    refused("gguf-granite4-dense", &rope, "a GGUF of Bamba");
}
