//! Requests with grammars while ranks are lost and masks are late: the tokens are those of each request alone on one
//! rank, and a request without an allowed token ends without an effect on others.

use crate::common::requests::{difference, few_requests};
use crate::common::{Answer, Replica, Setup, reference_model};
use grammar::{GrammarLimits, GrammarSpec, ThinkingBudget};
use std::time::Duration;
use types::{Finish, Grammar, GrammarFault, Request, Sampling};
use worker::MaskConfig;

const MODEL: &str = "gguf-smollm3";

fn setup() -> Setup {
    Setup::new(reference_model(MODEL), "int8", "f16")
}

fn late() -> MaskConfig {
    MaskConfig { wait_max: Duration::ZERO, delay: Duration::from_millis(3), ..MaskConfig::default() }
}

async fn alone(requests: &[Request]) -> Vec<Answer> {
    let mut replica = Replica::start(&setup().on(1, 1)).await;
    let answers = replica.run_alone(requests).await;
    replica.stop().await;
    answers
}

fn check_equal(way: &str, requests: &[Request], got: &[Answer], expected: &[Answer]) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(got == expected, "{way}: request {i} ({:?}): {}", requests[i].grammar, difference(got, expected));
    }
}

#[tokio::test]
async fn lost_ranks_and_late_masks_on_grids_cost_no_token() {
    let mut requests = few_requests(&reference_model(MODEL));
    let closes = vec!["zq".to_owned()];
    let budget = ThinkingBudget { tokens_max: 5, is_open: true, closes, ..ThinkingBudget::default() };
    let unlimited = requests.iter_mut().filter(|request| request.grammar.is_none());
    unlimited.step_by(2).for_each(|request| request.grammar = Some(budget.to_grammar(None)));
    let expected = alone(&requests).await;
    assert!(requests.iter().filter(|request| request.grammar.is_some()).count() > 6);
    for (tp, pp, masks) in [(1, 1, late()), (2, 1, MaskConfig::default()), (1, 2, late()), (2, 2, late())] {
        let way = format!("tp {tp}, pp {pp}, {masks:?}");
        let setup = Setup { masks, n_blocks: 50, prefix_cache: true, ..setup().on(tp, pp) };
        let mut replica = Replica::start(&setup).await;
        [9, 25].into_iter().for_each(|n| replica.break_at(n));
        let answers = replica.run(&requests).await;
        let seen = replica.seen();
        replica.stop().await;
        println!("{way}: {seen:?}");
        check_equal(&way, &requests, &answers, &expected);
        assert!(seen.loads > 2, "{way}: ranks were lost twice");
        assert!(masks != late() || seen.late > 20, "{way}: {} late", seen.late);
    }
}

#[tokio::test]
async fn a_request_whose_limits_leave_no_token_ends_alone_with_its_own_reason() {
    let yes = grammar::compile(&GrammarSpec::Choice(vec!["yes".into()]), &GrammarLimits::default()).unwrap();
    let request = |grammar: &Grammar, allowed: &[u32]| Request {
        prompt: vec![1, 2, 3],
        sampling: Sampling { tokens_max: 5, allowed: allowed.to_vec(), ..Sampling::default() },
        grammar: Some(grammar.clone()),
        ..Request::default()
    };
    let plain = Request { grammar: None, ..request(&yes, &[]) };
    let garbage = Grammar::new("garbage");
    let requests = [request(&yes, &[]), request(&yes, &[b'x'.into()]), request(&garbage, &[]), plain];
    let mut replica = Replica::start(&setup()).await;
    let answers = replica.run(&requests).await;
    replica.stop().await;
    let ends: Vec<_> = answers.iter().map(|answer| (answer.finish, answer.drawn.len())).collect();
    let length = (Some(Finish::Length), 5);
    assert_eq!(ends, [length, (Some(Finish::NoToken), 0), (Some(Finish::Grammar(GrammarFault::Broken)), 0), length]);
}
