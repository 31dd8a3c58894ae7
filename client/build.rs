//! Generates the client of `lockstep.v1`. `protox` parses the file, so that no `protoc` is needed. A published package
//! has a copy of the file in place of the link.

const FILE: &str = "lockstep/v1/inference.proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/{FILE}");
    let descriptors = protox::compile([FILE], ["proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    Ok(())
}
