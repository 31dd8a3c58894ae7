//! Folders with safetensors, in one or several files, with scales, and damaged.

use super::*;
use std::fmt::Write as _;
use types::Scales;

fn safetensors(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    typed(&tensors.iter().map(|(name, shape)| (*name, "BF16", *shape)).collect::<Vec<_>>())
}

fn typed(tensors: &[(&str, &str, &[usize])]) -> Vec<u8> {
    let (mut header, mut at) = (String::new(), 0);
    for (name, dtype, shape) in tensors {
        let size = if dtype.starts_with("F8") || matches!(*dtype, "U8" | "BOOL") { 1 } else { 2 };
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
    assert_eq!(
        *whole.defaults(),
        SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..SamplingDefaults::default() }
    );
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

#[test]
fn blocks_and_their_exponents_that_stand_apart_are_one_tensor() {
    let folder = Temporary::folder("in-two");
    // Four rows of two blocks: 16 bytes of nibbles each, then their exponents.
    let nibbles: Vec<u8> = (0..4 * 2 * 16u32).map(|i| (i * 7) as u8).collect();
    let exponents: Vec<u8> = (100..108).collect();
    let file = SourceFile::open(&folder.write("f", &[&[9; 5], &nibbles[..], &exponents[..]].concat())).unwrap();
    let whole = crate::tensor::Tensor::with_split_exponents((&file, 5), (&file, 5 + nibbles.len()), [4, 64]);
    let block = |i: usize| {
        let number = |n: usize| nibbles[i * 16 + n / 2] >> (n % 2 * 4) & 0xf;
        let bytes = (0..16).map(|n| number(n) | number(n + 16) << 4);
        [exponents[i]].into_iter().chain(bytes).collect::<Vec<_>>()
    };
    let rows = |rows: &[usize]| rows.iter().flat_map(|row| [block(2 * row), block(2 * row + 1)].concat()).collect();
    let read = |tensor: crate::tensor::Tensor<'_>| tensor.read().unwrap();
    assert_eq!(read(whole), rows(&[0, 1, 2, 3]));
    assert_eq!(read(whole.part(1, [2, 64]).unwrap()), rows(&[1, 2]));
    let every_second =
        |nth| whole.interleaved(crate::tensor::InterleavedRows { run: 1, before: nth, period: 2 }, [2, 64]);
    assert_eq!((read(every_second(0)), read(every_second(1))), (rows(&[0, 2]), rows(&[1, 3])));
    let mut one = vec![0; 34];
    every_second(1).read_rows(1..2, &mut one).unwrap();
    assert_eq!(one, rows(&[3]));
    assert_eq!(whole.edge_bytes(2).unwrap().len(), 8);

    folder.write("config.json", CONFIG.as_bytes());
    let open = |more: &[(&str, &str, &[usize])]| {
        let others = OUTER.iter().chain(&LAYER).map(|(name, shape)| (*name, "BF16", *shape));
        folder.write("model.safetensors", &typed(&others.chain(more.iter().copied()).collect::<Vec<_>>()));
        Checkpoint::open(&folder.0)
    };
    let blocks: (&str, &str, &[usize]) = ("x_blocks", "U8", &[4, 2, 16]);
    assert_eq!(open(&[blocks, ("x_scales", "U8", &[4, 2])]).unwrap().unread_tensors(), ["x"]);
    let error = open(&[blocks, ("x_scales", "U8", &[4, 3])]).err().unwrap().to_string();
    assert!(error.contains("x has blocks of [4, 2, 16] and scales of [4, 3]"), "{error}");
}

/// The first files of GPT-NeoX hold masks of truths or bytes, which no model reads.
#[test]
fn only_a_needed_tensor_is_refused_for_its_type() {
    const Q: &str = "model.layers.0.self_attn.q_proj.weight";
    let folder = Temporary::folder("refused-types");
    folder.write("config.json", CONFIG.as_bytes());
    let open = |without: &str, more: (&str, &str, &[usize])| {
        let others = OUTER.iter().chain(&LAYER).filter(|(name, _)| *name != without);
        let others = others.map(|(name, shape)| (*name, "BF16", *shape));
        folder.write("model.safetensors", &typed(&others.chain([more]).collect::<Vec<_>>()));
        Checkpoint::open(&folder.0)
    };
    const MASK: &str = "model.layers.0.attention.bias";
    for (name, dtype) in [(MASK, "BOOL"), (MASK, "U8"), (MASK, "I16"), ("x_blocks", "U8"), ("x_scales", "U8")] {
        assert_eq!(open("", (name, dtype, &[1, 1, 8, 8])).unwrap().unread_tensors(), [name], "{dtype}");
    }
    let blocks = format!("{Q}_blocks");
    for (name, dtype, expect) in [
        (Q, "U8", format!("the tensor {Q} has type U8, which is not supported")),
        (Q, "F8_E5M2", format!("the tensor {Q} has type F8_E5M2, which is not supported")),
        (&blocks, "U8", format!("the tensor {blocks} of the type U8 without {Q}_scales, which is not supported")),
        ("model.layers.0.self_attn.q_proj.qweight", "U8", "q_proj.qweight has type U8, which".into()),
        ("model.layers.0.self_attn.q", "U8", format!("there is no tensor {Q}")),
    ] {
        let error = open(Q, (name, dtype, &[32, 32])).err().unwrap().to_string();
        assert!(error.contains(&expect), "{error}");
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
