//! The draft model of a replica: its location, whether it fits the served model, and the memory that it needs.

use super::coordinator::policy;
use crate::models;
use crate::settings::hub::HubSettings;
use crate::settings::{CoordinatorParts, SpeculationSettings};
use anyhow::{Context, bail, ensure};
use checkpoint::Checkpoint;
use coordinator::{DraftModel, DraftModelCost, ModelShape, MtpDrafts};
use types::{DeviceClass, Grid};

/// The models that guess for the served one.
#[derive(Clone, Debug, Default)]
pub struct DraftModels {
    pub draft_model: Option<DraftModel>,
    pub mtp: Option<MtpDrafts>,
}

/// Finds the files of the draft model, if there is one, and fetches them if they are not here.
pub fn find(settings: &mut SpeculationSettings, hub: &HubSettings) -> anyhow::Result<()> {
    let Some(draft) = settings.draft() else { return Ok(()) };
    let located = models::locate_or_fetch(draft, hub).with_context(|| format!("the draft model {draft}"))?;
    settings.set_draft_path(located.path.to_string_lossy().into_owned());
    Ok(())
}

/// Returns the shape to place, including the memory of what guesses, and the description of that for ranks.
pub fn shape(parts: CoordinatorParts<'_>, checkpoint: &Checkpoint) -> anyhow::Result<(ModelShape, DraftModels)> {
    let shape = ModelShape::of(checkpoint);
    let speculation = &parts.coordinator.speculation;
    if speculation.uses_mtp() {
        return mtp_shape(parts, checkpoint, shape);
    }
    let Some(path) = speculation.draft() else { return Ok((shape, DraftModels::default())) };
    let class = parts.device.class();
    ensure!(class == DeviceClass::Cpu, "a draft model guesses on the CPU alone, and the device is {}", class.name());
    let opened = Checkpoint::open(path.as_ref()).with_context(|| format!("the draft model {path}"))?;
    check_same_vocabulary(&opened, checkpoint).with_context(|| format!("the draft model {path}"))?;
    let kv_memory = speculation.draft_kv_memory.map(|bytes| bytes.0);
    let needs = DraftModelCost::of(&ModelShape::of(&opened), &shape, &policy(parts), class, kv_memory)?;
    let draft = DraftModel {
        path: path.into(),
        kv_bytes: needs.kv_bytes,
        pass_permille: needs.pass_permille,
        is_alone: speculation.is_draft_alone(),
    };
    Ok((ModelShape { draft: needs.bytes(), ..shape }, DraftModels { draft_model: Some(draft), mtp: None }))
}

/// Returns the shape with the memory of the model's own layer that guesses. It shares the model's embedding and head
/// where the rank that samples holds both whole.
fn mtp_shape(
    parts: CoordinatorParts<'_>,
    checkpoint: &Checkpoint,
    shape: ModelShape,
) -> anyhow::Result<(ModelShape, DraftModels)> {
    let speculation = &parts.coordinator.speculation;
    let class = parts.device.class();
    ensure!(class == DeviceClass::Cpu, "MTP guesses on the CPU alone, and the device is {}", class.name());
    let layer = ModelShape::of_mtp(checkpoint);
    let layer = layer.context("this model's files have no layer that predicts one token further (MTP)")?;
    let kv_memory = speculation.draft_kv_memory.map(|bytes| bytes.0);
    let needs = DraftModelCost::of(&layer, &shape, &policy(parts), class, kv_memory)?;
    let shared = if parts.coordinator.grid() == Grid::SOLO { layer.sizes.embedding + layer.sizes.head } else { 0 };
    let mtp = MtpDrafts {
        kv_bytes: needs.kv_bytes,
        pass_permille: needs.pass_permille,
        is_alone: speculation.is_draft_alone(),
    };
    let draft = needs.bytes().saturating_sub(shared);
    Ok((ModelShape { draft, ..shape }, DraftModels { draft_model: None, mtp: Some(mtp) }))
}

/// Fails unless each token id means the same to both models.
fn check_same_vocabulary(draft: &Checkpoint, target: &Checkpoint) -> anyhow::Result<()> {
    let (of_draft, of_target) = (draft.spec().vocab, target.spec().vocab);
    ensure!(of_draft == of_target, "its vocabulary has {of_draft} tokens, and the model's has {of_target}");
    let (of_draft, of_target) = (draft.token_table()?, target.token_table()?);
    let mut pairs = of_draft.tokens().map(Some).chain(std::iter::repeat(None)).zip(of_target.tokens());
    if let Some((id, (ours, theirs))) = (0..).zip(&mut pairs).find(|(_, (ours, theirs))| *ours != Some(*theirs)) {
        let written =
            |token: Option<(&[u8], bool)>| token.map(|(bytes, _)| String::from_utf8_lossy(bytes).into_owned());
        let (ours, theirs) = (written(ours), written(Some(theirs)));
        bail!("its token {id} is {ours:?}, and the model's is {theirs:?}: they must have the same vocabulary");
    }
    Ok(())
}
