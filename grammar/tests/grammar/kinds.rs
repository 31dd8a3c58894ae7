//! Each kind of constraint, and the tokens that its masks allow.

use crate::common::{END, N_VOCAB, TOOL, check, matcher, vocabulary};
use grammar::{GrammarSpec, MatcherError, TokenMask};
use serde_json::json;
use types::Token;

#[test]
fn each_kind_takes_its_texts_and_no_others() {
    check(
        &GrammarSpec::JsonObject,
        &["{}", r#"{"a": [1, null]}"#, r#"{"a":{"b":"c"}}"#],
        &["[]", "1", "{", "{} {}", "{a}"],
    );
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "additionalProperties": false});
    check(
        &GrammarSpec::JsonSchema(schema),
        &[r#"{"a":1}"#, r#"{"a": -20}"#],
        &["{}", r#"{"a":"1"}"#, r#"{"a":1,"b":2}"#],
    );
    check(&GrammarSpec::Regex("[a-c]+/x?".to_owned()), &["a/", "abc/x"], &["", "/", "d/", "a/xx"]);
    let choice = ["yes", "no \"quoted\"\n", "naïve"].map(str::to_owned).to_vec();
    check(&GrammarSpec::Choice(choice), &["yes", "no \"quoted\"\n", "naïve"], &["", "ye", "yesno"]);
    check(&GrammarSpec::Choice(vec![String::new(), "a".to_owned()]), &["", "a"], &["aa"]);
    check(&GrammarSpec::Choice(vec![String::new()]), &[""], &["a"]);
    check(&GrammarSpec::Regex(String::new()), &[""], &["a"]);
    check(&GrammarSpec::Lark("start: \"a\" b*\nb: \"b\"".to_owned()), &["a", "abb"], &["b", "ba"]);
}

#[test]
fn only_an_end_follows_where_nothing_else_can() {
    let vocabulary = vocabulary();
    let mut matcher = matcher(&vocabulary, &GrammarSpec::Choice(vec!["ab".to_owned(), "abc".to_owned()]));
    let mut mask = TokenMask::default();
    let mut allowed = |matcher: &mut grammar::Matcher| -> Vec<Token> {
        matcher.fill_mask(&mut mask).unwrap();
        assert_eq!(mask.n_vocab(), N_VOCAB);
        mask.tokens().collect()
    };
    let (ab, abc) = (256 + 8, 256 + 9);
    assert_eq!(allowed(&mut matcher), [Token::from(b'a'), ab, abc]);
    assert!(!matcher.is_complete().unwrap());
    matcher.accept(ab).unwrap();
    assert_eq!(allowed(&mut matcher), [Token::from(b'c'), END]);
    assert_eq!(matcher.accept(Token::from(b'd')), Err(MatcherError::Token(u32::from(b'd'))));
    matcher.accept(Token::from(b'c')).unwrap();
    assert_eq!((allowed(&mut matcher), matcher.forced_token().unwrap()), (vec![END], Some(END)));
    matcher.accept(END).unwrap();
    assert_eq!((allowed(&mut matcher), matcher.is_ended()), (vec![], true));
    assert_eq!(matcher.accept(END), Err(MatcherError::Token(END)));
}

#[test]
fn special_tokens_are_in_no_free_text() {
    let vocabulary = vocabulary();
    let mut matcher = matcher(&vocabulary, &GrammarSpec::Regex("[^]*".to_owned()));
    let mut mask = TokenMask::default();
    matcher.fill_mask(&mut mask).unwrap();
    assert!(mask.allows(Token::from(b'<')) && mask.allows(256 + 9) && mask.allows(END));
    assert!(!mask.allows(TOOL) && !mask.allows(TOOL + 1) && !mask.allows(END + 1), "special, and ids without bytes");
}
