//! Models small enough to write down, whole and damaged in every way: they are read right or refused with a reason, and
//! never cause a panic.

use super::*;
use crate::error::Fault;
use crate::gguf::Gguf;
use std::fmt::Write as _;
use types::Scales;

/// A metadata value as it is written.
pub(crate) enum Meta<'a> {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'a str),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

#[derive(Default)]
pub(crate) struct Writer {
    values: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, usize)>,
}

impl Writer {
    pub fn meta(mut self, key: &str, value: Meta<'_>) -> Writer {
        let mut bytes = Vec::new();
        match value {
            Meta::U32(n) => bytes.extend([&4u32.to_le_bytes()[..], &n.to_le_bytes()].concat()),
            Meta::F32(n) => bytes.extend([&6u32.to_le_bytes()[..], &n.to_le_bytes()].concat()),
            Meta::Bool(b) => bytes.extend([&7u32.to_le_bytes()[..], &[u8::from(b)]].concat()),
            Meta::Text(t) => bytes.extend([&8u32.to_le_bytes()[..], &text(t)].concat()),
            Meta::Texts(list) => {
                bytes.extend(array_head(8, list.len()));
                list.iter().for_each(|t| bytes.extend(text(t)));
            }
            Meta::I32s(list) => {
                bytes.extend(array_head(5, list.len()));
                list.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            }
            Meta::F32s(list) => {
                bytes.extend(array_head(6, list.len()));
                list.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            }
        }
        self.values.retain(|(known, _)| known != key);
        self.values.push((key.to_owned(), bytes));
        self
    }

    fn raw_meta(mut self, key: &str, bytes: &[u8]) -> Writer {
        self.values.push((key.to_owned(), bytes.to_vec()));
        self
    }

    /// `dims` in the file's order, the fastest first.
    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, n_bytes: usize) -> Writer {
        self.tensors.push((name.to_owned(), dims.to_vec(), kind, n_bytes));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            out.extend(text(key));
            out.extend(value);
        }
        let mut offset = 0u64;
        for (name, dims, kind, n_bytes) in &self.tensors {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + *n_bytes as u64).next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        let start = out.len();
        out.extend((0..offset as usize).map(|i| (i * 7 + 1) as u8));
        out.truncate(start + offset as usize);
        out
    }
}

fn text(t: &str) -> Vec<u8> {
    [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat()
}

fn array_head(kind: u32, n: usize) -> Vec<u8> {
    [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(n as u64).to_le_bytes()].concat()
}

/// The 256 bytes, a few merges, and the control tokens of a chat: 256 + 4 + 3 tokens.
fn vocabulary() -> (Vec<String>, Vec<i32>, Vec<String>) {
    let mut tokens = crate::tokenizer::test_alphabet();
    tokens.extend(["he", "ll", "hell", "Ġhell"].map(str::to_owned));
    let mut kinds = vec![1; tokens.len()];
    tokens.extend(["<|im_start|>", "<|im_end|>", "<tool>"].map(str::to_owned));
    kinds.extend([3, 3, 4]);
    let merges = ["h e", "l l", "he ll", "Ġ hell"].map(str::to_owned).into();
    (tokens, kinds, merges)
}

const TEMPLATE: &str = "{% for m in messages %}\
    {{ '<|im_start|>' + m['role'] + '\n' + m.content.strip() + '<|im_end|>\n' }}\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn tiny() -> Writer {
    let (tokens, kinds, merges) = vocabulary();
    let n = tokens.len() as u64;
    let mut writer = Writer::default()
        .meta("general.architecture", Meta::Text("llama"))
        .meta("general.name", Meta::Text("tiny"))
        .meta("llama.block_count", Meta::U32(2))
        .meta("llama.context_length", Meta::U32(128))
        .meta("llama.embedding_length", Meta::U32(64))
        .meta("llama.feed_forward_length", Meta::U32(96))
        .meta("llama.attention.head_count", Meta::U32(4))
        .meta("llama.attention.head_count_kv", Meta::U32(2))
        .meta("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5))
        .meta("llama.rope.freq_base", Meta::F32(10_000.0))
        .meta("tokenizer.ggml.model", Meta::Text("gpt2"))
        .meta("tokenizer.ggml.pre", Meta::Text("smollm"))
        .meta("tokenizer.ggml.add_bos_token", Meta::Bool(false))
        .meta("tokenizer.ggml.bos_token_id", Meta::U32(260))
        .meta("tokenizer.ggml.eos_token_id", Meta::U32(261))
        .meta("tokenizer.chat_template", Meta::Text(TEMPLATE))
        .meta("tokenizer.ggml.tokens", Meta::Texts(tokens))
        .meta("tokenizer.ggml.token_type", Meta::I32s(kinds))
        .meta("tokenizer.ggml.merges", Meta::Texts(merges))
        .tensor("token_embd.weight", &[64, n], 8, n as usize * 68)
        .tensor("output_norm.weight", &[64], 0, 256);
    for layer in 0..2 {
        for (name, cols, rows) in [("attn_q", 64, 64), ("attn_k", 64, 32), ("attn_v", 64, 32), ("attn_output", 64, 64)]
        {
            writer = writer.tensor(
                &format!("blk.{layer}.{name}.weight"),
                &[cols, rows],
                3,
                (cols * rows / 32 * 20) as usize,
            );
        }
        for (name, cols, rows) in [("ffn_gate", 64, 96), ("ffn_up", 64, 96), ("ffn_down", 96, 64)] {
            writer = writer.tensor(&format!("blk.{layer}.{name}.weight"), &[cols, rows], 1, (cols * rows * 2) as usize);
        }
        for name in ["attn_norm", "ffn_norm"] {
            writer = writer.tensor(&format!("blk.{layer}.{name}.weight"), &[64], 0, 256);
        }
    }
    writer
}

/// A file that is deleted on drop.
pub(crate) struct Temporary(PathBuf);

impl Temporary {
    pub fn folder(name: &str) -> Temporary {
        let path = std::env::temp_dir().join(format!("lockstep-checkpoint-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Temporary(path)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self.0.join(name)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Does everything that opening a GGUF does, on bytes.
fn read(bytes: &[u8]) -> std::result::Result<ModelSpec, Fault> {
    ModelSpec::from_gguf(&Gguf::parse(bytes)?, bytes, "file")
}

fn refused(writer: Writer, expect: &str) {
    match read(&writer.bytes()) {
        Err(Fault::Malformed(what) | Fault::Unsupported(what)) => assert!(what.contains(expect), "{what}"),
        Ok(spec) => panic!("{spec:?} where {expect} was expected"),
    }
}

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
    refused("by its name part 2 of 3, by its header 3 of 3");
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
    assert!(alone.contains("one of 3 parts, and its name does not say which"), "{alone}");
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
    assert_eq!((plain.unread(), more.unread()), (vec![], vec!["mtp.weight".to_owned()]));
    let hashes = more.hashes().unwrap();
    assert_eq!(plain.hashes().unwrap(), hashes);
    // It is the last tensor of the file.
    let mut bytes = tiny().tensor("mtp.weight", &[64], 0, 256).bytes();
    *bytes.last_mut().unwrap() ^= 1;
    let damaged = Checkpoint::open(&folder.write("damaged.gguf", &bytes)).unwrap();
    assert_eq!((damaged.hashes().unwrap(), damaged.differs_from(&hashes, &|| false).unwrap()), (hashes, None));
}

#[test]
fn encodes_decodes_and_streams() {
    let folder = Temporary::folder("tokenizer");
    let tokenizer = Checkpoint::open(&folder.write("t.gguf", &tiny().bytes())).unwrap().tokenizer().unwrap();
    assert_eq!(tokenizer.n_vocab(), 263);
    let ids = |text: &str| tokenizer.encode(text, true).unwrap();
    assert_eq!(ids("hello hell"), [258, ids("o")[0], 259]);
    assert_eq!(ids("<|im_start|>hell<tool><|im_end|>"), [260, 258, 262, 261]);
    assert!(tokenizer.is_special(260) && !tokenizer.is_special(262) && !tokenizer.is_special(9999));
    assert_eq!(tokenizer.decode(&[260, 258, 262], true), "hell<tool>");
    assert_eq!(tokenizer.decode(&[260, 258, 262], false), "<|im_start|>hell<tool>");
    assert_eq!(tokenizer.token_bytes(9999), b"");
    let text = "naïve 漢字 😀👨‍👩‍👧 12 don't\n";
    let tokens = ids(text);
    assert!(tokens.len() > 20);
    let mut stream = tokenizer.stream();
    let mut streamed = String::new();
    for token in &tokens {
        let piece = stream.push(*token);
        assert!(!piece.contains('\u{FFFD}'));
        streamed.push_str(piece);
    }
    assert_eq!(streamed + stream.finish(), text);
}

#[test]
fn any_stream_is_what_decode_gives() {
    let folder = Temporary::folder("stream");
    let tokenizer = Checkpoint::open(&folder.write("t.gguf", &tiny().bytes())).unwrap().tokenizer().unwrap();
    let mut random = Random(1);
    for _ in 0..500 {
        let tokens: Vec<u32> = (0..random.below(40)).map(|_| random.below(264) as u32).collect();
        for skip in [true, false] {
            let mut stream = if skip { tokenizer.stream() } else { tokenizer.stream_with_special() };
            let mut streamed: String = tokens.iter().map(|token| stream.push(*token).to_owned()).collect();
            streamed.push_str(stream.finish());
            assert_eq!(streamed, tokenizer.decode(&tokens, skip));
        }
    }
}

#[test]
fn a_vocabulary_may_lack_bytes() {
    let (mut tokens, kinds, merges) = vocabulary();
    tokens[0] = "hehe".into();
    let writer = tiny().meta("tokenizer.ggml.tokens", Meta::Texts(tokens));
    let writer =
        writer.meta("tokenizer.ggml.token_type", Meta::I32s(kinds)).meta("tokenizer.ggml.merges", Meta::Texts(merges));
    let folder = Temporary::folder("lack");
    let tokenizer = Checkpoint::open(&folder.write("t.gguf", &writer.bytes())).unwrap().tokenizer().unwrap();
    assert_eq!(tokenizer.n_vocab(), 263);
    assert_eq!(tokenizer.encode("\0hell\0", false).unwrap(), [258]);
}

#[test]
fn refuses_tokenizers_by_name() {
    let folder = Temporary::folder("refused");
    let check = |writer: Writer, expect: &str| {
        let checkpoint = Checkpoint::open(&folder.write("t.gguf", &writer.bytes())).unwrap();
        let error = checkpoint.tokenizer().err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check(tiny().meta("tokenizer.ggml.pre", Meta::Text("klingon")), "the pre-tokenizer klingon");
    check(tiny().meta("tokenizer.ggml.pre", Meta::Text("default")), "the pre-tokenizer default");
    check(tiny().meta("tokenizer.ggml.model", Meta::Text("t5")), "the tokenizer model t5");
    check(tiny().meta("tokenizer.ggml.merges", Meta::Texts(vec!["h zz".into()])), "which is not in the vocabulary");
    check(tiny().meta("tokenizer.ggml.merges", Meta::Texts(vec!["hell hell".into()])), "\"hellhell\"");
    check(tiny().meta("tokenizer.ggml.merges", Meta::Texts(vec!["hell".into()])), "is not two tokens");
    check(tiny().meta("tokenizer.ggml.token_type", Meta::I32s(vec![1])), "1 token types for 263 tokens");
}

#[test]
fn every_named_pre_tokenizer_runs() {
    let folder = Temporary::folder("pre");
    for pre in ["gpt-2", "smollm", "refact", "command-r", "llama-bpe", "qwen2", "tekken"] {
        let path = folder.write("t.gguf", &tiny().meta("tokenizer.ggml.pre", Meta::Text(pre)).bytes());
        let tokenizer = Checkpoint::open(&path).unwrap().tokenizer().unwrap();
        let text = "It's 12345 hello\n\n  wörld 漢";
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap(), false), text, "{pre}");
    }
}

#[test]
fn bos_is_added_where_the_file_says() {
    let folder = Temporary::folder("bos");
    let ids = |writer: Writer, special: bool| {
        let checkpoint = Checkpoint::open(&folder.write("t.gguf", &writer.bytes())).unwrap();
        checkpoint.tokenizer().unwrap().encode("hell", special).unwrap()
    };
    assert_eq!(ids(tiny(), true), [258]);
    let adds = || tiny().meta("tokenizer.ggml.add_bos_token", Meta::Bool(true));
    assert_eq!(ids(adds(), true), [260, 258]);
    assert_eq!(ids(adds(), false), [258]);
    assert_eq!(ids(adds().meta("tokenizer.ggml.add_eos_token", Meta::Bool(true)), true), [260, 258, 261]);
}

#[test]
fn refuses_what_contradicts_itself() {
    refused(tiny().meta("general.architecture", Meta::Text("mamba")), "the architecture mamba");
    refused(tiny().meta("llama.attention.head_count_kv", Meta::U32(3)), "4 heads cannot share 3 KV heads");
    refused(tiny().meta("llama.attention.head_count_kv", Meta::U32(0)), "KV heads is zero");
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
    refused(tiny().tensor("x", &[256], 17, 0), "the tensor x has type IQ2_XS");
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

/// Reproducible, and good enough to choose bytes with.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

#[test]
fn renders_chats() {
    let folder = Temporary::folder("chat");
    let checkpoint = Checkpoint::open(&folder.write("t.gguf", &tiny().bytes())).unwrap();
    let template = checkpoint.chat_template().unwrap().unwrap();
    let messages = [Message { role: "user".into(), content: " Hi {{ 1 }} <b> ".into() }];
    assert_eq!(
        template.render(&messages, true).unwrap(),
        "<|im_start|>user\nHi {{ 1 }} <b><|im_end|>\n<|im_start|>assistant\n"
    );
    let tokens = checkpoint.tokenizer().unwrap().encode(&template.render(&messages, false).unwrap(), false).unwrap();
    assert_eq!(tokens[0], 260);
}

#[test]
fn templates_as_transformers_runs_them() {
    let check = |source: &str, expect: std::result::Result<&str, &str>| {
        let messages = [Message { role: "user".into(), content: "é\"\n".into() }];
        let template = ChatTemplate::new(source, Some("<s>".into()), None);
        match (template.and_then(|template| template.render(&messages, true)), expect) {
            (Ok(text), Ok(expect)) => assert_eq!(text, expect),
            (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
            (found, expect) => panic!("{source}: {found:?}, expected {expect:?}"),
        }
    };
    check("{{ bos_token }}{{ eos_token }}|{{ tools is none }}", Ok("<s>|True"));
    check("{{ messages[0] | tojson }}", Ok(r#"{"role": "user", "content": "é\"\n"}"#));
    check("{{ [1, {'a': none}] | tojson(indent=2) }}", Ok("[\n  1,\n  {\n    \"a\": null\n  }\n]"));
    check("{{ '<&>' | tojson }}{{ [] | tojson }}", Ok("\"<&>\"[]"));
    check("a\n  {% if true %}\nb\n  {% endif %}\nc\n", Ok("a\nb\nc"));
    check("a {%- generation %}b{% endgeneration -%} c", Ok("abc"));
    check("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", Ok("01"));
    check("{{ raise_exception('roles must alternate') }}", Err("roles must alternate"));
    check("{{ strftime_now('%Y') | length }}", Ok("4"));
    check("{{ strftime_now('%Q') }}", Err("%Q"));
    check("{% for", Err("line 1"));
    check("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", Err("recursion"));
    check(
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}\
         {% endfor %}{% endfor %}{% endfor %}",
        Err("instructions"),
    );
    check(&"x".repeat(2 << 20), Err("bytes are more"));
    check("{{ ''[::-1] }}", Err("stumbled"));
    for huge in [
        "{{ 'x' | indent(9999999999) }}",
        "{{ 'x' | indent(width=9999999999) }}",
        "{{ [1] | slice(9999999999) }}",
        "{{ [1] | batch(9999999999, 0) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
    ] {
        check(huge, Err("at most 10000 at once"));
    }
    for huge in ["{{ 'x' * 9999999999 }}", "{{ [1] * 9999999999 }}", "{{ range(9999999999) }}"] {
        check(huge, Err("too"));
    }
    check("{{ 'a\nb' | indent(2) }}{{ '%5.1f' | format(2.25) }}", Ok("a\n  b  2.2"));
}

/// The expected texts come from transformers, by `tests/reference/make_templates.py`.
#[test]
fn templates_of_models_render_as_in_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/templates");
    let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let expected = expected.as_object().unwrap();
    assert!(expected.len() >= 13);
    let mut wrong = String::new();
    for (name, cases) in expected {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(&source, Some("<s>".into()), Some("</s>".into())).unwrap();
        for case in cases.as_array().unwrap() {
            let text = |message: &Value, key: &str| message[key].as_str().unwrap().to_owned();
            let message = |m: &Value| Message { role: text(m, "role"), content: text(m, "content") };
            let messages: Vec<Message> = case["messages"].as_array().unwrap().iter().map(message).collect();
            let rendered = template.render(&messages, case["prompt"].as_bool().unwrap());
            match (&rendered, case["text"].as_str(), case["text"]["error"].as_str()) {
                (Ok(rendered), Some(expected), _) if rendered == expected => {}
                (Err(error), _, Some(expected)) if error.to_string().contains(expected) => {}
                _ => writeln!(wrong, "{name}: {rendered:?}, and transformers {:?}", case["text"]).unwrap(),
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 10,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}"#;

fn safetensors(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    typed(&tensors.iter().map(|(name, shape)| (*name, "BF16", *shape)).collect::<Vec<_>>())
}

fn typed(tensors: &[(&str, &str, &[usize])]) -> Vec<u8> {
    let (mut header, mut at) = (String::new(), 0);
    for (name, dtype, shape) in tensors {
        let size = if dtype.starts_with("F8") { 1 } else { 2 };
        let end = at + shape.iter().product::<usize>() * size;
        write!(header, r#","{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{end}]}}"#).unwrap();
        at = end;
    }
    let mut header = format!("{{{}}}", &header[1..]).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0x3F; at]].concat()
}

const OUTER: [(&str, &[usize]); 3] =
    [("model.embed_tokens.weight", &[10, 32]), ("model.norm.weight", &[32]), ("lm_head.weight", &[10, 32])];
const LAYER: [(&str, &[usize]); 9] = [
    ("model.layers.0.input_layernorm.weight", &[32]),
    ("model.layers.0.self_attn.q_proj.weight", &[32, 32]),
    ("model.layers.0.self_attn.k_proj.weight", &[16, 32]),
    ("model.layers.0.self_attn.v_proj.weight", &[16, 32]),
    ("model.layers.0.self_attn.o_proj.weight", &[32, 32]),
    ("model.layers.0.post_attention_layernorm.weight", &[32]),
    ("model.layers.0.mlp.gate_proj.weight", &[48, 32]),
    ("model.layers.0.mlp.up_proj.weight", &[48, 32]),
    ("model.layers.0.mlp.down_proj.weight", &[32, 48]),
];

#[test]
fn opens_a_folder_whole_or_in_shards() {
    let folder = Temporary::folder("folder");
    folder.write("config.json", CONFIG.as_bytes());
    let generation = br#"{"eos_token_id": [3, 2], "do_sample": true, "temperature": 0.6, "top_k": 20}"#;
    folder.write("generation_config.json", generation);
    let tokenizer = br#"{"eos_token": {"content": "<e>"}, "added_tokens_decoder": {"7": {"content": "<e>"}}}"#;
    folder.write("tokenizer_config.json", tokenizer);
    folder.write("model.safetensors", &safetensors(&[&OUTER[..], &LAYER[..]].concat()));
    let whole = Checkpoint::open(&folder.0).unwrap();
    assert_eq!((whole.spec().head_dim, whole.spec().rope.pairs, whole.spec().tied_embeddings), (8, false, false));
    assert_eq!(whole.spec().eos, [3, 2, 7]);
    assert_eq!(*whole.defaults(), Defaults { temperature: Some(0.6), top_k: Some(20), ..Defaults::default() });
    assert_eq!(whole.tensor("lm_head.weight").unwrap().shape, [10, 32]);
    assert_eq!(whole.tensor("model.norm.weight").unwrap().shape, [1, 32]);
    let digest = whole.fingerprint().unwrap();
    folder.write("a.safetensors", &safetensors(&OUTER));
    folder.write("b.safetensors", &safetensors(&LAYER));
    let map: serde_json::Map<String, Value> = LAYER.iter().map(|t| (t.0.into(), "b.safetensors".into())).collect();
    let mut index = serde_json::json!({ "weight_map": map });
    index["weight_map"]["lm_head.weight"] = "a.safetensors".into();
    folder.write("model.safetensors.index.json", index.to_string().as_bytes());
    assert_eq!(Checkpoint::open(&folder.0).unwrap().fingerprint().unwrap(), digest);
    index["weight_map"]["x"] = "../b.safetensors".into();
    folder.write("model.safetensors.index.json", index.to_string().as_bytes());
    let error = Checkpoint::open(&folder.0).err().unwrap().to_string();
    assert!(error.contains("not a file beside it"), "{error}");
}

#[test]
fn weights_of_eight_bits_have_their_scales() {
    const Q: &str = "model.layers.0.self_attn.q_proj.weight";
    const DOWN: &str = "model.layers.0.mlp.down_proj.weight";
    const NORM: &str = "model.norm.weight";
    let folder = Temporary::folder("eight-bits");
    folder.write("config.json", CONFIG.as_bytes());
    let open = |more: &[(&str, &str, &[usize])]| {
        let is_other = |tensor: &&(&str, &[usize])| more.iter().all(|(name, ..)| *name != tensor.0);
        let others = OUTER.iter().chain(&LAYER).filter(is_other).map(|(name, shape)| (*name, "BF16", *shape));
        folder.write("model.safetensors", &typed(&others.chain(more.iter().copied()).collect::<Vec<_>>()));
        Checkpoint::open(&folder.0)
    };
    let q_scale = format!("{Q}_scale");
    let with_scale = |shape: &[usize]| open(&[(Q, "F8_E4M3", &[32, 32]), (&q_scale, "F16", shape)]);
    for (shape, block) in [(&[][..], [32, 32]), (&[1], [32, 32]), (&[32, 1], [1, 32]), (&[32], [1, 32])] {
        let opened = with_scale(shape).unwrap();
        let tensor = opened.tensor(Q).unwrap();
        let (dtype, bytes) = (tensor.dtype, tensor.read().unwrap());
        let Scales { dtype: of_scales, block: found, per_row, first: [first_row, _], .. } = tensor.scales.unwrap();
        assert_eq!((dtype, bytes.len(), of_scales), (Dtype::F8E4M3, 32 * 32, Dtype::F16));
        assert_eq!((found, per_row, first_row), (block, 1, 0), "{shape:?}");
        assert_eq!(opened.sizes().layers[0].heads, 32 * 32 * 9 / 8 + 2 * 32 * 32);
    }
    // Other scales are other weights.
    let digest = |shape: &[usize]| with_scale(shape).unwrap().fingerprint().unwrap();
    assert_ne!(digest(&[1]), digest(&[32]));
    let refused = [
        (
            open(&[(Q, "F8_E4M3", &[32, 32])]),
            "q_proj.weight of F8_E4M3 has no model.layers.0.self_attn.q_proj.weight_scale",
        ),
        (with_scale(&[31, 1]), "q_proj.weight has [31, 1] scales for a matrix of 32 x 32"),
        (open(&[(Q, "F8_E4M3", &[32, 32]), (&q_scale, "F8_E4M3", &[1])]), "its scales F8E4M3"),
        (open(&[(DOWN, "F8_E4M3", &[32, 48]), (&format!("{DOWN}_scale"), "F16", &[1])]), "of F8_E4M3 with 48 columns"),
        (
            open(&[(NORM, "F8_E4M3", &[32]), (&format!("{NORM}_scale"), "F16", &[1])]),
            "model.norm.weight of the type F8_E4M3",
        ),
        (open(&[(Q, "F8_E5M2", &[32, 32]), (&q_scale, "F16", &[1])]), "F8_E5M2"),
    ];
    for (opened, expect) in refused {
        let error = opened.err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    }
}

/// A part of a tensor in the file has the scales of its own rows.
#[test]
fn a_part_of_a_matrix_knows_its_scales() {
    let folder = Temporary::folder("parts-of-scales");
    let file = SourceFile::open(&folder.write("f", &(0..96 * 36u32).map(|i| i as u8).collect::<Vec<_>>())).unwrap();
    let bytes = ScaleBytes::new(&file, 96 * 32, Dtype::F32, [96, 1]);
    let scales = Scales { dtype: Dtype::F32, bytes, block: [1, 32], per_row: 1, first: [0, 0] };
    let whole = Tensor { scales: Some(scales), ..Tensor::new(&file, 0, Dtype::F8E4M3, [96, 32]) };
    let part = whole.part(40, [20, 32]).unwrap();
    let bytes = part.read().unwrap();
    assert_eq!((part.scales.unwrap().first[0], bytes.len(), bytes[33]), (40, 20 * 32, (40 * 32 + 33) as u8));
    assert_eq!(part.scales.unwrap().bytes.read().unwrap().len(), 4 * 96);
    assert!(whole.part(80, [20, 32]).is_none());
}

#[test]
fn damaged_safetensors_are_an_error() {
    let folder = Temporary::folder("damaged-folder");
    folder.write("config.json", CONFIG.as_bytes());
    let whole = safetensors(&[&OUTER[..], &LAYER[..]].concat());
    let mut random = Random(7);
    for round in 0..300 {
        let mut bytes = whole.clone();
        if round % 2 == 0 {
            bytes.truncate(random.below(whole.len()));
        } else {
            let at = random.below(1200);
            bytes[at] = random.below(256) as u8;
        }
        folder.write("model.safetensors", &bytes);
        let opened = Checkpoint::open(&folder.0);
        assert!(round % 2 == 1 || opened.is_err());
    }
}

#[test]
fn hostile_safetensors_headers_are_an_error() {
    let folder = Temporary::folder("hostile");
    folder.write("config.json", CONFIG.as_bytes());
    let tensor =
        |shape: &str, offsets: &str| format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#);
    let entry =
        |name: &str, offsets: &str| format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#);
    let pair = format!("{{{},{}}}", entry("a", "[0,8]"), entry("b", "[4,12]"));
    let headers = [
        tensor("[1152921504606846976,1152921504606846976]", "[0,16]"),
        tensor("[4611686018427387904]", "[0,18446744073709551615]"),
        tensor("[4]", "[16,0]"),
        tensor("[4]", "[0,64]"),
        tensor("[-1]", "[0,16]"),
        tensor("[0,4]", "[0,0]"),
        pair,
        format!("{}{}", "[".repeat(10_000), "]".repeat(10_000)),
        "{}".to_owned(),
        "\u{0}".to_owned(),
    ];
    for header in headers {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat();
        folder.write("model.safetensors", &bytes);
        assert!(Checkpoint::open(&folder.0).is_err(), "{header}");
    }
    for len in [0u64, 1 << 20, 1 << 60, u64::MAX] {
        folder.write("model.safetensors", &[&len.to_le_bytes()[..], b"{}      "].concat());
        assert!(Checkpoint::open(&folder.0).is_err(), "a header of {len} bytes");
    }
}

#[test]
fn reads_configs() {
    let check = |edit: &str, expect: std::result::Result<RopeScaling, &str>| {
        let mut config: Value = serde_json::from_str(CONFIG).unwrap();
        let edits: Value = serde_json::from_str(edit).unwrap();
        for (key, value) in edits.as_object().unwrap() {
            config[key] = value.clone();
        }
        match (ModelSpec::from_config(&config, &Value::Null, &Value::Null, "f"), expect) {
            (Ok(spec), Ok(expect)) => assert_eq!(spec.rope.scaling, expect),
            (Err(Fault::Malformed(what) | Fault::Unsupported(what)), Err(expect)) => {
                assert!(what.contains(expect), "{what}");
            }
            (found, expect) => panic!("{edit}: {found:?}, expected {expect:?}"),
        }
    };
    check("{}", Ok(RopeScaling::None));
    check(r#"{"rope_scaling": {"type": "linear", "factor": 2}}"#, Ok(RopeScaling::Linear { factor: 2.0 }));
    check(r#"{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}"#, Ok(RopeScaling::None));
    let llama3 = r#"{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}}"#;
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
    check(llama3, Ok(scaling));
    check(r#"{"rope_scaling": {"rope_type": "dynamic", "factor": 2}}"#, Err("type dynamic"));
    let yarn = |magnitude| RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 512,
        magnitude,
        truncate: true,
    };
    let of_yarn = |more: &str| {
        format!(r#"{{"rope_scaling": {{"type": "yarn", "factor": 4, "original_max_position_embeddings": 512{more}}}}}"#)
    };
    check(&of_yarn(""), Ok(yarn(1.138_629_4)));
    check(&of_yarn(r#", "attention_factor": 0.5"#), Ok(yarn(0.5)));
    check(&of_yarn(r#", "mscale": 1, "mscale_all_dim": 1"#), Ok(yarn(1.0)));
    check(r#"{"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}"#, Err("long_factor is missing"));
    let long = r#"{"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}}"#;
    check(long, Err("1 and 1 factors for a rope of 8"));
    check(r#"{"rope_scaling": {"type": "linear"}}"#, Err("factor is missing"));
    check(r#"{"rope_scaling": {"type": "linear", "factor": 0}}"#, Err("not possible"));
    check(r#"{"architectures": ["MambaForCausalLM"]}"#, Err("MambaForCausalLM"));
    check(r#"{"attention_bias": true}"#, Err("attention_bias"));
    check(r#"{"hidden_act": "gelu"}"#, Err("gelu"));
    check(r#"{"hidden_size": null}"#, Err("hidden_size is missing"));
    check(r#"{"hidden_size": -1}"#, Err("hidden_size is -1"));
    check(r#"{"vocab_size": 1e30}"#, Err("vocab_size is"));
    check(r#"{"num_key_value_heads": 3}"#, Err("4 heads cannot share 3"));
    check(r#"{"quantization_config": {"quant_method": "gptq"}}"#, Err("quantization_config"));
}

#[test]
fn a_tokenizer_json_gives_what_the_gguf_gives() {
    let (tokens, kinds, merges) = vocabulary();
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().zip(0u32..).map(|(t, id)| (t.clone(), id.into())).collect();
    let added: Vec<Value> = (256..tokens.len())
        .filter(|id| kinds[*id] != 1)
        .map(|id| {
            serde_json::json!({"id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kinds[id] == 3})
        })
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    });
    let folder = Temporary::folder("json");
    let theirs = Tokenizer::from_file(&folder.write("tokenizer.json", json.to_string().as_bytes())).unwrap();
    let ours = Checkpoint::open(&folder.write("t.gguf", &tiny().bytes())).unwrap().tokenizer().unwrap();
    assert_eq!(theirs.n_vocab(), ours.n_vocab());
    for text in ["", "hello hell 123", "<|im_start|>x<tool>", "naïve\n\n  漢字 😀 don't"] {
        assert_eq!(theirs.encode(text, true).unwrap(), ours.encode(text, true).unwrap(), "{text}");
    }
    for id in 0..ours.n_vocab() as u32 {
        assert_eq!((theirs.token_bytes(id), theirs.is_special(id)), (ours.token_bytes(id), ours.is_special(id)));
    }
    let damaged = |from: &str, to: &str, expect: &str| {
        let text = json.to_string().replacen(from, to, 1);
        let error = Tokenizer::from_file(&folder.write("bad.json", text.as_bytes())).err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    };
    damaged("\"he ll\"", "\"he zz\"", "not in the vocabulary");
    damaged("\"type\":\"BPE\"", "\"type\":\"Other\"", "Other");
    damaged("\"id\":260", "\"id\":999", "cannot have the id 999");
    damaged("\"id\":260", "\"id\":99999999", "99999999");
    damaged("{", "", "not JSON");
}

/// The layers that a config's other keys give, one letter each: all positions or a window, the rope (r), a local one
/// (l) or none (n), a dense MLP or experts (x).
#[test]
fn layers_differ_as_their_config_says() {
    let check = |architecture: &str, edit: &str, expect: &str| {
        let mut config: Value = serde_json::from_str(CONFIG).unwrap();
        config["architectures"] = serde_json::json!([architecture]);
        config["num_hidden_layers"] = 8.into();
        config["num_experts_per_tok"] = 2.into();
        for (key, value) in serde_json::from_str::<Value>(edit).unwrap().as_object().unwrap() {
            config[key] = value.clone();
        }
        let found = match ModelSpec::from_config(&config, &Value::Null, &Value::Null, "f") {
            Err(Fault::Malformed(what) | Fault::Unsupported(what)) => what,
            Ok(spec) => spec.layers.iter().map(letters).collect::<Vec<_>>().join(" "),
        };
        assert!(found.contains(expect), "{architecture} {edit}: {found}");
    };
    check("LlamaForCausalLM", "{}", "r r r r r r r r");
    check("MistralForCausalLM", r#"{"sliding_window": null}"#, "r r r r r r r r");
    check("MistralForCausalLM", r#"{"sliding_window": 7}"#, "7r 7r 7r 7r 7r 7r 7r 7r");
    check("Qwen2ForCausalLM", r#"{"sliding_window": 7}"#, "r r r r r r r r");
    let late = r#"{"sliding_window": 7, "use_sliding_window": true, "max_window_layers": 6}"#;
    check("Qwen2ForCausalLM", late, "r r r r r r 7r 7r");
    check("SmolLM3ForCausalLM", "{}", "r r r n r r r n");
    check("SmolLM3ForCausalLM", r#"{"no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 0]}"#, "r n r r r r r n");
    let gemma = r#"{"hidden_act": null, "sliding_window": 9}"#;
    check("Gemma2ForCausalLM", gemma, "9r r 9r r 9r r 9r r");
    check("Gemma3ForCausalLM", gemma, "9l 9l 9l 9l 9l r 9l 9l");
    let chunked =
        r#"{"layer_types": ["full_attention", "sliding_attention", "chunked_attention", "", "", "", "", ""]}"#;
    check("Qwen3ForCausalLM", chunked, "a layer of the type chunked_attention");
    check("Qwen3ForCausalLM", r#"{"layer_types": []}"#, "0 layers of 8");
    check("MixtralForCausalLM", r#"{"num_local_experts": 4}"#, "rx rx rx rx rx rx rx rx");
    check("MixtralForCausalLM", "{}", "num_local_experts is missing");
    check("MixtralForCausalLM", r#"{"num_local_experts": 1}"#, "2 of 1 experts");
    let few = r#"{"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1], "decoder_sparse_step": 2}"#;
    check("Qwen3MoeForCausalLM", few, "r r r rx r rx r rx");
    check("Gemma2ForCausalLM", r#"{"hidden_activation": "silu"}"#, "the activation silu");
    check(
        "Qwen2ForCausalLM",
        r#"{"sliding_window": 0, "use_sliding_window": true, "max_window_layers": 0}"#,
        "no position",
    );
}

fn letters(layer: &LayerSpec) -> String {
    let positions = match layer.positions {
        Positions::Rope => "r",
        Positions::LocalRope => "l",
        Positions::None => "n",
    };
    let window = layer.window.map_or_else(String::new, |window| window.to_string());
    format!("{window}{positions}{}", if layer.has_experts { "x" } else { "" })
}
