//! EBNF and GBNF: the texts of their rules, character by character, and what is wrong with a text.

use crate::common::{check, compiled};
use grammar::{GrammarRefused, GrammarSpec};

const JSON: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn both_forms_count_characters() {
    let forms: [fn(String) -> GrammarSpec; 2] = [GrammarSpec::Ebnf, GrammarSpec::Gbnf];
    for form in forms {
        let takes = |text: &str, yes: &[&str], no: &[&str]| check(&form(text.to_owned()), yes, no);
        takes("root ::= \"a\" | b\nb ::= [0-9]+ \"x\"?", &["a", "1", "12x"], &["", "x", "ax"]);
        // The longest word is not always the right one.
        takes(
            "root ::= \"(\" root \")\" | [a-z]+ \"x\" | \"ab\" \"cd\"",
            &["abx", "((abcx))", "abcd"],
            &["ab", "(abx"],
        );
        takes(
            "root ::= list\nlist ::= item (\",\" list)?\nitem ::= \"a\" | \"ab\"",
            &["a", "ab,a", "ab,ab,a"],
            &["ab,", "b"],
        );
        takes("root ::= ([ \\t] root)? [^\\]\\\\]", &["x", "  x", "é"], &["]", "\\", ""]);
        takes(
            JSON,
            &["{}", "{\"a\": [1, -2.5e3, \"\\u00e9\\n\"],\"b\":null}"],
            &["{", "[]", "{\"a\" 1}", "{\"\u{1}\":1}"],
        );
    }
    check(&GrammarSpec::Gbnf("root ::= .{2,3}".to_owned()), &["ab", "a\né"], &["a", "abcd"]);
}

#[test]
fn errors_name_line_and_column() {
    let cases = [
        ("", "line 1, column 1"),
        ("root := \"a\"", "line 1, column 6"),
        ("root ::= a", "line 1, column 10"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1"),
        ("root ::= (\"a\"", "line 1, column 10"),
        ("root ::= \"a\n", "line 1, column 10"),
        ("root ::= [a\n", "line 1, column 10"),
        ("root ::= \"\\q\"", "line 1, column 11"),
        ("root ::= \"a\"{2,1}", "line 1, column 13"),
        ("root ::= [z-a]", "line 1, column 10"),
        ("root ::=\n  (?=a)", "line 2, column 4"),
        ("root ::= \"a\" ) \"b\"", "line 1, column 14"),
    ];
    for (text, place) in cases {
        let refused = compiled(&GrammarSpec::Ebnf(text.to_owned())).unwrap_err();
        assert!(refused.to_string().starts_with(place), "{text:?}: {refused}");
    }
    let endless = compiled(&GrammarSpec::Ebnf("root ::= \"a\" root".to_owned()));
    assert!(matches!(endless, Err(GrammarRefused::Unsatisfiable { .. })), "{endless:?}");
}
