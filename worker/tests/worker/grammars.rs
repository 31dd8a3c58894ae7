//! Requests with grammars: on any grid, in any batch and steps, and however late the masks are, the tokens are those of
//! the request alone, and the text follows its grammar.

use crate::common::grid::Threads;
use crate::common::{Alone, Plan, Played, Player, assignment, requests};
use checkpoint::Checkpoint;
use grammar::{GrammarLimits, GrammarSpec, ThinkingBudget};
use serde_json::{Value, json};
use std::time::Duration;
use types::cache::blocks_for;
use types::{
    BlockId, Failure, Grammar, GrammarFault, Grid, Layout, Penalties, Request, RequestId, Sampling, Slice, Step,
    StepDone, StepId, Token, TokenOut, Want,
};
use worker::{Assignment, MaskConfig, ModelLoader, RunError, Runner};

const MODEL: &str = "llama-f16-sharded";
const DEEP: &str = "smollm3";
const N_LAYERS: u32 = 4;

/// Masks that are later than the passes of a tiny model.
const LATE: MaskConfig = MaskConfig {
    threads: 2,
    wait_max: Duration::ZERO,
    late_max: Duration::from_secs(60),
    delay: Duration::from_millis(4),
};

fn compiled(spec: &GrammarSpec) -> Grammar {
    grammar::compile(spec, &GrammarLimits::default()).unwrap()
}

/// Returns one of eight different grammars, or none.
fn grammar_spec(i: usize) -> Option<GrammarSpec> {
    let schema = |schema: Value| Some(GrammarSpec::JsonSchema(schema));
    let (text, number) = (json!({"type": "string", "maxLength": 8}), json!({"type": "integer"}));
    match i % 9 {
        0 => schema(json!({
            "type": "object",
            "properties": {"name": text, "age": number},
            "required": ["name", "age"],
            "additionalProperties": false,
        })),
        1 => Some(GrammarSpec::Regex("[a-f]{3}-[0-9]{2,9}".into())),
        2 => Some(GrammarSpec::Choice(vec!["yes".into(), "no".into(), "perhaps not".into()])),
        3 => schema(json!({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 40})),
        4 => schema(json!({"enum": ["red", "green", 12, null]})),
        5 => None,
        6 => Some(GrammarSpec::Regex("(ab|ba)*c".into())),
        7 => schema(json!({"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, text]})),
        _ => Some(GrammarSpec::JsonObject),
    }
}

/// Returns requests of many lengths and samplings, with grammars and other edits of logits.
fn with_grammars(n: u64) -> Vec<Request> {
    let mut requests = requests(n);
    for (i, request) in requests.iter_mut().enumerate() {
        request.grammar = grammar_spec(i).as_ref().map(compiled);
        request.prompt.iter_mut().for_each(|token| *token %= 264);
        let sampling = &mut request.sampling;
        sampling.tokens_max += 14;
        if i % 3 == 1 {
            sampling.penalties = Penalties { presence: 0.5, frequency: 0.25, repetition: 1.1, window: 0 };
        }
        if i % 4 == 2 {
            sampling.bias = vec![(b'a'.into(), 3.0), (b'5'.into(), -2.0)];
        }
    }
    // Two choices of one prompt, each with a grammar of its own.
    let choice = Request { id: RequestId(n), ..requests[0].clone() };
    let sampling = Sampling { choice: 1, temperature: 1.0, ..choice.sampling.clone() };
    requests.push(Request { sampling, ..choice });
    requests
}

fn loader(masks: MaskConfig) -> ModelLoader {
    ModelLoader { spin: false, masks, ..ModelLoader::new(1) }
}

fn play(masks: MaskConfig, assignment: &Assignment, requests: &[Request], plan: Plan) -> Played {
    let (mut runner, _) = loader(masks).build(assignment).unwrap();
    Player::new(&mut Alone::new(&mut runner), assignment).play(requests, plan)
}

fn on_grid(masks: MaskConfig, assignment: &Assignment, layout: &Layout, requests: &[Request], plan: Plan) -> Played {
    let mut grid = Threads::start(&loader(masks), assignment, layout);
    let played = Player::new(&mut grid, assignment).play(requests, plan);
    grid.end();
    played
}

/// Returns the text up to the end token.
fn text(checkpoint: &Checkpoint, output: &[TokenOut]) -> (String, bool) {
    let ends = &checkpoint.spec().eos;
    let tokens: Vec<_> = output.iter().map(|out| out.token).collect();
    let end = tokens.iter().position(|token| ends.contains(token));
    let (answer, rest) = tokens.split_at(end.unwrap_or(tokens.len()));
    assert!(rest.iter().all(|token| ends.contains(token)), "nothing follows an end but ends: {tokens:?}");
    (checkpoint.tokenizer().unwrap().decode(answer, false), end.is_some())
}

fn is_prefix_of_list(text: &str) -> bool {
    let words: Vec<&str> = text.trim_start_matches('[').trim_end_matches(']').split(',').map(str::trim).collect();
    text.is_empty()
        || (text.starts_with('[') && words.iter().all(|word| "true".starts_with(word) || "false".starts_with(word)))
}

fn check_texts(assignment: &Assignment, played: &Played) {
    let checkpoint = Checkpoint::open(&assignment.model_path).unwrap();
    let mut n_ended = 0;
    for (i, output) in played.outputs.iter().enumerate().filter(|(i, _)| i % 9 != 5) {
        let (text, is_whole) = text(&checkpoint, output);
        n_ended += usize::from(is_whole);
        let value: Option<Value> = serde_json::from_str(&text).ok();
        match i % 9 {
            0 | 8 if is_whole => assert!(value.is_some_and(|value| value.is_object()), "{text}"),
            0 | 8 => assert!(text.starts_with('{'), "{text}"),
            1 => {
                let (letters, digits) = (&text.as_bytes()[..3], &text.as_bytes()[4..]);
                assert!(letters.iter().all(|byte| (b'a'..=b'f').contains(byte)), "{text}");
                assert!(digits.iter().all(u8::is_ascii_digit) && digits.len() <= 9, "{text}");
            }
            2 => assert!(["yes", "no", "perhaps not"].contains(&text.as_str()) && is_whole, "{text}"),
            3 => assert!(is_prefix_of_list(&text), "{text}"),
            4 => assert!(["\"red\"", "\"green\"", "12", "null"].contains(&text.as_str()) && is_whole, "{text}"),
            6 => assert!(text.bytes().all(|byte| (b'a'..=b'c').contains(&byte)), "{text}"),
            _ => assert!(value.is_some() || !is_whole, "{text}"),
        }
    }
    assert!(n_ended > played.outputs.len() / 4, "{n_ended} ended");
}

#[test]
fn grammars_hold_and_steps_of_any_shape_give_the_tokens_of_the_request_alone() {
    let (assignment, requests) = (assignment(MODEL), with_grammars(18));
    let masks = MaskConfig::default();
    let alone = play(masks, &assignment, &requests, Plan::ALONE);
    check_texts(&assignment, &alone);
    let open: Vec<Request> = requests.iter().map(|request| Request { grammar: None, ..request.clone() }).collect();
    let without = play(masks, &assignment, &open, Plan::ALONE);
    let n_changed = alone.outputs.iter().zip(&without.outputs).filter(|(with, without)| with != without).count();
    assert_eq!((n_changed, without.n_late), (17, 0), "all but those without a grammar");
    let together = Plan { chunk: 30, together: 16, ..Plan::ALONE };
    let plans = [
        ("together", together),
        ("in chunks of 7", Plan { chunk: 7, together: 5, ..Plan::ALONE }),
        ("preempted", Plan { chunk: 30, together: 6, preempt_every: Some(3), ..Plan::ALONE }),
    ];
    for (what, plan) in plans {
        for masks in [masks, LATE] {
            let played = play(masks, &assignment, &requests, plan);
            assert!(played.outputs == alone.outputs, "{what}, {} late", played.n_late);
            assert!(masks != LATE || played.n_late > 100, "{what}: {} late", played.n_late);
            assert!(plan.preempt_every.is_none() || played.n_preempted > 10);
        }
    }
}

fn even(tp: u16, pp: u16) -> Layout {
    Layout::even(Grid { tp, pp }, N_LAYERS).unwrap()
}

/// As many steps in flight as a coordinator gives: one per stage and one ahead, and more, so that slices are planned
/// behind late draws.
#[test]
fn grids_give_the_tokens_of_one_rank_with_masks_in_time_and_late() {
    let (assignment, requests) = (assignment(DEEP), with_grammars(9));
    let expected = play(MaskConfig::default(), &assignment, &requests, Plan::ALONE);
    for (tp, pp) in [(2, 1), (1, 2), (2, 2), (1, 3)] {
        for (masks, turns) in [(MaskConfig::default(), pp), (LATE, pp), (LATE, 1)] {
            let in_flight = usize::from(pp) + 1;
            let plan = Plan { chunk: 60, together: 9, preempt_every: Some(7), turns: turns.into(), in_flight };
            let layout = even(tp, pp);
            let played = on_grid(masks, &assignment, &layout, &requests, plan);
            assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}, {} late", played.n_late);
            assert!(masks != LATE || played.n_late > 20, "tp {tp}, pp {pp}: {} late", played.n_late);
        }
    }
}

/// The end of a thought. It is not drawn by chance.
const CLOSE: &str = "zjxk";

/// Returns a budget for answers within a thought of at most this many tokens.
fn budget(tokens_max: u32) -> ThinkingBudget {
    let (opens, closes) = (vec!["(".to_owned()], vec![CLOSE.to_owned()]);
    ThinkingBudget { tokens_max, is_open: true, repeats: false, opens, closes }
}

/// Returns the grammar of a thought, with `yes` or `no` behind it.
fn thought_and_choice() -> Grammar {
    let thought = json!({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": CLOSE});
    let choice = json!({"type": "regex", "pattern": "(yes|no)"});
    let format = json!({"type": "sequence", "elements": [thought, choice]});
    compiled(&GrammarSpec::StructuralTag(json!({"type": "structural_tag", "format": format})))
}

/// Returns the model's token of a letter: its vocabulary begins with the printable characters.
fn letter(byte: u8) -> Token {
    (byte - b'!').into()
}

fn thinking(n: u64) -> Vec<Request> {
    let mut requests = requests(n);
    let behind = thought_and_choice();
    for (i, request) in requests.iter_mut().enumerate() {
        request.prompt.iter_mut().for_each(|token| *token %= 264);
        request.sampling.tokens_max = 24;
        request.sampling.stop.clear();
        request.sampling.bad_words.clear();
        // Only letters: otherwise a character of several bytes would end before its thought.
        request.sampling.allowed = if i % 3 == 2 { Vec::new() } else { (b'a'..=b'z').map(letter).collect() };
        let budget = budget([0, 3, 7, 1000][i % 4]);
        request.grammar = Some(budget.to_grammar((i % 3 == 2).then_some(&behind)));
    }
    requests
}

/// The end of a thought is a rule for draws like any other: the forced tokens depend on the log alone.
#[test]
fn thoughts_end_at_their_budgets_whatever_steps_and_grids_look_like() {
    let (assignment, requests) = (assignment(DEEP), thinking(12));
    let checkpoint = Checkpoint::open(&assignment.model_path).unwrap();
    let play = |masks, requests: &[Request], plan| play(masks, &assignment, requests, plan);
    let alone = play(MaskConfig::default(), &requests, Plan::ALONE);
    let open: Vec<Request> = requests.iter().map(|request| Request { grammar: None, ..request.clone() }).collect();
    let free = play(MaskConfig::default(), &open, Plan::ALONE);
    for (i, (limited, free)) in alone.outputs.iter().zip(&free.outputs).enumerate() {
        let tokens = |output: &[TokenOut]| output.iter().map(|out| out.token).collect::<Vec<_>>();
        let (answer, _) = text(&checkpoint, limited);
        let (limited, free) = (tokens(limited), tokens(free));
        let n = [0, 3, 7, 1000][i % 4];
        match (i % 3 == 2, n) {
            // The budget is not used up, so nothing has changed.
            (false, 1000) => assert_eq!(limited, free, "request {i}"),
            (false, n) => {
                let close: Vec<Token> = CLOSE.bytes().map(letter).collect();
                assert_eq!((&limited[..n], &limited[n..n + close.len()]), (&free[..n], &close[..]));
                assert_eq!(limited.len(), 24, "it goes on");
            }
            (true, 1000) => {}
            (true, _) => {
                // A character that has begun ends first.
                assert!(
                    ["yes", "no"].iter().any(|end| answer.ends_with(&format!("{CLOSE}{end}"))),
                    "request {i}: {answer}"
                );
            }
        }
    }
    let plan = Plan { chunk: 30, together: 6, preempt_every: Some(3), ..Plan::ALONE };
    for (masks, plan) in
        [(MaskConfig::default(), plan), (LATE, Plan { chunk: 7, together: 12, ..Plan::ALONE }), (LATE, plan)]
    {
        let played = play(masks, &requests, plan);
        assert!(played.outputs == alone.outputs, "{masks:?}, {} late", played.n_late);
    }
    for (tp, pp) in [(2, 1), (1, 2)] {
        let plan = Plan { chunk: 60, together: 9, preempt_every: Some(7), turns: 1, in_flight: 2 };
        let played = on_grid(LATE, &assignment, &even(tp, pp), &requests, plan);
        assert!(played.outputs == alone.outputs, "tp {tp}, pp {pp}, {} late", played.n_late);
    }
}

fn begin(request: &Request, range: std::ops::Range<u32>, blocks: &[u32]) -> Step {
    Step {
        id: StepId(request.id.0),
        starts: vec![request.clone()],
        slices: vec![Slice::new(request.id, range, Want::Last)],
        blocks: blocks.iter().copied().map(BlockId).collect(),
        ..Step::default()
    }
}

/// A mask is never late, however long it takes, so that a step draws all tokens.
const PATIENT: MaskConfig = MaskConfig {
    threads: 1,
    wait_max: Duration::from_secs(60),
    late_max: Duration::from_secs(60),
    delay: Duration::ZERO,
};

#[test]
fn a_shared_prefix_and_a_replayed_log_give_the_same_token() {
    let (mut runner, _) = loader(PATIENT).build(&assignment(MODEL)).unwrap();
    let request = Request {
        prompt: (0..70).map(|i| (i * 13) % 256).collect(),
        sampling: Sampling { temperature: 1.0, logprobs: Some(2), ..Sampling::default() },
        grammar: Some(compiled(&GrammarSpec::Regex("[a-f]{3}-[0-9]{2,9}".into()))),
        ..Request::default()
    };
    let mut run = |step: &Step| {
        let mut done = StepDone::default();
        runner.run(step, &mut done).unwrap();
        // A step that only ends a request has no slice.
        done.slices.into_iter().next().unwrap_or_default()
    };
    let cold = run(&begin(&Request { id: RequestId(1), ..request.clone() }, 0..70, &[9, 2, 5, 7, 0]));
    let warm = run(&begin(&Request { id: RequestId(2), ..request.clone() }, 64..70, &[9, 2, 5, 7, 3]));
    assert_eq!((warm.tokens.len(), &warm), (1, &cold));
    // The log of a request that began elsewhere.
    let mut output = vec![cold.tokens[0].token];
    for position in 70..80 {
        let slices = vec![Slice::new(RequestId(1), position..position + 1, Want::Last)];
        let next = run(&Step { slices, ..Step::default() });
        let id = RequestId(100 + u64::from(position));
        let blocks: Vec<u32> = (20..20 + blocks_for(position + 1)).collect();
        let replayed = Request { id, output: output.clone(), ..request.clone() };
        let again = run(&Step { ends: vec![id], ..begin(&replayed, 0..position + 1, &blocks) });
        assert_eq!(
            next.tokens.iter().map(|out| out.token).collect::<Vec<_>>(),
            again.tokens.iter().map(|out| out.token).collect::<Vec<_>>()
        );
        output.push(next.tokens[0].token);
        run(&Step { ends: vec![id], slices: vec![], ..Step::default() });
    }
}

fn failure_of(request: Request, masks: MaskConfig) -> (Option<Failure>, usize) {
    let (mut runner, _) = loader(masks).build(&assignment(MODEL)).unwrap();
    let neighbour = Request { id: RequestId(2), prompt: vec![1, 2, 3], ..Request::default() };
    let mut step = begin(&request, 0..request.prompt.len() as u32, &[0]);
    step.starts.push(neighbour.clone());
    step.slices.push(Slice::new(neighbour.id, 0..3, Want::Last));
    step.blocks.push(BlockId(1));
    let mut done = StepDone::default();
    runner.run(&step, &mut done).unwrap();
    assert!(done.slices[1].failed.is_none() && done.slices[1].tokens.len() == 1, "its neighbour goes on");
    (done.slices[0].failed, done.slices[0].tokens.len())
}

#[test]
fn a_grammar_that_cannot_be_followed_ends_its_request_alone() {
    let choice = Some(compiled(&GrammarSpec::Choice(vec!["yes".into()])));
    let sampling = |sampling| Request {
        id: RequestId(1),
        prompt: vec![5, 6],
        grammar: choice.clone(),
        sampling,
        ..Request::default()
    };
    let none = Sampling::default();
    let failed = |fault| (Some(Failure::Grammar(fault)), 0);
    let (no_token, broken) = ((Some(Failure::NoToken), 0), failed(GrammarFault::Broken));
    assert_eq!(failure_of(sampling(none.clone()), PATIENT), (None, 1));
    let allowed = Sampling { allowed: vec![b'x'.into()], ..none.clone() };
    assert_eq!(failure_of(sampling(allowed), PATIENT), no_token);
    // An invalid description, and an output that the grammar does not allow.
    let garbage = Request { grammar: Some(Grammar::new("garbage")), ..sampling(none.clone()) };
    assert_eq!(failure_of(garbage, PATIENT), broken);
    let other = Request { prompt: vec![5], output: vec![b'q'.into()], ..sampling(none.clone()) };
    let other = Request { prompt: vec![5, 6], ..other };
    let (mut runner, _) = loader(PATIENT).build(&assignment(MODEL)).unwrap();
    let mut done = StepDone::default();
    runner.run(&begin(&other, 0..3, &[0]), &mut done).unwrap();
    assert_eq!((done.slices[0].failed, done.slices[0].tokens.len()), broken);
    // A mask that is never ready.
    let hopeless = MaskConfig { delay: Duration::from_secs(2), late_max: Duration::ZERO, ..LATE };
    assert_eq!(failure_of(sampling(none), hopeless), failed(GrammarFault::Late));
}

/// A complete answer ends, unless the request forbids that: then nothing remains, or only ends are drawn.
#[test]
fn where_an_answer_is_complete_only_an_end_follows() {
    let assignment = assignment(MODEL);
    let end = Checkpoint::open(&assignment.model_path).unwrap().spec().eos[0];
    let request = |sampling| Request {
        prompt: vec![5, 6],
        grammar: Some(compiled(&GrammarSpec::Choice(vec!["no".into()]))),
        sampling,
        ..Request::default()
    };
    let none = Sampling { tokens_max: 8, ..Sampling::default() };
    // A request that ignores ends has none among its stop tokens. A stop token that the grammar forbids is not drawn.
    let ignored = Sampling { stop: vec![b'x'.into()], ..none.clone() };
    let played = play(PATIENT, &assignment, &[request(ignored)], Plan::ALONE);
    let tokens: Vec<_> = played.outputs[0].iter().map(|out| out.token).collect();
    let n_ends = tokens.iter().filter(|token| **token == end).count();
    assert!(n_ends >= 6 && tokens[8 - n_ends..].iter().all(|token| *token == end), "{tokens:?}");
    // An end before `tokens_min` is forbidden, and the grammar allows nothing else.
    let more = Sampling { stop: vec![end], tokens_min: 8, ..none };
    let complete = Request { output: tokens[..8 - n_ends].to_vec(), ..request(more) };
    let (mut runner, _) = loader(PATIENT).build(&assignment).unwrap();
    let mut done = StepDone::default();
    let n_tokens = complete.n_tokens() as u32;
    runner.run(&begin(&complete, 0..n_tokens, &[0]), &mut done).unwrap();
    assert_eq!(done.slices[0].failed, Some(Failure::NoToken));
}

#[test]
fn a_vocabulary_that_is_gone_ends_requests_with_a_grammar_and_no_others() {
    let original = assignment(MODEL);
    let folder = std::env::temp_dir().join(format!("lockstep-vocabulary-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for entry in std::fs::read_dir(&original.model_path).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
    }
    let assignment = Assignment { model_path: folder.clone(), ..original };
    let (mut runner, _) = loader(PATIENT).build(&assignment).unwrap();
    std::fs::remove_file(folder.join("tokenizer.json")).unwrap();
    let with = |id| Request {
        id: RequestId(id),
        prompt: vec![5, 6],
        grammar: Some(compiled(&GrammarSpec::JsonObject)),
        ..Request::default()
    };
    let mut run = |step: &Step| -> Result<StepDone, RunError> {
        let mut done = StepDone::default();
        runner.run(step, &mut done).map(|()| done)
    };
    let done = run(&begin(&with(1), 0..2, &[0])).unwrap();
    assert_eq!((done.slices[0].failed, done.slices[0].tokens.len()), (Some(Failure::Grammar(GrammarFault::Broken)), 0));
    let plain = Request { grammar: None, ..with(2) };
    assert_eq!(run(&begin(&plain, 0..2, &[1])).unwrap().slices[0].tokens.len(), 1);
    std::fs::remove_dir_all(&folder).unwrap();
}
