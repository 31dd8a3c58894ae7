//! The CUDA kernels without a device: their sources compiled as C++ and run by the emulator, in several orders of
//! threads, against naive references in Rust. Where `kernels.cuh` fixes the order of a sum the bits are compared, and
//! against the CPU backend's where the two are one arithmetic.
//!
//! This cannot show the sums inside a tensor core, races between blocks, or the inline PTX. A device shows those.
//!
//! The emulator's checks were tested with planted bugs. In small kernels that stay (`planted.rs`): a missing barrier, a
//! barrier that some threads do not reach, two barriers for one, a missing, a short and a forgotten wait for copies, a
//! crooked copy, a missing meeting of a warp, a lane that leaves its warp, two operations for one. In copies of the
//! kernels themselves: every barrier, every meeting of a warp and every wait for copies taken out alone; stages of the
//! pipeline mixed up; rows, columns and positions off by one at each bound; sums in another order: steps of elements
//! that are not adjacent, strands by a tree, tiles that merge into the row at once; the mask of unseen positions, and a
//! chunk of it that counts. Not caught, because no result here changes: the barrier between the rounds of a reduction
//! that takes the largest (a thread that reads the next round's number finds the same largest), the one behind a number
//! that only its writer uses, two scores of f64 that are equal, and a last bit of f32 that rounding to bf16 hides.
#![allow(unsafe_code, reason = "kernels take pointers")]

mod device;

mod attention;
mod experts;
mod f8;
pub mod functions;
mod linear;
mod one_shot;
mod planted;
mod pointwise;
mod sample;
mod table;
mod tiled;
