//! Tokenizers of GGUFs and of folders.

use super::*;

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
fn a_stream_may_show_some_control_tokens_and_hide_the_rest() {
    let folder = Temporary::folder("shown");
    let tokenizer = Checkpoint::open(&folder.write("t.gguf", &tiny().bytes())).unwrap().tokenizer().unwrap();
    let mut stream = tokenizer.stream().with_visible_tokens([260].into());
    let shown: String = [260, 258, 261, 262].map(|token| stream.push(token).to_owned()).concat();
    assert_eq!(shown, "<|im_start|>hell<tool>");
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
    check(tiny().meta("tokenizer.ggml.model", Meta::Text("rwkv")), "the tokenizer model rwkv");
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
fn bos_is_added_if_file_sets_it() {
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
