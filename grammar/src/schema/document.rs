//! A document as the writer reads it: its schemas, its values, and the limits. Nothing in it changes.

use super::facts::SchemaClaim;
use super::places::SchemaPlaces;
use super::structures::ValueSchemas;
use crate::GrammarLimits;
use serde_json::Value;

pub(super) struct SchemaDocument<'a> {
    pub(super) places: SchemaPlaces<'a>,
    pub(super) structures: ValueSchemas,
    pub(super) limits: &'a GrammarLimits,
}

impl SchemaDocument<'_> {
    /// The same claims in their order, without those that always hold.
    pub(super) fn simplified(&self, mut claims: Vec<SchemaClaim>) -> Vec<SchemaClaim> {
        claims.sort_unstable();
        claims.dedup();
        let everything = (self.places.false_schema(), false);
        claims.retain(|claim| *claim != everything && self.places.value(claim.0) != &Value::Bool(claim.1));
        claims
    }

    /// Whether it is plain that nothing satisfies them.
    pub(super) fn is_unsatisfiable(&self, claims: &[SchemaClaim]) -> bool {
        claims.iter().any(|(place, is)| self.places.value(*place) == &Value::Bool(!is))
    }
}
