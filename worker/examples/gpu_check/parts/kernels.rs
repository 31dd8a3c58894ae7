//! The part `kernels`: compares every kernel with the CPU, in small shapes and in the shapes of models, and checks that
//! every batch gives the same bits.

use super::{Done, Finding, FindingSink, Group, Options, cuda};
use crate::on_device::shapes::{self, REAL, SMALL, Sizes};
use crate::on_device::{self, Check, every};
use backend::cuda::Cuda;
use serde_json::json;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use types::{Dtype, KvDtype, NumericsMode};

/// Row counts for pairs of products: they cover every kernel, and exceed the rows of a block.
const ROWS: [usize; 6] = [1, 7, 13, 30, 64, 200];

pub fn sizes(options: &Options) -> &'static Sizes {
    if options.is_tiny { &SMALL } else { &REAL }
}

/// Returns a new seed each time. It is printed so that a run can be repeated.
fn seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64)
}

fn found(check: Check, seed: u64) -> Finding {
    let details = json!({ "apart": check.apart, "limit": check.limit, "same_bits": check.same_bits, "seed": seed });
    let is_good = check.is_good();
    Finding::checked(check.name, is_good, details)
}

/// Checks on the device in this mode, with numbers from a seed.
fn group<C>(name: impl Into<String>, mode: NumericsMode, checks: C) -> Group
where
    C: Fn(&Cuda, &Options, u64) -> Vec<Check> + 'static,
{
    let name = name.into();
    Group::new("kernels", name.clone(), move |options, report| {
        if let (NumericsMode::Fast, Err(why)) = (mode, worker::lt_version()) {
            report(Finding::not_run(&name, &why));
            return Ok(());
        }
        let (cuda, seed, begun) = (cuda(options, mode)?, seed(), Instant::now());
        checks(&cuda, options, seed).into_iter().map(|check| found(check, seed)).for_each(report);
        eprintln!("{name}: {:.1} s of checks", begun.elapsed().as_secs_f64());
        Ok(())
    })
}

/// Returns the groups: small checks of all kernels first, and then the large shapes, which keep the CPU busiest.
pub fn groups(options: &Options) -> Vec<Group> {
    let mut groups = vec![Group::opened("kernels"), group("small shapes", NumericsMode::Lockstep, small)];
    for dtype in every::TYPES {
        let name = format!("every kernel for {dtype:?}");
        groups.push(group(name, NumericsMode::Lockstep, move |cuda, _, seed| every::of_type(cuda, dtype, seed)));
    }
    for width in every::WIDTHS {
        let name = format!("every kernel for heads of {width}");
        groups.push(group(name, NumericsMode::Lockstep, move |cuda, _, seed| every::of_width(cuda, width, seed)));
    }
    groups.push(group("every other kernel", NumericsMode::Lockstep, |cuda, _, seed| every::rest(cuda, seed)));
    groups.push(group("rows and draws", NumericsMode::Lockstep, |cuda, of, seed| shapes::rows(cuda, sizes(of), seed)));
    groups.push(group("experts", NumericsMode::Lockstep, |cuda, of, seed| shapes::experts(cuda, sizes(of), seed)));
    let under_fast = group("every kernel under fast", NumericsMode::Fast, |cuda, _, seed| {
        let types = [Dtype::BF16, Dtype::F8E4M3];
        types.into_iter().flat_map(|dtype| every::of_type(cuda, dtype, seed)).collect()
    });
    let products = Group::new("kernels", "products under fast", fast);
    groups.extend([under_fast, products].map(|group| group.in_process("beside the library")));
    groups.extend(large(options).into_iter().map(|group| group.in_process("large")));
    groups
}

/// Checks in the shapes of models.
fn large(options: &Options) -> Vec<Group> {
    let mut groups = Vec::new();
    for heads in sizes(options).heads {
        let name = format!("attention of {heads:?}");
        groups.push(group(name, NumericsMode::Lockstep, |cuda, of, _| shapes::attention(cuda, sizes(of), *heads)));
    }
    for dtype in every::TYPES {
        let products = move |cuda: &Cuda, options: &Options, seed| shapes::products(cuda, sizes(options), dtype, seed);
        groups.push(group(format!("products of {dtype:?}"), NumericsMode::Lockstep, products));
    }
    groups.push(group("head", NumericsMode::Lockstep, |cuda, of, seed| vec![shapes::head(cuda, sizes(of), seed)]));
    groups
}

fn small(cuda: &Cuda, options: &Options, seed: u64) -> Vec<Check> {
    let rounds = if options.is_tiny { &ROWS[..2] } else { &ROWS };
    let rounds = rounds.chunks(2).enumerate();
    rounds.flat_map(|(i, rows)| on_device::checks(cuda, KvDtype::Bf16, rows, seed + i as u64)).collect()
}

fn fast(options: &Options, report: FindingSink<'_>) -> Done {
    if let Err(why) = worker::lt_version() {
        report(Finding::not_run("products under fast", &why));
        return Ok(());
    }
    let (fast, lockstep, seed) = (cuda(options, NumericsMode::Fast)?, cuda(options, NumericsMode::Lockstep)?, seed());
    let rows = if options.is_tiny { &[1, 33][..] } else { &[1, 33, 200, 500] };
    let checks = on_device::fast_checks(&fast, rows, seed);
    let checks = checks.into_iter().chain([every::few_rows(&fast, &lockstep)]);
    checks.map(|check| found(check, seed)).for_each(report);
    Ok(())
}
