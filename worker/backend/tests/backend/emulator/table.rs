//! The compiled kernels, those that the emulator runs and those declared in `kernels.cuh` are the same: none is shipped
//! that no test can run.

use super::device::kernels;

#[test]
fn every_kernel_of_the_table_is_emulated() {
    let table = include_str!("../../../src/cuda/kernels/registers.txt");
    let mut compiled: Vec<&str> = table.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    compiled.sort_unstable();
    let emulated = kernels();
    let emulated: Vec<&str> =
        emulated.iter().map(String::as_str).filter(|name| !name.starts_with("planted_")).collect();
    assert_eq!(emulated, compiled);
}
