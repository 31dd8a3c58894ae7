//! Reads a model's layers and values from a `config.json`.

use super::*;
use types::KvLayout;

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
            (Err(ParseError::Malformed(what) | ParseError::Unsupported(what)), Err(expect)) => {
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
    check(r#"{"rope_scaling": {"type": "linear", "factor": 0}}"#, Err("is invalid"));
    check(r#"{"architectures": ["MambaForCausalLM"]}"#, Err("MambaForCausalLM"));
    check(r#"{"attention_bias": true}"#, Err("attention_bias"));
    check(r#"{"hidden_act": "gelu"}"#, Err("gelu"));
    check(r#"{"hidden_size": null}"#, Err("hidden_size is missing"));
    check(r#"{"hidden_size": -1}"#, Err("hidden_size is -1"));
    check(r#"{"vocab_size": 1e30}"#, Err("vocab_size is"));
    check(r#"{"num_key_value_heads": 3}"#, Err("4 heads cannot share 3"));
    check(r#"{"quantization_config": {"quant_method": "gptq"}}"#, Err("quantization_config"));
}

/// The layers that result from a config's other keys, one letter each: all positions or a window, the rope (r), a local
/// one (l) or none (n), a dense MLP or experts (x).
#[test]
fn layers_differ_as_configured() {
    let check = |architecture: &str, edit: &str, expect: &str| {
        let mut config: Value = serde_json::from_str(CONFIG).unwrap();
        config["architectures"] = serde_json::json!([architecture]);
        config["num_hidden_layers"] = 8.into();
        config["num_experts_per_tok"] = 2.into();
        for (key, value) in serde_json::from_str::<Value>(edit).unwrap().as_object().unwrap() {
            config[key] = value.clone();
        }
        let found = match ModelSpec::from_config(&config, &Value::Null, &Value::Null, "f") {
            Err(ParseError::Malformed(what) | ParseError::Unsupported(what)) => what,
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
    let windows = r#"{"sliding_window": 9}"#;
    check("Olmo2ForCausalLM", windows, "r r r r r r r r");
    check("Olmo3ForCausalLM", windows, "9l 9l 9l r 9l 9l 9l r");
    check("Cohere2ForCausalLM", windows, "9r 9r 9r n 9r 9r 9r n");
    check("MinistralForCausalLM", windows, "9r 9r 9r 9r 9r 9r 9r 9r");
    check("GptOssForCausalLM", r#"{"sliding_window": 9, "num_local_experts": 4}"#, "9rx rx 9rx rx 9rx rx 9rx rx");
    let glm = r#"{"n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 3"#;
    check("Glm4MoeForCausalLM", &format!("{glm}}}"), "r r r rx rx rx rx rx");
    let of_groups = r#", "n_group": 2, "topk_group": 3"#;
    check("Glm4MoeForCausalLM", &format!("{glm}{of_groups}}}"), "2 of 4 experts in 3 of 2 groups");
    check("GraniteForCausalLM", r#"{"attention_bias": true}"#, "attention_bias");
    check("GraniteForCausalLM", r#"{"logits_scaling": 0.0}"#, "a scale or a cap is inf");
    check("GPTNeoXForCausalLM", r#"{"hidden_act": "gelu", "attention_bias": false}"#, "without attention_bias");
    check("GPTNeoXForCausalLM", r#"{"hidden_act": "gelu_fast"}"#, "the activation gelu_fast");
    for other in ["Llama4ForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM", "CohereForCausalLM"] {
        check(other, "{}", &format!("the architecture {other}"));
    }
    check(
        "Qwen2ForCausalLM",
        r#"{"sliding_window": 0, "use_sliding_window": true, "max_window_layers": 0}"#,
        "a window of 0 positions",
    );
}

fn letters(layer: &LayerSpec) -> String {
    let positions = match layer.positions {
        PositionEncoding::Rope => "r",
        PositionEncoding::LocalRope => "l",
        PositionEncoding::None => "n",
    };
    let window = layer.window.map_or_else(String::new, |window| window.to_string());
    format!("{window}{positions}{}", if layer.has_experts { "x" } else { "" })
}

/// A folder, the change in its config, and the error's text.
const REFUSED: &[(&str, &str, &str)] = &[
    ("qwen3-next", r#"{"linear_num_value_heads": 3}"#, "3 recurrent heads cannot share 2"),
    ("qwen3-next", r#"{"linear_num_key_heads": 0}"#, "recurrent layers of [4, 0, 16, 32]"),
    ("qwen3-next", r#"{"linear_key_head_dim": 8388608}"#, "recurrent layers of"),
    ("qwen3-next", r#"{"linear_conv_kernel_dim": 17}"#, "with 17 taps"),
    ("qwen3-next", r#"{"linear_value_head_dim": null}"#, "linear_value_head_dim is missing"),
    ("qwen3-next", r#"{"layer_types": ["mamba2", "mamba2", "mamba2", "mamba2"]}"#, "mamba2"),
    ("granite4", r#"{"mamba_conv_bias": false}"#, "mamba_conv_bias"),
    ("granite4", r#"{"mamba_proj_bias": true}"#, "mamba_proj_bias"),
    ("granite4", r#"{"mamba_n_heads": 3}"#, "mamba_expand"),
    ("falcon-h1", r#"{"mamba_d_ssm": 80}"#, "the 80 of mamba_d_ssm"),
    ("falcon-h1", r#"{"mamba_rms_norm": true, "mamba_norm_before_gate": true}"#, "mamba_norm_before_gate"),
    ("falcon-h1", r#"{"projectors_bias": true}"#, "projectors_bias"),
    ("falcon-h1", r#"{"ssm_multipliers": [1.0, 2.0]}"#, "2 numbers instead of 5"),
    ("falcon-h1", r#"{"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 0.0]}"#, "the multipliers are invalid"),
    ("granite4", r#"{"time_step_limit": [1.0, 0.5]}"#, "steps between 1 and 0.5"),
    ("granite4", r#"{"time_step_limit": [1.0]}"#, "time_step_limit has 1"),
    ("granite4", r#"{"layer_types": null}"#, "layer_types is missing"),
    ("lfm2", r#"{"conv_bias": true}"#, "conv_bias"),
    ("lfm2", r#"{"conv_L_cache": 17}"#, "with 17 taps"),
    ("lfm2", r#"{"layer_types": ["conv", "mamba", "full_attention"]}"#, "a layer of the type mamba"),
    ("lfm2-moe", r#"{"use_expert_bias": false}"#, "use_expert_bias"),
    ("lfm2-moe", r#"{"moe_intermediate_size": null}"#, "moe_intermediate_size is missing"),
    ("bamba", r#"{"mamba_proj_bias": true}"#, "mamba_proj_bias"),
    ("bamba", r#"{"attention_bias": true}"#, "attention_bias"),
    ("nemotron-h", r#"{"mlp_hidden_act": "silu"}"#, "the activation silu"),
    ("nemotron-h", r#"{"mamba_hidden_act": "gelu"}"#, "the mamba_hidden_act gelu"),
    ("nemotron-h", r#"{"use_bias": true}"#, "use_bias"),
    ("nemotron-h", r#"{"use_conv_bias": false}"#, "use_conv_bias"),
    ("nemotron-h", r#"{"layers_block_type": null}"#, "layers_block_type is missing"),
    ("nemotron-h", r#"{"layers_block_type": ["mamba", "conv"]}"#, "a layer of the type conv"),
    ("nemotron-h", r#"{"layers_block_type": ["mlp"]}"#, "without recurrent layers"),
    ("nemotron-h-moe", r#"{"moe_latent_size": 16}"#, "moe_latent_size of 16"),
    ("nemotron-h-moe", r#"{"n_shared_experts": 2}"#, "n_shared_experts of 2"),
];

fn committed(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(name).join("config.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn spec_of(config: &Value) -> std::result::Result<ModelSpec, ParseError> {
    ModelSpec::from_config(config, &Value::Null, &Value::Null, "f")
}

#[test]
fn a_config_of_text_is_found_within_one_of_images() {
    // The text part of a model that also takes images.
    let plain = committed("qwen3.5");
    let whole = serde_json::json!({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": plain});
    assert_eq!(spec_of(&whole).unwrap(), spec_of(&plain).unwrap());
    // Types of text models within others; older configs have the keys of the text beside the others.
    for (class, model_type, family) in [
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3-yarn"),
        ("InternVLForConditionalGeneration", "qwen3", "qwen3-yarn"),
    ] {
        let mut text = committed(family);
        text["model_type"] = model_type.into();
        let whole = serde_json::json!({"architectures": [class], "text_config": text});
        assert_eq!(spec_of(&whole).unwrap(), spec_of(&committed(family)).unwrap(), "{class}");
    }
    let mut flat = committed("qwen2");
    flat["architectures"] = serde_json::json!(["Qwen2VLForConditionalGeneration"]);
    flat["model_type"] = "qwen2_vl".into();
    assert_eq!(spec_of(&flat).unwrap(), spec_of(&committed("qwen2")).unwrap());
    for (class, model_type) in
        [("PaliGemmaForConditionalGeneration", "gemma2"), ("LlavaForConditionalGeneration", "opt")]
    {
        let whole = serde_json::json!({"architectures": [class], "text_config": {"model_type": model_type}});
        assert!(spec_of(&whole).is_err(), "{class} of {model_type}");
    }
    // The makers of Gemma 3 leave out the defaults of transformers' `Gemma3TextConfig`.
    let sparse = serde_json::json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "text_config": { "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024 },
    });
    let spec = spec_of(&sparse).unwrap();
    let lengths = (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.vocab, spec.context);
    assert_eq!((lengths, spec.tied_embeddings), ((8, 4, 256, 262_208, 131_072), true));
}

#[test]
fn recurrent_layers_are_read_and_those_that_cannot_be_are_refused() {
    let next = spec_of(&committed("qwen3-next")).unwrap();
    let groups = next.cache_groups();
    let layouts: Vec<_> = groups.groups().iter().map(|group| group.layout).collect();
    assert_eq!(layouts, [KvLayout::recurrence(4, 16, 32, 4), KvLayout::heads(2, 16)]);
    assert_eq!(groups.n_layers(&(0..4)).collect::<Vec<_>>(), [3, 1]);
    // Without a list every fourth layer is attention.
    let mut unlisted = committed("qwen3-next");
    unlisted["layer_types"] = Value::Null;
    assert_eq!(spec_of(&unlisted).unwrap().layers, next.layers);
    // Ranks divide all layers with a state alike.
    let mut unlike = next.clone();
    let MixerSpec::Recurrence(of) = &mut unlike.layers[0].mixer else { panic!("the first layer is recurrent") };
    of.value_dim *= 2;
    let refused = unlike.checked();
    assert!(matches!(&refused, Err(ParseError::Malformed(what)) if what.contains("differ in shape")), "{refused:?}");
    // Runs of a short convolution's channels end on multiples of 32.
    let short = spec_of(&committed("lfm2")).unwrap();
    let layouts: Vec<_> = short.cache_groups().groups().iter().map(|group| group.layout).collect();
    assert_eq!(layouts, [KvLayout::convolution(2, 32, 3), KvLayout::heads(2, 16)]);
    let mut unlisted = committed("lfm2");
    unlisted["layer_types"] = Value::Null;
    unlisted["full_attn_idxs"] = serde_json::json!([1]);
    assert_eq!(spec_of(&unlisted).unwrap().layers, short.layers);
    // Two thirds of the given value, up to a multiple.
    unlisted["block_auto_adjust_ff_dim"] = true.into();
    unlisted["intermediate_size"] = 480.into();
    assert_eq!(spec_of(&unlisted).unwrap().inner, 512);
    // Layers that keep nothing belong to no group; a text of letters is equivalent to the list.
    let single = spec_of(&committed("nemotron-h")).unwrap();
    assert_eq!(single.cache_groups().n_layers(&(0..5)).collect::<Vec<_>>(), [2, 1]);
    let mut lettered = committed("nemotron-h");
    lettered["layers_block_type"] = Value::Null;
    lettered["hybrid_override_pattern"] = "M-*M-".into();
    assert_eq!(spec_of(&lettered).unwrap(), single);
    // A layer with a recurrence and attention belongs to two groups.
    let both = spec_of(&committed("falcon-h1")).unwrap();
    let layouts: Vec<_> = both.cache_groups().groups().iter().map(|group| group.layout).collect();
    assert_eq!(layouts, [KvLayout::heads(2, 16), KvLayout::recurrence(4, 16, 16, 4)]);
    assert_eq!(both.cache_groups().n_layers(&(0..2)).collect::<Vec<_>>(), [2, 2]);
    // Without a list every fourth layer is attention, or of fewer the last.
    let mut unlisted = committed("olmo-hybrid");
    unlisted["layer_types"] = Value::Null;
    let mixers: Vec<_> = spec_of(&unlisted).unwrap().layers.iter().map(|layer| layer.mixer.has_attention()).collect();
    assert_eq!(mixers, [false, false, true]);
    for (name, edit, expect) in REFUSED {
        let mut config = committed(name);
        for (key, value) in serde_json::from_str::<Value>(edit).unwrap().as_object().unwrap() {
            config[key] = value.clone();
        }
        match spec_of(&config) {
            Err(ParseError::Malformed(what) | ParseError::Unsupported(what)) => {
                assert!(what.contains(expect), "{what}")
            }
            found => panic!("{edit}: {found:?}"),
        }
    }
}
