//! AMX: a product of sixteen rows of signed bytes with sixteen columns of them, in one instruction.
//!
//! Its sums are whole numbers, so they are those of any other order. Inline assembly, because Rust's intrinsics for
//! tiles are not stable.

use super::lanes::LANES;
use std::marker::PhantomData;

/// Rows of a full tile.
pub(crate) const TILE_ROWS: usize = 16;

/// The sums of a tile: a row of sixteen columns for each row of the left operand.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct TileSums(pub [[u8; 4 * LANES]; TILE_ROWS]);

/// Whether this processor has tiles of int8, and the system lets this process use them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn is_supported() -> bool {
    use std::sync::OnceLock;
    static IS_SUPPORTED: OnceLock<bool> = OnceLock::new();
    *IS_SUPPORTED.get_or_init(|| has_int8_tiles() && is_permitted())
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) fn is_supported() -> bool {
    false
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_int8_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const TILE_AND_INT8: u32 = 0b11 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8
}

/// Linux saves the tiles of a process only after it has requested them. Threads that start later may use them too.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn is_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let result: i64;
    // SAFETY: the call takes two numbers, and a kernel that does not know it returns an error.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// The shape of this thread's tiles, while it lives.
pub(crate) struct TileShape {
    /// Tiles belong to a thread.
    of_thread: PhantomData<*const ()>,
}

/// `LDTILECFG`'s operand.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const SUM_TILES: usize = 4;

impl TileShape {
    /// Products of `n_rows` rows over `depth` bytes of each: at most 16, and 64, a multiple of 4.
    #[inline(always)]
    pub fn new(n_rows: usize, depth: usize) -> TileShape {
        assert!(n_rows <= TILE_ROWS && depth <= 64 && depth.is_multiple_of(4) && is_supported());
        let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for tile in 0..SUM_TILES {
            (config.rows[tile], config.row_bytes[tile]) = (n_rows as u8, 4 * LANES as u16);
        }
        for tile in [4, 5] {
            (config.rows[tile], config.row_bytes[tile]) = (n_rows as u8, depth as u16);
        }
        for tile in [6, 7] {
            (config.rows[tile], config.row_bytes[tile]) = (depth as u8 / 4, 4 * LANES as u16);
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has tiles, and the shape is a valid one.
        unsafe {
            std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack));
        }
        TileShape { of_thread: PhantomData }
    }

    /// Sums over `depth` of `left` × `right`, both signed. I names the tiles: products that differ in it do not wait
    /// for each other.
    ///
    /// # Safety
    /// `n_rows` rows of `depth` bytes every `stride` bytes at `left`; at `right`, depth / 4 lines of sixteen columns of
    /// four bytes.
    #[inline(always)]
    pub unsafe fn product<const I: usize>(
        &self,
        left: *const u8,
        stride: usize,
        right: *const u8,
        sums: &mut TileSums,
    ) {
        const { assert!(I < SUM_TILES) }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise; `new` configured the tiles; the sums have sixteen lines.
        unsafe {
            std::arch::asm!(
                "tilezero tmm{sums}",
                "tileloadd tmm{a}, [{left} + {stride}]",
                "tileloadd tmm{b}, [{right} + {line}]",
                "tdpbssd tmm{sums}, tmm{a}, tmm{b}",
                "tilestored [{to} + {line}], tmm{sums}",
                sums = const I,
                a = const 4 + I % 2,
                b = const 6 + I % 2,
                left = in(reg) left,
                stride = in(reg) stride,
                right = in(reg) right,
                line = in(reg) 4 * LANES,
                to = in(reg) sums.0.as_mut_ptr(),
                options(nostack),
            );
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no tiles on this architecture: {:?}", (left, stride, right, &raw mut *sums));
    }
}

impl Drop for TileShape {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has tiles.
        unsafe {
            std::arch::asm!("tilerelease", options(nostack, nomem));
        }
    }
}
