//! The deltas of one output, split where their order would be lost: in a delta the thought comes first, then the text,
//! then the calls. So a client's view of an answer is a function of its tokens, however many of them came at once.

use crate::front::generation::has_content;
use proto::v1;

/// Deltas in the order in which their tokens came.
#[derive(Default)]
pub struct DeltaSequence {
    deltas: Vec<v1::Delta>,
    /// Whether there is anything but text. Text alone has no order to keep.
    has_order: bool,
}

impl DeltaSequence {
    pub fn new(has_order: bool) -> DeltaSequence {
        DeltaSequence { deltas: Vec::new(), has_order }
    }

    /// Adds the content that one token reveals. It joins the last delta if that loses no order.
    pub fn add(&mut self, one: v1::Delta) {
        match self.deltas.last_mut() {
            Some(last) if !self.has_order || can_join(last, &one) => join(last, one),
            _ => self.deltas.push(one),
        }
    }

    pub fn into_deltas(self) -> Vec<v1::Delta> {
        self.deltas
    }
}

/// A token without content belongs to the delta before it. A thought's tokens are counted, so they stay apart.
fn can_join(before: &v1::Delta, next: &v1::Delta) -> bool {
    if !has_content(next) {
        return true;
    }
    let is_thought = |delta: &v1::Delta| !delta.reasoning.is_empty();
    let thought_is_first = !is_thought(next) || (before.text.is_empty() && before.tool_calls.is_empty());
    let text_is_before_calls = next.text.is_empty() || before.tool_calls.is_empty();
    has_content(before) && is_thought(before) == is_thought(next) && thought_is_first && text_is_before_calls
}

fn join(to: &mut v1::Delta, next: v1::Delta) {
    to.text.push_str(&next.text);
    to.reasoning.push_str(&next.reasoning);
    to.token_ids.extend(next.token_ids);
    to.logprobs.extend(next.logprobs);
    for part in next.tool_calls {
        match to.tool_calls.iter_mut().find(|of| of.index == part.index) {
            Some(of) => of.arguments.push_str(&part.arguments),
            None => to.tool_calls.push(part),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(token: u32, reasoning: &str, text: &str, call: &str) -> v1::Delta {
        let part = |arguments: &str| v1::ToolCallDelta { arguments: arguments.into(), ..Default::default() };
        let tool_calls = Some(call).filter(|call| !call.is_empty()).map(part).into_iter().collect();
        let (reasoning, text) = (reasoning.into(), text.into());
        v1::Delta { reasoning, text, tool_calls, token_ids: vec![token], ..v1::Delta::default() }
    }

    /// Returns the tokens of each delta, joined.
    fn cuts(has_order: bool, all: &[(&str, &str, &str)]) -> Vec<Vec<u32>> {
        let mut run = DeltaSequence::new(has_order);
        (0..).zip(all).for_each(|(token, (reasoning, text, call))| run.add(delta(token, reasoning, text, call)));
        run.into_deltas().into_iter().map(|delta| delta.token_ids).collect()
    }

    #[test]
    fn a_delta_ends_where_what_follows_would_stand_before_it() {
        let parts = [("", "", ""), ("hm", "", ""), ("", "", ""), ("", "a", ""), ("", "", "{"), ("", "", "}")];
        assert_eq!(cuts(true, &parts), [vec![0], vec![1, 2], vec![3, 4, 5]]);
        assert_eq!(cuts(true, &[("", "", "{"), ("", "a", ""), ("hm", "", "")]), [vec![0], vec![1], vec![2]]);
        assert_eq!(cuts(false, &[("", "", ""), ("", "a", ""), ("", "b", "")]), [vec![0, 1, 2]]);
    }
}
