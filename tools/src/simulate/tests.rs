//! Invariants of a simulated cluster, for any of its parts.

use super::*;
use clap::Parser;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: SimulateOptions,
}

fn options(line: &str) -> SimulateOptions {
    Line::parse_from(["simulate"].into_iter().chain(line.split_ascii_whitespace())).options
}

/// A folder without models.
fn no_models() -> anyhow::Result<ModelSources> {
    Ok(ModelSources::new(std::env::temp_dir()))
}

fn report(line: &str) -> SimulationReport {
    simulate(&options(line), no_models, |_, _| {}).unwrap()
}

fn outcome(options: &SimulateOptions) -> (SimOutcome, PlacedReplica) {
    let model = SimulatedModel::find(&options.model, options.replica.weights, no_models).unwrap();
    let laid_out = PlacedReplica::new(options, &model).unwrap();
    let (traffic, window) = options.load.traffic(options.seed).unwrap();
    (laid_out.run(options, traffic, window, |_| {}).unwrap(), laid_out)
}

const SMALL: &str =
    "--replicas 4 --rate 40 --duration 6 --warm-up 2 --prompt lognormal:400,400 --output uniform:10..90";

#[test]
fn same_seed_gives_the_same_bytes() {
    let report_text = |seed: u64| {
        let report = report(&format!("{SMALL} --seed {seed}"));
        serde_json::to_string(&report).unwrap() + &report.to_string()
    };
    assert_eq!(report_text(7), report_text(7));
    assert_ne!(report_text(7), report_text(8));
}

#[test]
fn every_request_ends_once_and_tokens_add_up() {
    for line in [
        SMALL.to_owned(),
        format!("{SMALL} --pp 2 --prefix-share 0.7 --prefixes 3"),
        // Far beyond capacity, with little memory: some requests wait, some are preempted, some are rejected.
        "--gpu l4 --weights int4 --context 2048 --memory-utilization 0.27 --rate 60 --duration 8 --warm-up 0 \
         --prompt uniform:100..900 --output 200 --max-waiting 100"
            .to_owned(),
    ] {
        let options = options(&line);
        let (outcome, _) = outcome(&options);
        assert!(outcome.n_arrived > 100 && outcome.n_arrived == outcome.n_ended, "{line}");
        assert_eq!((outcome.open.now, outcome.tokens.delivered), (0, outcome.tokens.drawn), "{line}");
        // Each request was rejected, or received all its tokens.
        let (traffic, _) = options.load.traffic(options.seed).unwrap();
        let n_requested: u64 = traffic.map(|arrival| u64::from(arrival.n_output)).sum();
        match outcome.n_refused {
            0 => assert_eq!(outcome.tokens.delivered, n_requested, "{line}"),
            _ => assert!(outcome.tokens.delivered < n_requested && outcome.n_preemptions > 0, "{line}"),
        }
        let n_first = outcome.ttft.n + outcome.itl.n;
        assert_eq!(n_first, outcome.tokens.counted, "{line}: each token is a first one or behind another");
    }
}

#[test]
fn lone_request_is_as_fast_as_the_roofline() {
    for line in [
        "--model llama-3.1-8b",
        "--model llama-3.1-70b --tp 8 --overhead 0",
        "--model llama-3.1-70b --tp 4 --pp 2 --weights fp8 --kv-dtype fp8",
        "--model mixtral-8x7b --tp 2 --gpu h200",
    ] {
        let alone = "--rate 0.05 --duration 100 --warm-up 0 --prompt 1000 --output 21 --seed 3";
        let options = options(&format!("{line} {alone}"));
        let (outcome, laid_out) = outcome(&options);
        let n_requests = outcome.ttft.n;
        let gaps: f64 = (1000..1020)
            .map(|position| {
                let mut work = coordinator::StepWork::default();
                work.add(
                    &laid_out.config.scheduler(&laid_out.blueprint, PolicyDigest::default()).groups,
                    &(position..position + 1),
                    true,
                );
                laid_out.roofline.step(&work).micros() + options.kernels.overhead * f64::from(options.replica.pp)
            })
            .sum();
        let (got, expected) = (outcome.itl.sum as f64 / 1e3, gaps * n_requests as f64);
        assert!(n_requests > 0 && (got / expected - 1.0).abs() < 1e-4, "{line}: {got} of {expected} us");
    }
}

#[test]
fn an_8b_on_an_h100_reads_its_weights_for_each_token() {
    // 8.03 billion parameters less the embedding, at two bytes; 1,001 positions of 128 KiB; 75% of 3.35 TB/s.
    let report = report("--rate 0.05 --duration 60 --warm-up 0 --prompt 1000 --output 2 --overhead 0");
    let bytes = 2.0 * (8.03e9 - 128_256.0 * 4096.0) + 1001.0 * 131_072.0;
    let expected = bytes / (0.75 * 3.35e12) * 1e3;
    assert!((report.itl_ms.mean / expected - 1.0).abs() < 0.002, "{} {expected}", report.itl_ms.mean);
}

#[test]
fn twice_the_bandwidth_decodes_faster_and_nothing_else_slower() {
    let of = |part: f64| report(&format!("{SMALL} --bandwidth-efficiency {part}"));
    let (half, whole) = (of(0.4), of(0.8));
    assert!(whole.itl_ms.p50 < 0.7 * half.itl_ms.p50 && whole.itl_ms.mean < half.itl_ms.mean);
    assert!(whole.ttft_ms.mean < half.ttft_ms.mean && whole.e2e_ms.mean < half.e2e_ms.mean);
    assert!(whole.requests.open < half.requests.open);
}

#[test]
fn beyond_its_capacity_the_queue_grows_and_goodput_falls() {
    let at = |rate: f64| report(&format!("--gpu l40s --rate {rate} --duration 30 --prompt 1000 --output 100"));
    let (easy, much) = (at(0.2), at(20.0));
    assert!(easy.goodput.share > 0.99 && easy.utilisation.waiting < 0.1 && easy.utilisation.busy < 0.9);
    assert!(much.goodput.share < 0.5 * easy.goodput.share && much.utilisation.waiting > 50.0);
    assert!(much.ttft_ms.p99 > 5.0 * easy.ttft_ms.p99 && much.utilisation.busy > 0.99);
    assert!(much.throughput.output_tokens > easy.throughput.output_tokens);
}

/// Requests that begin before the window, or end after it, count with their tokens within it.
#[test]
fn goodput_is_a_part_of_throughput_and_its_tokens_are_no_cheaper() {
    for line in ["--rate 0.2 --duration 30", "--rate 4 --duration 10 --warm-up 5", "--rate 20 --duration 20"] {
        let report = report(&format!("--gpu l40s --prompt 1000 --output 400 {line}"));
        let (good, all) = (report.goodput.tokens, report.throughput.output_tokens);
        assert!(0.0 < all && good <= all * (1.0 + 1e-9), "{line}: {good} of {all}");
        let prices = (report.cost.per_million_tokens.unwrap(), report.cost.per_million_good_tokens);
        assert!(prices.1.is_none_or(|good| good >= prices.0 * (1.0 - 1e-9)), "{line}: {prices:?}");
        let page = report.to_string();
        assert!(page.starts_with("assumed, not measured: a l40s has 0.86 TB/s and 362 bf16 TFLOP/s"), "{page}");
    }
}

#[test]
fn as_many_are_open_as_arrive_in_the_time_that_they_take() {
    for line in ["--rate 30 --replicas 3", "--rate 4 --gpu a100 --tp 2"] {
        let report = report(&format!("{line} --duration 120 --warm-up 20 --prompt 500 --output 100"));
        let arriving = report.requests.counted as f64 / report.seconds;
        let expected = arriving * report.e2e_ms.mean / 1e3;
        let open = report.requests.open;
        assert!((open / expected - 1.0).abs() < 0.03, "{line}: {open} of {expected}");
    }
}

#[test]
fn what_prompts_share_is_computed_once() {
    let of = |share: f64| report(&format!("{SMALL} --prefix-share {share} --prefixes 2"));
    let (none, most) = (of(0.0), of(0.9));
    assert!(none.throughput.cached == 0.0 && most.throughput.cached > 0.5, "{}", most.throughput.cached);
    assert!(most.ttft_ms.mean < none.ttft_ms.mean);
}

#[test]
fn cache_aware_policies_have_more_cache_hits() {
    let of = |policy: &str| {
        let load = "--replicas 8 --rate 16 --duration 20 --prompt 2000 --output 20 --prefix-share 0.8 --prefixes 24";
        report(&format!("{load} --policy {policy}"))
    };
    let [prefix, round_robin, least_work, affinity] = ["prefix", "round-robin", "least-work", "affinity"].map(of);
    let cached = |report: &SimulationReport| report.throughput.cached;
    assert!(cached(&prefix) > 0.6 && cached(&affinity) > 0.6, "{} {}", cached(&prefix), cached(&affinity));
    assert!(cached(&prefix) > 1.05 * cached(&round_robin) && cached(&prefix) > 1.05 * cached(&least_work));
    assert!(prefix.ttft_ms.mean < round_robin.ttft_ms.mean);
}

#[test]
fn smaller_formats_leave_more_room_and_cost_less() {
    let of = |formats: &str| report(&format!("{SMALL} --model qwen3-32b {formats}"));
    let (wide, narrow) = (of("--tp 2"), of("--tp 2 --weights fp8 --kv-dtype fp8"));
    assert!(narrow.weight_bytes < wide.weight_bytes && narrow.kv_tokens > 2 * wide.kv_tokens);
    assert!(narrow.itl_ms.mean < wide.itl_ms.mean);
    assert_eq!(narrow.gpus, 8);
    assert_eq!(narrow.cost.per_hour, 8.0 * 2.5);
    let half_price = report(&format!("{SMALL} --price-per-gpu-hour 1.25"));
    let price = report(SMALL).cost.per_million_tokens.unwrap();
    assert_eq!(half_price.cost.per_million_tokens, Some(price / 2.0));
}

#[test]
fn a_trace_is_served_as_it_came() {
    let path = std::env::temp_dir().join(format!("lockstep-trace-{}.jsonl", std::process::id()));
    let lines = r#"{"at": 1.5, "prompt": 64, "output": 3, "prefix": 9, "prefix_tokens": 48}
        {"at": 0.5, "prompt": 64, "output": 2, "prefix": 9, "prefix_tokens": 48}

        {"at": 2, "prompt": 100, "output": 1}"#;
    std::fs::write(&path, lines).unwrap();
    let served = report(&format!("--trace {} --warm-up 0", path.display()));
    assert_eq!((served.requests.arrived, served.seconds), (3, 2.000_000_001));
    // The last request arrives as the window closes, and its token comes after it.
    assert_eq!((served.throughput.cached, served.throughput.output_tokens.round()), (48.0 / 128.0, 2.0));
    for (wrong, why) in
        [("", "no requests"), ("{\"at\": -1, \"prompt\": 1, \"output\": 1}", "line 1"), ("{}", "line 1")]
    {
        std::fs::write(&path, wrong).unwrap();
        let error = simulate(&options(&format!("--trace {}", path.display())), no_models, |_, _| {}).err().unwrap();
        assert!(error.to_string().contains(why), "{error:#}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let cases = [
        ("--model llama-3.1-405b", "weights"),
        ("--model llama-3.1-70b --tp 2 --memory-utilization 0.8", "leave no room"),
        ("--model no-such-model", "llama-3.1-8b"),
        ("--rate -1", "rate"),
        ("--rate nan", "rate"),
        ("--replicas 0", "replicas"),
        ("--tp 9", "tp 9"),
        ("--max-running 4096", "batch_tokens_max"),
        ("--memory-utilization 1.5", "at most 1"),
        ("--context 999999999", "context"),
    ];
    for (line, why) in cases {
        let options = options(&line.replace(" -1", "=-1"));
        let error = simulate(&options, no_models, |_, _| {}).err().unwrap_or_else(|| panic!("{line} is not refused"));
        assert!(format!("{error:#}").contains(why), "{line}: {error:#}");
    }
    assert!(Line::try_parse_from(["simulate", "--gpu", "abacus"]).is_err());
}

#[test]
fn nodes_of_eight_are_joined_by_a_network() {
    let step = |line: &str| {
        let options = options(line);
        let model = SimulatedModel::find(&options.model, options.replica.weights, no_models).unwrap();
        PlacedReplica::new(&options, &model).unwrap().roofline.step(&coordinator::StepWork::one_row())
    };
    let (near, far) =
        (step("--model llama-3.1-405b --weights fp8 --tp 4 --pp 2"), step("--model llama-3.1-405b --tp 8 --pp 2"));
    assert!(near.exchange > 0.0 && far.exchange > near.exchange);
    assert_eq!(step("--model llama-3.1-8b").exchange, 0.0);
}
