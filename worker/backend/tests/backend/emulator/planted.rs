//! Bugs that were planted in small kernels (`emulator/planted.cpp`), and how the emulator catches each.

use super::device::{Launch, Memory, ORDERS};
use crate::arguments;

const IN: [u32; 64] = {
    let mut numbers = [0; 64];
    let mut i = 0;
    while i < 64 {
        numbers[i] = 1000 + 7 * i as u32;
        i += 1;
    }
    numbers
};

/// What the threads leave in one order, or the emulator's error.
fn run(kernel: &str, block: usize, order: i32) -> Result<Vec<u32>, String> {
    let (from, to) = (Memory::of(&IN), Memory::filled(64, 0u32));
    let launch = Launch { order, ..Launch::new([1, 1, 1], block) };
    launch.run(&format!("planted_{kernel}"), arguments![from.start(), to.start()])?;
    Ok(to.read()[..block].to_vec())
}

fn reversed(n: usize) -> Vec<u32> {
    IN[..n].iter().rev().copied().collect()
}

#[test]
fn a_kernel_without_a_bug_passes() {
    for order in ORDERS {
        assert_eq!(run("nothing", 64, order).unwrap(), reversed(64));
    }
}

#[test]
fn missing_barriers_and_waits_give_other_numbers() {
    for (kernel, block) in [("missing_barrier", 64), ("missing_meeting", 32), ("missing_wait", 64), ("short_wait", 64)]
    {
        for order in ORDERS {
            assert_ne!(run(kernel, block, order).unwrap(), reversed(block), "{kernel} in order {order}");
        }
    }
}

#[test]
fn what_would_hang_or_harm_ends_with_a_word() {
    let planted = [
        ("barrier_for_some", 64, "no thread can run"),
        ("two_barriers", 64, "different barriers"),
        ("copy_left_behind", 64, "before its copies had arrived"),
        ("crooked_copy", 64, "not aligned"),
        ("lane_that_left", 32, "no thread can run"),
        ("two_meetings", 32, "different operations"),
    ];
    for (kernel, block, word) in planted {
        for order in ORDERS {
            let error = run(kernel, block, order).unwrap_err();
            assert!(error.contains(word), "{kernel}: {error}");
        }
    }
    // An error does not affect the next launch.
    assert_eq!(run("nothing", 64, 2).unwrap(), reversed(64));
}

#[test]
fn launches_that_cannot_be_are_refused() {
    let from = Memory::of(&IN);
    let launch = |launch: Launch| {
        let arguments: &mut [*mut std::ffi::c_void] = arguments![from.start(), from.start()];
        launch.run("planted_nothing", arguments).unwrap_err()
    };
    assert!(launch(Launch::new([0, 1, 1], 64)).contains("empty"));
    assert!(launch(Launch::new([1, 1, 1], 1056)).contains("too large"));
    assert!(launch(Launch { shared: 228 << 10, ..Launch::new([1, 1, 1], 64) }).contains("shared memory"));
    assert!(run("no_such_kernel", 64, 0).unwrap_err().contains("unknown kernel"));
}
