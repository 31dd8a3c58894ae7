//! Plans steps. Knows nothing of time, sockets, devices, random sources or text: time is an argument, and the same
//! calls give the same steps.
#![no_std]

extern crate alloc;
