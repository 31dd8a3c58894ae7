//! Our own protos need no `protoc`: `protox` parses them.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "lockstep/v1/inference.proto",
        "lockstep/cluster/v1/coordinator.proto",
        "lockstep/cluster/v1/step.proto",
        "faces/vllm.proto",
        "faces/vllm_engine.proto",
        "faces/kserve.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    // A step's bytes are shared by all ranks, so they are counted, not copied.
    let build = tonic_prost_build::configure().bytes(".lockstep.cluster.v1.RankFrame.step");
    // A state comes once a second, and lies in one place with frames that come with every step.
    let large = [".lockstep.cluster.v1.State.prediction", ".lockstep.cluster.v1.State.step_speed"];
    large.iter().fold(build, |build, field| build.boxed(field)).compile_fds(descriptors)?;
    Ok(())
}
