//! What documents list of this crate: the families, and the types of a GGUF.

use crate::catalogue::CATALOGUE;
use crate::documents::check;
use crate::families::{Family, FamilyDefinition};
use crate::gguf::tensors::{TYPES, supported_dtype};

#[test]
fn the_documents_list_every_family() {
    let rows: String = Family::ALL.iter().map(|family| row(family.definition())).collect();
    let head =
        "| family | class in `config.json` | architecture in a GGUF | layers beside attention |\n|---|---|---|---|";
    check("docs/models.md", &[("<!-- families: begin -->{}<!-- families: end -->", format!("\n\n{head}\n{rows}\n"))]);
    let n_models = CATALOGUE.len().to_string();
    check("docs/models.md", &[("a catalogue of names: {} models from", n_models)]);
    let names: Vec<&str> = Family::ALL.iter().map(|family| family.name()).collect();
    check("README.md", &[("<!-- families: begin -->{}<!-- families: end -->", names.join(", "))]);
}

fn row(of: &FamilyDefinition) -> String {
    let name = of.gguf.variant.map_or(of.architecture, |variant| variant.architecture);
    let is_read = Family::find(|reader| reader.gguf.is_read && reader.architecture == name).is_some();
    let names: Vec<String> = [Some(name), of.gguf.also].into_iter().flatten().map(|name| format!("`{name}`")).collect();
    let gguf = if is_read { names.join(", ") } else { "refused".to_owned() };
    let others = match (of.tensors.recurrence.is_empty(), of.tensors.convolution.is_empty()) {
        (true, true) => "",
        (false, _) => "recurrent",
        (true, false) => "short convolutions",
    };
    format!("| {} | `{}` | {gguf} | {others} |\n", of.name, of.config.class)
}

#[test]
fn the_documents_list_every_type_of_a_gguf() {
    let names = |is_supported: bool| {
        let names = TYPES.iter().map(|(_, name)| *name).filter(|name| supported_dtype(name).is_some() == is_supported);
        names.collect::<Vec<_>>().join(", ")
    };
    let supported = ("<!-- gguf: begin -->{}<!-- gguf: end -->", names(true));
    let refused = ("<!-- refused: begin -->{}<!-- refused: end -->", names(false));
    check("docs/formats.md", &[supported.clone(), refused]);
    check("README.md", &[supported]);
}
