//! The CUDA kernels without a device: their sources compiled as C++ and run by the emulator, in several orders of
//! threads, against naive references in Rust. Where `kernels.cuh` fixes the order of a sum the bits are compared, and
//! against the CPU backend's where the two are one arithmetic.
//!
//! What this cannot show: the sums inside a tensor core, races between blocks, the inline PTX. A device shows those.
//!
//! What the emulator catches was tried by planting it. In kernels of their own (`planted.rs`, which stay): a missing
//! barrier, a barrier that some threads do not reach, two barriers for one, a missing wait for copies, a missing meeting
//! of a warp, a lane that leaves its warp. PLANTED_IN_COPIES
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "kernels take pointers")]

#[path = "../common/mod.rs"]
mod common;

mod device;

mod attention;
mod experts;
mod functions;
mod linear;
mod planted;
mod pointwise;
mod sample;
